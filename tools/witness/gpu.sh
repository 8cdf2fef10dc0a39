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

both() { # STAGE NAME NAME: at once, sharing the GPU
    python3 -m witness.train "$1" "$WORK" "$2" 2>"$WORK/$2.$1.log" &
    python3 -m witness.train "$1" "$WORK" "$3" 2>"$WORK/$3.$1.log" &
    wait
    for name in "$2" "$3"; do
        cp "$WORK/$name/model.safetensors" "$OUT/$name.safetensors"
        tail -n 3 "$WORK/$name.$1.log"
    done
    (cd "$WORK" && tar czf "$OUT/logs.tgz" ./*.log ./tokenizer*.json ./*/training.jsonl ./*/config.json)
}

case $PART in
first)
    python3 -m witness.train data "$WORK"
    both dense witness-v3 witness-glm5
    ;;
second) both dense witness-ling witness-k25 ;;
sparse) both sparse witness-v32 witness-glm5 ;;
esac
