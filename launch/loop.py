"""The reference scripts of all frameworks share this training loop, with its clocks and records."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from rankwise.launch.data import Corpus
from rankwise.launch.sampler import validation_batches
from rankwise.launch.settings import Settings

__all__ = ["Engine", "Loop", "learning_rate_factor", "optimizer_state_bytes"]

_UNTIMED_STEPS = 5
"""Steps that are left out of the throughput figures, because they allocate, touch memory first, and compile."""

_SYNC_INTERVAL = 10
"""Steps between two averages of the loss over the ranks, for the progress bar or lines, and for the curve."""


class Engine(Protocol):
    """A model with its optimizer in one framework, on this rank.

    Attributes:
        device: Device of its tensors.
        global_batch: Samples per step over all ranks.
        micro_batch: Largest number of samples per forward pass.
        data_rank: Number of this rank's share of the validation windows.
        data_size: Number of shares.
        update_seconds: Seconds in optimizer steps so far.
    """

    device: torch.device
    global_batch: int
    micro_batch: int
    data_rank: int
    data_size: int
    update_seconds: float

    def rate(self, step: int) -> float:
        """Return the learning rate that the step will use."""

    def train_step(self, step: int) -> Tensor:
        """Do one optimizer step, and return the mean loss over this rank's samples, 0-d."""

    def evaluate(self, tokens: Tensor) -> Tensor:
        """Return losses of samples in nats per token, shape (samples,); tokens has shape (samples, window + 1)."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def state_bytes(self) -> int:
        """Return the bytes of optimizer state on this rank, without fp32 master weights."""


def learning_rate_factor(step: int, steps: int, warmup: float, final: float) -> float:
    """Return the factor of the peak learning rate: a linear rise, then a cosine down to ``final``.

    Args:
        step: Number of the next step, from 0.
        steps: Steps of the whole run.
        warmup: Share of the steps in which the factor rises; the first step is already above 0.
        final: Factor at the last step.
    """
    rise = round(warmup * steps)
    if step < rise:
        return (step + 1) / rise
    progress = min(1.0, (step - rise) / max(1, steps - 1 - rise))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of optimizer state that this rank holds, without fp32 master weights."""
    count = getattr(optimizer, "state_bytes", None)
    if callable(count):
        return sum(count().values())  # {"element": ..., "matrix": ...}
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(optimizer.state.values()))


class Loop:
    """Trains, validates and records.

    Args:
        engine: Model with its optimizer.
        settings: Steps, validation and output of the run.
        corpus: Text with the validation windows.
    """

    def __init__(self, engine: Engine, settings: Settings, corpus: Corpus) -> None:
        self.engine, self.settings, self.corpus = engine, settings, corpus
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.seconds = self.elapsed = 0.0
        self.validation_loss = math.nan

    def train(self) -> dict[str, Any]:
        """Do all steps, write ``metrics.jsonl``, and return the summary, equal on every rank."""
        settings, steps = self.settings, self.settings.steps
        untimed = min(_UNTIMED_STEPS, steps - 1)
        losses: list[Tensor] = []
        with (Path(os.devnull) if self.rank else settings.output / "metrics.jsonl").open("w") as metrics:
            # None shows the bar on terminals only; elsewhere it would be one line that never ends.
            disable = True if self.rank else None
            bar = tqdm(total=steps, desc=settings.label, disable=disable, dynamic_ncols=True, unit="step")
            for step in range(steps):
                if step == untimed:
                    self.seconds = self.engine.update_seconds = 0.0
                rate = self.engine.rate(step)
                losses.append(self._step(step))
                bar.update()
                if (step + 1) % _SYNC_INTERVAL == 0 or step + 1 == steps:
                    loss = self._mean(torch.stack(losses).mean())
                    losses.clear()
                    speed = self._tokens_per_second(step + 1 - (untimed if step >= untimed else 0))
                    bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{speed:.0f}", lr=f"{rate:.1e}")
                    if bar.disable and self.rank == 0:
                        line = f"{settings.label}: step {step + 1}/{steps}, loss {loss:.3f}, {speed:,.0f} tokens/s"
                        print(f"{line}, lr {rate:.1e}", flush=True)
                    _write(metrics, step=step + 1, loss=loss, lr=rate, tokens_per_second=speed, seconds=self.elapsed)
                if (step + 1) % settings.validation_interval == 0 or step + 1 == steps:
                    self.validation_loss = self._validate()
                    _write(metrics, step=step + 1, validation_loss=self.validation_loss)
            bar.close()
        return self._summary(steps - untimed)

    def _step(self, step: int) -> Tensor:
        self.engine.synchronize()
        started = time.perf_counter()
        loss = self.engine.train_step(step)
        self.engine.synchronize()
        taken = time.perf_counter() - started
        self.seconds, self.elapsed = self.seconds + taken, self.elapsed + taken
        return loss

    @torch.no_grad()
    def _validate(self) -> float:
        total = torch.zeros(2, dtype=torch.float64, device=self.engine.device)
        batches = validation_batches(
            self.corpus.validation,
            self.settings.seq_len,
            self.settings.validation_samples,
            self.engine.micro_batch,
            self.engine.data_rank,
            self.engine.data_size,
        )
        for tokens, weights in batches:
            weights = weights.to(total)
            total += torch.stack([(self.engine.evaluate(tokens.to(total.device)) * weights).sum(), weights.sum()])
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def _mean(self, value: Tensor) -> float:
        value = value.double()
        dist.all_reduce(value)
        return float(value) / self.world_size

    def _tokens_per_second(self, steps: int) -> float:
        return steps * self.engine.global_batch * self.settings.seq_len / self.seconds

    def _summary(self, timed_steps: int) -> dict[str, Any]:
        held = torch.tensor(self.engine.state_bytes(), device=self.engine.device)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        settings = self.settings
        return {
            "label": settings.label,
            "optimizer": settings.deepspeed["optimizer"],
            "world_size": self.world_size,
            "steps": settings.steps,
            "tokens": settings.steps * self.engine.global_batch * settings.seq_len,
            "validation_loss": self.validation_loss,
            "unigram_entropy": self.corpus.unigram_entropy,
            "tokens_per_second": self._tokens_per_second(timed_steps),
            "step_share": self.engine.update_seconds / self.seconds,
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
