#!/bin/bash
# What has changed, on a GPU, within some 200 s: OUT=folder bash results/step/speed/gpu_call.sh
# BEFORE: sources of 30c30c7 (git archive 30c30c7 src | tar x -C runs/before makes runs/before/src); else no comparison.
# TINY=1 tries it on a CPU. Everything is written as it comes.
cd "$(dirname "$0")/../../.." && export PYTHONPATH=$PWD/src:$PWD/tests OUT=${OUT:-runs/gpu_call} && mkdir -p "$OUT"
BEFORE=${BEFORE:-runs/before/src} began=$SECONDS device=cuda tiny=""
if [ -n "$TINY" ]; then device=cpu tiny="--tiny --steps 6"; fi
says() { echo "== $1, after $((SECONDS - began)) s"; }
bench() {
    says "$1" && timeout "$2" python benchmarks/bench_networks.py "$1" --short $tiny --out "$OUT/$1" \
        --only "AdamW (fused)" "EKFAC(model)" "AdamW, captured" "EKFAC(model), graphed" 2>&1 | grep -v Warning | tee "$OUT/$1.txt"
}
says tests && timeout 60 python -m pytest -q -x -m gpu -p no:cacheprovider tests/optim/cuda/test_update.py \
    tests/optim/cuda/test_ahead.py tests/optim/cuda/test_fused.py tests/optim/cuda/test_graphed.py \
    tests/optim/cuda/test_graphs.py 2>&1 | tail -15 | tee "$OUT/tests.txt"
bench autoencoder 40
bench resnet18 60
bench gpt29 90
if [ -d "$BEFORE" ]; then
    says before_after
    timeout 60 python benchmarks/before_after.py "$BEFORE" src --device $device --turns 6 --rules per_example \
        --networks layers convolutions ${TINY:+--warm-up 2 --turns 1} --out "$OUT/before_after.json" 2>&1 | tee "$OUT/before_after.txt"
fi
says parts && timeout 60 python results/step/speed/graphed_parts.py autoencoder resnet18 ${TINY:+--tiny} 2>&1 \
    | grep -v Warning | tee "$OUT/parts.txt"
bench vit 60
says done
