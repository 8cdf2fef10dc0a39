#!/bin/sh
# Train the built-in models on a machine with a GPU, in parts that fit calls of ten minutes: each
# leaves its weights in OUT, at most four files. WORK must survive from one part to the next.
#
#   tools/witness/gpu.sh OUT first     tokenizer, sequences, witness-v3 and witness-glm5 (dense)
#   tools/witness/gpu.sh OUT second    witness-ling and witness-k25
#   tools/witness/gpu.sh OUT sparse    witness-v32 and witness-glm5
set -eu
OUT=${1:?} PART=${2:?}
WORK=${WORK:-/tmp/witness}
cd "$(dirname "$0")/../.."
export PYTHONPATH="src:tools:.gpu_site" PYTHONUNBUFFERED=1
mkdir -p "$WORK"

train() { # STAGE NAME
    start=$(date +%s)
    python3 -m witness.train "$1" "$WORK" "$2" 2>"$WORK/$2.$1.log"
    echo "$2: $1 training took $(($(date +%s) - start)) s" | tee -a "$WORK/seconds.log"
}

keep() { # STAGE NAME NAME
    for name in "$2" "$3"; do
        cp "$WORK/$name/model.safetensors" "$OUT/$name.safetensors"
        tail -n 3 "$WORK/$name.$1.log"
    done
    (cd "$WORK" && tar czf "$OUT/logs.tgz" ./*.log ./tokenizer*.json ./*/training.jsonl ./*/config.json)
}

case $PART in
first)
    python3 -m witness.train data "$WORK"
    train dense witness-v3 & train dense witness-glm5 & wait # sharing the GPU
    keep dense witness-v3 witness-glm5
    ;;
second)
    train dense witness-ling
    train dense witness-k25
    keep dense witness-ling witness-k25
    ;;
sparse)
    train sparse witness-v32 & train sparse witness-glm5 & wait
    keep sparse witness-v32 witness-glm5
    ;;
esac
