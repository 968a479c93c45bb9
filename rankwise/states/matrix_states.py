"""The states of the matrices a rank owns."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rankwise.kernels.dispatch import quantization_for
from rankwise.kernels.low_precision_runs import LowPrecisionRuns, is_coded

__all__ = ["MatrixState", "MatrixStates", "base_name", "keep_narrow_", "kept_by"]

MatrixState = dict[str, Tensor]
_NOBODY: Mapping[tuple[str, str], int] = {}


class MatrixStates(dict[str, MatrixState]):
    """States in use by key, and those loaded from a checkpoint whose matrix has not been stepped since.

    Attributes:
        loaded: States that no step has used yet. Only stepping shows which matrices this rank owns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, MatrixState] = {}
        self._before: dict[str, MatrixState] | None = None

    def obtain(self, key: str, initial: Callable[[], MatrixState]) -> MatrixState:
        """Return an owned matrix's states: those in use, else those loaded, else fresh ones."""
        state = self.take_up(key, initial)
        if self._before is not None and key not in self._before:
            self._before[key] = {name: value.clone() for name, value in state.items()}
        return state

    def take_up(self, key: str, initial: Callable[[], MatrixState]) -> MatrixState:
        """Return the states as :meth:`obtain` does, but keep no copy for :meth:`watched`."""
        state = self.get(key)
        if state is None:
            state = initial()
            loaded = self.loaded.pop(key, None)
            if loaded is not None:
                # A checkpoint may have been read into another device's memory, or be of another type.
                state |= {name: _like(state[name], value, key) for name, value in loaded.items() if name in state}
            self[key] = state
        return state

    @contextmanager
    def watched(self) -> Iterator[dict[str, MatrixState]]:
        """Collect copies of the states that are asked for in the context, as they are when first asked for."""
        self._before = {}
        try:
            yield self._before
        finally:
            self._before = None

    def load(self, states: Mapping[str, MatrixState]) -> None:
        """Replace all states; the new ones are used when their matrices are stepped."""
        self.clear()
        self.loaded = dict(states)

    def drop_foreign(
        self, owners: Mapping[str, int], rank: int, keepers: Mapping[tuple[str, str], int] = _NOBODY
    ) -> None:
        """Drop states of matrices that another rank owns: they would only take memory and go stale."""
        if self or self.loaded:
            for key, owner in owners.items():
                if owner != rank:
                    for states in (self, self.loaded):
                        state = states.pop(key, {})
                        if state and (kept := {name: state[name] for _, name in kept_by(keepers, rank, {key: state})}):
                            states[key] = kept

    def everything(self) -> dict[str, MatrixState]:
        """States for a checkpoint: those in use and loaded ones."""
        return {**self.loaded, **self}

    def drop(self, keys: Iterable[str]) -> None:
        """Drop the states of some matrices, which begin afresh."""
        for key in keys:
            self.pop(key, None)
            self.loaded.pop(key, None)

    def forget(self) -> None:
        """Drop all states."""
        self.load({})

    def bytes_of(self, key: str) -> int:
        """Bytes of the states in use of one matrix."""
        return sum(value.nbytes for value in self.get(key, {}).values())

    @property
    def nbytes(self) -> int:
        """Bytes of all states in use."""
        return sum(map(self.bytes_of, self))


def base_name(key: str, names: Container[str]) -> str:
    """The name that the key of a matrix begins with, before brackets; empty if there is none."""
    while key and key not in names:
        key = key.rpartition("[")[0]
    return key


def kept_by(
    keepers: Mapping[Any, int], rank: int, states: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    """Matrices and names of the states that a rank keeps for their owners; ``keepers`` may have other keys, too."""
    return ((key, name) for key, state in states.items() for name in state if keepers.get((key, name)) == rank)


def _like(fresh: Tensor, loaded: Tensor, key: str) -> Tensor:
    if fresh.shape != loaded.shape:
        raise RuntimeError(
            f"a state of '{key}' has the shape {tuple(loaded.shape)}, but must have {tuple(fresh.shape)}; load the "
            "checkpoint into the model that it was saved with"
        )
    return loaded.to(device=fresh.device, dtype=fresh.dtype)


def keep_narrow_(
    states: Sequence[Tensor], values: Sequence[Tensor], keys: Sequence[int], step: int | Tensor | None
) -> None:
    """Overwrite states of whole matrices that are kept in fewer bits, all of one type, by values that are rounded once.

    Args:
        states: bfloat16 values; or codes of a byte, 1-D, with their exponents behind them.
        values: New values of the states, in the type of the computation.
        keys: Numbers of the states, for the noise of stochastic rounding.
        step: Number of the step, one for all or (states,) on the device; None to round to the nearest.
    """
    flats = [value.reshape(-1) for value in values]
    codes, exponents = [state.view(-1) for state in states], []
    if is_coded(codes[0].dtype):
        pairs = [state.tensor_split([flat.numel()]) for state, flat in zip(codes, flats, strict=True)]
        codes, exponents = [own for own, _ in pairs], [behind.view(torch.int8) for _, behind in pairs]
    runs = LowPrecisionRuns(codes, exponents, [0] * len(codes), keys, step)
    quantization_for(flats[0].device, flats[0].dtype).encode_(flats, runs)
