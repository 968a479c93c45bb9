"""The examples as Megatron's ``--optimizer``: any parallel layout does with given gradients what one process does."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron_cells import DISTRIBUTED, OVERLAPPED, Cell
from megatron_harness import Result, Trainer, move, opened, trained
from megatron_weights import cuts, reduced_gradient
from ranks import once, run_ranks
from torch import Tensor

from megatron_patches.arguments import add_flags, flags, given_options
from megatron_patches.cpu import cpu_megatron
from rankwise.states import optimizer_spec

BEFORE, AFTER = 3, 2
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "soap": ("soap", {"precondition_frequency": 2}),
    "soap, int8": ("soap", {"precondition_frequency": 2, "state_dtype": "int8"}),
    "signsgd": ("signsgd", {"momentum": 0.8}),
}
LAYOUTS: dict[str, tuple[int, Cell]] = {
    "TP2": (2, Cell(clip=0.0, tp=2)),
    "DP3 distributed": (3, Cell(clip=0.0, uneven=True, **DISTRIBUTED)),
    "DP2 distributed": (2, Cell(clip=0.0, **OVERLAPPED)),
    "TP2 SP distributed": (2, Cell(clip=0.0, tp=2, sp=True, **DISTRIBUTED)),
    "TP2 DP2 layer-wise": (4, Cell(clip=0.0, tp=2, optimizer={"rankwise_layer_wise": True})),
    "PP2": (2, Cell(clip=0.0, pp=2)),
    "DP2 bf16": (2, Cell(clip=0.0, precision="bf16", **DISTRIBUTED)),
}
USUAL = ("TP2", "DP3 distributed")
Gradients = list[dict[str, Tensor]]


@pytest.fixture(autouse=True)
def small_codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parameters of any size keep states in codes, where they are asked for."""
    monkeypatch.setattr(optimizer_spec, "FEWEST_CODED", 1)
    yield


def _make(label: str) -> Any:
    name, options = CASES[label]

    def make(config: dict[str, Any], chunks: Any) -> Any:
        from megatron_patches.registry import RankwiseConfig, get_megatron_optimizer

        return get_megatron_optimizer(RankwiseConfig(**{**config, "optimizer": name}, rankwise=options), chunks)

    return make


def _record(gradients: Gradients, trainer: Trainer) -> None:
    gradients.append(trainer.weights(reduced_gradient)[0])


def _replay(gradients: Gradients, trainer: Trainer) -> None:
    for chunk in trainer.chunks:
        for parameter, cut in cuts(chunk, trainer.cell.tied):
            parameter.main_grad.copy_(cut.of(gradients[trainer.step][cut.name]))


def _references(rank: int, world: int) -> dict[str, tuple[Result, Result, Gradients]]:
    found = {}
    with cpu_megatron():
        for label in CASES:
            gradients: Gradients = []
            with opened(Cell(clip=0.0), _make(label)) as trainer:
                start = trained(trainer, 0)
                for _ in range(BEFORE + AFTER):
                    trainer.train_step(functools.partial(_record, gradients))
                found[label] = (start, trained(trainer, 0), gradients)
    return found


@once
def references() -> dict[str, tuple[Result, Result, Gradients]]:
    """One process: weights before and after, and its gradients."""
    return run_ranks(1, _references)[0]


def _cell(rank: int, world: int, cell: Cell, known: dict[str, Any], first: int, last: int, folder: str) -> Any:
    """Steps [first, last) on given gradients, from a checkpoint unless they are the first; saved unless the last."""
    found = {}
    with cpu_megatron():
        for label, (_, _, gradients) in known.items():
            with opened(cell, _make(label)) as trainer:
                if first:
                    trainer.load(Path(folder) / label)
                for _ in range(first, last):
                    trainer.train_step(functools.partial(_replay, gradients))
                if last < BEFORE + AFTER:
                    (Path(folder) / label).mkdir(exist_ok=True)
                    trainer.save(Path(folder) / label)
                found[label] = trained(trainer, 0)
    return found


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in USUAL else pytest.mark.exhaustive) for name in LAYOUTS]
)
def test_any_layout_follows_one_process(layout: str) -> None:
    world, cell = LAYOUTS[layout]
    found = run_ranks(world, _cell, cell, references(), 0, BEFORE + AFTER, "")[0]
    for label, (start, end, _) in references().items():
        assert found[label].replica_gap == 0.0
        if cell.precision == "fp32":
            assert move(found[label].weights, end.weights, start.weights).largest <= 1e-5, label


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DP3 distributed", "DP2 distributed"),
        pytest.param("TP2", "DP3 distributed", marks=pytest.mark.exhaustive),
        pytest.param("DP2 distributed", "TP2 SP distributed", marks=pytest.mark.exhaustive),
    ],
)
def test_goes_on_on_another_layout(tmp_path: Path, before: str, after: str) -> None:
    (world, cell), (other_world, other) = LAYOUTS[before], LAYOUTS[after]
    run_ranks(world, _cell, cell, references(), 0, BEFORE, str(tmp_path))
    found = run_ranks(other_world, _cell, other, references(), BEFORE, BEFORE + AFTER, str(tmp_path))[0]
    for label, (start, end, _) in references().items():
        assert move(found[label].weights, end.weights, start.weights).largest <= 1e-5, label


# --- the command line -------------------------------------------------------------------------------------------------


def parser(*names: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(exit_on_error=False)
    made.add_argument("--optimizer", choices=["adam", "sgd", *names], default="adam")
    made.add_argument("--lr", type=float)
    add_flags(made)
    return made


def test_flags_are_those_of_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    given, _ = parser().parse_known_args("--optimizer soap --soaprw-precondition-frequency 3".split())
    assert given.rankwise_optimizer == "soap" and given_options(given, "soap") == {"precondition_frequency": 3}
    assert {"--soaprw-max-precond-dim", "--signsgd-momentum"} <= {flag.option for flag in flags()}
    with pytest.raises(SystemExit):
        parser().parse_known_args("--optimizer soap --soaprw-precondition-frequency 0".split())
    assert "--soaprw-precondition-frequency: soap: precondition_frequency=0 is invalid" in capsys.readouterr().err


def test_a_name_that_megatron_has_itself_is_ambiguous(capsys: pytest.CaptureFixture[str]) -> None:
    """Its later versions have an optimizer "soap"; the other name is nobody else's."""
    with pytest.raises(SystemExit):
        parser("soap").parse_known_args("--optimizer soap".split())
    assert "'soap' is ambiguous: Megatron has an optimizer of this name, and soap has registered another; use " in (
        said := capsys.readouterr().err
    )
    assert "--optimizer soap-rw" in said
    assert parser("soap").parse_known_args("--optimizer soap-rw".split())[0].rankwise_optimizer == "soap-rw"
    assert parser("lion").parse_known_args("--optimizer lion".split())[0].rankwise_optimizer is None


def test_a_flag_of_megatrons_own_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    made = argparse.ArgumentParser()
    made.add_argument("--optimizer", choices=["adam"])
    made.add_argument("--signsgd-momentum")
    with pytest.raises(SystemExit):
        add_flags(made)
    assert "--signsgd-momentum of --optimizer signsgd is a flag of Megatron's own" in capsys.readouterr().err
