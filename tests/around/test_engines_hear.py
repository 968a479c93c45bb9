"""Under DeepSpeed: what is thrown away between two steps changes MKOR where it changes AdamW, and nowhere else.

CI has NaN at stage 3; the play-book has cells of ZeRO 2 there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpu_deepspeed import choose_cpu, prepare_ranks
from heard_passes import STEPS, Layers, batch
from ranks import run_ranks
from torch import Tensor

choose_cpu()
deepspeed = pytest.importorskip("deepspeed")

PARAMS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "torch_adam": True},
    "MKOR": {"lr": 1e-2, "update_interval": 2},
    "MKOR-H": {"lr": 1e-2, "update_interval": 2},
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    """See `prepare_ranks`."""
    prepare_ranks()


def _engine(kind: str, stage: int, micro_batches: int = 1) -> Any:
    import deepspeed_plugin  # noqa: F401

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": kind, "params": PARAMS[kind]},
    }
    module = Layers()
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    return engine


def _loss(engine: Any, number: int, rank: int) -> Tensor:
    return engine(batch(number, rank)).square().mean()


def _discard(*clear: str) -> Callable[[Any, int, int, float], None]:
    def run(engine: Any, number: int, rank: int, factor: float) -> None:
        engine.backward(_loss(engine, number + 50, rank) * factor)
        if "optimizer" in clear:
            engine.optimizer.zero_grad()
        if "in place" in clear:
            engine.optimizer.zero_grad(set_to_none=False)
        if "engine" in clear:
            engine.zero_grad()
        if "module" in clear:
            engine.module.zero_grad()

    return run


def _penalty(engine: Any, number: int, rank: int, factor: float) -> None:
    x = batch(number + 50, rank).requires_grad_()
    torch.autograd.grad(engine.module(x).sum(), x)


def _copy(engine: Any, number: int, rank: int, factor: float) -> None:
    copy.deepcopy(engine.module)(batch(number, rank)).square().mean().backward()


def _look(engine: Any, number: int, rank: int, factor: float) -> None:
    if rank == 0:
        engine.module(batch(number + 50)).sum()


EVENTS: dict[str, Callable[[Any, int, int, float], None]] = {
    "optimizer": _discard("optimizer"),
    "in place": _discard("in place"),
    "engine": _discard("engine"),
    "module": _discard("module"),
    "both": _discard("optimizer", "engine"),
    "not at all": _discard(),
    "penalty": _penalty,
    "copy": _copy,
    "look": _look,
}


def _train(kind: str, stage: int, rank: int, event: str | None, factor: float, micro_batches: int = 1) -> list[Tensor]:
    engine = _engine(kind, stage, micro_batches)
    losses: list[float] = []
    if kind == "MKOR-H":
        engine.basic_optimizer.switch.detector.update = losses.append
    for number in range(STEPS):
        if event is not None and number in (1, 2, 4):
            EVENTS[event](engine, number, rank, factor)
        for micro in range(micro_batches):
            engine.backward(_loss(engine, 2 * number + micro, rank))
            engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    engine.destroy()
    return [*weights, torch.tensor(losses)]


def _differs(one: list[Tensor], other: list[Tensor]) -> bool:
    return not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _faults(rank: int, world: int, stage: int, factors: tuple[float, ...]) -> tuple[list[str], list[str]]:
    """Events that change MKOR's weights, or MKOR-H's losses, and not AdamW's weights; and those that change neither."""
    deepspeed.init_distributed("gloo")
    faults, harmless = [], []
    without = {kind: _train(kind, stage, rank, None, 1.0) for kind in PARAMS}
    for name in EVENTS:
        if stage == 3 and name in ("penalty", "copy", "look"):
            continue  # every rank must take part in a forward pass; a partitioned module has no copy
        for factor in factors:
            if _differs(_train("AdamW", stage, rank, name, factor), without["AdamW"]):
                continue
            harmless.append(f"{name}, {factor}")
            faults += [
                f"{kind}: {name}, {factor}"
                for kind in ("MKOR", "MKOR-H")
                if _differs(_train(kind, stage, rank, name, factor), without[kind])
            ]
    return faults, harmless


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "factors"),
    [(3, (math.nan,)), *(pytest.param(stage, (3.0, math.nan), marks=pytest.mark.exhaustive) for stage in range(4))],
)
def test_engines(stage: int, factors: tuple[float, ...]) -> None:
    for faults, harmless in run_ranks(2, _faults, stage, factors, timeout=500.0):
        assert faults == []
        assert {f"both, {factor}" for factor in factors} <= set(harmless)
