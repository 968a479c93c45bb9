"""Groups made by their own ranks alone, where the default group is bound to a device."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankwise
from rankwise.comm import local_groups

ROOT = Path(rankwise.__file__).parents[1]


@pytest.mark.parametrize("bound", [torch.device("cuda", 1), None])
@pytest.mark.parametrize("fails", [False, True])
def test_the_world_is_unbound_while_a_group_is_made(bound: Any, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound one would be split, which takes all ranks."""
    world, made = SimpleNamespace(bound_device_id=bound), dist.ProcessGroup(0, 1)
    calls: list[Any] = []

    def new_group(ranks: list[int], **options: Any) -> Any:
        calls.append((ranks, options, world.bound_device_id))
        if fails:
            raise RuntimeError("refused")
        return made

    monkeypatch.setattr(local_groups, "_world", lambda: world)
    monkeypatch.setattr(dist, "new_group", new_group)
    if fails:
        with pytest.raises(RuntimeError, match="refused"):
            local_groups.local_group((1, 2), backend="gloo")
    else:
        assert local_groups.local_group((1, 2), backend="gloo") is made
    assert calls == [([1, 2], {"use_local_synchronization": True, "backend": "gloo"}, None)]
    assert world.bound_device_id == bound


@pytest.mark.parametrize("package", ["rankwise", "deepspeed_plugin", "megatron_patches"])
def test_nobody_makes_such_groups_otherwise(package: str) -> None:
    found = [
        path.name
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "use_local_synchronization"
    ]
    assert found == (["local_groups.py"] if package == "rankwise" else [])


def test_no_function_of_torch_keeps_the_default_group(tmp_path: Path) -> None:
    """Also if rankwise is imported after the group was made: a process would abort at its end."""
    code = f"""
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
import rankwise
rankwise.MARS
from torch.distributed.nn import functional
assert dist.group.WORLD is not None and functional.broadcast.__defaults__ == (None,), functional.broadcast.__defaults__
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
