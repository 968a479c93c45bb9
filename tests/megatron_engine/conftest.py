"""Megatron on CPU processes: skipped where it is not installed, its notices muted, its files written at once."""

from __future__ import annotations

import functools
import logging
import os
import queue
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_patches import cpu

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read by Megatron's tensor-parallel layers, which otherwise warn once per layer.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
warnings.simplefilter("ignore")

pytest.importorskip("megatron.core")
logging.getLogger("megatron").setLevel(logging.ERROR)


class _Here:
    """Stands for a process that writes a file of a checkpoint: the rank itself writes it."""

    def __init__(self, target: Callable[..., None], kwargs: dict[str, Any]) -> None:
        self.start = functools.partial(target, **(kwargs | {"use_fsync": False}))

    def join(self) -> None:
        pass


@pytest.fixture(scope="package", autouse=True)
def files_written_at_once() -> Iterator[None]:
    """Ranks write checkpoints themselves: Megatron forks three processes for one of a tiny model.

    It does so in the tests of `faults` and `around`, and where a script is run.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    context = SimpleNamespace(Queue=queue.Queue, JoinableQueue=queue.Queue, Process=_Here)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem_async, "mp", SimpleNamespace(get_context=lambda _: context))
        patch.setattr(cpu, "_forked_queue", lambda stack: functools.cache(lambda *_: queue.Queue()))
        yield
