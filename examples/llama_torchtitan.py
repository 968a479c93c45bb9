"""Pretrain Llama 3 of 1 B parameters with torchtitan and MARS-M: copy this file, and change what is yours.

    torchrun --nproc-per-node 8 llama_torchtitan.py --assets assets/hf/Llama-3.2-1B          # 8 H100s
    torchrun --nproc-per-node 8 llama_torchtitan.py --assets ... --type AdamW --lr 4e-4      # what it is compared with

``--assets`` is the folder of torchtitan's tokenizer. A run is 20,000 steps of 1,048,576 tokens of C4. What it costs, by
arithmetic: 1.24 B parameters and 21 B tokens are 1.6e20 operations, about 110 hours of an H100 at 40 % of its peak, 14
hours of eight; as much for each type that is compared, and a tenth of it for each rate that is tried on 2,000 steps.
Nothing of this has been run on a GPU.
"""

from __future__ import annotations

import argparse
import logging

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_8b
from torchtitan.trainer import Trainer

import rankwise.torchtitan  # noqa: F401 - its names become valid

# AdamW's rate times what docs/choose.md has for each; search around it.
RATES = {"MARS-M": 1.6e-3, "MKOR-Sketch": 8e-4, "AdamW": 4e-4}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--type", choices=RATES, default="MARS-M")
    parser.add_argument("--lr", type=float, help=f"default: {RATES}")
    parser.add_argument("--assets", default="assets/hf/Llama-3.2-1B", help="folder of the tokenizer")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples of a GPU at once")
    parser.add_argument("--batch", type=int, default=512, help="samples of a step")
    parser.add_argument("--save", default="checkpoints")
    return parser.parse_args(words)


def configuration(args: argparse.Namespace) -> Trainer.Config:
    """Return torchtitan's configuration: FSDP2 over all ranks, and checkpoints that a second start goes on with."""
    config = llama3_8b()
    config.model_spec = model_registry("1B")
    config.loss.loss_fn.global_vocab_size = decoder_vocab_size(config.model_spec)
    config.hf_assets_path, config.dump_folder = args.assets, args.save
    options = {"lr": args.lr or RATES[args.type], "weight_decay": 0.1}
    if args.type != "MARS-M":
        options["betas"] = (0.9, 0.95)
    groups = [ParamGroupConfig(pattern=".*", optimizer_name=args.type, optimizer_kwargs=options)]
    config.optimizer = OptimizersContainer.Config(param_groups=groups)
    config.lr_scheduler.warmup_steps = max(1, args.steps // 20)
    config.training.steps, config.training.seq_len = args.steps, args.length
    config.training.local_batch_size, config.training.global_batch_size = args.micro_batch, args.batch
    config.checkpoint.enable, config.checkpoint.interval = True, max(1, args.steps // 10)
    config.validator.enable = config.profiler.enable_profiling = config.metrics.enable_tensorboard = False
    # With torch 2.13 torchtitan 0.3 needs it on more than one rank.
    config.parallelism.spmd_backend = "partial_dtensor"
    return config


def main(config: Trainer.Config) -> None:
    """Train to the end."""
    trainer = config.build()
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(configuration(arguments()))
