#!/bin/sh
# `trueline verify` of every family on a GPU machine that is lent for minutes, and of the built-in
# models; then what it makes of the known bugs that only a GPU meets.
#
#   tools/gpu_verify.sh [SECONDS]     560 at most unless told; .gpu_site copied along (tools/gpu.sh pack)
#
# Reports go to $OUT/reports.tar.gz, a line for each model to $OUT/log. DEVICE=cpu rehearses it, TIER=--smoke
# is shorter, JOBS models are verified at a time.
set -u
cd "$(dirname "$0")/.."
SECONDS_IN_ALL=${1:-560}
OUT=${OUT:-gpu_verify}
export DEVICE="${DEVICE:-cuda}" TIER="${TIER:-}"
SCRATCH=$(mktemp -d)
export SCRATCH
BEGUN=$(date +%s)
# NAME FAMILY OPTIONS-OF-MAKE-TINY, - and the engine's; widths that kernels for stored formats take
WIDE="--hidden 256 --width 384 --expert-width 128"
MODELS="
v2 deepseek_v2 --dtype bfloat16 -
v2-lite-float16 deepseek_v2_lite --dtype float16 -
v3-fp8 deepseek_v3 --dtype bfloat16 --format block-fp8 $WIDE -
v3-fp8-cache deepseek_v3 --dtype bfloat16 --kv-lora 128 - --kv-cache-dtype fp8
k2-int4 kimi_k2 --dtype bfloat16 --format int4 $WIDE -
k25 kimi_k25 --dtype bfloat16 -
glm4 glm4_moe_lite --dtype bfloat16 -
v32 deepseek_v32 --dtype bfloat16 -
v32-float32 deepseek_v32 --dtype float32 -
glm5 glm_moe_dsa --dtype bfloat16 -
ling bailing_moe_v2_5 --dtype bfloat16 -
ling-fp8 bailing_moe_v2_5 --dtype bfloat16 --format block-fp8 $WIDE -
v4 deepseek_v4 --dtype bfloat16 -
v4-fp4 deepseek_v4 --dtype bfloat16 --format fp4 --hidden 256 --expert-width 128 -
v4-published deepseek_v4 --dtype bfloat16 --index-head 16 - --numerics published
witness-v3
witness-ling
witness-v32
witness-v4
"
mkdir -p "$OUT" "$SCRATCH/reports"

cat >"$SCRATCH/one" <<'ONE'
name=$1 family=${2:-} options= engine=
begun=$(date +%s)
echo "$name: begun"
if [ -n "$family" ]; then
    shift 2
    while [ "$1" != - ]; do options="$options $1" && shift; done
    shift
    engine=$*
    model=$SCRATCH/$name
    python3 -m trueline make-tiny "$family" "$model" $options >"$SCRATCH/reports/$name.log" 2>&1 || {
        echo "$name: not made: $(tail -n 1 "$SCRATCH/reports/$name.log" | cut -c 1-300)"
        exit 1
    }
else
    model=$name
fi
# not a share of the GPU: 4 GiB of that are set aside for a step, and what others use counts
python3 -m trueline verify "$model" --device "$DEVICE" $TIER --quiet \
    --kv-cache-memory-bytes 1000000000 $engine \
    --out "$SCRATCH/reports/$name" >>"$SCRATCH/reports/$name.log" 2>&1
code=$?
echo "$name: exit $code after $(($(date +%s) - begun)) s"
grep -E '^trueline:|PASSED|FAILED|  (failed|error) ' "$SCRATCH/reports/$name.log" | cut -c 1-600
ONE
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
printf '%s\n' "$MODELS" | grep -v '^$' |
    timeout "$SECONDS_IN_ALL" tools/gpu.sh run xargs -P "${JOBS:-4}" -L 1 sh "$SCRATCH/one" 2>&1 |
    tee "$OUT/log"
left=$((SECONDS_IN_ALL - $(date +%s) + BEGUN))
if [ "$left" -gt 30 ]; then
    ids=$(tools/gpu.sh run python3 -c "
from trueline.verify.checks import NEEDS
from trueline.verify.faults.table import FAULTS
print(*(fault.id for fault in FAULTS if NEEDS.get(fault.check) == 'needs a GPU'))")
    timeout "$left" tools/gpu.sh run python3 -m trueline.verify.suite.table "$OUT/faults.md" \
        --only $ids 2>&1 | tail -n 3
fi
tar -czf "$OUT/reports.tar.gz" -C "$SCRATCH" reports
rm -rf "$SCRATCH"
# every one that was listed has ended, and well
[ "$(printf '%s\n' "$MODELS" | grep -c .)" -eq "$(grep -c ': exit 0 ' "$OUT/log")" ]
