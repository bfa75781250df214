#!/bin/bash
# Fine-tunes on one machine; the number of GPUs may be given as the first argument.
set -euo pipefail

NUM_GPUS=${1:-4}
TOTAL=64
BATCH=4
ACCUMULATE=$((TOTAL / BATCH / NUM_GPUS))
export WANDB_API_KEY=0123456789abcdef

OPTIMIZER_ARGS=(
    --learning_rate 2e-5
    --lr_scheduler_type cosine
    --warmup_steps 100
    --weight_decay 0.   # none
)
if [ "$NUM_GPUS" -gt 8 ]; then
    echo "one machine has 8"
    exit 1
fi

mkdir -p out
cat > ds.json <<JSON
{
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 2, "overlap_comm": true}
}
JSON

deepspeed --num_gpus=$NUM_GPUS --master_port 29501 train.py \
    --model_name_or_path "our models/small" \
    --deepspeed ds.json \
    --per_device_train_batch_size $BATCH --gradient_accumulation_steps $ACCUMULATE \
    --num_train_epochs 3 --bf16 True \
    --output_dir out --save_strategy steps --save_steps 200 \
    "${OPTIMIZER_ARGS[@]}" 2>&1 | tee out/log.txt
