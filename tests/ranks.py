"""Runs a function on several gloo processes, with a hang guard; the first failing rank's traceback is the message."""

from __future__ import annotations

import functools
import gc
import io
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 240.0

_OF_NUMPY = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
_KEPT = (Exception, pytest.fail.Exception, pytest.skip.Exception)
"""What :func:`once` keeps; a test that takes too long fails by the second."""


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """As :func:`functools.cache`, but what is raised is kept too: each further test would wait for the same ranks."""

    @functools.cache
    def outcome(*args: Any, **kwargs: Any) -> tuple[Any, BaseException | None]:
        try:
            return function(*args, **kwargs), None
        except _KEPT as error:
            return None, error

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, error = outcome(*args, **kwargs)
        if error is not None:
            raise error
        return value

    return call


def _main(rank: int, world: int, store: str, results: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    gc.freeze()  # DeepSpeed collects garbage often; what this process inherited need not be searched each time
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        _send(results, True, fn(rank, world, *args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        _send(results, False, traceback.format_exc())
        os._exit(1)


def _send(results: Any, ok: bool, value: Any) -> None:
    # Tensors by value: multiprocessing would pass them by a handle that dies with this process.
    sent = io.BytesIO()
    _Pickler(sent, pickle.HIGHEST_PROTOCOL).dump((ok, value))
    results.send_bytes(sent.getbuffer())


class _Pickler(pickle.Pickler):
    """Takes a tenth of the time for tensors that numpy has a type for."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.dtype in _OF_NUMPY and value.device.type == "cpu":
            if not (value.requires_grad or value.is_sparse):
                return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Call ``fn(rank, world, *args)`` on ``world`` forked gloo processes and return their results in rank order.

    Raises:
        AssertionError: A rank raised, died, or did not finish in time.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(target=_main, args=(rank, world, f"{folder}/store", pipes[rank][1], fn, args))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return _collect([receiver for receiver, _ in pipes], timeout)
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(receivers: list[Any], timeout: float) -> list[Any]:
    results: list[Any] = [None] * len(receivers)
    pending = dict(enumerate(receivers))
    while pending:
        ready = wait(list(pending.values()), timeout)
        assert ready, f"ranks {sorted(pending)} did not finish within {timeout:.0f} s: a collective hangs"
        for rank in [rank for rank, receiver in pending.items() if receiver in ready]:
            try:
                ok, value = pickle.loads(pending.pop(rank).recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died without a message") from None
            assert ok, f"rank {rank} failed:\n{value}"
            results[rank] = value
    return results
