"""torch.distributed.checkpoint takes all states, and gives them to any mesh, number of ranks, or one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from shard_settings import SETTINGS
from sharded_models import CLASSES, Run, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from rankwise import MARS, MKOR
from rankwise.states import optimizer_spec as spec

BEFORE, AFTER = 3, 2
Weights = dict[str, Tensor]


class Replicated(Run):
    """Under ``DistributedDataParallel``."""

    def __init__(self, case: str, **options: Any) -> None:
        super().__init__(case, **options)
        self.part, self.parts = dist.get_rank(), dist.get_world_size()
        # One layer is not used at every step; the wrapper would refuse.
        self.model = nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=True)  # type: ignore[assignment]
        if self.optimizer.needs_capture:
            self.optimizer.capture(self.model)

    def weights(self) -> Weights:
        return {name.removeprefix("module."): whole(value) for name, value in self.model.named_parameters()}


def _start(case: str, setting: str | None, **options: Any) -> Run:
    return Replicated(case, **options) if setting == "ddp" else Run(case, setting, **options)


def _world(setting: str | None) -> int:
    return 2 if setting == "ddp" else SETTINGS[setting].world if setting else 1


def _everywhere(setting: str | None, fn: Callable[..., Any], *args: Any) -> list[Any]:
    world = _world(setting)
    return [fn(0, 1, setting, *args)] if world == 1 else run_ranks(world, fn, setting, *args)


def _states(run: Run, **options: Any) -> dict[str, Any]:
    model, optimizer = get_state_dict(run.model, run.optimizer, options=StateDictOptions(**options))
    return {"model": model, "optimizer": optimizer}


def _save(rank: int, world: int, setting: str, cases: list[str], folder: str, flat: bool) -> dict[str, Weights]:
    found = {}
    for case in cases:
        run = _start(case, setting).train(BEFORE)
        dcp.save(_states(run, flatten_optimizer_state_dict=flat), checkpoint_id=f"{folder}/{case}")
        found[case] = run.train(AFTER).weights()
    return found


def _resume(
    rank: int, world: int, setting: str, cases: list[str], folder: str, flat: bool, trained: int = 0
) -> dict[str, Weights]:
    """Load into fresh objects, or into those that have trained and whose last gradients wait for a step."""
    found = {}
    for case in cases:
        run = _start(case, setting).train(trained)
        if trained:
            run.backward()
        run.count = BEFORE
        states = _states(run, flatten_optimizer_state_dict=flat)
        dcp.load(states, checkpoint_id=f"{folder}/{case}")
        set_state_dict(
            run.model,
            run.optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
            options=StateDictOptions(flatten_optimizer_state_dict=flat),
        )
        run.optimizer.zero_grad()
        found[case] = run.train(AFTER).weights()
    return found


def _difference(found: Weights, expected: Weights) -> float:
    differences = torch.stack([(found[name] - expected[name]).abs().max() for name in expected])
    return float(differences.nan_to_num(nan=torch.inf).max())


ALL, MATRICES = list(CLASSES), ["mars-m", "ldadam", "mkor-h"]
KINDS = ["mars-adamw", "mars-m", "sonew-4", "ldadam", "mkor-h"]
MOVES = [
    # Bitwise on the same layout.
    ("rows-3", "rows-3", [*KINDS, "ldadam-8bit"], False),
    ("rows-3", "rows-3", ALL, True),
    ("hybrid-4", "hybrid-4", MATRICES, False),
    ("tensor-4", "tensor-4", MATRICES, False),
    (None, None, ALL, False),
    (None, None, MATRICES, True),
    ("ddp", "ddp", MATRICES, False),
    # On another.
    ("rows-3", "rows-2", MATRICES, False),
    ("rows-2", "rows-4", MATRICES, True),
    ("hybrid-4", "rows-3", MATRICES, False),
    ("tensor-4", "columns-2", MATRICES, False),
    ("rows-3", None, MATRICES, False),
    (None, "rows-3", MATRICES, False),
    ("rows-2", "ddp", MATRICES, False),
    ("ddp", "rows-2", MATRICES, False),
    ("ddp", None, MATRICES, False),
]
BY_HAND = (
    *(("rows-3", "rows-3", True), ("hybrid-4", "hybrid-4", False), ("rows-2", "rows-4", True)),
    *(("tensor-4", "tensor-4", False), ("hybrid-4", "rows-3", False), ("rows-3", None, False), (None, None, True)),
    ("ddp", "ddp", False),
)
"""Moves of which others show as much, for CI."""


@pytest.mark.parametrize(
    ("before", "after", "cases", "flat"),
    [
        pytest.param(
            *(before, after, cases, flat),
            id=f"{before}-{after}{'-flat' * flat}",
            marks=pytest.mark.exhaustive if (before, after, flat) in BY_HAND else (),
        )
        for before, after, cases, flat in MOVES
    ],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_goes_on_elsewhere(before: str | None, after: str | None, cases: list[str], flat: bool, tmp_path: Path) -> None:
    saved = _everywhere(before, _save, cases, str(tmp_path), flat)[0]
    for resumed in _everywhere(after, _resume, cases, str(tmp_path), flat):
        for case in cases:
            assert _difference(resumed[case], saved[case]) <= (0.0 if before == after else 1e-6), case


EXHAUSTIVE = [pytest.param(setting, ALL, marks=pytest.mark.exhaustive) for setting in ("hybrid-4", "tensor-4", "ddp")]


@pytest.mark.parametrize(("setting", "cases"), [(None, KINDS), ("rows-3", MATRICES), *EXHAUSTIVE])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_rolls_back_bitwise(setting: str | None, cases: list[str], tmp_path: Path) -> None:
    flat = setting is not None  # a flattened dictionary is for a new optimizer of one process
    saved = _everywhere(setting, _save, cases, str(tmp_path), flat)[0]
    for resumed in _everywhere(setting, _resume, cases, str(tmp_path), flat, BEFORE + 2):
        for case in cases:
            assert _difference(resumed[case], saved[case]) == 0.0, case


@pytest.mark.parametrize("setting", [None, "rows-3", pytest.param("tensor-4", marks=pytest.mark.exhaustive)])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_narrow_states_go_on_bitwise(setting: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spec, "FEWEST_CODED", 1)
    kinds = KINDS if setting is None else ["sonew-4", "ldadam"]
    cases = [f"{case} in 8 bits" for case in kinds]
    for name, case in zip(cases, kinds, strict=True):
        kind, options = CLASSES[case]
        monkeypatch.setitem(CLASSES, name, (kind, {**options, "state_dtype": "int8"}))
    saved = _everywhere(setting, _save, cases, str(tmp_path), False)[0]
    for resumed in _everywhere(setting, _resume, cases, str(tmp_path), False):
        for case in cases:
            assert _difference(resumed[case], saved[case]) == 0.0, case


@pytest.mark.parametrize("case", MATRICES)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_that_began_with_a_checkpoint_is_saved_too(case: str) -> None:
    """torch's functions have made its states then, before its first step."""
    run, again = Run(case), Run(case)
    _states(run)
    states = _states(run.train(BEFORE), flatten_optimizer_state_dict=True)["optimizer"]
    again.count = BEFORE
    again.model.load_state_dict(run.model.state_dict())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(again.model, again.optimizer, states, options=options)
    assert _difference(again.train(AFTER).weights(), run.train(AFTER).weights()) == 0.0


# --- whole dictionaries ----------------------------------------------------------------------------------------------


def _whole(rank: int, world: int, setting: str, folder: Path) -> dict[str, list[Weights]]:
    """The weights of a run that goes on, and of two that take over what its first rank has saved."""
    found = {}
    for case in MATRICES:
        run = _start(case, setting).train(BEFORE)
        states = _states(run, full_state_dict=True, cpu_offload=True)
        if rank == 0:
            torch.save(states, folder / case)
        dist.barrier()
        own = run.train(AFTER).weights()
        found[case] = [own, *(_from_whole(setting, case, folder, alone) for alone in (True, False))]
    return found


def _from_whole(setting: str | None, case: str, folder: Path, broadcast: bool) -> Weights:
    run = _start(case, setting)
    run.count = BEFORE
    alone = broadcast and dist.get_rank() > 0
    states = {"model": {}, "optimizer": {}} if alone else torch.load(folder / case, weights_only=True)
    options = StateDictOptions(full_state_dict=setting is not None, broadcast_from_rank0=broadcast)
    set_model_state_dict(run.model, states["model"], options=options)
    set_optimizer_state_dict(run.model, run.optimizer, states["optimizer"], options=options)
    return run.train(AFTER).weights()


def _all_from_whole(rank: int, world: int, setting: str, folder: Path) -> dict[str, Weights]:
    return {case: _from_whole(setting, case, folder, True) for case in MATRICES}


def test_one_rank_saves_everything(tmp_path: Path) -> None:
    everything = run_ranks(3, _whole, "rows-3", tmp_path)[1]
    elsewhere = run_ranks(2, _all_from_whole, "rows-2", tmp_path)[1]
    for case, (saved, *again) in everything.items():
        states = torch.load(tmp_path / case, weights_only=True)["optimizer"]["state"]
        assert all(type(value) is Tensor for state in states.values() for value in state.values())
        assert [_difference(weights, saved) for weights in again] == [0.0, 0.0], case
        assert _difference(elsewhere[case], saved) <= 1e-6
        assert _difference(_from_whole(None, case, tmp_path, False), saved) <= 1e-6


def _asynchronously(rank: int, world: int, folder: str) -> dict[str, Weights]:
    found = {}
    for case in MATRICES:
        run = Run(case, "rows-2").train(BEFORE)
        # It writes while the run goes on: its messages must not meet the run's.
        saving = dcp.async_save(_states(run), checkpoint_id=f"{folder}/{case}", process_group=dist.new_group())
        found[case] = run.train(AFTER).weights()  # while it is written
        saving.result()
    return found


def test_asynchronous_saves_are_of_one_step(tmp_path: Path) -> None:
    saved = run_ranks(2, _asynchronously, str(tmp_path))[0]
    again = run_ranks(2, _resume, "rows-2", MATRICES, str(tmp_path), False)[1]
    assert [_difference(again[case], saved[case]) for case in MATRICES] == [0.0] * len(MATRICES)


def test_states_go_to_their_parameters_whatever_their_order() -> None:
    """torch puts a dictionary in the order of the optimizer that takes it, but leaves its list of names as it was."""
    models = [nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3))) for _ in range(2)]
    first, second = (
        MARS(list(model.named_parameters())[::order], variant="muon")
        for model, order in zip(models, (1, -1), strict=True)
    )
    models[0](torch.ones(4, 6)).square().sum().backward()
    first.step()
    set_optimizer_state_dict(models[1], second, get_optimizer_state_dict(models[0], first))
    for own, same in zip(models[0].parameters(), models[1].parameters(), strict=True):
        for name, value in first.state[own].items():
            assert torch.equal(second.state[same][name], value), name


# --- the step that makes states ---------------------------------------------------------------------------------------


def _asked(rank: int, world: int, setting: str | None, cases: list[str], asks: bool) -> dict[str, Any]:
    found = {}
    for case in cases:
        run = _start(case, setting)
        before = run.weights()
        if asks:
            states = get_optimizer_state_dict(run.model, run.optimizer)["state"]
            assert states and all(not state["step"] for state in states.values())
            assert _difference(run.weights(), before) == 0.0
        found[case] = run.train(4).weights()
    return found


@pytest.mark.parametrize("setting", ["rows-3", pytest.param("hybrid-4", marks=pytest.mark.exhaustive), None])
def test_asking_for_states_leaves_no_trace(setting: str | None) -> None:
    cases = ALL if setting is None else KINDS
    expected, found = (_everywhere(setting, _asked, cases, asks)[0] for asks in (False, True))
    for case in cases:
        assert _difference(found[case], expected[case]) == 0.0, case


def test_a_first_step_at_rate_zero_is_a_step() -> None:
    run = Run("mars-adamw")
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run.step()
    assert {int(state["step"]) for state in run.optimizer.state.values()} == {1}


# --- what does not belong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("wrote", "reads"), [("ldadam", "mkor"), ("mars-m", "mars-shampoo"), ("mars-adamw", "sonew")])
def test_states_of_another_type_are_refused_before_anything_changes(wrote: str, reads: str, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    first = Run(wrote).train(2)
    states = get_optimizer_state_dict(first.model, first.optimizer, options=options)
    second, untouched = Run(reads).train(2), Run(reads).train(2)
    with pytest.raises((ValueError, KeyError, RuntimeError)):
        set_optimizer_state_dict(second.model, second.optimizer, states, options=options)
    assert _difference(second.train(2).weights(), untouched.train(2).weights()) == 0.0


def _adamws(rank: int, world: int, cases: list[str]) -> list[str]:
    adamw = Run("mars-adamw", "rows-2")
    adamw.optimizer = torch.optim.AdamW(adamw.optimizer.param_groups)
    adamw.optimizer.needs_loss = False
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = get_optimizer_state_dict(adamw.train(3).model, adamw.optimizer, options=options)
    # accelerate and the Trainer give torch what it has not.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    found = []
    for case in cases:
        run = Run(case, "rows-2")
        with pytest.raises((ValueError, KeyError, RuntimeError)) as refused:
            set_optimizer_state_dict(run.model, run.optimizer, states, options=options)
        found.append(str(refused.value))
    return found


def test_whole_states_of_adamw_are_not_taken_for_ours() -> None:
    """torch fills our dictionary with what it finds of the same names, and leaves what says that it is ours."""
    for texts in run_ranks(2, _adamws, ["ldadam", "mars-adamw", "mkor"]):
        assert all("was written by another optimizer than rankwise's" in text for text in texts), texts


def test_mkor_h_goes_on_after_its_switch(tmp_path: Path) -> None:
    """It has dropped the states of matrices that a new one asks for."""
    options = {"hybrid_min_steps": 2, "hybrid_patience": 1, "hybrid_beta": 10.0}
    first, second = Run("mkor-h", **options).train(4), Run("mkor-h", **options)
    assert first.optimizer.switch.is_over
    dcp.save(_states(first), checkpoint_id=tmp_path, no_dist=True)
    states, second.count = _states(second), first.count
    dcp.load(states, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True), no_dist=True)
    set_state_dict(
        second.model, second.optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    assert _difference(second.train(3).weights(), first.train(3).weights()) == 0.0
    assert not second.optimizer.matrix_states


def _other_sides(rank: int, world: int) -> str:
    """Load a factor of another shape than the matrix's, and take a step."""
    mesh = init_device_mesh("cpu", (world,))

    def built() -> tuple[nn.Module, MKOR]:
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 8)), mesh=mesh)
        optimizer = MKOR(model.named_parameters(), lr=1e-2)
        optimizer.capture(model)
        return model, optimizer

    def step(model: nn.Module, optimizer: MKOR) -> None:
        model(torch.ones(4, 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run, other = built(), built()
    step(*run)
    saved = run[1].state_dict()
    own = saved["state"][0]
    (name,) = (name for name in own if "right_vectors" in name)
    own[name] = distribute_tensor(torch.zeros(128, 10), mesh, [Shard(0)])
    other[1].load_state_dict(saved)
    try:
        step(*other)
    except ValueError as error:
        return str(error)
    return ""


def test_factors_of_another_shape_are_refused_on_all_ranks() -> None:
    """Not by their owner alone, for which the others would wait."""
    texts = run_ranks(2, _other_sides)
    assert len(set(texts)) == 1
    assert "the state 'right_vectors' of '0.weight' has the shape (128, 10)" in texts[0]
