"""Layers of Transformer Engine's spec, by Megatron's real wrappers on a stand-in for Transformer Engine itself.

It does not install without CUDA. That the model follows one of Megatron's own layers is shown among the other layouts
(``test_megatron_parity.py``); here is what differs: names, routes, statistics, checkpoints, and what is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cells import BIASED, DISTRIBUTED, MOE, Cell
from megatron_harness import Result, largest_gap, opened
from megatron_resumes import Job, resume, save
from megatron_statistics import Seen, inner_optimizers
from megatron_types import TYPES, maker
from ranks import once, run_ranks
from test_megatron_checkpoints import LARGEST_MOVE
from test_megatron_mkor import _watched, alone, gap
from torch.distributed.checkpoint import FileSystemReader
from with_stand_in import Call, run_with_stand_in

from megatron_patches.cpu import cpu_megatron
from megatron_patches.support import SupportError

ENGINE: dict[str, Any] = {"transformer_engine": True}
Engine = dict[str, list[Any]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """What the tests ask of the one process that has the stand-in, by what it is."""
    saved, resumed = _kept_and_resumed(folder, USUAL)
    calls: dict[str, Call] = {
        **{f"routes: {label}": (2, _routes, (replace(cell, **ENGINE), "mars-m")) for label, cell in ROUTED.items()},
        "routes: in 8 bits": (2, _routes, (KEPT["EP2 in 8 bits"], "mkor")),
        "statistics": (2, _watched, (list(WATCHED.values()),)),
        "saved": saved,
        "resumed": resumed,
        "refusals": (1, _refusals, ()),
        "contract": (1, _broken, ()),
    }
    return dict(zip(calls, run_with_stand_in(*calls.values()), strict=True))


# --- routes -----------------------------------------------------------------------------------------------------------


def _routes(rank: int, world: int, cell: Cell, name: str) -> dict[str, tuple[Any, ...]]:
    """Rule, shape and reason of every parameter, and of every logical matrix, on all ranks."""
    with cpu_megatron(), opened(cell, maker(name)) as trainer:
        trainer.train_step()
        mine = {
            line.name: (line.shape, line.rule, line.reason)
            for inner in inner_optimizers(trainer)
            for line in inner.explain()
        }
    everyone: list[dict[str, tuple[Any, ...]]] = [{} for _ in range(world)]
    dist.all_gather_object(everyone, mine)
    return {key: value for found in everyone for key, value in found.items()}


ROUTED = {"TP2 SP": Cell(tp=2, sp=True), "EP2": Cell(ep=2, **MOE), "TP2 with biases": Cell(tp=2, **BIASED)}


@pytest.mark.parametrize("label", ROUTED)
def test_every_parameter_takes_the_rule_and_name_it_has_among_megatrons_own(engine: Engine, label: str) -> None:
    found = engine[f"routes: {label}"][0]
    assert found == run_ranks(2, _routes, ROUTED[label], "mars-m")[0]
    first = "mlp.linear_fc1" if label != "EP2" else "mlp.experts.local_experts.3.linear_fc1"
    inner = [key for key in found if key.startswith(f"decoder.layers.1.{first}.weight")]
    assert inner and {found[key][1] for key in inner} == {"matrix"}


def test_mkor_leaves_experts_to_its_backend_whose_tokens_are_filled_up(engine: Engine) -> None:
    """As products in few bits want: zeros would count as tokens."""
    found = engine["routes: in 8 bits"][0]
    experts = {key: rule for key, (shape, rule, _) in found.items() if "experts" in key and len(shape) == 2}
    assert len(experts) == 16 and set(experts.values()) == {"fallback"}
    assert {rule for key, (_, rule, _) in found.items() if "linear_qkv.weight" in key} == {"matrix"}


# --- MKOR's statistics ------------------------------------------------------------------------------------------------

WATCHED: dict[str, Cell] = {
    "TP2 SP": Cell(tp=2, sp=True, microbatches=4, **DISTRIBUTED, **ENGINE),
    "TP2 SP with biases": Cell(tp=2, sp=True, **BIASED, **ENGINE),
    "TP2 with biases": Cell(tp=2, **BIASED, **ENGINE),
    "TP2 SP recomputed": Cell(tp=2, sp=True, recompute=True, **ENGINE),
    "TP2 SP with experts": Cell(tp=2, sp=True, **MOE, **ENGINE),
    "EP2": Cell(ep=2, **MOE, **DISTRIBUTED, **ENGINE),
    "CP2": Cell(cp=2, **DISTRIBUTED, **ENGINE),
}


@once
def _references() -> dict[str, list[Seen]]:
    models = {str(alone(cell)): alone(cell) for cell in WATCHED.values()}
    return dict(zip(models, run_ranks(1, _watched, list(models.values()))[0], strict=True))


@pytest.mark.parametrize("label", WATCHED)
def test_statistics_are_those_of_megatrons_own_layers(engine: Engine, label: str) -> None:
    """Those of a norm inside a layer, too: its hook sees what goes into the norm."""
    found = dict(zip(WATCHED, engine["statistics"][0], strict=True))[label]
    references = _references()[str(alone(WATCHED[label]))]
    # From the second step on the weights differ by rounding.
    for seen, reference, allowed in zip(found, references, (2e-5, 1e-3), strict=True):
        assert seen.vectors.keys() == reference.vectors.keys() and seen.vectors
        for key, (a, g, count) in reference.vectors.items():
            assert seen.vectors[key][2] == count, key
            assert gap(seen.vectors[key][0], a) < allowed, key
            assert gap(seen.vectors[key][1], g) < allowed, key


# --- checkpoints ------------------------------------------------------------------------------------------------------

KEPT: dict[str, Cell] = {
    "TP2 SP distributed": Cell(tp=2, sp=True, **DISTRIBUTED, **ENGINE),
    "EP2 in 8 bits": Cell(ep=2, precision="bf16", fp8=True, **MOE, **DISTRIBUTED, **ENGINE),
    "TP2 SP in 8 bits": Cell(tp=2, sp=True, precision="bf16", fp8=True, **ENGINE),
}
USUAL: list[Job] = [("mkor", KEPT["EP2 in 8 bits"])]
ALL: list[Job] = [(name, cell) for name in TYPES for cell in KEPT.values()]


def _kept_and_resumed(folder: Path, jobs: list[Job]) -> tuple[Call, Call]:
    resumed = [(*job, folder / str(index)) for index, job in enumerate(jobs)]
    return (2, save, (jobs, folder)), (2, resume, (resumed,))


def _check_bitwise(jobs: list[Job], saved: list[Result], again: list[Result]) -> None:
    for job, whole, found in zip(jobs, saved, again, strict=True):
        assert found.losses == whole.losses, job
        assert all(torch.equal(found.weights[key], whole.weights[key]) for key in whole.weights), job


def test_resumes_bitwise_with_the_extra_states_of_8_bits(engine: Engine, folder: Path) -> None:
    _check_bitwise(USUAL, engine["saved"][0], engine["resumed"][0])
    keys = FileSystemReader(folder / "0").read_metadata().state_dict_metadata
    assert any("linear_qkv._extra_state" in key for key in keys)
    assert any(key.startswith("optimizer.rankwise.MKOR") and key.endswith("input_layernorm.weight") for key in keys)


@pytest.mark.exhaustive
def test_all_resume_bitwise(tmp_path: Path) -> None:
    saved, again = run_with_stand_in(*_kept_and_resumed(tmp_path, ALL))
    _check_bitwise(ALL, saved[0], again[0])


MOVED = {"dense": Cell(**DISTRIBUTED), "experts": Cell(ep=2, **MOE, **DISTRIBUTED)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("label", MOVED)
def test_checkpoints_go_to_megatrons_own_layers_and_back(tmp_path: Path, label: str, name: str) -> None:
    own = MOVED[label]
    theirs = replace(own, **ENGINE)
    for folder in ("own", "engine"):
        (tmp_path / folder).mkdir()
    whole = run_ranks(2, save, [(name, own)], tmp_path / "own")[0][0]
    there, back = run_with_stand_in(
        (2, resume, ([(name, theirs, tmp_path / "own" / "0")],)), (2, save, ([(name, theirs)], tmp_path / "engine"))
    )
    assert largest_gap(there[0][0].weights, whole.weights) <= LARGEST_MOVE
    again = run_ranks(2, resume, [(name, own, tmp_path / "engine" / "0")])[0][0]
    assert largest_gap(again.weights, back[0][0].weights) <= LARGEST_MOVE


# --- refused ----------------------------------------------------------------------------------------------------------


def _refusals(rank: int, world: int) -> list[str]:
    """What is said of a model that runs its layers as one operation, and of clipping weights cut once more."""
    said = []
    with cpu_megatron(), pytest.MonkeyPatch.context() as patch:
        from megatron.core.transformer.mlp import MLP

        with pytest.raises(SupportError) as refusal:
            patch.setattr(MLP, "_make_fused_impl", lambda self: None, raising=False)
            with opened(Cell(**ENGINE), maker("mkor")):
                pass
        said.append(str(refusal.value))
        patch.undo()
        with pytest.raises(SupportError) as refusal, opened(Cell(**ENGINE), maker("ldadam")) as trainer:
            trainer.config.gtp_weight_remat_size, trainer.config.qk_clip = 2, True
            maker("ldadam")(Cell().optimizer_config(), trainer.chunks)
        said.append(str(refusal.value))
    return said


def test_what_shows_no_statistics_or_is_cut_once_more_is_refused(engine: Engine) -> None:
    fused, cut = engine["refusals"][0]
    assert "--use-transformer-engine-op-fuser is invalid for MKOR" in fused and "mlp" in fused
    assert "--qk-clip is invalid with --tensor-parallel-num-weight-shards and --optimizer ldadam" in cut


# --- the contract -----------------------------------------------------------------------------------------------------


def _broken(rank: int, world: int) -> tuple[list[str], list[str]]:
    import transformer_engine.pytorch as engine
    from transformer_engine.pytorch.module.norms import RMSNorm

    from megatron_patches.transformer_engine import broken_contract

    intact = broken_contract()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "GroupedLinear", RMSNorm)
        patch.setattr(engine.Linear, "forward", lambda self, other: other)
        patch.setattr(RMSNorm, "__init__", lambda self, **_: torch.nn.Module.__init__(self))
        return intact, broken_contract()


def test_the_doctor_says_what_is_not_as_it_is_relied_on(engine: Engine) -> None:
    intact, broken = engine["contract"][0]
    assert intact == []
    told = " ".join(broken)
    assert "GroupedLinear has the parameters []" in told and "TEGroupedLinear is no RMSNorm" in told
    assert "Linear is called with ('other',), and not with ('inp',)" in told
