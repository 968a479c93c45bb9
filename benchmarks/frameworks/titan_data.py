"""Data for torchtitan's trainer that are the same on any number of ranks, without a data set and a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

__all__ = ["NoTokenizer", "Rows"]


class NoTokenizer(BaseTokenizer):
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing is to be configured."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Nobody asks."""
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Nobody asks."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Nobody asks."""
        raise NotImplementedError


class Rows(BaseDataLoader):
    """One endless list of rows, of which a step takes the same ones on any number of ranks and micro-batches."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Number of different tokens."""

        vocabulary: int = 64

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **kwargs: Any
    ) -> None:
        self._vocabulary, self._length = config.vocabulary, seq_len
        self._ranks, self._rank, self._count = dp_world_size, dp_rank, local_batch_size
        self._taken = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = self._taken + self._rank * self._count
            self._taken += self._ranks * self._count
            rows = torch.stack([self._row(number) for number in range(first, first + self._count)])
            positions = torch.arange(self._length).repeat(self._count, 1)
            yield {"input": rows[:, :-1].contiguous(), "positions": positions}, rows[:, 1:].contiguous()

    def _row(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randint(0, self._vocabulary, (self._length + 1,), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """How many rows were taken."""
        return {"taken": self._taken}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on behind the rows that were taken."""
        self._taken = state_dict["taken"]
