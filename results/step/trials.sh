# Trials side by side in the background: sh results/step/trials.sh DATA OUT SECONDS WORKERS
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 EKFAC_CACHE=/tmp/plain CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
mkdir -p /tmp/mps /tmp/mps-log "$2"; nvidia-cuda-mps-control -d >/dev/null 2>&1
for i in $(seq "$4"); do timeout "$3" python3 results/step/schedule_trials.py "$1" "$2" "$3" >> "$2/log.txt" 2>&1 & sleep 0.2; done; wait
