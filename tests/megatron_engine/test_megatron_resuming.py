"""Resuming with other options than the checkpoint's: what counts is said in one line, what cannot fit is refused."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron_cells import Cell
from megatron_harness import Trainer, opened
from megatron_types import maker
from ranks import once, run_ranks

import megatron_patches
from megatron_patches.cpu import cpu_megatron

CELL = Cell(precision="bf16", use_distributed_optimizer=True)
PLAIN = Cell()
OVERRIDE: dict[str, Any] = {"rankwise_override_checkpoint": True}
LDADAM = {"betas": (0.9, 0.95)}


class Case(NamedTuple):
    """One optimizer's checkpoint, loaded into another one."""

    saved: tuple[str, dict[str, Any]]
    wanted: tuple[str, dict[str, Any]]
    cell: Cell = CELL
    config: dict[str, Any] = {}
    torch_format: bool = False


class Seen(NamedTuple):
    """What loading printed or raised, and what the groups then hold."""

    line: str
    error: str
    groups: list[dict[str, Any]]
    unchanged: bool


COUNTS = {
    "same": Case(("ldadam", LDADAM), ("ldadam", LDADAM)),
    "betas": Case(("ldadam", {"betas": (0.9, 0.95)}), ("ldadam", {"betas": (0.8, 0.9)})),
    "betas override": Case(("ldadam", LDADAM), ("ldadam", {"betas": (0.8, 0.9)}), config=OVERRIDE),
    "gamma": Case(("mars-m", {"gamma": 0.05}), ("mars-m", {})),
    "interval": Case(("mkor", {"update_interval": 3}), ("mkor", {"update_interval": 5})),
    "feedback off": Case(("ldadam", {}), ("ldadam", {"error_feedback": False})),
    "torch format": Case(("ldadam", LDADAM), ("ldadam", {}), PLAIN, torch_format=True),
    "torch format override": Case(("ldadam", LDADAM), ("ldadam", {}), PLAIN, OVERRIDE, torch_format=True),
}
REFUSED = {
    "rank": Case(("ldadam", {"rank": 16}), ("ldadam", {"rank": 8})),
    "band": Case(("sonew", {"band": 1}), ("sonew", {"band": 3})),
    "feedback on": Case(("ldadam", {"error_feedback": False}), ("ldadam", {})),
    "another optimizer": Case(("ldadam", {}), ("sonew", {})),
    # Lion's states have the names and shapes of some of AdamW's.
    "another variant": Case(("mars-adamw", {}), ("mars-lion", {})),
    "clip off": Case(("mars-m", {}), ("mars-m", {"clip": None})),
    "ours into Adam": Case(("ldadam", {}), ("adam", {})),
    "no states": Case(("none", {}), ("ldadam", {})),
    "Adam into ours torch format": Case(("adam", {}), ("ldadam", {}), PLAIN, torch_format=True),
}
CASES = {**COUNTS, **REFUSED}


def _tensors(trainer: Trainer) -> list[torch.Tensor]:
    inner = trainer.optimizer.chained_optimizers[0].optimizer
    kept = [value for state in inner.state.values() for value in state.values()]
    kept += [v for state in getattr(inner, "matrix_states", {}).values() for v in state.values()]
    weights = [weight for group in inner.param_groups for weight in group["params"]]
    return [value.detach().clone() for value in [*weights, *kept] if isinstance(value, torch.Tensor)]


def _load(trainer: Trainer, case: Case, folder: Path, state: dict[str, Any]) -> None:
    if case.torch_format:
        trainer.optimizer.load_state_dict(state)
    else:
        trainer.load(folder)


def _one(case: Case, folder: Path) -> Seen:
    state: dict[str, Any] = {}
    author = "ldadam" if case.saved[0] == "none" else case.saved[0]
    with opened(case.cell, maker(author, **case.saved[1])) as trainer:
        trainer.advance(1)
        state = trainer.optimizer.state_dict()
        if case.saved[0] == "none":
            weights = {key: value for key, value in trainer.sharded_state().items() if key != "optimizer"}
            dist_checkpointing.save(weights, str(folder))
        elif not case.torch_format:
            trainer.save(folder)
    cell = Cell(**{**vars(case.cell), "optimizer": case.config})
    with opened(cell, maker(case.wanted[0], **case.wanted[1])) as trainer:
        trainer.advance(1)
        before, error, printed = _tensors(trainer), "", io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                _load(trainer, case, folder, state)
            except BaseException as failure:  # noqa: BLE001 - torch's CheckpointException is no Exception
                error = f"{type(failure).__name__}: {failure}"
        after = _tensors(trainer)
        unchanged = len(before) == len(after) and all(map(torch.equal, before, after))
        if not error:
            trainer.advance(1)
        groups = trainer.optimizer.chained_optimizers[0].optimizer.param_groups
        kept = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        return Seen(printed.getvalue(), error, kept, unchanged)


def _all(rank: int, world: int, folder: Path) -> dict[str, Seen]:
    megatron_patches.apply()
    found = {}
    with cpu_megatron():
        for name, case in CASES.items():
            target = folder / name.replace(" ", "-")
            target.mkdir(exist_ok=True)
            found[name] = _one(case, target)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resuming")


@once
def seen(folder: Path) -> list[dict[str, Seen]]:
    return run_ranks(2, _all, folder)


LINES = {
    "betas": "rankwise ldadam: on resuming, --ldadam-betas is (0.9, 0.95) in the checkpoint and (0.8, 0.9) in this "
    "run: the checkpoint's counts. --override-opt_param-scheduler lets this run's count\n",
    "betas override": "rankwise ldadam: on resuming, --ldadam-betas is (0.9, 0.95) in the checkpoint and (0.8, 0.9) in "
    "this run: this run's counts\n",
    "gamma": "rankwise mars-m: on resuming, --mars-gamma is 0.05 in the checkpoint and 0.025 in this run: the "
    "checkpoint's counts. --override-opt_param-scheduler lets this run's count\n",
    "interval": "rankwise mkor: on resuming, --mkor-update-interval is 3 in the checkpoint and 5 in this run: this "
    "run's counts\n",
    "feedback off": "rankwise ldadam: on resuming, --ldadam-error-feedback is True in the checkpoint and False in this "
    "run: this run's counts\n",
    "same": "",
}
LINES["torch format"] = LINES["betas"].replace("(0.8, 0.9)", "(0.908, 0.99)")
LINES["torch format override"] = LINES["betas override"].replace("(0.8, 0.9)", "(0.908, 0.99)")
GROUPS: dict[str, dict[str, Any]] = {
    "same": {"betas": (0.9, 0.95)},
    "betas": {"betas": (0.9, 0.95)},
    "betas override": {"betas": (0.8, 0.9)},
    "gamma": {"gamma": 0.05},
    "feedback off": {"error_feedback": False},
    "torch format": {"betas": (0.9, 0.95)},
    "torch format override": {"betas": (0.908, 0.99)},
}


@pytest.mark.parametrize("name", COUNTS)
def test_one_line_says_which_value_counts(folder: Path, name: str) -> None:
    """The checkpoint's, as Megatron has it for Adam's betas, unless this run's are to override."""
    for rank, found in enumerate(seen(folder)):
        assert found[name].error == ""
        assert found[name].line == (LINES[name] if rank == 0 else "")
        for group in found[name].groups:
            assert GROUPS.get(name, {}).items() <= group.items()


MESSAGES = {
    "rank": ("matrix.basis.", "has shape (64, 16) in the checkpoint and must have (64, 8)", "rank=16, now 8"),
    "band": ("the checkpoint has no covariance_2.", "band=1, now 3"),
    "feedback on": ("the checkpoint has no error.", "error_feedback=False, now True"),
    "another optimizer": ("'LDAdam'", "SONew cannot continue"),
    "another variant": ("'MARS-adamw'", "MARS-lion cannot continue"),
    "clip off": ("the checkpoint has no grad_avg.",),
    "ours into Adam": ("Megatron's own optimizer cannot continue", "written by 'LDAdam'"),
    "Adam into ours torch format": ("LDAdam cannot continue", "written by one of Megatron's own"),
}
MESSAGES["no states"] = ("LDAdam cannot continue", "if it holds any")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_fit_is_refused_with_the_way_out(folder: Path, name: str) -> None:
    for found in seen(folder):
        assert found[name].error.startswith("ValueError: ")
        assert found[name].unchanged
        for part in (*MESSAGES[name], "or pass --no-load-optim to start the states afresh"):
            assert part in found[name].error
