#!/bin/sh
# Train the built-in models on a machine with a GPU, in parts that fit calls of ten minutes: each
# leaves its weights in OUT, at most four files. WORK must survive from one part to the next.
#
#   tools/witness/gpu.sh OUT first     witness-v3 and witness-glm5 (dense)
#   tools/witness/gpu.sh OUT second    witness-ling and witness-k25
#   tools/witness/gpu.sh OUT sparse    witness-v32 and witness-glm5, after the first part
#   tools/witness/gpu.sh OUT v4        witness-v4
#
# Two at a time share the GPU. The tokenizer and the sequences are made where they are not there.
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
    cp "$WORK/$2/model.safetensors" "$OUT/$2.safetensors"
}

case $PART in
first) stage=dense names="witness-v3 witness-glm5" ;;
second) stage=dense names="witness-ling witness-k25" ;;
sparse) stage=sparse names="witness-v32 witness-glm5" ;;
v4) stage=dense names="witness-v4" ;;
*) echo "accepted: first, second, sparse, v4" >&2 && exit 2 ;;
esac
test -e "$WORK/answers.npy" || python3 -m witness.train data "$WORK" "${names%% *}"
for name in $names; do
    train $stage "$name" &
done
wait
for name in $names; do
    tail -n 2 "$WORK/$name.$stage.log"
done
(cd "$WORK" && tar czf "$OUT/logs.tgz" ./*.log ./tokenizer*.json ./*/training.jsonl ./*/config.json)
