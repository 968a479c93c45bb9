"""The language model trained by DeepSpeed, by Megatron, by FSDP2 and in one process: the same samples and schedule."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from language_model import Model, PlainTrainer
from megatron_cells import DECAY_STEPS, GLOBAL_BATCH, MAX_LR, MIN_LR, Cell, tokens
from megatron_harness import largest_gap, opened, trained
from megatron_types import EPS, TYPES, maker
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from deepspeed_plugin.registry import build
from megatron_patches.cpu import cpu_megatron

deepspeed = pytest.importorskip("deepspeed")

STEPS, ALLOWED = 10, 10.0
# MKOR-H switches half-way.
OPTIONS: dict[str, dict[str, Any]] = {
    "mars": {"optimize_1d": True},
    **TYPES,
    "mkor-h": {**TYPES["mkor-h"], "hybrid_min_steps": 6, "hybrid_patience": 1, "hybrid_beta": 10.0},
}
CELL = Cell(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=5000)
# Of the learning rate, in a run that must not pass.
PERTURBATION = 0.01

Weights = dict[str, Tensor]


def _rate(step: int) -> float:
    """Megatron's linear schedule, relative to the largest rate."""
    return (MIN_LR + (1 - step / DECAY_STEPS) * (MAX_LR - MIN_LR)) / MAX_LR


def _groups(name: str, model: nn.Module, named: bool) -> list[dict[str, Any]]:
    """What Megatron does by default: no decay of vectors, neither by MARS's own rule for them."""
    found: list[dict[str, Any]] = []
    for decay, wanted in ((0.1, True), (0.0, False)):
        chosen = [(key, value) for key, value in model.named_parameters() if (value.dim() > 1) is wanted]
        found.append({"params": chosen if named else [value for _, value in chosen], "weight_decay": decay})
    if name.startswith("mars"):
        found[1]["weight_decay_1d"] = 0.0
    return found


def _engine(name: str, stage: int, rate: float) -> Any:
    model = Model(mean=True)
    params = {"torch_adam": True} if name == "adam" else OPTIONS[name]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": CELL.microbatches,
        "gradient_clipping": CELL.clip,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW" if name == "adam" else name, "params": {"lr": rate, "eps": EPS, **params}},
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=_groups(name, model, named=False),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, _rate),
        config=config,
    )
    return engine


def under_deepspeed(rank: int, world: int, name: str, stage: int, perturbed: bool = False) -> Weights:
    engine = _engine(name, stage, MAX_LR * (1 + PERTURBATION * perturbed))
    for step in range(STEPS):
        for batch in tokens(step).tensor_split(CELL.microbatches * world)[rank::world]:
            loss = engine(batch[:, :-1].contiguous(), None, None, labels=batch[:, 1:].contiguous())
            engine.backward(loss)
            engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        weights = {key: value.detach().clone() for key, value in engine.module.named_parameters()}
    engine.destroy()
    return weights


def all_under_deepspeed(rank: int, world: int, jobs: list[tuple[str, int, bool]]) -> list[Weights]:
    import deepspeed_plugin  # registers the types

    assert deepspeed_plugin.is_registered()
    deepspeed.init_distributed("gloo")
    return [under_deepspeed(rank, world, *job) for job in jobs]


def all_under_megatron(rank: int, world: int, names: list[str], steps: int) -> list[Any]:
    found = []
    with cpu_megatron():
        for name in names:
            options = {} if name == "adam" else OPTIONS[name]
            with opened(CELL, maker(name, **options), PlainTrainer) as trainer:
                found.append(trained(trainer, steps))
    return found


def in_torch(rank: int, world: int, name: str, micro_batches: int = CELL.microbatches) -> Weights:
    """Plain PyTorch, of several ranks under FSDP2; ranks that the samples do not divide by have unequal numbers."""
    model = Model(mean=True)
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
    optimizer = _optimizer(name, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)
    for step in range(STEPS):
        for batch in tokens(step).tensor_split(micro_batches):
            own = batch.tensor_split(world)[rank]
            loss = model(own[:, :-1], None, None, labels=own[:, 1:])
            (loss * (len(own) * world / GLOBAL_BATCH)).backward()
        if getattr(optimizer, "needs_loss", False):
            optimizer.record_loss(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), CELL.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {key: _whole(value.detach()) for key, value in model.named_parameters()}


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _optimizer(name: str, model: nn.Module) -> Any:
    if name == "adam":
        return torch.optim.AdamW(_groups(name, model, named=True), lr=MAX_LR, eps=EPS)
    optimizer = build(name, _groups(name, model, named=True), lr=MAX_LR, eps=EPS, **OPTIONS[name])
    if optimizer.needs_capture:
        optimizer.capture(model)
    return optimizer


def all_in_torch(rank: int, world: int, names: list[str]) -> list[Weights]:
    """Each of the optimizers."""
    return [in_torch(rank, world, name) for name in names]


class Figures(NamedTuple):
    """Differences of the final weights.

    Attributes:
        largest: Over the largest change.
        mean: Over the mean change.
        most: What 99 % of the elements do not exceed, over the largest change.
    """

    largest: float
    mean: float
    most: float


def figures_of(got: Weights, expected: Weights, start: Weights) -> Figures:
    def mean(weights: Weights, others: Weights) -> float:
        return float(sum((weights[key] - others[key]).abs().sum(dtype=torch.float64) for key in others))

    change = largest_gap(expected, start)
    gaps = torch.cat([(got[key] - expected[key]).abs().view(-1) for key in expected])
    most = float(gaps.kthvalue(int(0.99 * gaps.numel())).values)
    return Figures(largest_gap(got, expected) / change, mean(got, expected) / mean(expected, start), most / change)


def check_alike(name: str, ours: Figures, stock: Figures, response: float = 0.0) -> None:
    """Within ten times of what AdamW shows, or the rule itself.

    Args:
        name: Name of the optimizer.
        ours: Its figures.
        stock: AdamW's.
        response: What rounding does to the rule in one process, over the largest change.
    """
    # The stock optimizers' own figure must be one of rounding, or ten times of it would be no bound.
    assert 0.0 < stock.largest < 1e-4
    if name == "mars-lion":
        # A rounded zero has a sign: a whole step of that element, from which others follow. One in a thousand does.
        assert ours.most <= ALLOWED * stock.largest
    elif name == "sonew":  # An edge beside its threshold is much of a step.
        assert ours.mean <= ALLOWED * stock.mean
    else:
        assert ours.largest <= ALLOWED * max(stock.largest, response)
