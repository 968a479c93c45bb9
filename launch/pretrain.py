"""Reference training script: a small causal language model with stock DeepSpeed.

Every rank runs it: ``torchrun --nproc-per-node 2 -m rankwise.launch.pretrain runs/x/settings.json``. All that is
particular to rankwise is :func:`initialize`; the rest is what any DeepSpeed training loop does.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from rankwise.launch.data import Corpus, load_corpus, load_tokenizer
from rankwise.launch.environment import skip_shm_build_without_compiler
from rankwise.launch.models import build_model
from rankwise.launch.sampler import WindowSampler, validation_batches
from rankwise.launch.settings import Settings

__all__ = ["initialize", "learning_rate_factor", "optimizer_state_bytes", "run"]

_UNTIMED_STEPS = 5
"""Steps left out of the throughput figures: allocation, first-touch and lazy compilation happen there."""

_SYNC_INTERVAL = 10
"""Steps between two averages of the loss over the ranks, for the progress bar and the curve."""


def initialize(model: nn.Module, config: dict[str, Any], scheduler: Any) -> Any:
    """``deepspeed.initialize`` with our optimizer types known to the JSON.

    Args:
        model: the model.
        config: DeepSpeed configuration; its ``optimizer`` block chooses the optimizer.
        scheduler: called with the optimizer inside DeepSpeed's ZeRO wrapper, so it acts on the real learning rates.

    Returns:
        The DeepSpeed engine.
    """
    import deepspeed

    start = deepspeed.initialize
    if config["optimizer"]["type"].lower() not in {"adamw", "adam"}:
        start = importlib.import_module("deepspeed_plugin").initialize
    return start(model=model, model_parameters=model.parameters(), config=config, lr_scheduler=scheduler)[0]


def learning_rate_factor(step: int, steps: int, warmup: float, final: float) -> float:
    """Linear rise, then a cosine down to ``final``: the factor on the peak learning rate.

    Args:
        step: step about to be taken, from 0.
        steps: steps of the whole run.
        warmup: share of the steps spent rising; the first step is already above 0.
        final: factor at the last step.
    """
    rise = round(warmup * steps)
    if step < rise:
        return (step + 1) / rise
    progress = min(1.0, (step - rise) / max(1, steps - 1 - rise))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer state this rank holds, fp32 master weights not included."""
    own = getattr(optimizer, "state_bytes", None)
    if callable(own):
        return sum(own().values())  # {"element": ..., "matrix": ...}
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(optimizer.state.values()))


def run(settings: Settings) -> None:
    """Trains one model and writes ``metrics.jsonl`` and ``summary.json`` into ``settings.output``."""
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed calls collectives under names that newer torch versions deprecate.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    skip_shm_build_without_compiler()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    corpus = load_corpus(_path(settings.data), load_tokenizer(settings.tokenizer), Path(settings.cache))
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

    def scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, settings.steps, settings.warmup, settings.final_lr)
        )

    engine = initialize(model, settings.deepspeed, scheduler)
    try:
        trainer = _Trainer(engine, settings, corpus, rank, world_size, get_accelerator().synchronize)
        summary = trainer.train()
        summary["parameters"] = parameters
        summary["device"] = get_accelerator().current_device_name()
        if rank == 0:
            path = Path(settings.output) / "summary.json"
            path.write_text(json.dumps(summary, indent=2), encoding="utf-8")
        # A rank that closes its connections while a peer still uses them makes that peer abort.
        comm.barrier()
    finally:
        engine.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()


class _Trainer:
    """The training loop with its clocks and its records."""

    def __init__(
        self, engine: Any, settings: Settings, corpus: Corpus, rank: int, world_size: int, synchronize: Any
    ) -> None:
        self.engine, self.settings, self.corpus = engine, settings, corpus
        self.rank, self.world_size, self.synchronize = rank, world_size, synchronize
        self.sampler = WindowSampler(
            corpus.train,
            settings.seq_len,
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
            world_size,
            settings.seed,
        )
        self.seconds = self.step_seconds = 0.0
        self.validation_loss = math.nan

    def train(self) -> dict[str, Any]:
        """All steps; returns the summary, the same on every rank."""
        settings, steps = self.settings, self.settings.steps
        untimed = min(_UNTIMED_STEPS, steps - 1)
        losses: list[Tensor] = []
        with (Path(os.devnull) if self.rank else Path(settings.output) / "metrics.jsonl").open("w") as metrics:
            bar = tqdm(total=steps, desc=settings.label, disable=self.rank != 0, dynamic_ncols=True, unit="step")
            for step in range(steps):
                if step == untimed:
                    self.seconds = self.step_seconds = 0.0
                rate = float(self.engine.basic_optimizer.param_groups[0]["lr"])
                losses.append(self._step(step))
                bar.update()
                if (step + 1) % _SYNC_INTERVAL == 0 or step + 1 == steps:
                    loss = self._mean(torch.stack(losses).mean())
                    losses.clear()
                    speed = self._tokens_per_second(step + 1 - (untimed if step >= untimed else 0))
                    bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{speed:.0f}", lr=f"{rate:.1e}")
                    _write(metrics, step=step + 1, loss=loss, lr=rate, tokens_per_second=speed)
                if (step + 1) % settings.validation_interval == 0 or step + 1 == steps:
                    self.validation_loss = self._validate()
                    _write(metrics, step=step + 1, validation_loss=self.validation_loss)
            bar.close()
        return self._summary(steps - untimed)

    def _step(self, step: int) -> Tensor:
        """One optimizer step; returns this rank's mean loss."""
        self.engine.train()
        self.synchronize()
        started = time.perf_counter()
        losses = []
        for micro_step in range(self.sampler.accumulation):
            tokens = self.sampler.batch(step, micro_step, self.rank).to(self.engine.device)
            loss = self._losses(tokens).mean()
            self.engine.backward(loss)
            losses.append(loss.detach().float())
            self.synchronize()
            before = time.perf_counter()
            self.engine.step()
            self.synchronize()
            self.step_seconds += time.perf_counter() - before
        self.seconds += time.perf_counter() - started
        return torch.stack(losses).mean()

    def _losses(self, tokens: Tensor) -> Tensor:
        """Mean loss of every sample in nats per token, shape (samples,)."""
        logits = self.engine(input_ids=tokens[:, :-1]).logits.float()
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(dim=1)

    @torch.no_grad()
    def _validate(self) -> float:
        self.engine.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.engine.device)
        batches = validation_batches(
            self.corpus.validation,
            self.settings.seq_len,
            self.settings.validation_samples,
            self.sampler.micro_batch,
            self.rank,
            self.world_size,
        )
        for tokens, weights in batches:
            weights = weights.to(total)
            total += torch.stack([(self._losses(tokens.to(total.device)) * weights).sum(), weights.sum()])
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def _mean(self, value: Tensor) -> float:
        value = value.double()
        dist.all_reduce(value)
        return float(value) / self.world_size

    def _tokens_per_second(self, steps: int) -> float:
        return steps * self.sampler.global_batch * self.settings.seq_len / self.seconds

    def _summary(self, timed_steps: int) -> dict[str, Any]:
        held = torch.tensor(optimizer_state_bytes(self.engine.basic_optimizer), device=self.engine.device)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        settings = self.settings
        return {
            "label": settings.label,
            "optimizer": settings.deepspeed["optimizer"],
            "zero_stage": self.engine.zero_optimization_stage(),
            "world_size": self.world_size,
            "steps": settings.steps,
            "tokens": settings.steps * self.sampler.global_batch * settings.seq_len,
            "validation_loss": self.validation_loss,
            "unigram_entropy": self.corpus.unigram_entropy,
            "tokens_per_second": self._tokens_per_second(timed_steps),
            "step_share": self.step_seconds / self.seconds,
            "state_bytes_per_rank": int(held),
        }


def _write(file: IO[str], **record: float) -> None:
    file.write(json.dumps(record) + "\n")
    file.flush()


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


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
