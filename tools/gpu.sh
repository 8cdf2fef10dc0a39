#!/bin/sh
# The GPU tests and the benchmark on a machine that has PyTorch, Triton and transformers, but no
# network and none of our small dependencies.
#
#   tools/gpu.sh pack [PYTHON_VERSION]   where there is a network: fetch them into .gpu_site
#   tools/gpu.sh test [pytest options]   on the GPU machine, with .gpu_site copied along
#   tools/gpu.sh bench [options]         likewise: trueline bench gpu
#   tools/gpu.sh warmup [MODEL...]       likewise: time to ready, kernels compiled after it
#   tools/gpu.sh run COMMAND...          likewise: anything else
set -eu
cd "$(dirname "$0")/.."
SITE=.gpu_site
SMALL="msgspec cyclopts attrs docstring_parser rich rich-rst docutils markdown-it-py mdurl pygments \
    typing_extensions pytest pytest-xdist execnet iniconfig pluggy packaging hypothesis sortedcontainers \
    jinja2 markupsafe starlette uvicorn uvloop httptools pyzmq prometheus_client anyio h11 idna click \
    sniffio llguidance"

pack() {
    rm -rf "$SITE" && mkdir "$SITE"
    ${PIP:-.venv/bin/pip} download --quiet --no-deps --only-binary=:all: --dest "$SITE/wheels" \
        --python-version "${1:-3.12}" --implementation cp --platform manylinux2014_x86_64 \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 --platform any $SMALL
    for wheel in "$SITE"/wheels/*.whl; do
        python3 -m zipfile -e "$wheel" "$SITE"
    done
    rm -r "$SITE/wheels"
}

verb=${1:?pack, test, bench, warmup or run}
shift
PYTHON=${PYTHON:-python3}
# last, so that what the machine has comes first
PYTHONPATH="src:${PYTHONPATH:-}:$SITE"
# bytecode, which pip writes when it installs: the packages of such a machine may come without
PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-${TMPDIR:-/tmp}/trueline-bytecode}
export PYTHONPATH PYTHONPYCACHEPREFIX PYTHONUNBUFFERED=1
case $verb in
pack) pack "$@" ;;
test) # the soak begins first; the others share what is left of the GPU
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
    failed=0
    "$PYTHON" -m pytest -q -m gpu -n "${WORKERS:-8}" --maxschedchunk=1 -p no:cacheprovider \
        tests/gpu "$@" || failed=1
    "$PYTHON" -m trueline.verify.machine_code || failed=1
    exit $failed ;;
bench) exec "$PYTHON" -m trueline bench gpu "$@" ;;
warmup) exec "$PYTHON" -m trueline.bench.gpu.warmup "$@" ;;
run) exec "$@" ;;
*) echo "accepted: pack, test, bench, warmup, run" >&2 && exit 2 ;;
esac
