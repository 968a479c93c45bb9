"""Pretrain a Llama with DeepSpeed ZeRO-3 and MARS-M: copy this file, and change what is yours.

deepspeed llama_deepspeed.py --text my/texts                              # all GPUs of this machine
rankwise deepspeed --ranks 2 --device cpu llama_deepspeed.py --tiny       # a try on CPUs

Run it again with ``--resume`` to go on from the last checkpoint. Without ``--text`` it reads the Python files of the
standard library. Tokens are bytes: put your tokenizer into :func:`read_tokens`.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed_plugin  # noqa: F401 - makes the types known to DeepSpeed; before deepspeed.initialize

SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16}
TINY = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCABULARY = 256


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="file or folder")
    parser.add_argument("--type", default="MARS-M", help="MARS-AdamW, SONew, LDAdam, MKOR ...: see 'rankwise list'")
    parser.add_argument("--lr", type=float, default=1.6e-3, help="4 times AdamW's, for MARS-M; search around it")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--save", type=Path, default=Path("checkpoints"))
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a model for CPUs")
    parser.add_argument("--local_rank", type=int, help="DeepSpeed's launcher passes it")
    return parser.parse_args()


def deepspeed_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return what could as well be a file."""
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": args.type, "params": {"lr": args.lr, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": args.steps, "warmup_num_steps": max(args.steps // 50, 1)},
        },
    }


def read_tokens(path: Path) -> Tensor:
    """Return the bytes of a file, or of all .py or .txt files of a folder."""
    files = sorted(path.rglob("*.py")) or sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise SystemExit(f"--text is {path}, which has no .py and no .txt file")
    return torch.frombuffer(bytearray(b"\0".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batch(tokens: Tensor, args: argparse.Namespace, number: int, device: torch.device) -> Tensor:
    """Return windows that only this rank sees; their number decides which, so that a run can be resumed."""
    random = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(tokens) - args.length, (args.micro_batch,), generator=random)
    return torch.stack([tokens[start : start + args.length] for start in starts.tolist()]).long().to(device)


def main() -> None:
    """Train, and save from time to time."""
    args = arguments()
    deepspeed.init_distributed()
    config = deepspeed_config(args)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):  # no rank ever holds the whole model
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **(TINY if args.tiny else SIZES)))
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if args.resume:
        engine.load_checkpoint(str(args.save))
    tokens, begun = read_tokens(args.text), time.perf_counter()
    first = engine.global_steps
    for step in range(first, args.steps):
        for micro in range(args.accumulation):
            window = batch(tokens, args, step * args.accumulation + micro, engine.device)
            loss = engine(input_ids=window, labels=window).loss
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0 and (step % 10 == 0 or step + 1 == args.steps):
            rate = args.micro_batch * args.accumulation * args.length * (step + 1 - first) * dist.get_world_size()
            rate /= time.perf_counter() - begun
            print(f"step {step + 1}: loss {loss.item():.4f}, {rate:,.0f} tokens/s", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            engine.save_checkpoint(str(args.save))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
