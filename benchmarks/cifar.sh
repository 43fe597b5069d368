#!/bin/sh
# The paper's CIFAR-10 experiments on a bare GPU machine: torch and numpy alone, several trainings side by side.
#     sh benchmarks/cifar.sh SECONDS WORKERS DATA OUT NAME...
# DATA holds the folders cifar10 and mnist. Runs and paces come to OUT; the same command again goes on. Without
# checkpoints, which are large, all of it is packed into OUT.tar.gz.
seconds=$1 workers=$2 data=$3 out=$4
shift 4
export PYTHONPATH=src PYTHONUNBUFFERED=1 EKFAC_CACHE="${EKFAC_CACHE:-/tmp/plain}" OMP_NUM_THREADS=1
# NVIDIA's MPS lets kernels of several processes run at the same time; where it does not work, they take turns.
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
nvidia-cuda-mps-control -d >/dev/null 2>&1
if timeout 60 python3 -c "import torch; torch.ones(2, device='cuda').sum().item()" >/dev/null 2>&1; then
    echo "MPS: $(pgrep -c nvidia-cuda-mps || true) of its processes run"
else
    echo "MPS does not work here"
    echo quit | timeout 10 nvidia-cuda-mps-control >/dev/null 2>&1
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
fi
python3 -m ekfac.lab.reproduce "$@" --budget "$seconds" --workers "$workers" --data-dir "$data" --out "$out"
tar -C "$(dirname "$out")" --exclude='checkpoint.pt*' --exclude='*.lock' --exclude='.lock' -czf "$out.tar.gz" "$(basename "$out")"
