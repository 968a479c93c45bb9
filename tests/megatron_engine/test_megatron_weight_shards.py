"""Weights that are cut once more (``--tensor-parallel-num-weight-shards``): as one process, resumed, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cells import BIASED, DISTRIBUTED, MOE, OVERLAPPED, Cell
from megatron_harness import largest_gap, opened
from megatron_resumes import went_on
from megatron_types import TYPES, maker
from ranks import run_ranks
from rows_apart import HAS_WEIGHT_SHARDS
from test_megatron_checkpoints import LARGEST_MOVE
from test_megatron_parity import EVERYWHERE, LAYOUTS, LIKES, STEPS, _check

from megatron_patches.cpu import cpu_megatron
from megatron_patches.support import SupportError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_WEIGHT_SHARDS, reason="before 0.20 weights are cut once, or gradients are others"),
]
USUAL = ("WS2, plain", "WS2 TP2 SP, distributed", "WS2 with experts, distributed")
ALL = tuple(label for label in LAYOUTS if label.startswith("WS2"))


@pytest.mark.parametrize("label", [pytest.param(x, marks=() if x in USUAL else pytest.mark.exhaustive) for x in ALL])
def test_follows_one_process(label: str) -> None:
    for name in EVERYWHERE:
        _check(name, label, "fp32", EVERYWHERE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("label", ALL)
def test_every_type_follows_one_process(label: str, precision: str) -> None:
    for types in (EVERYWHERE, LIKES):
        for name in types:
            _check(name, label, precision, types, STEPS)


CUT: dict[str, Any] = {"again": 2, **DISTRIBUTED}
HALF = Cell(precision="bf16", **CUT)
EXPERTS = Cell(expert_again=2, **MOE, **CUT)


@pytest.mark.parametrize(
    "jobs",
    [
        [("ldadam", HALF), ("mkor", EXPERTS)],
        pytest.param(
            [(name, cell) for name in TYPES for cell in (HALF, EXPERTS, Cell(again=2))], marks=pytest.mark.exhaustive
        ),
    ],
    ids=["usual", "every type"],
)
def test_resumes_bitwise(jobs: list[tuple[str, Cell]], tmp_path: Path) -> None:
    for job, whole, again in went_on([(name, cell, cell) for name, cell in jobs], tmp_path):
        assert again.losses == whole.losses, job
        assert all(torch.equal(again.weights[key], whole.weights[key]) for key in whole.weights), job


# From, to, and their ranks: fp32, so that nothing but the order of sums differs. SwiGLU's weights are written to wrong
# places by Megatron, which takes each rank's rows for some of the gate's and as many of the other part's.
MOVES = {
    "away": (Cell(tp=2, sp=True, **CUT), Cell(**DISTRIBUTED), 4, 2),
    "there": (Cell(**DISTRIBUTED), Cell(again=2), 2, 2),
}


@pytest.mark.parametrize("label", MOVES)
def test_resumes_on_another_layout(label: str, tmp_path: Path) -> None:
    *cells, world, end_world = MOVES[label]
    first, second = (replace(cell, **BIASED, transformer={"add_bias_linear": False}) for cell in cells)
    for job, whole, again in went_on([(n, first, second) for n in ("ldadam", "sonew")], tmp_path, world, end_world):
        assert largest_gap(again.weights, whole.weights) <= LARGEST_MOVE, job


def _refused(rank: int, world: int, given: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]) -> list[str]:
    messages = []
    with cpu_megatron():
        for model, buffers, fields in given:
            with opened(Cell(again=2), maker("adam")) as trainer:
                vars(trainer.config).update(model)
                vars(trainer.chunks[0].ddp_config).update(buffers)
                with pytest.raises(SupportError) as caught:
                    maker("mars-m")({**trainer.cell.optimizer_config(), **fields}, trainer.chunks)
                messages.append(str(caught.value))
    return messages


def test_what_does_not_go_with_them_is_refused() -> None:
    given: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
        "--qk-clip": ({"qk_clip": True}, {}, {}),
        "--fp8-param-gather": ({}, {"fp8_param_gather": True}, {}),
        "--rankwise-layer-wise": ({}, {}, {"rankwise_layer_wise": True}),
        "--expert-tensor-parallel-num-weight-shards": ({"num_moe_experts": 4}, {}, {}),
    }
    for flag, message in zip(given, run_ranks(2, _refused, list(given.values()))[0], strict=True):
        assert f"{flag} is invalid with --tensor-parallel-num-weight-shards and --optimizer mars-m" in message


def _overlapped(rank: int, world: int) -> list[float]:
    """Gaps between ranks' copies, of weights that are cut or not."""
    with cpu_megatron(), opened(replace(Cell(again=2), **OVERLAPPED), maker("mkor")) as trainer:
        for _ in range(3):
            trainer.train_step()
        return [trainer.weights()[1]]


def test_copies_of_what_is_not_cut_stay_equal() -> None:
    assert run_ranks(4, _overlapped)[0] == [0.0]
