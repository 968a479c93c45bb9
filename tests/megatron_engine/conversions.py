"""One model trained by DeepSpeed, FSDP2 and Megatron: saved, loaded and looked at by each one's own means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from language_model import Model, PlainTrainer
from megatron_cells import LENGTH, MAX_LR, Cell, tokens
from megatron_harness import opened
from megatron_types import EPS, maker
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from megatron_patches.cpu import cpu_megatron
from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.checkpoint.named_vectors import owned_states, stored_shards
from rankwise.step.optimizer import ShardedOptimizer

BEFORE, AFTER = 3, 2
CASES: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "ldadam": (LDAdam, "LDAdam", {"rank": 16}),
    "mkor-h": (
        MKOR,
        "MKOR-H",
        {
            "update_interval": 2,
            "factor_dtype": "float32",
            "hybrid_min_steps": 4,
            "hybrid_patience": 1,
            "hybrid_beta": 10.0,
        },
    ),
    "mars-m": (MARS, "MARS-M", {"ns_dtype": "float32"}),
    "mars-adamw": (MARS, "MARS-AdamW", {}),
    "mars-shampoo": (MARS, "MARS-Shampoo", {"ns_dtype": "float32"}),
    "sonew": (SONew, "SONew", {"band": 2, "gamma": 0.1}),
}
"""By Megatron's name: the class, DeepSpeed's name, and options."""
_VARIANTS = {"mars-m": {"variant": "muon"}, "mars-shampoo": {"variant": "shampoo"}, "mkor-h": {"hybrid": True}}
_CELL = Cell(use_distributed_optimizer=True, microbatches=1, clip=0.0, optimizer={"min_lr": MAX_LR})
Values = dict[str, Tensor]


class Job(NamedTuple):
    """A run.

    Attributes:
        case: One of `CASES`.
        load: Where it goes on from; None to begin.
        save: Where it is saved after :data:`BEFORE` steps; None if it is not.
        stage: Stage of ZeRO.
    """

    case: str
    load: Path | None = None
    save: Path | None = None
    stage: int = 1


class Seen(NamedTuple):
    """What a rank has of a run.

    Attributes:
        states: After :data:`BEFORE` steps, or once loaded.
        weights: The whole weights, :data:`AFTER` steps later.
    """

    states: Values
    weights: Values


def _batch(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a rank; twelve sequences are those of all."""
    mine = torch.cat([tokens(step), tokens(step + 100)[:4]]).tensor_split(world)[rank]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def _groups(model: torch.nn.Module, case: str) -> list[dict[str, Any]]:
    """As Megatron makes them: no decay of vectors, neither by MARS's own rule for them."""
    named = list(model.named_parameters())
    matrices, vectors = ([(n, p) for n, p in named if is_matrix(n)] for is_matrix in (_is_matrix, _is_vector))
    apart = {"weight_decay_1d": 0.0} if case.startswith("mars") else {}
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, **apart}]


def _is_vector(name: str) -> bool:
    return name.endswith("bias") or "norm" in name


def _is_matrix(name: str) -> bool:
    return not _is_vector(name)


def assembled(ranks: list[Values]) -> Values:
    """Whole tensors from what ranks have; a run is called ``name@start/numel``."""
    found: Values = {}
    for name, values in (item for rank in ranks for item in rank.items()):
        key, _, place = name.partition("@")
        if not place:
            assert torch.equal(found.setdefault(key, values), values), key
            continue
        start, numel = map(int, place.split("/"))
        found.setdefault(key, torch.full((numel,), torch.nan, dtype=values.dtype))[start : start + len(values)] = values
    return {name: values.reshape(-1) for name, values in found.items()}


def _held(optimizer: ShardedOptimizer) -> Values:
    """This rank's part of weights and states, where one optimizer's tensors are runs."""
    found: Values = {}
    for part, _, weight, states in stored_shards(optimizer):
        for name, values in {"weight": weight, **states}.items():
            found[f"{part.key}.{name}@{part.start}/{prod(part.shape)}"] = values.clone()
    for key, state in owned_states(optimizer).items():
        found |= {f"{key}.matrix.{name}": value.clone() for name, value in state.items()}
    return found | _extra_values(optimizer)


def _extra_values(optimizer: ShardedOptimizer) -> Values:
    """Counts, and what belongs to no parameter, as bytes."""
    steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    assert len(steps) == 1
    text = repr(sorted(optimizer.extra_state().items())).replace("(", "[").replace(")", "]")
    rates = sorted((float(group["lr"]), float(group["weight_decay"])) for group in optimizer.param_groups)
    values = {"steps": sorted(steps), "groups": rates, "text": list(text.encode())}
    return {f"extra.{name}": torch.tensor(value) for name, value in values.items()}


# --- FSDP2 ----------------------------------------------------------------------------------------------------------


def under_torch(rank: int, world: int, jobs: list[Job]) -> list[Seen]:
    """Runs under ``fully_shard``."""
    return [_under_torch(rank, world, job) for job in jobs]


def _under_torch(rank: int, world: int, job: Job) -> Seen:
    model = Model(mean=True)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    kind, _, options = CASES[job.case]
    groups = _groups(model, job.case)
    optimizer = kind(groups, lr=MAX_LR, eps=EPS, **options, **_VARIANTS.get(job.case, {}))
    if optimizer.needs_capture:
        optimizer.capture(model)

    def step(number: int) -> None:
        inputs, labels = _batch(number, rank, world)
        loss = model(inputs, None, None, labels=labels)
        loss.backward()
        if optimizer.needs_loss:
            optimizer.record_loss(loss.detach())
        optimizer.step()
        optimizer.zero_grad()

    def states(**how: Any) -> dict[str, Any]:
        own, others = get_state_dict(model, optimizer, options=StateDictOptions(**how))
        return {"model": own, "optimizer": others}

    if job.load is None:
        for number in range(BEFORE):
            step(number)
    else:
        asked = states()
        dcp.load(asked, checkpoint_id=job.load)
        set_state_dict(model, optimizer, model_state_dict=asked["model"], optim_state_dict=asked["optimizer"])
    if job.save is not None:
        dcp.save(states(), checkpoint_id=job.save)
    whole = states(full_state_dict=True, cpu_offload=True)  # on the first rank
    seen = _by_name(whole) | _extra_values(optimizer) if rank == 0 else {}
    for number in range(BEFORE, BEFORE + AFTER):
        step(number)
    return Seen(seen, {name: value.full_tensor() for name, value in model.named_parameters()})


def _by_name(states: dict[str, Any]) -> Values:
    found = {f"{name}.weight": value.clone() for name, value in states["model"].items()}
    for name, own in states["optimizer"]["state"].items():
        for state, value in own.items():
            if state.startswith("matrix.["):
                place, _, state = state.removeprefix("matrix.").rpartition(".")
                found[f"{name}{place}.matrix.{state}"] = value.clone()
            elif state != "step":
                found[f"{name}.{state}"] = value.clone()
    return found


# --- DeepSpeed ------------------------------------------------------------------------------------------------------


def under_deepspeed(rank: int, world: int, jobs: list[Job]) -> list[Seen]:
    """Runs under ZeRO."""
    import deepspeed_plugin  # registers the types

    assert deepspeed_plugin.is_registered()
    deepspeed.init_distributed("gloo")
    return [_under_deepspeed(rank, world, job) for job in jobs]


def _under_deepspeed(rank: int, world: int, job: Job) -> Seen:
    model = Model(mean=True)
    _, name, options = CASES[job.case]
    groups = [{**group, "params": [p for _, p in group["params"]]} for group in _groups(model, job.case)]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 12 // world,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": job.stage},
        "optimizer": {"type": name, "params": {"lr": MAX_LR, "eps": EPS, **options}},
    }
    if job.load is not None:
        config["checkpoint"] = {"load_universal": True}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)

    def step(number: int) -> None:
        inputs, labels = _batch(number, rank, world)
        engine.backward(engine(inputs, None, None, labels=labels))
        engine.step()

    if job.load is None:
        for number in range(BEFORE):
            step(number)
    else:
        engine.load_checkpoint(str(job.load.parent), tag=job.load.name)
        assert engine.global_steps == BEFORE
    if job.save is not None:
        engine.save_checkpoint(str(job.save.parent), tag=job.save.name)
    seen = _held(engine.basic_optimizer)
    for number in range(BEFORE, BEFORE + AFTER):
        step(number)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=job.stage == 3):
        weights = {key: value.detach().clone() for key, value in engine.module.named_parameters()}
    engine.destroy()
    return Seen(seen, weights)


# --- Megatron -------------------------------------------------------------------------------------------------------


class _Trainer(PlainTrainer):
    def _micro_batches(self) -> list[Tensor]:
        inputs, labels = _batch(self.step, dist.get_rank(), dist.get_world_size())
        return [torch.cat([inputs, labels[:, -1:]], dim=1)]


def under_megatron(rank: int, world: int, jobs: list[Job]) -> list[Seen]:
    """Runs under the distributed optimizer. What is saved has beside it ``like``, of another run's first step."""
    with cpu_megatron():
        return [_under_megatron(rank, world, job) for job in jobs]


@contextmanager
def _trainer(case: str) -> Iterator[Any]:
    with opened(_CELL, maker(case, **CASES[case][2]), _Trainer) as trainer:
        yield trainer


def _under_megatron(rank: int, world: int, job: Job) -> Seen:
    if job.save is not None:
        with _trainer(job.case) as trainer:
            trainer.step = 50
            trainer.train_step()
            trainer.step = 1
            like = job.save.with_name(f"{job.save.name}-like")
            like.mkdir(exist_ok=True)
            trainer.save(like)
    with _trainer(job.case) as trainer:
        if job.load is None:
            for _ in range(BEFORE):
                trainer.train_step()
        else:
            trainer.load(job.load)
            assert trainer.step == BEFORE
        if job.save is not None:
            job.save.mkdir(exist_ok=True)
            trainer.save(job.save)
        inner = trainer.optimizer.chained_optimizers[0].optimizer
        seen = _held(inner)
        for _ in range(AFTER):
            trainer.train_step()
        trainer.gather_params()
        weights = {name: value.detach().clone() for name, value in trainer.chunks[0].module.named_parameters()}
        return Seen(seen, weights)


assert LENGTH > 1
RUNS: dict[str, tuple[int, Callable[..., list[Seen]]]] = {
    "deepspeed": (2, under_deepspeed),
    "megatron": (2, under_megatron),
    "torch": (3, under_torch),
}
"""By format: ranks, and what runs there."""
