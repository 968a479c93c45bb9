"""This reference training script trains a small causal language model with stock DeepSpeed.

Every rank runs it: ``torchrun --nproc-per-node 2 -m rankwise.launch.pretrain runs/x/settings.json``. All that is
particular to rankwise is :func:`initialize`; any DeepSpeed training loop does the rest.
"""

from __future__ import annotations

import importlib
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from rankwise.launch.data import Corpus, load_corpus, load_tokenizer
from rankwise.launch.environment import leave_groups, prepare_shm_build
from rankwise.launch.loop import Loop, learning_rate_factor, optimizer_state_bytes
from rankwise.launch.models import build_model
from rankwise.launch.planning.devices import DEVICES
from rankwise.launch.sampler import WindowSampler
from rankwise.launch.settings import Settings

__all__ = ["initialize", "run"]


def initialize(model: nn.Module, config: dict[str, Any], scheduler: Any) -> Any:
    """Run ``deepspeed.initialize``, whose JSON may have our optimizer types.

    Args:
        model: The model.
        config: DeepSpeed configuration, whose ``optimizer`` block chooses the optimizer.
        scheduler: Called with the optimizer inside DeepSpeed's ZeRO wrapper, to act on the real learning rates.

    Returns:
        The DeepSpeed engine.
    """
    import deepspeed

    start = deepspeed.initialize
    if config["optimizer"]["type"].lower() not in {"adamw", "adam"}:
        start = importlib.import_module("deepspeed_plugin").initialize
    return start(model=model, model_parameters=model.parameters(), config=config, lr_scheduler=scheduler)[0]


def run(settings: Settings) -> None:
    """Train one model, and write ``metrics.jsonl`` and ``summary.json`` into ``settings.output``."""
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed calls collectives under names that newer torch versions deprecate.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    prepare_shm_build()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    corpus = load_corpus(settings.data, load_tokenizer(settings.tokenizer), settings.cache)
    torch.manual_seed(settings.seed)
    model = build_model(
        settings.model,
        vocab_size=corpus.vocab_size,
        layers=settings.layers,
        hidden=settings.hidden,
        heads=settings.heads,
        seq_len=settings.seq_len,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if settings.compiled:
        model.compile(backend=settings.compiled)  # in place: parameters keep their names

    def scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, settings.steps, settings.warmup, settings.final_lr)
        )

    engine = initialize(model, settings.deepspeed, scheduler)
    try:
        trained = _DeepSpeed(engine, settings, corpus, rank, world_size, get_accelerator().synchronize)
        summary = Loop(trained, settings, corpus).train()
        summary["parameters"] = parameters
        summary["layout"] = f"ZeRO-{engine.zero_optimization_stage()}"
        summary["zero_stage"] = engine.zero_optimization_stage()
        summary["device"] = get_accelerator().current_device_name()
        summary |= _of_device(summary["tokens_per_second"] / world_size, parameters, settings)
        if rank == 0:
            path = settings.output / "summary.json"
            path.write_text(json.dumps(summary, indent=2), encoding="utf-8")
        # A rank that closes its connections while a peer still uses them makes that peer abort.
        comm.barrier()
    finally:
        engine.destroy()
    del engine, trained
    leave_groups()


def _of_device(tokens_per_second: float, parameters: int, settings: Settings) -> dict[str, Any]:
    """Return what a GPU needed of its memory, and the share of its peak that was reached; nothing on CPUs.

    A token takes 6 operations a parameter and 12 a layer, width and position of its attention, as is usual.

    Args:
        tokens_per_second: Tokens per second of one rank.
        parameters: Number of parameters.
        settings: Shape of the model.
    """
    if not torch.cuda.is_available():
        return {}
    name = torch.cuda.get_device_name()
    peaks = [device.teraflops for device in DEVICES if device.name in name]
    operations = 6 * parameters + 12 * settings.layers * settings.hidden * settings.seq_len
    share = {"share_of_peak": tokens_per_second * operations / (peaks[0] * 1e12)} if peaks else {}
    return {"device": name, "peak_memory_bytes": torch.cuda.max_memory_allocated(), **share}


class _DeepSpeed:
    """A DeepSpeed engine for the loop."""

    def __init__(
        self,
        engine: Any,
        settings: Settings,
        corpus: Corpus,
        rank: int,
        world_size: int,
        synchronize: Callable[[], None],
    ) -> None:
        self.engine, self.synchronize = engine, synchronize
        self.data_rank, self.data_size = rank, world_size
        self.device = engine.device
        self.sampler = WindowSampler(
            corpus.train,
            settings.seq_len,
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
            world_size,
            settings.seed,
        )
        self.global_batch, self.micro_batch = self.sampler.global_batch, self.sampler.micro_batch
        self.update_seconds = 0.0

    def rate(self, step: int) -> float:
        return float(self.engine.basic_optimizer.param_groups[0]["lr"])

    def train_step(self, step: int) -> Tensor:
        self.engine.train()
        losses = []
        for micro_step in range(self.sampler.accumulation):
            tokens = self.sampler.batch(step, micro_step, self.data_rank).to(self.device)
            loss = self._losses(tokens).mean()
            self.engine.backward(loss)
            losses.append(loss.detach().float())
            self.synchronize()
            before = time.perf_counter()
            self.engine.step()
            self.synchronize()
            self.update_seconds += time.perf_counter() - before
        return torch.stack(losses).mean()

    def evaluate(self, tokens: Tensor) -> Tensor:
        self.engine.eval()
        return self._losses(tokens)

    def _losses(self, tokens: Tensor) -> Tensor:
        logits = self.engine(input_ids=tokens[:, :-1]).logits.float()
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(dim=1)

    def state_bytes(self) -> int:
        return optimizer_state_bytes(self.engine.basic_optimizer)


def main(
    settings: Annotated[Path, typer.Argument(help="settings.json of the run.", exists=True, dir_okay=False)],
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """Train one model on this rank."""
    run(Settings.read(settings))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
