"""Matrices that travel in another type: half the bytes, a bounded error, and replicas that stay alike."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from collectives import recorded
from ranks import run_ranks
from simulated import CASES, LAYOUTS, Case, Framework, reference, world_group
from torch import Tensor

WORLD, STEPS = 3, 10
MATRIX_CASES = ("mars-shampoo", "mars-muon", "ldadam-ef", "ldadam-plain", "mkor-official-adamw")
COMM_DTYPES = ("bfloat16", "float16", "float32", "int8")
# Of the largest parameter change over ten steps. bfloat16 changes a value that crosses by up to 2^-9, float16 by 2^-12,
# int8 by up to 2^-6 of the largest of 64.
LARGEST_ERROR = {
    "mars": {"bfloat16": 4e-3, "float16": 1e-3, "int8": 0.05},
    "mkor": {"bfloat16": 1e-2, "float16": 2e-3, "int8": 0.3},
}
# A subspace whose singular values nearly tie turns by far more than what turned it, by whichever type.
LARGEST_ERROR["ldadam"] = {"bfloat16": 0.05, "float16": 0.05, "int8": 0.3}
# Every type where replicas must stay alike and where all is cut; one of them, and an optimizer of each paper, in every
# other layout.
EVERY_TYPE = ("replicated", "cut")
EVERYWHERE = ("mars-muon", "ldadam-ef", "mkor-official-adamw")
CELLS = [
    (name, layout, kind)
    for name in MATRIX_CASES
    for layout in LAYOUTS
    if layout in EVERY_TYPE or name in EVERYWHERE
    for kind in (COMM_DTYPES if layout in EVERY_TYPE else COMM_DTYPES[:1])
]


class Run(NamedTuple):
    weights: list[Tensor]
    bytes: int
    messages: int


def _with_comm(name: str, comm_dtype: str | None) -> Case:
    return replace(CASES[name], options={**CASES[name].options, "comm_dtype": comm_dtype})


def _run(case: Case, layout: str, rank: int, world: int) -> Run:
    framework = Framework(layout, case, torch.float32, rank, world, world_group())
    with recorded("all_to_all_single") as calls:
        for _ in range(STEPS):
            framework.step()
    sizes = calls["all_to_all_single"]
    return Run([tensor.detach().clone() for tensor, _ in framework.shards], sum(sizes), len(sizes))


def _all(rank: int, world: int) -> dict[tuple[str, str, str | None], Run]:
    return {
        (name, layout, comm_dtype): _run(_with_comm(name, comm_dtype), layout, rank, world)
        for name, layout, comm_dtype in (*dict.fromkeys((name, layout, None) for name, layout, _ in CELLS), *CELLS)
    }


@pytest.fixture(scope="module")
def runs() -> list[dict[tuple[str, str, str | None], Run]]:
    reference("mars-adamw", torch.float32, STEPS)  # imports half of torch: not in every fork
    return run_ranks(WORLD, _all)


@pytest.mark.parametrize(("name", "layout", "comm_dtype"), CELLS)
def test_error_and_bytes(
    runs: list[dict[tuple[str, str, str | None], Run]], name: str, layout: str, comm_dtype: str
) -> None:
    change = reference(name, torch.float32, STEPS)[1]
    total = 0
    errors = []
    for rank in runs:
        own, other = rank[name, layout, None], rank[name, layout, comm_dtype]
        assert other.messages == own.messages
        if comm_dtype != "int8":  # of which test_coded_messages knows the sizes
            assert other.bytes * 4 == own.bytes * getattr(torch, comm_dtype).itemsize
        total += other.bytes
        errors += [float((a - b).abs().max()) for a, b in zip(own.weights, other.weights, strict=True) if a.numel()]
    error = max(errors) / change
    # What was rounded is seen, so the option is not ignored; the matrices' own type rounds nothing.
    bound = LARGEST_ERROR[name.split("-")[0]].get(comm_dtype, 0.0)
    assert total > 0 and error <= bound and (error > 1e-6) == (bound > 0)
    if layout == "replicated":
        first = runs[0][name, layout, comm_dtype].weights
        for rank in runs[1:]:
            for one, same in zip(first, rank[name, layout, comm_dtype].weights, strict=True):
                assert torch.equal(one, same)


def _disagree(rank: int, world: int) -> str:
    case = _with_comm("mars-muon", "bfloat16" if rank else None)
    framework = Framework("cut", case, torch.float32, rank, world, world_group())
    try:
        framework.step()
    except RuntimeError as refusal:
        return str(refusal)
    return ""


def test_ranks_that_disagree_are_refused() -> None:
    assert all("planned different steps (ranks [0]" in message for message in run_ranks(WORLD, _disagree))
