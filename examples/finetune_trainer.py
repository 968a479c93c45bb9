"""Fine-tune a causal language model with Hugging Face's Trainer, whole or by LoRA: copy this file.

torchrun --nproc-per-node 8 finetune_trainer.py --model my/llama --text my/texts            # all weights, LDAdam
torchrun --nproc-per-node 8 finetune_trainer.py --model my/llama --text my/texts --lora 16  # adapters, MARS-AdamW
python finetune_trainer.py --tiny --lora 4                                                  # a try on a CPU

``--tiny`` makes a small model with random weights, and reads bytes. docs/fine-tuning.md says what is known of types
and rates, and what is not. With DeepSpeed, put ``import deepspeed_plugin`` here, pass ``deepspeed="ds.json"`` to the
arguments, and leave ``optimizer_cls_and_kwargs`` out.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import rankwise.hf

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")


class LoRA(nn.Module):
    """A frozen linear layer, and a product of two small matrices that is trained: W x + (alpha / r) B A x."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float = 16.0) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        kind = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(base.in_features, rank, **kind)
        self.lora_B = nn.Linear(rank, base.out_features, **kind)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Add the product to what the frozen layer gives."""
        return self.base(x) + self.scale * self.lora_B(self.lora_A(x))


def adapt(model: nn.Module, rank: int) -> None:
    """Freeze the model, and put adapters beside the projections of attention."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ADAPTED and isinstance(child, nn.Linear):
                setattr(module, name, LoRA(child, rank))


def read_bytes(path: Path) -> bytes:
    """Return a file, or all .py or .txt files of a folder."""
    files = sorted(path.rglob("*.py")) or sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    return b"\0".join(file.read_bytes() for file in files)


def model_and_tokens(args: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """Return the model and the ids of the text."""
    text = read_bytes(args.text)
    if args.tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
        torch.manual_seed(0)
        tokens = torch.frombuffer(bytearray(text[: 1 << 20]), dtype=torch.uint8)
        return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)), tokens
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = tokenizer(text.decode("utf-8", "replace"), return_tensors="pt").input_ids[0]
    return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16), tokens


def main() -> None:
    """Train by the Trainer, which logs and saves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder or name of a pretrained model")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="file or folder")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank, not all weights")
    parser.add_argument("--type", help="LDAdam for all weights, MARS-AdamW for adapters")
    parser.add_argument("--lr", type=float, default=1e-4, help="twice the Trainer's own, for AdamW; to be searched")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sample")
    parser.add_argument("--output", default="out")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not (args.tiny or args.model):
        parser.error("--model is missing: name a folder or a model, or try --tiny")
    model, tokens = model_and_tokens(args)
    if args.lora:
        adapt(model, args.lora)
    kind = args.type or ("MARS-AdamW" if args.lora else "LDAdam")
    # A quarter of the width is what ended even with AdamW in pretraining (docs/evidence.md).
    options = {"rank": model.config.hidden_size // 4, "error_dtype": "int8"} if kind == "LDAdam" else {}
    samples = tokens[: len(tokens) // args.length * args.length].view(-1, args.length).long()
    trainer = Trainer(
        model,
        TrainingArguments(
            args.output,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            warmup_steps=args.steps // 20,
            lr_scheduler_type="cosine",
            weight_decay=0.0,
            bf16=torch.cuda.is_available(),
            logging_steps=10,
            save_steps=max(args.steps // 2, 1),
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=[{"input_ids": sample, "labels": sample} for sample in samples],
        optimizer_cls_and_kwargs=rankwise.hf.optimizer_cls_and_kwargs(model, kind, lr=args.lr, **options),
    )
    trainer.train()


if __name__ == "__main__":
    main()
