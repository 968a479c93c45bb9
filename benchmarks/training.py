"""Time of whole training steps: what the choice of optimizer costs where forward and backward passes run too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.contenders import BASELINE, OURS, Contender, selected
from benchmarks.step import timed

__all__ = ["measure_training"]

_WARMUP = 1


class _Work(NamedTuple):
    """What a forward pass goes through.

    Attributes:
        context: Tokens of a sample.
        samples: Samples of one forward pass: what lies in memory does not depend on the tokens of a step.
        autocast: Type of its products; None: that of the weights.
    """

    context: int = 256
    samples: int = 1
    autocast: torch.dtype | None = None


_ON_CUDA = _Work(1024, 16, torch.bfloat16)


def _model(device: torch.device, tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=512) if tiny else GPT2Config()
    return GPT2LMHeadModel(config).to(device)


class _Trainer:
    def __init__(self, contender: Contender, device: torch.device, work: _Work, tiny: bool) -> None:
        self.name = contender.name
        self.model = _model(device, tiny)
        self.optimizer = contender.build(self.model)
        self.seconds: list[float] = []
        self.optimizer_seconds: list[float] = []
        self._work = work

    def step(self, samples: torch.Tensor, recorded: bool) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        for batch in samples.split(self._work.samples):
            with torch.autocast(samples.device.type, self._work.autocast, enabled=self._work.autocast is not None):
                loss = self.model(batch, labels=batch).loss
            loss.mul(len(batch) / len(samples)).backward()
        own, _, _ = timed(self.optimizer, samples.device)
        if recorded:
            self.seconds.append(time.perf_counter() - start)
            self.optimizer_seconds.append(own)


def measure_training(
    device: torch.device, tokens: int, steps: int, names: Sequence[str] = (), tiny: bool = False
) -> Iterator[dict[str, Any]]:
    """Train GPT-2 small with each type and with fused AdamW in turns.

    Args:
        device: Where to run.
        tokens: Tokens of one training step, in samples of 256; on a CUDA device in 16 of 1024 at a time, with products
            in             bfloat16.
        steps: Timed steps.
        names: Which types; empty for all.
        tiny: Whether a toy takes the place of GPT-2 small.

    Yields:
        A row per type: median seconds, of the whole and of the optimizer, and the median of the ratios of neighbouring
        steps.
    """
    work = _ON_CUDA if device.type == "cuda" else _Work()
    generator = torch.Generator().manual_seed(0)
    shape = (max(1, tokens // work.context), work.context)
    samples = torch.randint(0, 512 if tiny else 50257, shape, generator=generator).to(device)
    for contender in selected(OURS, names):
        plain, ours = (_Trainer(each, device, work, tiny) for each in (BASELINE, contender))
        for index in range(_WARMUP + steps):
            for trainer in (plain, ours):
                trainer.step(samples, index >= _WARMUP)
        ratios = [own / other for own, other in zip(ours.seconds, plain.seconds, strict=True)]
        yield {
            "name": ours.name,
            "seconds": statistics.median(ours.seconds),
            "optimizer_seconds": statistics.median(ours.optimizer_seconds),
            "adamw_seconds": statistics.median(plain.seconds),
            "ratio": statistics.median(ratios),
            "tokens": samples.numel(),
        }
