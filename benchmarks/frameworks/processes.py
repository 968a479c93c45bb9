"""Starts the ranks of a task: on one card several NCCL ranks, each of which says that it is another host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.frameworks.tasks import Task

__all__ = ["Ranks"]

_ROOT = Path(__file__).resolve().parents[2]
# NCCL refuses two ranks on one device of one host: messages go over sockets.
_ONE_CARD = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
}


class Ranks:
    """The processes of a task.

    Args:
        task: What they are told.
        paths: Folders that come first where Python looks for modules, as a version of Megatron's.
        environment: Further variables.
    """

    def __init__(self, task: Task, paths: tuple[str, ...] = (), environment: dict[str, str] | None = None) -> None:
        self.task = task
        self.began = time.monotonic()
        told = Path(f"{task.out}.json")
        told.parent.mkdir(parents=True, exist_ok=True)
        task.write(told)
        port = _free_port()
        self._processes = []
        for rank in range(task.ranks):
            with open(f"{task.out}.log{rank}", "w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.frameworks.rank", str(told)],
                    cwd=_ROOT,
                    env={**os.environ, **_variables(task, rank, port, paths), **(environment or {})},
                    stdout=log,
                    stderr=log,
                )
            self._processes.append(process)

    @property
    def seconds(self) -> float:
        """Since they were started."""
        return time.monotonic() - self.began

    @property
    def codes(self) -> list[int | None]:
        """Exit codes, None of those that run."""
        return [process.poll() for process in self._processes]

    @property
    def is_over(self) -> bool:
        """Whether all have ended."""
        return None not in self.codes

    def kill(self) -> None:
        """End those that run."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def last_words(self) -> str:
        """Last lines of the first rank that says anything, those of errors first."""
        for rank in range(self.task.ranks):
            lines = Path(f"{self.task.out}.log{rank}").read_text(errors="replace").splitlines()
            said = [line.strip() for line in lines if line.strip()]
            wrong = [line for line in said if "Error" in line] or said
            if wrong:
                return " / ".join(wrong[-2:])[:400]
        return ""


def _variables(task: Task, rank: int, port: int, paths: tuple[str, ...]) -> dict[str, str]:
    on_card = task.device == "cuda"
    found = {
        "RANK": str(rank),
        "LOCAL_RANK": "0" if on_card else str(rank),
        "WORLD_SIZE": str(task.ranks),
        "LOCAL_WORLD_SIZE": str(task.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join([*paths, str(_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
        # DeepSpeed looks there for ninja, which is installed beside the interpreter.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    return found | (_ONE_CARD | {"NCCL_HOSTID": f"host{rank}"} if on_card else {"DS_ACCELERATOR": "cpu"})


def _free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])
