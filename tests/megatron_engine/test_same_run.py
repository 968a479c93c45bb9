"""One model, the same data: DeepSpeed ZeRO-3, Megatron's distributed optimizer and FSDP2 end at the same weights.

Each is compared with one process of plain PyTorch. What is left is rounding: gradients are summed in another order and
clipped by formulas of their own. AdamW's own figure in the same framework shows by how much that alone moves a run.

With ``RANKWISE_FSDP_TABLE=FILE`` the figures are written down, for ``python -m benchmarks fsdp-parity``.
"""

from __future__ import annotations

import pytest
from cpu_deepspeed import prepare_ranks
from frameworks_alike import (
    OPTIONS,
    STEPS,
    Figures,
    Weights,
    all_in_torch,
    all_under_deepspeed,
    all_under_megatron,
    check_alike,
    figures_of,
    in_torch,
)
from fsdp_table import write_down
from language_model import Model
from megatron_harness import largest_gap
from ranks import once, run_ranks

ALL = tuple(name for name in OPTIONS if name != "mars")
PLACES = ("ZeRO-3 × 2", "Megatron × 2", "FSDP2 × 2", "FSDP2 × 3")
CUTS = (4, 8)


@pytest.fixture(scope="module", autouse=True)
def _import_before_forking() -> None:
    """ZeRO-3 imports the compiler; once here instead of in every rank."""
    import torch._inductor.compile_fx  # noqa: F401


@once
def _alone(name: str, micro_batches: int | None = None) -> Weights:
    return in_torch(0, 1, name, *(() if micro_batches is None else (micro_batches,)))


def _start() -> Weights:
    return {name: parameter.detach() for name, parameter in Model(True).named_parameters()}


@once
def _compared(names: tuple[str, ...], places: tuple[str, ...]) -> dict[tuple[str, str], Figures]:
    prepare_ranks()
    every = ["adam", *names]
    runs = {
        PLACES[0]: lambda: run_ranks(2, all_under_deepspeed, [(name, 3, False) for name in every]),
        PLACES[1]: lambda: [[result.weights for result in run_ranks(2, all_under_megatron, every, STEPS)[0]]],
        PLACES[2]: lambda: run_ranks(2, all_in_torch, every),
        PLACES[3]: lambda: run_ranks(3, all_in_torch, every),
    }
    figures: dict[tuple[str, str], Figures] = {}
    for place in places:
        ranks = runs[place]()
        for at, name in enumerate(every):
            assert all(largest_gap(other[at], ranks[0][at]) == 0.0 for other in ranks[1:])
            figures[name, place] = figures_of(ranks[0][at], _alone(name), _start())
    write_down(
        {"type": name, "layout": place, "precision": "frameworks", **found._asdict()}
        for (name, place), found in figures.items()
    )
    return figures


@once
def _response(name: str) -> Figures:
    """What rounding does to the rule: one process that cuts the samples into other micro-batches."""
    others = [figures_of(_alone(name, count), _alone(name), _start()) for count in CUTS]
    return Figures(*(max(values) for values in zip(*others, strict=True)))


def _check(name: str, place: str, names: tuple[str, ...], places: tuple[str, ...]) -> None:
    found = _compared(names, places)
    check_alike(name, found[name, place], found["adam", place], _response(name).largest)


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ALL)
def test_all_end_at_the_weights_of_one_process(name: str, place: str) -> None:
    _check(name, place, ALL, PLACES)
