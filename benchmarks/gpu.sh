#!/usr/bin/env bash
# All GPU benchmarks on a machine with one large CUDA GPU, in about ten minutes: attention in bf16 with the kernels that
# ran, training steps against timm, eager and compiled, with their fraction of the GPU's peak, and, for the remaining
# time, configs/cifar10_gpu.yaml.
#
#   bash benchmarks/gpu.sh DATA            # DATA holds cifar-10-batches-bin; TOTAL_SECONDS=600 by default
#   bash benchmarks/gpu.sh DATA --short    # the same commands on a CPU, a few steps of each
#
# Needs no network. In addition to torch >= 2.9, torchvision and Lightning 2.6 it needs the packages of
# benchmarks/gpu_wheels.txt.
set -euo pipefail
data=$(realpath "$1")
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD KINETO_LOG_LEVEL=99
total=${TOTAL_SECONDS:-600}
failed=0  # status of the benchmarks; training starts even if one fails

if [[ "${2:-}" == --short ]]; then
  device=cpu
  attention=(--pairs 2 --table module)
  steps=(--rounds 2 --size "width 192, depth 6, 32 px")
  training=(--model.compile false --trainer.precision 32-true --model.vit.depth 1 --data.batch_size 64
    --trainer.limit_train_batches 2 --trainer.limit_val_batches 2 --trainer.check_val_every_n_epoch 1
    --attention.every_n_epochs 0)
  epochs=2
else
  device=cuda
  attention=()
  steps=(--compile)
  training=()
fi

train() {
  python train.py --config configs/cifar10_gpu.yaml --data.root "$data" "${training[@]}" "$@"
}

python -c "import torch; print('torch', torch.__version__, torch.cuda.get_device_name() if '$device' == 'cuda' else 'cpu')"
echo "== attention, $SECONDS s"
timeout $((total / 3)) python benchmarks/attention.py --device $device "${attention[@]}" || failed=$?
echo "== training steps, $SECONDS s"
timeout $((total / 3)) python benchmarks/train_step.py --device $device "${steps[@]}" || failed=$?
echo "== cifar10_gpu, $SECONDS s"
if [[ $device == cuda ]]; then
  # One epoch with compilation, then eleven: the difference tells how many epochs fit.
  start=$SECONDS
  train --run_name trial --trainer.max_epochs 1 --trainer.limit_val_batches 1 --attention.every_n_epochs 0
  one=$((SECONDS - start)) start=$SECONDS
  train --run_name trial --trainer.max_epochs 11 --trainer.limit_val_batches 1 --attention.every_n_epochs 0
  ten=$((SECONDS - start - one))
  epochs=$(((total - SECONDS - one - 15) * 10 / (ten > 0 ? ten : 1)))
  epochs=$((epochs > 1 ? epochs : 1))
  echo "one epoch and the start take $one s, ten more epochs $ten s: $epochs epochs fit"
fi
train --trainer.max_epochs "$epochs" --trainer.callbacks+=benchmarks.clock.Clock  # prints when 94 % are reached
echo "== done, $SECONDS s"
if ((failed)); then
  echo "a benchmark failed or timed out (status $failed; 124 is a timeout)"
  exit "$failed"
fi
