"""From AdamW's checkpoint to one of ours, on any ranks, stage and groups: weights and moments go on, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import safe_get_full_optimizer_state
from ds_harness import run_ranks

from deepspeed_plugin.checkpoints import CheckpointError
from rankwise.checkpoint.named_vectors import stored_shards

HALF = 4
TYPES = ("MARS-AdamW", "MARS-M", "SONew", "LDAdam", "MKOR")
# One that takes moments of matrices and one that does not; the others where states are cut in either way.
FEW, WITH_ALL = ("MARS-M", "LDAdam"), ("stage 2", "stage 3")
MOMENTS = ("exp_avg", "exp_avg_sq")
# What means the same: what takes AdamW's rule in ours, too; the average under an orthogonalised or preconditioned step.
EXPECTED: dict[str, Callable[[set[str]], bool]] = {
    "MARS-AdamW": lambda found: {"up.bias exp_avg", "norm.weight exp_avg_sq", "up.weight exp_avg"} <= found,
    "MARS-M": lambda found: {"up.weight exp_avg", "embedding.weight exp_avg_sq"} <= found,
    "SONew": lambda found: {"up.bias exp_avg"} <= found,
    "LDAdam": lambda found: "embedding.weight exp_avg_sq" in found and "up.weight exp_avg" not in found,
    "MKOR": lambda found: {"up.weight exp_avg", "embedding.weight exp_avg_sq"} <= found,
}
CELLS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, bf16": {"stage": 2, "dtype": torch.bfloat16},
    "stage 0, bf16": {"stage": 0, "dtype": torch.bfloat16},
    "BF16_Optimizer": {"stage": 1, "dtype": torch.bfloat16, "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "two groups": {"stage": 2, "split": True},
}


MOVES = {
    # Written by, taken over by.
    "to ZeRO-3": ("stage 2", {"stage": 3}),
    "from ZeRO-3": ("stage 3", {"stage": 1}),
    "other groups": ("stage 2", {"stage": 2, "split": True}),
    "one group": ("two groups", {"stage": 3}),
    "another order": ("stage 2", {"stage": 2, "backwards": True}),
    "round robin": ("stage 2", {"stage": 2, "round_robin": True}),
    "from round robin": ("round robin", {"stage": 2}),
    "half": ("stage 2, bf16", {"stage": 3, "dtype": torch.bfloat16}),
    "to BF16_Optimizer": ("stage 2, bf16", CELLS["BF16_Optimizer"]),
}
WRITTEN = {**CELLS, "round robin": {"stage": 2, "round_robin": True}}


def _engine(name: str, cell: dict[str, Any], world: int, seed: int = 0) -> Any:
    given = {**cell}
    stage, config, backwards = given.pop("stage"), given.pop("config", {}), given.pop("backwards", False)
    block = {"stage": stage, "round_robin_gradients": given.pop("round_robin", False)}
    job = next(job for job in ds.jobs(**given) if job.name == name)
    job = replace(job, config={**config, "zero_optimization": block}, seed=seed)
    if not backwards:
        return ds.engine_of(job, world)
    model = ds.model_of(job)
    return deepspeed.initialize(
        model=model, model_parameters=list(model.parameters())[::-1], config=job.ds_config(world)
    )[0]


Moments = dict[str, dict[str, np.ndarray]]


def _moments_of_adamw(engine: Any) -> Moments:
    """As torch has them, or DeepSpeed tells them; of flat partitions each rank's, one after the other."""
    wrapper, names = engine.optimizer, {p: name for name, p in engine.module.named_parameters()}
    if engine.zero_optimization_partition_weights():
        parts = [{n: {m: safe_get_full_optimizer_state(p, m) for m in MOMENTS} for p, n in names.items()}]
    elif not engine.zero_optimization():
        clones = getattr(wrapper, "fp32_groups", None) or [group["params"] for group in wrapper.param_groups]
        owned = getattr(wrapper, "fp16_groups", clones)
        pairs = [pair for group in zip(owned, clones, strict=True) for pair in zip(*group, strict=True)]
        state = engine.basic_optimizer.state
        parts = [{names[p]: {m: state[own][m] for m in MOMENTS} for p, own in pairs if has_moments(state.get(own))}]
    else:
        own = _moments_in_partition(wrapper, names, engine.basic_optimizer.state)
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
    found: Moments = {}
    for name in names.values():
        for moment in MOMENTS:
            values = [part[name][moment].float().reshape(-1).numpy() for part in parts if name in part]
            if values:
                found.setdefault(name, {})[moment] = np.concatenate(values)
    return found


def has_moments(state: Any) -> bool:
    return bool(state) and MOMENTS[0] in state


def _moments_in_partition(wrapper: Any, names: dict[Any, str], state: Any) -> dict[str, dict[str, torch.Tensor]]:
    is_bf16 = isinstance(wrapper, BF16_Optimizer)
    flats = wrapper.fp32_groups_flat_partition if is_bf16 else wrapper.single_partition_of_fp32_groups
    groups = wrapper.bf16_groups if is_bf16 else wrapper.bit16_groups
    found = {}
    for flat, group in zip(flats, groups, strict=True):
        for parameter in group:
            if parameter._hp_mapping is not None:
                place = parameter._hp_mapping.get_hp_fragment_address()
                found[names[parameter]] = {m: state[flat][m].narrow(0, place.start, place.numel) for m in MOMENTS}
    return found


def _train(rank: int, world: int, cells: list[str], folder: str) -> dict[str, Any]:
    """AdamW's weights and moments when it was saved."""
    found = {}
    for label in cells:
        engine = _engine("AdamW", WRITTEN[label], world)
        for step in range(HALF):
            ds.train_step(engine, rank, world, step)
        engine.save_checkpoint(f"{folder}/{label}", client_state={"note": label})
        found[label] = (ds.master_weights(engine), _moments_of_adamw(engine))
        engine.destroy()
    return found


def _pieces(engine: Any) -> list[tuple[str, str, int, np.ndarray]]:
    """Weights and moments on this rank."""
    parts = stored_shards(engine.basic_optimizer)
    return [
        (part.shard.key, name, part.shard.start, values.numpy().copy())
        for part in parts
        for name, values in {"weight": part.weight, **part.states}.items()
        if name in (*MOMENTS, "weight")
    ]


def _take_over(
    rank: int, world: int, moves: list[tuple[str, str, dict[str, Any], tuple[str, ...]]], folder: str
) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for label, source, cell, types in moves:
        for name in types:
            engine = _engine(name, cell, world, seed=7)
            _, client = engine.load_checkpoint(f"{folder}/{source}")
            assert client["note"] == source and engine.global_steps == HALF
            loaded, pieces = ds.master_weights(engine), _pieces(engine)
            afresh = set(engine.basic_optimizer.extra_state()["transition"]["afresh"])
            rates = {group["lr"] for group in engine.basic_optimizer.param_groups}
            ds.train_step(engine, rank, world, HALF)
            steps = {int(state["step"]) for state in engine.basic_optimizer.state.values() if "step" in state}
            found[label, name] = {
                "loaded": loaded,
                "pieces": pieces,
                "afresh": afresh,
                "stepped": ds.master_weights(engine),
                "rates": rates,
                "steps": steps,
            }
            engine.destroy()
    return found


def _that_went_on(ranks: list[Any], weights: Any, theirs: Moments) -> set[str]:
    """Parameters whose moments are those that AdamW had; the others are zero. All weights are."""
    found: set[str] = set()
    for own in ranks:
        for key, moment, start, values in own["pieces"]:
            if moment == "weight":
                assert np.array_equal(values, weights[key].reshape(-1)[start : start + values.size]), key
                continue
            past = theirs.get(key, {}).get(moment)
            if past is None or key in own["afresh"]:
                assert not values.any(), (key, moment)
                continue
            assert np.array_equal(values, past[start : start + values.size]), (key, moment)
            found.add(f"{key} {moment}")
    return found


def _check(label: str, name: str, ranks: list[Any], before: tuple[Any, Moments]) -> None:
    weights, moments = before
    for own in ranks:
        loaded, stepped = own["loaded"], own["stepped"]
        assert ds.TYPES[name]["lr"] in own["rates"], "rates are this optimizer's own"
        # With half weights at stage 0 DeepSpeed begins by an idle step, which AdamW counts.
        assert own["steps"] == {HALF + 1 + (label == "stage 0, bf16")}, (label, name)
        moved = [key for key in stepped if not np.array_equal(stepped[key], loaded[key])]
        assert all(np.isfinite(stepped[key]).all() for key in stepped) and "up.weight" in moved
    went_on = _that_went_on(ranks, weights, moments)
    assert EXPECTED[name](went_on), (label, name, went_on)


@pytest.mark.slow
def test_moments_go_on(tmp_path: Path) -> None:
    before = run_ranks(2, _train, list(WRITTEN), str(tmp_path))[0]
    here = [(label, label, cell, TYPES if label in WITH_ALL else FEW) for label, cell in CELLS.items()]
    after = run_ranks(2, _take_over, here, str(tmp_path))
    for label, name in after[0]:
        _check(label, name, [found[label, name] for found in after], before[label])
    moves = [(label, *move, FEW[:1]) for label, move in MOVES.items()]
    for world, some in ((2, moves[::2]), (3, moves[1::2])):
        after = run_ranks(world, _take_over, some, str(tmp_path))
        for label, name in after[0]:
            # Of reordered partitions DeepSpeed tells other parameters' weights and moments; the run is the same.
            source = "stage 2" if MOVES[label][0] == "round robin" else MOVES[label][0]
            _check(label, name, [found[label, name] for found in after], before[source])


def _refused(rank: int, world: int, folder: str) -> str:
    engine = _engine("LDAdam", CELLS["stage 2"], world)
    before = ds.master_weights(engine)
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as refusal:
        after = ds.master_weights(engine)
        assert all(np.array_equal(after[key], before[key]) for key in before), "nothing has changed"
        return str(refusal)
    return ""


def test_ranks_refuse_together_what_one_cannot_take(tmp_path: Path) -> None:
    run_ranks(2, _train, ["stage 2"], str(tmp_path))
    (file,) = (tmp_path / "stage 2").rglob("*rank_1_mp_rank_00_optim_states.pt")
    content = torch.load(file, weights_only=False)
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0].pop("exp_avg_sq")
    torch.save(content, file)
    for message in run_ranks(2, _refused, str(tmp_path / "stage 2")):
        assert "does not hold AdamW's moments, or Muon's," in message and file.name in message


def _from_muon(rank: int, world: int, folder: str) -> dict[int, Any]:
    """Weights of DeepSpeed's Muon, and what MARS-M has of its checkpoint."""
    found = {}
    for stage in (1, 2, 3):
        block = {"stage": stage, "reduce_scatter": False}
        job = ds.Job("Muon", {"lr": 0.01, "momentum": 0.9}, config={"zero_optimization": block})
        engine = ds.engine_of(job, world)
        for step in range(HALF):
            ds.train_step(engine, rank, world, step)
        engine.save_checkpoint(f"{folder}/{world}-{stage}")
        weights = ds.model_weights(engine)
        engine.destroy()
        heir = _engine("MARS-M", {"stage": 2}, world, seed=7)
        heir.load_checkpoint(f"{folder}/{world}-{stage}")
        loaded = ds.model_weights(heir)
        assert all(np.array_equal(loaded[name], weights[name]) for name in weights)
        found[stage] = (_pieces(heir), set(heir.basic_optimizer.extra_state()["transition"]["afresh"]))
        ds.train_step(heir, rank, world, HALF)
        heir.destroy()
    return found


@pytest.mark.exhaustive
def test_momentum_of_deepspeeds_muon_goes_on(tmp_path: Path) -> None:
    """Whole parameters at ZeRO-1 and -2, partitions at ZeRO-3, everything on one rank: the same averages.

    DeepSpeed compiles its fused Adam for it, which takes a minute.
    """
    averages = {}
    for world in (1, 2):
        ranks = run_ranks(world, _from_muon, str(tmp_path))
        for stage in (1, 2, 3):
            assert ranks[0][stage][1] == {"head.weight"}, "Muon's, but AdamW's here, which needs both moments"
            parts: dict[tuple[str, str], dict[int, np.ndarray]] = {}
            for found in ranks:
                for key, name, start, values in found[stage][0]:
                    parts.setdefault((key, name), {})[start] = values
            averages[world, stage] = {
                place: np.concatenate([held[start] for start in sorted(held)]) for place, held in parts.items()
            }
    for place, expected in averages[1, 1].items():
        assert place[0] in ("head.weight", "unused.weight", "unused.bias") or expected.any(), place
        for case, found in averages.items():
            np.testing.assert_allclose(found[place], expected, rtol=1e-3, atol=1e-5, err_msg=f"{place} {case}")
