#!/bin/sh
# DeepSeek V4's decode step, the GPU tests of what it runs, and `trueline verify` of a model as large
# as V2-Lite, in one call of a GPU machine that is lent for minutes.
#
#   tools/gpu_v4.sh [SECONDS]     380 at most unless told; .gpu_site copied along (tools/gpu.sh pack)
#
# Results go to $OUT as they are made. What is timed runs first; only the checkpoint for `verify` is
# written beside it, while its kernels are compiled.
set -u
cd "$(dirname "$0")/.."
SECONDS_IN_ALL=${1:-380}
OUT=${OUT:-gpu_v4}
SCRATCH=$(mktemp -d)
BEGUN=$(date +%s)
V4_TESTS="(w4a16 and fp4) or (experts and stored and bfloat16) or (experts and numbers) \
    or (batched_gemm and bfloat16) or (compress and numbers) or (captured and v4) \
    or captured_steps or (stored_formats and fp4) or (sixteen and fp4 and bfloat16)"
IN_ORDER="
import json, sys
from trueline import device
from trueline.bench.gpu.end_to_end import main
device._on_gpu = lambda: False
print(json.dumps(main(*sys.argv[1:])))
"
mkdir -p "$OUT"

left() { # but for so many seconds
    echo $((SECONDS_IN_ALL - $(date +%s) + BEGUN - $1))
}
say() {
    echo "$(($(date +%s) - BEGUN)) s: $*" | tee -a "$OUT/log"
}
part() { # NAME LIMIT COMMAND...: what it says in NAME.log
    name=$1 limit=$2
    shift 2
    say "$name begins, $limit s at most"
    timeout "$limit" tools/gpu.sh run "$@" >"$OUT/$name.log" 2>&1
    code=$?
    say "$name ends with $code"
    tail -n 12 "$OUT/$name.log" | cut -c 1-1200
    return $code
}

part make-tiny 120 python3 -m trueline make-tiny config "$SCRATCH/v2lite" \
    --config src/trueline/bench/configs/v2lite --device cuda &
written=$!
part v4s 170 python3 -m trueline.bench.gpu.end_to_end v4s fp4 "$BEGUN" 16,64,1
# the same without branches in its graphs: what they gain, or figures where they fail
if [ "$(left 0)" -gt 240 ]; then
    part v4s-in-order 60 python3 -c "$IN_ORDER" v4s fp4 "$(date +%s)" 16,64
fi
wait $written
part tests "$(left 15)" python3 -m pytest -q -m gpu -n 6 --maxschedchunk=1 -p no:cacheprovider \
    -k "$V4_TESTS" tests/gpu/test_gpu.py tests/gpu/test_gpu_v4.py &
tested=$!
part verify "$(left 5)" python3 -m trueline verify "$SCRATCH/v2lite" --device cuda \
    --gpu-memory-utilization 0.6 --out "$SCRATCH/report"
cp "$SCRATCH"/report/*.json "$SCRATCH"/report/*.html "$OUT"
wait $tested
rm -rf "$SCRATCH"
say "done"
