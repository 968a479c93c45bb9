"""The windows of tokens that are read at a step are a function of the seed and the step, never of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["WindowSampler", "validation_batches"]


@dataclass(frozen=True)
class WindowSampler:
    """Random windows of a token stream, in an order that no world size changes.

    Step ``t`` draws ``global_batch`` window positions from ``(seed, t)``; ranks and micro-batches take consecutive
    pieces of that list. Any split of one global batch over ranks and accumulation steps has the same samples.

    Attributes:
        tokens: Token ids, one-dimensional.
        window: Tokens that a sample predicts; it reads one more.
        micro_batch: Samples of one forward pass on one rank.
        accumulation: Micro-batches per optimizer step.
        world_size: Number of data-parallel ranks.
        seed: Decides the order.
    """

    tokens: np.ndarray[Any, Any]
    window: int
    micro_batch: int
    accumulation: int
    world_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        """Check that the stream holds at least one window.

        Raises:
            ValueError: It does not, or a count is not positive.
        """
        for name in ("window", "micro_batch", "accumulation", "world_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        _check_window(self.tokens, self.window)

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch * self.accumulation * self.world_size

    def positions(self, step: int) -> np.ndarray[Any, Any]:
        """Return the first token of every sample of a step's global batch, in global order, shape (global_batch,)."""
        generator = np.random.default_rng([self.seed, step])
        return generator.integers(0, len(self.tokens) - self.window, self.global_batch)

    def batch(self, step: int, micro_step: int, rank: int) -> Tensor:
        """Return the tokens of one micro-batch, shape (micro_batch, window + 1), int64.

        Args:
            step: Optimizer step, from 0.
            micro_step: Micro-batch of that step, from 0 to ``accumulation - 1``.
            rank: Data-parallel rank.
        """
        first = (micro_step * self.world_size + rank) * self.micro_batch
        return _windows(self.tokens, self.positions(step)[first : first + self.micro_batch], self.window)


def validation_batches(
    tokens: np.ndarray[Any, Any], window: int, samples: int, batch: int, rank: int, world_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of a fixed set of evenly spaced windows.

    All ranks get equally many batches of equal shapes, because a forward pass may have collectives (ZeRO-3). If the
    windows do not divide evenly, the last one is repeated with weight 0.

    Args:
        tokens: Token ids, one-dimensional.
        window: Tokens that a sample predicts.
        samples: Windows over all ranks; fewer if the stream has no room for so many without overlap.
        batch: Largest number of windows per batch.
        rank: Number of this rank.
        world_size: Number of ranks.

    Yields:
        Tokens of shape (at most batch, window + 1), int64, and the weight of each window, 1 or 0.

    Raises:
        ValueError: The stream is shorter than one window.
    """
    _check_window(tokens, window)
    last = len(tokens) - window - 1
    starts = np.linspace(0, last, min(samples, last // window + 1), dtype=np.int64)
    weights = np.ones(len(starts), np.float32)
    padding = -len(starts) % world_size
    starts = np.pad(starts, (0, padding), mode="edge")[rank::world_size]
    weights = np.pad(weights, (0, padding))[rank::world_size]
    for first in range(0, len(starts), batch):
        chosen = slice(first, first + batch)
        yield _windows(tokens, starts[chosen], window), torch.from_numpy(weights[chosen])


def _windows(tokens: np.ndarray[Any, Any], starts: np.ndarray[Any, Any], window: int) -> Tensor:
    return torch.from_numpy(np.stack([tokens[start : start + window + 1] for start in starts]).astype(np.int64))


def _check_window(tokens: np.ndarray[Any, Any], window: int) -> None:
    if len(tokens) <= window:
        raise ValueError(
            f"window is {window} tokens and the text has {len(tokens)}: it must have at least {window + 1}; "
            "pass more text or a smaller --seq-len"
        )
