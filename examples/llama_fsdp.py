"""Pretrain a Llama with FSDP2, torch.compile and MARS-M: copy this file, and change what is yours.

torchrun --nproc-per-node 8 llama_fsdp.py --text my/texts      # GPUs
torchrun --nproc-per-node 2 llama_fsdp.py --tiny               # a try on CPUs

Run it again with ``--resume`` to go on from the last checkpoint, on any number of ranks. Without ``--text`` it reads
the Python files of the standard library. Tokens are bytes: put your tokenizer into :func:`read_tokens`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import rankwise

SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16}
TINY = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCABULARY = 256


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="file or folder")
    parser.add_argument("--lr", type=float, default=1.6e-3, help="4 times AdamW's, for MARS-M; search around it")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--save", type=Path, default=Path("checkpoints"))
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a model for CPUs")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; 'eager' compiles nothing")
    return parser.parse_args()


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


def sharded_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return a model whose layers are compiled and sharded one by one."""
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **(TINY if args.tiny else SIZES)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        block.compile(backend=args.backend)  # each layer by itself: compiled once, and sharded as a whole
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def states(model: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> dict[str, Any]:
    """Return what a checkpoint holds."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "steps": done}


def main() -> None:
    """Train, and save from time to time."""
    args = arguments()
    logging.basicConfig(level=logging.INFO if os.environ["RANK"] == "0" else logging.WARNING, format="%(message)s")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    model = sharded_model(args, device)
    rankwise.annotate(model)  # which weights are embeddings, heads, fused projections
    optimizer = rankwise.MARS(model.parameters(), variant="muon", lr=args.lr, weight_decay=0.1)
    warmup = max(args.steps // 50, 1)
    done = 0
    if args.resume:
        whole = [folder for folder in args.save.iterdir() if (folder / ".metadata").is_file()]  # it is written last
        saved = states(model, optimizer, 0)
        dcp.load(saved, checkpoint_id=max(whole, key=lambda folder: int(folder.name)))
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        done = saved["steps"]
    tokens, begun, first = read_tokens(args.text), time.perf_counter(), done
    for step in range(done, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min((step + 1) / warmup, 1 - 0.9 * step / args.steps)
        window = batch(tokens, args, step, device)
        loss = model(input_ids=window, labels=window).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 10 == 0 or step + 1 == args.steps):
            rate = args.micro_batch * args.length * dist.get_world_size() * (step + 1 - first)
            rate /= time.perf_counter() - begun
            print(f"step {step + 1}: loss {loss.item():.4f}, {rate:,.0f} tokens/s", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            dcp.save(states(model, optimizer, step + 1), checkpoint_id=args.save / str(step + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
