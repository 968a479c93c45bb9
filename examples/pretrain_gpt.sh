#!/bin/bash
# Pretrain a Llama-shaped model by Megatron-LM's unedited pretrain_gpt.py with MARS-M: copy this file.
#
#   MEGATRON=~/Megatron-LM DATA=my/corpus_text_document TOKENIZER=my/llama bash pretrain_gpt.sh
#   MEGATRON=~/Megatron-LM TINY=1 bash pretrain_gpt.sh        # a try on two CPU ranks, on Megatron's mock data
#
# DATA is what Megatron's tools/preprocess_data.py wrote. On several nodes start
# "torchrun ... -m rankwise.launch.megatron_shim pretrain_gpt.py ..." in the place of "rankwise megatron --ranks N".
# More arguments are passed on, as in "bash pretrain_gpt.sh --train-iters 100"; DRY_RUN=1 prints what would be started.
set -eu

SCRIPT=$MEGATRON/pretrain_gpt.py
OPTIMIZER=${OPTIMIZER:-mars-m}      # or mars-adamw, sonew, ldadam, mkor ...; each has flags: rankwise megatron $SCRIPT --help
SAVE=${SAVE:-checkpoints}

if [ -n "${TINY:-}" ]; then
    RUN=(--cpu --ranks 2)
    SIZES=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
        --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr-decay-iters 20 --lr-warmup-iters 2)
    TEXT=(--mock-data --tokenizer-type NullTokenizer --vocab-size 255)
    PARALLEL=()
else
    RUN=(--ranks "${RANKS:-8}")
    SIZES=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
        --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096
        --micro-batch-size 1 --global-batch-size 256 --train-iters 50000 --lr-decay-iters 50000 --lr-warmup-iters 500)
    TEXT=(--data-path "$DATA" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
    PARALLEL=(--tensor-model-parallel-size 4 --sequence-parallel)
fi

exec rankwise megatron ${DRY_RUN:+--dry-run} "${RUN[@]}" "$SCRIPT" \
    --optimizer "$OPTIMIZER" --lr "${LR:-1.2e-3}" --min-lr 1.2e-4 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16 \
    --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope \
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
    "${SIZES[@]}" "${TEXT[@]}" "${PARALLEL[@]}" \
    --no-create-attention-mask-in-dataloader --eval-iters 1 --eval-interval 1000 --log-interval 1 \
    --save "$SAVE" --load "$SAVE" --save-interval 1000 --ckpt-format torch_dist "$@"
