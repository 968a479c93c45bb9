"""A process group that a user destroys is gone, with its threads: gloo's abort a process that ends before they do."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks

from rankwise.launch import self_test
from rankwise.launch.environment import leave_groups

_FRESH = """
import weakref, sys, torch, torch.distributed as dist
import rankwise
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
layer = torch.nn.Linear(3, 3)
optimizer = getattr(rankwise, sys.argv[1])(layer.named_parameters(), lr=0.1)
layer(torch.ones(2, 3)).sum().backward()
optimizer.step()
dist.destroy_process_group()
assert group() is None
"""


@pytest.mark.parametrize("name", ["SONew", pytest.param("MARS", marks=pytest.mark.exhaustive)])
def test_torch_keeps_no_group_since_ours_was_imported(name: str, tmp_path: Path) -> None:
    """The first optimizer makes torch import defaults that hold the group of that moment."""
    subprocess.run([sys.executable, "-c", _FRESH, name], check=True, timeout=240, cwd=Path(__file__).parents[2])


def _alive(rank: int, world: int, folder: str) -> list[str]:
    """Which optimizers' groups live on, each of a default group of its own."""

    def begin(name: str) -> weakref.ref[dist.ProcessGroup | None]:
        dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=world)
        return weakref.ref(dist.group.WORLD)

    alive = []
    dist.destroy_process_group()
    for name in self_test.OPTIONS:
        group = begin(name)
        self_test.trajectory(name, rank, world)
        dist.barrier()
        leave_groups()
        if group() is not None:
            alive.append(name)
    begin("end")
    return alive


def test_an_optimizer_that_is_gone_holds_no_group(tmp_path: Path) -> None:
    assert run_ranks(2, _alive, str(tmp_path)) == [[], []]
