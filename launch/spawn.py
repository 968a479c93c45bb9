"""Starts one process per rank with torchrun, on a free port."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from rankwise.launch.environment import rank_environment

__all__ = ["choose_device", "exec_ranks", "print_ranks", "run_ranks", "started_ranks", "torchrun_command"]

_GRACE_SECONDS = 40.0
"""torchrun gives its ranks 30."""
_LAST_WORDS_SECONDS = 2.0


def choose_device(device: str, ranks: int | None) -> tuple[bool, int]:
    """Decides between CPU and GPU and how many ranks to start.

    Args:
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        ranks: number of ranks, or None for one per GPU, two on a CPU.

    Returns:
        Whether to use the CPU, and the number of ranks.

    Raises:
        ValueError: if there are fewer GPUs than ranks, or the number of ranks is not positive.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is {device!r}: it must be 'auto', 'cpu' or 'cuda'")
    if ranks is not None and ranks < 1:
        raise ValueError(f"ranks is {ranks}: it must be at least 1")
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus == 0:
        raise ValueError("device is 'cuda' and torch sees no GPU; use --device cpu")
    if gpus == 0:
        return True, ranks or 2
    if ranks is not None and ranks > gpus:
        raise ValueError(f"ranks is {ranks} and there are {gpus} GPU(s); use --ranks {gpus} or --device cpu")
    return False, ranks or gpus


def torchrun_command(
    module: str, arguments: list[str], ranks: int, launcher: str = "torch.distributed.run"
) -> list[str]:
    """The command line that runs a module of :mod:`rankwise.launch` on every rank of this machine.

    Args:
        module: module name without its package, e.g. ``"pretrain"``.
        arguments: arguments of the module.
        ranks: number of processes.
        launcher: module that starts them.
    """
    torchrun = [sys.executable, "-m", launcher, f"--nproc-per-node={ranks}"]
    # Port 0 lets the rendezvous take any free one; localhost needs no resolvable host name.
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
    return [*torchrun, *rendezvous, "--module", f"{_package()}.{module}", *arguments]


def _package() -> str:
    return importlib.import_module("rankwise.launch").__name__  # "launch" in a checkout that is not installed


def _quiet_command(module: str, arguments: list[str], ranks: int) -> list[str]:
    return torchrun_command(module, arguments, ranks, f"{_package()}.torchrun")


def print_ranks(module: str, arguments: list[str], ranks: int, cpu: bool) -> None:
    """What would be started, as a line for a shell: the variables that are not this process's own, and the command."""
    environment = rank_environment(ranks, cpu)
    changed = {name: value for name, value in sorted(environment.items()) if os.environ.get(name) != value}
    variables = [f"{name}={shlex.quote(value)}" for name, value in changed.items()]
    print(*variables, shlex.join(torchrun_command(module, arguments, ranks)))


@contextmanager
def started_ranks(
    module: str, arguments: list[str], ranks: int, environment: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher of a module on every rank, which is ended with its ranks when the block is left.

    Args:
        module: module name without its package.
        arguments: arguments of the module.
        ranks: number of processes.
        environment: of all of them.
        streams: ``stdout`` and ``stderr`` of all of them.
    """
    # In a session of its own: Ctrl-C reaches this process alone, which ends the launcher once.
    command = _quiet_command(module, arguments, ranks)
    process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def run_ranks(module: str, arguments: list[str], ranks: int, cpu: bool) -> int:
    """Runs a module on every rank and waits for it; ends the ranks when this process is interrupted.

    Returns:
        The launcher's exit status: 0 if every rank succeeded.

    Raises:
        BrokenPipeError: nobody reads stdout any more.
    """
    environment = rank_environment(ranks, cpu)
    if sys.stdout.isatty():
        with started_ranks(module, arguments, ranks, environment) as process:
            return process.wait()
    # Through this process, so that it is not a rank that fails where nobody reads any more.
    failed: list[OSError] = []
    with started_ranks(module, arguments, ranks, environment, stdout=subprocess.PIPE) as process:
        relay = threading.Thread(target=_relay, args=(process, failed), daemon=True)
        relay.start()
        status = process.wait()
        relay.join(_LAST_WORDS_SECONDS)  # not longer: a process that a rank has left behind may keep the pipe open
    if failed:
        raise failed[0]
    return status


def _relay(process: subprocess.Popen[bytes], failed: list[OSError]) -> None:
    assert process.stdout is not None
    try:
        while said := os.read(process.stdout.fileno(), 1 << 16):
            sys.stdout.buffer.write(said)
            sys.stdout.flush()
    except OSError as error:
        failed.append(error)
        process.terminate()


def exec_ranks(module: str, arguments: list[str], ranks: int, cpu: bool) -> NoReturn:
    """Replaces this process by the launcher, so that signals and the exit status are the launcher's own."""
    command = _quiet_command(module, arguments, ranks)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, rank_environment(ranks, cpu))
