"""From checkpoints of Megatron's own Adam and Muon to ours: weights to the bit, moments that mean the same, by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron_cells import DISTRIBUTED, MOE, Cell
from megatron_harness import Trainer, opened, trained
from megatron_muon import megatron_muon
from megatron_types import maker
from megatron_weights import assembled, bare, distributed, model_weight
from ranks import once, run_ranks
from torch import Tensor, nn

import megatron_patches
from megatron_patches.adam_states import Stored
from megatron_patches.cpu import cpu_megatron
from rankwise.step.optimizer import ShardedOptimizer

STEPS = 3
MOMENTS = ("exp_avg", "exp_avg_sq")
ABSENT = -7.0
BY_NAME, IN_BUCKETS = "fully_reshardable", "dp_reshardable"
MUON = "Muon's"
"""Of Megatron's own Muon, by name."""
BF16: dict[str, Any] = {"precision": "bf16"}
SHARDS: dict[str, Any] = {**BF16, **DISTRIBUTED}
CELLS = {
    "DP2 shards": Cell(**SHARDS),
    "DP2": Cell(**BF16),
    "DP2 fp32": Cell(tied=True),
    "DP2 fp16 shards": Cell(precision="fp16", **DISTRIBUTED),
    "TP2 shards": Cell(tp=2, **SHARDS),
    "PP2 tied": Cell(pp=2, tied=True, **BF16),
    "EP2 shards": Cell(ep=2, **MOE, **SHARDS),
    "layer-wise": Cell(**BF16, optimizer={"rankwise_layer_wise": True}),
}


class Move(NamedTuple):
    """One optimizer of ours that goes on from Adam in another cell, or in the same one."""

    author: str
    format: str
    heir: str
    name: str


USUAL = (
    Move("DP2 shards", BY_NAME, "DP2 shards", "mars-adamw"),
    Move("DP2 shards", BY_NAME, "DP2 shards", "ldadam"),
    Move("DP2 shards", BY_NAME, "TP2 shards", "mkor"),
    Move("DP2 shards", IN_BUCKETS, "DP2 shards", "mars-m"),
    Move("TP2 shards", IN_BUCKETS, "TP2 shards", "sonew"),
    Move("DP2", BY_NAME, "TP2 shards", "mars-m"),
    Move("DP2 fp32", BY_NAME, "DP2 fp32", "mars-m"),
    Move("PP2 tied", MUON, "PP2 tied", "mars-adamw"),
    Move("DP2", MUON, "TP2 shards", "mars-m"),
    Move("DP2", MUON, "DP2", "mkor"),
)
FURTHER = (
    Move("DP2 shards", BY_NAME, "layer-wise", "mars-m"),
    Move("TP2 shards", BY_NAME, "DP2 shards", "mars-m"),
    Move("TP2 shards", IN_BUCKETS, "TP2 shards", "mkor"),
    Move("DP2", BY_NAME, "DP2", "sonew"),
    Move("PP2 tied", BY_NAME, "PP2 tied", "mars-m"),
    Move("PP2 tied", BY_NAME, "DP2 fp32", "ldadam"),
    Move("DP2 fp16 shards", BY_NAME, "DP2 fp16 shards", "mars-m"),
    Move("EP2 shards", BY_NAME, "EP2 shards", "mars-m"),
    Move("EP2 shards", IN_BUCKETS, "EP2 shards", "sonew"),
)
REFUSED = {
    Move("DP2 shards", IN_BUCKETS, "DP2", "mars-m"): "lies in the buffers of a distributed optimizer, whose layout",
    Move(
        "DP2 shards", IN_BUCKETS, "TP2 shards", "sonew"
    ): "lies in the buffers of a distributed optimizer, whose layout",
    Move("DP2 shards", "changed", "DP2 shards", "mkor"): "have another weight in the place of 'decoder.final_layernorm",
}
# Whose matrices' moments go on: an average under an orthogonalised or preconditioned step means the same.
MATRICES = {"mars-adamw": MOMENTS, "mars-m": MOMENTS[:1], "sonew": MOMENTS, "ldadam": (), "mkor": MOMENTS}
# Muon's momentum is an average; there is no second one.
FROM_MUON = {"mars-m": MOMENTS[:1], "mkor": (), "mars-adamw": ()}
RESUMED = ("PP2 tied", "mars-adamw")
"""Whose checkpoint within the transition is loaded, too: stages have other parameters, one record is saved."""
# Embeddings, the head and routers are matrices, too, to what works on single elements.
ELEMENT_WISE = ("mars-adamw", "sonew")


class Seen(NamedTuple):
    """What rank 0 saw: weights and moments by unsharded name, as they were saved or after they were loaded."""

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    log: str
    steps: set[int]
    moved: float
    resumed: bool = True


def _moment(name: str) -> Callable[[nn.Parameter, list[MegatronOptimizer]], Tensor]:
    def of(parameter: nn.Parameter, optimizers: list[MegatronOptimizer]) -> Tensor:
        owner = distributed(parameter, optimizers)
        if owner is not None:

            def shard(span: slice) -> Tensor:
                group, order = owner.model_param_group_index_map[parameter]
                return _kept(owner.optimizer, owner.optimizer.param_groups[group]["params"][order], name)

            return assembled(parameter, owner, shard)
        tensor = parameter if parameter.dtype == torch.float32 else getattr(parameter, "main_param", None)
        found, holders = torch.zeros(parameter.shape), torch.zeros(())
        for inner in (optimizer.optimizer for optimizer in optimizers):
            if inner is not None and any(tensor is p for group in inner.param_groups for p in group["params"]):
                found, holders = _kept(inner, tensor, name).view(parameter.shape).clone(), torch.ones(())
        # One rank's, where whole parameters are dealt out; else all have the same.
        for value in (found, holders):
            dist.all_reduce(value, group=mpu.get_data_parallel_group(with_context_parallel=True))
        return found / holders

    return of


def _kept(inner: Any, tensor: Tensor, name: str) -> Tensor:
    if not isinstance(inner, ShardedOptimizer):
        states = inner.state[tensor]
        if name == "exp_avg" and "momentum_buffer" in states:
            return states["momentum_buffer"].reshape(-1)
        return states[name].reshape(-1) if name in states else torch.full((tensor.numel(),), ABSENT)
    found = torch.full((tensor.numel(),), ABSENT)
    for unit in inner.planned_units:
        for index, own in enumerate(unit.tensors):
            for entry, states in unit.states.of_entries(inner.state, index) if own is tensor else ():
                if name in states:
                    start = entry.shard.offset
                    found[start : start + entry.shard.numel] = states[name]
    return found


def _seen(trainer: Trainer, log: str = "") -> Seen:
    weights, _ = trainer.weights()
    moments = {name: trainer.weights(_moment(name))[0] for name in MOMENTS}
    inners = [o.optimizer for o in trainer.optimizer.chained_optimizers if o.optimizer is not None]
    steps = {int(state["step"]) for inner in inners for state in inner.state.values() if "step" in state}
    return Seen(weights, moments, log, steps, 0.0)


def _save(rank: int, world: int, folder: Path, saved: list[tuple[str, str]]) -> dict[tuple[str, str], Seen]:
    found = {}
    with cpu_megatron():
        for author, kind in saved:
            with opened(CELLS[author], megatron_muon if kind == MUON else maker("adam")) as trainer:
                trainer.advance(STEPS)
                target = folder / f"{author} {kind}"
                target.mkdir(exist_ok=True)
                if kind == "changed":
                    bare(trainer.chunks[0]).decoder.final_layernorm.weight.data.add_(1.0)
                trainer.save(target, IN_BUCKETS if kind == "changed" else kind)
                found[author, kind] = _seen(trainer)
    return found


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def _refused(folder: Path, move: Move) -> tuple[str, bool]:
    """What a rank raised, and whether it still has the states it had."""
    with opened(CELLS[move.heir], maker(move.name)) as trainer:
        trainer.advance(1)
        before, error = _seen(trainer), ""
        try:
            trainer.load(folder / f"{move.author} {move.format}", IN_BUCKETS)
        except ValueError as failure:
            error = str(failure)
        after = _seen(trainer)
    same = all(
        torch.equal(after.moments[moment][key], values)
        for moment in MOMENTS
        for key, values in before.moments[moment].items()
    )
    return error, same and after.steps == before.steps and _equal(before.weights, after.weights)


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(other[key], weight) for key, weight in one.items())


def _resumes(trainer: Trainer, folder: Path, move: Move) -> bool:
    """Whether a checkpoint within the transition goes on as the run itself, and Adam takes the model's weights back."""
    folder.mkdir(exist_ok=True)
    trainer.save(folder)
    kept = trainer.weights(model_weight)[0]
    with opened(CELLS[move.heir], maker("adam")) as adam:
        # As Megatron's loop does with --no-load-optim.
        state = {key: value for key, value in adam.sharded_state(True).items() if key != "optimizer"}
        bare(adam.chunks[0]).load_state_dict(dist_checkpointing.load(state, str(folder))["model"])
        adam.optimizer.reload_model_params()
        begun = adam.weights(model_weight)[0], adam.weights()[0]
        if not all(_equal(kept, weights) for weights in begun):
            return False
    whole = trained(trainer, 2)
    with opened(CELLS[move.heir], maker(move.name)) as again:
        again.load(folder)
        after = trained(again, 2)
    return whole is None or (after is not None and _equal(whole.weights, after.weights))


def _go_on(rank: int, world: int, folder: Path, moves: tuple[Move, ...]) -> dict[Move, Any]:
    megatron_patches.apply()
    found: dict[Move, Any] = {}
    with cpu_megatron():
        for move in moves:
            if move in REFUSED:
                found[move] = _refused(folder, move)
                continue
            with opened(CELLS[move.heir], maker(move.name)) as trainer:
                trainer.advance(1)
                lines = _Lines()
                logging.getLogger("rankwise").addHandler(lines)
                trainer.load(folder / f"{move.author} {move.format}", move.format)
                logging.getLogger("rankwise").removeHandler(lines)
                seen = _seen(trainer, lines.text)
                after = trained(trainer, 1)
                if after is not None:
                    change = [(after.weights[key] - seen.weights[key]).abs().max().item() for key in seen.weights]
                    seen = seen._replace(moved=max(change))
                if (move.heir, move.name) == RESUMED:
                    seen = seen._replace(resumed=_resumes(trainer, folder / "resumed", move))
                found[move] = seen
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("succession")


@once
def runs(folder: Path, moves: tuple[Move, ...]) -> tuple[dict[tuple[str, str], Seen], list[dict[Move, Any]]]:
    saved = list(dict.fromkeys((move.author, move.format) for move in moves))
    return run_ranks(2, _save, folder, saved)[0], run_ranks(2, _go_on, folder, moves)


def _is_matrix(key: str, name: str) -> bool:
    if key.startswith(("embedding", "output_layer")) or "router" in key:
        return name in ELEMENT_WISE
    return key.endswith("weight") and "norm" not in key


def _kept_moments(move: Move, key: str) -> tuple[str, ...]:
    if move.format == MUON:
        return FROM_MUON[move.name] if _is_matrix(key, "muon") else MOMENTS
    return MATRICES[move.name] if _is_matrix(key, move.name) else MOMENTS


def _check(folder: Path, move: Move, moves: tuple[Move, ...]) -> None:
    saved, loaded = runs(folder, moves)
    before, after = saved[move.author, move.format], loaded[0][move]
    assert after.steps == {STEPS} and 0 < after.moved < 1 and after.resumed
    assert "goes on from Megatron's own optimizer: weights are kept" in after.log
    assert _equal(before.weights, after.weights)
    for key in before.weights:
        kept = _kept_moments(move, key)
        for moment in MOMENTS:
            now, then = after.moments[moment][key], before.moments[moment][key]
            if moment in kept:
                assert torch.equal(now, then), (key, moment)
            else:
                assert not now.any() or bool((now == ABSENT).all()), (key, moment)


@pytest.mark.parametrize("move", USUAL, ids=" to ".join)
def test_adam_s_states_go_on(folder: Path, move: Move) -> None:
    _check(folder, move, (*USUAL, *REFUSED))


@pytest.mark.exhaustive
@pytest.mark.parametrize("move", FURTHER, ids=" to ".join)
def test_adam_s_states_go_on_in_further_layouts(folder: Path, move: Move) -> None:
    _check(folder, move, FURTHER)


@pytest.mark.parametrize("move", REFUSED, ids=" to ".join)
def test_buffers_of_another_layout_are_refused_on_all_ranks_before_anything_changes(folder: Path, move: Move) -> None:
    for error, unchanged in (rank[move] for rank in runs(folder, (*USUAL, *REFUSED))[1]):
        assert REFUSED[move] in error and "--dist-ckpt-optim-fully-reshardable" in error
        assert "--no-load-optim" in error
        assert unchanged


@pytest.mark.parametrize(
    ("group", "is_average"),
    [
        ({"lr": 0.1, "momentum_beta": 0.9}, True),
        ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, True),
        ({"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False}, False),
        ({"lr": 0.1, "betas": (0.9, 0.95)}, False),
    ],
    ids=["Muon 0.1", "Muon", "SGD", "Adam"],
)
def test_muons_momentum_is_an_average_and_sgds_a_sum(group: dict[str, Any], is_average: bool) -> None:
    names = Stored({}, {"optimizer": [{"optimizer": {"param_groups": [group]}}]}).names
    assert ("momentum_buffer" in names["exp_avg"]) is is_average
