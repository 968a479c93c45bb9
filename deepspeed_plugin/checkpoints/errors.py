"""What is wrong with a checkpoint, told alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from rankwise.layout.agreement import together
from rankwise.layout.chunked_vectors import StorageError

__all__ = ["CheckpointError", "own_error", "read_together"]

_T = TypeVar("_T")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be continued as asked."""


def read_together(group: dist.ProcessGroup | None, work: Callable[[], _T]) -> _T:
    """Read or write files on every rank, which may fail on some of them; then it fails on all, with the first reason.

    Raises:
        CheckpointError: On every rank, if ``work`` met bad files on any.
    """

    def with_own_errors() -> _T:
        try:
            return work()
        except (StorageError, OSError) as error:
            raise CheckpointError(str(error)) from error

    return together(with_own_errors, group)


@contextmanager
def own_error() -> Iterator[None]:
    """Storage errors as ours."""
    try:
        yield
    except StorageError as error:
        raise CheckpointError(str(error)) from error
