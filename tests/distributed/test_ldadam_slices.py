"""Slices of a matrix that two ranks compute together, where the power iteration fails, and what the messages are."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from collectives import Wire
from ranks import run_ranks
from torch import Tensor

from rankwise import LDAdam
from rankwise.layout.layout_source import LayoutSource, Slice, TensorContents, TensorParallel

SHAPES = {"long": (16, 10), "short": (10, 16)}  # cut by rows along their long and their short side
RANK, STEPS = 3, 5


class _Halves(LayoutSource):
    """Two ranks with the upper and the lower halves of some matrices; the optimizer's ``LayoutSource``."""

    replicated = False

    def __init__(self, rank: int, optimizer: LDAdam) -> None:
        self.group: Any = dist.group.WORLD
        self.tensor_parallel = TensorParallel(((0, 1),), self.group)
        self._contents = {}
        for tensor, (name, shape) in zip(optimizer.param_groups[0]["params"], SHAPES.items(), strict=True):
            half = shape[0] * shape[1] // 2
            self._contents[id(tensor)] = TensorContents(0, (Slice(name, rank * half, (rank + 1) * half, 0),))

    def contents(self, tensor: Tensor) -> TensorContents:
        return self._contents[id(tensor)]


class Outcome(NamedTuple):
    weights: dict[str, Tensor]
    bases: list[Tensor]
    squares: list[Tensor]
    sent: list[list[tuple[str, int]]]


def _gradient(name: str, step: int, kind: str, dtype: torch.dtype) -> Tensor:
    rows, columns = SHAPES[name]
    generator = torch.Generator().manual_seed(step + 7 * rows)
    noise = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if kind == "zero at first" and step < 3:
        noise.zero_()
    if kind == "graded":
        # Columns of X between 1 and 1e-30: their squares are beyond the range of single precision.
        noise *= 10.0 ** -torch.linspace(0, 30, columns, dtype=torch.float64)
    return noise.to(dtype)


def _train(rank: int, world: int, kind: str, dtype: torch.dtype, feedback: bool, **options: Any) -> Outcome:
    named = {}
    for name, shape in SHAPES.items():
        start = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]), dtype=torch.float64).to(dtype)
        named[name] = torch.nn.Parameter(start)
    optimizer = LDAdam(named.items(), lr=1e-2, rank=RANK, error_feedback=feedback, **options)
    if world == 2:
        parts = [torch.nn.Parameter(named[name].detach().chunk(2)[rank].reshape(-1).clone()) for name in SHAPES]
        optimizer.param_groups[0]["params"] = parts
        optimizer.attach(_Halves(rank, optimizer))
    sent = []
    for step in range(STEPS):
        for name, tensor in zip(SHAPES, optimizer.param_groups[0]["params"], strict=True):
            gradient = _gradient(name, step, kind, dtype)
            tensor.grad = gradient.chunk(2)[rank].reshape(-1) if world == 2 else gradient
        with Wire() as wire:
            optimizer.step()
        sent.append([(message.operation, message.bytes) for message in wire.messages])
    weights = dict(zip(SHAPES, (part.detach() for part in optimizer.param_groups[0]["params"]), strict=True))
    bases, squares = (
        [optimizer.matrix_states[key][name] for key in sorted(optimizer.matrix_states)]
        for name in ("basis", "exp_avg_sq")
    )
    return Outcome(weights, bases, squares, sent)


@pytest.mark.parametrize("feedback", [True, False], ids=["ef", "plain"])
@pytest.mark.parametrize("kind", ["usual", "zero at first"])
def test_slices_follow_one_process(kind: str, feedback: bool) -> None:
    alone = _train(0, 1, kind, torch.float64, feedback)
    ranks = run_ranks(2, _train, kind, torch.float64, feedback)
    for name, expected in alone.weights.items():
        found = torch.cat([outcome.weights[name] for outcome in ranks]).view(expected.shape)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    assert len(ranks[0].bases) == 2
    # Slices of the long side have one basis, to the bit.
    assert torch.equal(ranks[0].bases[0], ranks[1].bases[0])


@pytest.mark.parametrize("feedback", [True, False], ids=["ef", "plain"])
@pytest.mark.parametrize("rounding", ["auto", "nearest"])
def test_narrow_slices(feedback: bool, rounding: str) -> None:
    """Rounded alike by all who have the same; without noise, which tells slices apart, they follow one process."""
    types = dict.fromkeys(("basis", "exp_avg", "exp_avg_sq"), "bfloat16")
    options = {"state_dtype": types, "state_rounding": rounding}
    ranks = run_ranks(2, partial(_train, **options), "usual", torch.float64, feedback)
    short = list(SHAPES).index("short")
    assert ranks[0].squares[short].dtype == torch.bfloat16
    assert torch.equal(ranks[0].squares[short], ranks[1].squares[short])
    if rounding == "nearest":
        alone = _train(0, 1, "usual", torch.float64, feedback, **options)
        for name, expected in alone.weights.items():
            found = torch.cat([outcome.weights[name] for outcome in ranks]).view(expected.shape)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_whole_matrices_are_gathered_only_where_sums_do_not_do() -> None:
    whole = 16 * 10 // 2 * 8  # bytes of a rank's half in float64
    for kind, failing in (("usual", [0]), ("zero at first", [0, 1, 2])):
        for outcome in run_ranks(2, _train, kind, torch.float64, True):
            for step, messages in enumerate(outcome.sent):
                gathered = ("allgather_", whole) in messages
                assert gathered == (step in failing), (kind, step)


def test_graded_slices_stay_orthonormal() -> None:
    ranks = run_ranks(2, _train, "graded", torch.float32, False)
    for position, key in enumerate(SHAPES):
        basis = ranks[0].bases[position] if key == "long" else torch.cat([rank.bases[position] for rank in ranks])
        torch.testing.assert_close(basis.mT @ basis, torch.eye(RANK), rtol=0, atol=2e-6)
