"""What the Megatron tests stand on: cells with many buckets, and the scope in which Megatron runs on CPUs.

That stock Megatron follows one process in every layout is the control of test_megatron_parity.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import random
from megatron.core.transformer import torch_norm
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron_cells import DISTRIBUTED, MOE, OVERLAPPED
from megatron_harness import Cell, run_cells
from torch import Tensor

from megatron_patches.cpu import cpu_megatron


def test_overlap_has_many_buckets() -> None:
    cells = [Cell(**DISTRIBUTED), Cell(**OVERLAPPED), Cell(ep=2, **MOE, **OVERLAPPED)]
    one, *many = (result.buckets for result in run_cells(2, cells, steps=1))
    assert one == 1 and min(many) > 4


TOUCHED = (
    torch.cuda,
    torch.cuda.random,
    torch.cuda.nvtx,
    torch.autograd,
    random,
    torch_norm.WrappedTorchNorm,
    moe_utils,
    token_dispatcher,
    filesystem_async,
)


def surroundings() -> list[dict[str, Any]]:
    return [dict(vars(owner)) for owner in TOUCHED]


@pytest.mark.parametrize("fails", [False, True])
def test_the_scope_leaves_nothing_behind(fails: bool) -> None:
    before, filters = surroundings(), list(random.logging.getLogger(random.__name__).filters)
    with pytest.raises(KeyError) if fails else cpu_megatron():
        with cpu_megatron(), cpu_megatron():
            assert torch.ones(1, device="cuda").type() == "torch.cuda.FloatTensor"
            assert torch.ones(1, device="cuda", dtype=torch.bfloat16).cuda().to("cuda").device.type == "cpu"
            assert torch.cuda.current_device() == 0
            if fails:
                raise KeyError
    assert surroundings() == before
    assert random.logging.getLogger(random.__name__).filters == filters
    assert torch.ones(1).type() == "torch.FloatTensor"
    assert not torch.cuda.is_available() or torch.ones(1, device="cuda").is_cuda
    compiled = torch.compile(lambda x: x + 1, backend=_counting)
    compiled(torch.ones(1))
    assert _counting.calls == 1, "torch.compile stays off"
    _counting.calls = 0
    torch.compiler.reset()


def _counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    _counting.calls += 1
    return graph.forward


_counting.calls = 0


def test_importing_changes_nothing() -> None:
    """Importing the module neither replaces anything nor imports Megatron."""
    program = (
        "import sys, torch\n"
        "before = dict(vars(torch.cuda))\n"
        "import megatron_patches.cpu\n"
        "assert dict(vars(torch.cuda)) == before\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'megatron']\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_layers_may_be_imported_after_process_groups_are_made() -> None:
    """They are compiled while they are imported, from a list the compiler draws up anew for new process groups."""
    program = (
        "import torch, torch.distributed as dist, megatron_patches.cpu as cpu\n"
        "with cpu.cpu_megatron():\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "    assert torch.compile(lambda x: x + 1)(torch.ones(1)) == 2\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_a_torch_for_cuda_pins_no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a torch says that it has an accelerator once a device is counted, and the data loaders ask its driver."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    with cpu_megatron():
        assert not torch.accelerator.is_available()
    assert torch.accelerator.is_available()
