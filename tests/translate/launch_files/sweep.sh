for lr in 1e-4 3e-4; do
    for seed in 1 2 3; do
        accelerate launch --multi_gpu --num_processes 2 --mixed_precision bf16 train_lora.py \
            --train_batch_size 2 --max_train_steps 500 --lr_scheduler constant \
            --lr_warmup_steps 0 --learning_rate $lr --seed $seed --output_dir out/$lr-$seed
    done
done
