#!/usr/bin/env bash
set -e
DATA=$1
prepare() {
    local folder=$1
    wget -q https://example.org/data.tar.gz
    rm -rf "$folder"
    python prepare.py --to "$folder"
}
train() {
    torchrun --nproc_per_node "$2" train.py --stage "$1" "$DATA"
}
prepare work
train pretrain 4
if [ -f work/done ]; then
    train finetune 2
fi
