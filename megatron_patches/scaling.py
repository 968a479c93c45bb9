"""This module follows what Megatron multiplies the summed gradients of a step by, besides the loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.utils import get_model_config
from torch import Tensor, nn

__all__ = ["GradientScale"]


class GradientScale:
    """Follows the factor between gradients summed over ranks and micro-batches and those an optimizer is given.

    Megatron averages over the data-parallel ranks, experts included. With ``calculate_per_token_loss`` it divides by
    the number of tokens instead, which it knows when the backward pass is over.

    Args:
        chunks: The model chunks, wrapped by Megatron's ``DistributedDataParallel``.
        ranks: Number of data-parallel ranks (with context parallelism) of the dense parameters.
    """

    def __init__(self, chunks: Sequence[nn.Module], ranks: int) -> None:
        per_token = any(getattr(get_model_config(chunk), "calculate_per_token_loss", False) for chunk in chunks)
        # ``fully_shard`` averages in any case, and Megatron does not scale what that has reduced.
        buffered = [chunk for chunk in chunks if not isinstance(chunk, TorchFullyShardedDataParallel)]
        self.ranks = ranks
        self._averaging = 1.0 if per_token and buffered else 1.0 / ranks
        self._tokens: float | Tensor = 1.0
        for chunk in buffered:
            self._listen(chunk)

    def _listen(self, chunk: Any) -> None:
        scale_gradients = chunk.scale_gradients

        def recorded(factor: float | Tensor) -> None:
            self._tokens = factor.detach().clone() if isinstance(factor, Tensor) else factor
            scale_gradients(factor)

        chunk.scale_gradients = recorded

    def begin_window(self) -> None:
        """Forget the factor of the last step."""
        self._tokens = 1.0

    @property
    def factor(self) -> float | Tensor:
        """The factor of the present step."""
        return self._averaging * self._tokens
