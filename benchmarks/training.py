"""Time of whole training steps: what the choice of optimizer costs where forward and backward passes run too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.contenders import BASELINE, OURS, Contender, selected

__all__ = ["measure_training"]

_CONTEXT = 256
_WARMUP = 1


def _model(device: torch.device) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config()).to(device)


class _Trainer:
    def __init__(self, contender: Contender, device: torch.device) -> None:
        self.name = contender.name
        self.model = _model(device)
        self.optimizer = contender.build(self.model)
        self.seconds: list[float] = []

    def step(self, samples: torch.Tensor, recorded: bool) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        # One sample of 256 tokens at a time: what lies in memory does not depend on the number of tokens.
        for sample in samples:
            self.model(sample[None], labels=sample[None]).loss.div(len(samples)).backward()
        self.optimizer.step()
        if samples.device.type == "cuda":
            torch.cuda.synchronize(samples.device)
        if recorded:
            self.seconds.append(time.perf_counter() - start)


def measure_training(
    device: torch.device, tokens: int, steps: int, names: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Train GPT-2 small with each type and with fused AdamW in turns.

    Args:
        device: Where to run.
        tokens: Of one training step, in samples of 256.
        steps: Timed steps.
        names: Which types; empty for all.

    Yields:
        A row per type: median seconds, and the median of the ratios of neighbouring steps.
    """
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(0, 50257, (max(1, tokens // _CONTEXT), _CONTEXT), generator=generator).to(device)
    for contender in selected(OURS, names):
        plain, ours = _Trainer(BASELINE, device), _Trainer(contender, device)
        for index in range(_WARMUP + steps):
            for trainer in (plain, ours):
                trainer.step(samples, index >= _WARMUP)
        ratios = [own / other for own, other in zip(ours.seconds, plain.seconds, strict=True)]
        yield {
            "name": ours.name,
            "seconds": statistics.median(ours.seconds),
            "adamw_seconds": statistics.median(plain.seconds),
            "ratio": statistics.median(ratios),
            "tokens": samples.numel(),
        }
