"""What a rank holds, and the most it needs at once during step(), falls as one over the number of ranks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from simulated import world_group
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.estimate import estimate
from rankwise.layout.layout_source import LayoutSource, Slice, TensorContents
from rankwise.mkor import cpu as mkor_cpu
from rankwise.step.optimizer import ShardedOptimizer

WIDTH, BLOCKS, VOCABULARY = 32, 48, 256
LARGEST_SHARE = 1.15
BUILDERS: dict[str, Callable[..., ShardedOptimizer]] = {
    "mars-m": lambda params: MARS(params, variant="muon", ns_dtype="float32"),
    "sonew": lambda params: SONew(params, band=2),
    "ldadam": lambda params: LDAdam(params, rank=8),
    "mkor": lambda params: MKOR(params, update_interval=1, factor_dtype="float32"),
}


class Block(nn.Module):
    """The matrices and vectors of a transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.qkv(self.norm(x))[:, :WIDTH])
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Blocks with an embedding in front."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.blocks(self.embedding(tokens))
        return found


class FlatShard(LayoutSource):
    """One rank's equal cut of all parameters laid end to end; the optimizer's ``LayoutSource``."""

    replicated = False
    tensor_parallel = None

    def __init__(self, model: nn.Module, rank: int, world: int) -> None:
        self.group = world_group()
        total = sum(parameter.numel() for parameter in model.parameters())
        size = -(-total // world)
        slices, position = [], 0
        self.tensor = torch.zeros(size)
        for name, parameter in model.named_parameters():
            start, end = max(position, rank * size), min(position + parameter.numel(), (rank + 1) * size)
            if start < end:
                slices.append(Slice(name, start - position, end - position, start - rank * size))
                values = parameter.detach().reshape(-1)[start - position : end - position]
                self.tensor[start - rank * size : end - rank * size] = values
            position += parameter.numel()
        self._contents = TensorContents(0, tuple(slices))

    def contents(self, tensor: Tensor) -> TensorContents:
        return self._contents


class Memory(NamedTuple):
    element: int
    matrix: int
    temporary: int
    estimated_element: int
    estimated_matrix: int

    @property
    def states(self) -> int:
        return self.element + self.matrix

    @property
    def peak(self) -> int:
        return self.states + self.temporary


def _measure(rank: int, world: int, name: str) -> Memory:
    model = Net()
    optimizer = BUILDERS[name](model.named_parameters())
    optimizer.capture(model)
    shard = FlatShard(model, rank, world)
    optimizer.param_groups[0]["params"] = [shard.tensor]
    optimizer.attach(shard)
    generator = torch.Generator().manual_seed(rank)
    temporary = 0
    for step in range(3):
        model(torch.randint(VOCABULARY, (4,), generator=generator)).square().sum().backward()
        for parameter in model.parameters():
            parameter.grad = None
        shard.tensor.grad = torch.randn(shard.tensor.shape, generator=generator)
        if step < 2:
            optimizer.step()
        else:
            temporary = _peak(optimizer.step)
    held, expected = optimizer.state_bytes(), estimate(optimizer)[rank]
    return Memory(held["element"], held["matrix"], temporary, expected.element_state_bytes, expected.matrix_state_bytes)


def _peak(call: Callable[[], Any]) -> int:
    """The most memory that is allocated at once while ``call`` runs, beyond what was there before."""
    # Blocks of the usual size would hold the whole model.
    with (
        pytest.MonkeyPatch.context() as patch,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder,
    ):
        patch.setattr(mkor_cpu, "_BLOCK", 1024)
        call()
    with tempfile.TemporaryDirectory() as folder:
        recorder.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    sizes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    assert sizes
    held = most = 0
    for _, size in sizes:
        held += size
        most = max(most, held)
    return most


def _all(rank: int, world: int) -> dict[str, Memory]:
    return {name: _measure(rank, world, name) for name in BUILDERS}


@pytest.fixture(scope="module")
def alone() -> dict[str, Memory]:
    return _all(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_memory_falls_as_one_over_world(alone: dict[str, Memory], world: int) -> None:
    ranks = run_ranks(world, _all)
    for name, one in alone.items():
        cells = [rank[name] for rank in ranks]
        # Nothing is lost or kept twice, but for the padding of the last rank's shard.
        assert sum(cell.matrix for cell in cells) == one.matrix
        assert one.element <= sum(cell.element for cell in cells) <= one.element * 1.001
        assert max(cell.states for cell in cells) <= LARGEST_SHARE * one.states / world, name
        assert max(cell.peak for cell in cells) <= LARGEST_SHARE * one.peak / world, name
        for cell in cells:
            assert cell.estimated_matrix == cell.matrix
            assert cell.estimated_element <= cell.element <= 1.001 * cell.estimated_element


@pytest.mark.slow
def test_ldadam_with_a_sharded_error_buffer_holds_little() -> None:
    """At rank d / 4 and four ranks: under 60 % of AdamW's moments, and under AdamW's where they are sharded too."""
    numel = sum(parameter.numel() for parameter in Net().parameters())
    held = max(cell.states for cell in run_ranks(4, _ldadam))
    assert held < 0.6 * 8 * numel
    assert held < 8 * numel / 4


def _ldadam(rank: int, world: int) -> Memory:
    return _measure(rank, world, "ldadam")


BYTES: dict[str, tuple[Callable[..., ShardedOptimizer], int]] = {
    "mars-adamw": (lambda params: MARS(params), 12),
    "mars-lion": (lambda params: MARS(params, variant="lion"), 8),
    "mars-shampoo": (lambda params: MARS(params, variant="shampoo", ns_dtype="float32"), 8),
    "mars-m": (lambda params: MARS(params, variant="muon", ns_dtype="float32"), 8),
    "sonew-diagonal": (lambda params: SONew(params, band=0), 8),
    "sonew-tridiagonal": (lambda params: SONew(params, band=1), 12),
    "sonew-band-4": (lambda params: SONew(params, band=4), 24),
}


@pytest.mark.parametrize("name", BYTES)
def test_no_state_is_kept_that_the_rule_does_not_need(name: str) -> None:
    """Bytes per element of a matrix, in fp32: what the rule reads at the next step and nothing else."""
    build, expected = BYTES[name]
    model = nn.Linear(24, 40, bias=False)
    optimizer = build(model.named_parameters())
    for _ in range(2):
        model(torch.randn(4, 24)).square().sum().backward()
        optimizer.step()
    held = sum(value.nbytes for state in optimizer.state.values() for key, value in state.items() if key != "step")
    assert held + optimizer.matrix_states.nbytes == expected * 24 * 40
