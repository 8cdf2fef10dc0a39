#!/bin/sh
# Train the built-in models on a machine with a GPU, in parts that fit calls of ten minutes: each
# leaves its weights in OUT, at most four files. WORK must survive from one part to the next.
#
#   tools/witness/gpu.sh OUT first     witness-v3 and witness-glm5 (dense)
#   tools/witness/gpu.sh OUT second    witness-ling and witness-k25
#   tools/witness/gpu.sh OUT sparse    witness-v32 and witness-glm5, after the first part
#   tools/witness/gpu.sh OUT v4        witness-v4
#
# Two at a time share the GPU. The tokenizer and the sequences are made where they are not there,
# while the training begins with the first ones. LIMIT=SECONDS: a dense training has as many steps
# as fit. What there is so far is copied to OUT all the time, for a call that ends early.
set -eu
OUT=${1:?} PART=${2:?}
WORK=${WORK:-/tmp/witness}
cd "$(dirname "$0")/../.."
export PYTHONPATH="src:tools:.gpu_site" PYTHONUNBUFFERED=1
mkdir -p "$WORK"

train() { # STAGE NAME
    start=$(date +%s)
    if [ "$1" = dense ]; then
        set -- "$@" --seconds "${LIMIT:-inf}"
    fi
    stage=$1 name=$2
    shift 2
    python3 -m witness.train "$stage" "$WORK" "$name" "$@" 2>"$WORK/$name.$stage.log" ||
        echo "$name: $stage training failed" | tee -a "$WORK/seconds.log"
    echo "$name: $stage training took $(($(date +%s) - start)) s" | tee -a "$WORK/seconds.log"
}

keep() {
    for name in $names; do
        test ! -e "$WORK/$name/model.safetensors" ||
            cp "$WORK/$name/model.safetensors" "$OUT/$name.safetensors"
    done
    (cd "$WORK" && find . -name '*.log' -o -name 'tokenizer*.json' -o -name training.jsonl \
        -o -name config.json | tar czf "$OUT/logs.tgz" --files-from -)
}

tokenizer=
case $PART in
first) stage=dense names="witness-v3 witness-glm5" ;;
second) stage=dense names="witness-ling witness-k25" ;;
sparse) stage=sparse names="witness-v32 witness-glm5" ;;
v4) stage=dense names="witness-v4" tokenizer="--tokenizer src/trueline/witness/models/witness-v3" ;;
*) echo "accepted: first, second, sparse, v4" >&2 && exit 2 ;;
esac
making=
if [ ! -e "$WORK/made.txt" ]; then
    nice python3 -m witness.train data "$WORK" "${names%% *}" $tokenizer 2>"$WORK/data.log" &
    making=$!
fi
training=
for name in $names; do
    train $stage "$name" &
    training="$training $!"
done
while sleep 15; do keep || true; done >/dev/null 2>&1 &
keeping=$!
for one in $training; do wait "$one"; done
kill $keeping
keep
test -z "$making" || wait $making
for name in $names; do
    tail -n 3 "$WORK/$name.$stage.log"
done
