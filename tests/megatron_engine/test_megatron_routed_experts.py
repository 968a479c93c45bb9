"""MKOR of Megatron's experts: explicit inverses of every token that was routed to each of them, on whichever rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron_cells import DISTRIBUTED, MOE, Cell
from megatron_harness import Trainer, opened
from megatron_latent import any_megatron
from megatron_statistics import inner_optimizers
from megatron_weights import cuts
from ranks import run_ranks
from routed_experts import INTERVAL, MOMENTUM, Dense
from torch import Tensor, nn

from megatron_patches.registry import RankwiseConfig, get_megatron_optimizer

STEPS = 4
OPTIONS = {"backend": "sgd", "momentum": MOMENTUM, "update_interval": INTERVAL, "factor_dtype": "float64"}
_CELL: dict[str, Any] = {"clip": 0.0, "layers": 1, "precision": "fp64", **MOE}
CELLS = {
    1: [Cell(**_CELL)],
    2: [Cell(**_CELL, **DISTRIBUTED), Cell(ep=2, **_CELL), Cell(ep=2, **_CELL, **DISTRIBUTED)],
    4: [Cell(ep=2, **_CELL, **DISTRIBUTED)],
}
Tokens = list[tuple[str, Tensor, Tensor]]


def _mkor(config: dict[str, Any], chunks: list[nn.Module]) -> Any:
    return get_megatron_optimizer(RankwiseConfig(**{**config, "optimizer": "mkor"}, rankwise=OPTIONS), chunks)


class _Tokens:
    """What experts' layers of this rank are given, and the loss's gradients with respect to what they return."""

    def __init__(self, trainer: Trainer) -> None:
        self.seen: Tokens = []
        self.names = {id(weight): cut.name for weight, cut in cuts(trainer.chunks[0], False)}
        for name, module in trainer.chunks[0].named_modules():
            if ".local_experts." in name and name.endswith(("linear_fc1", "linear_fc2")):
                module.register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, given: tuple[Any, ...], returned: tuple[Any, ...]) -> None:
        name, inputs = self.names[id(module.weight)], given[0].detach().clone()
        returned[0].register_hook(lambda gradient: self.seen.append((name, inputs, gradient.detach().clone())))

    def of_all_ranks(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Inputs and output gradients (tokens, ...) of the mean loss, by weight."""
        everyone: list[Tokens] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, self.seen)
        self.seen = []
        found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for name, inputs, gradient in (item for theirs in everyone for item in theirs):
            found.setdefault(name, []).append((inputs, gradient / mpu.get_data_parallel_world_size()))
        return {
            name: (torch.cat([a for a, _ in all_]), torch.cat([g for _, g in all_])) for name, all_ in found.items()
        }


def _blocks(name: str, rows: int) -> dict[str, slice]:
    """A gate over what it multiplies."""
    return {"gate": slice(rows // 2), "up": slice(rows // 2, rows)} if "linear_fc1" in name else {"": slice(rows)}


def _without_decay(trainer: Trainer) -> None:
    trainer.scheduler.start_wd = trainer.scheduler.end_wd = 0.0
    trainer.scheduler.step(0)


def _follow(trainer: Trainer) -> tuple[dict[str, float], float, int]:
    """How far experts' weights are from the oracle's, the largest change of any, and the fewest tokens; on rank 0."""
    _without_decay(trainer)
    tokens, dense = _Tokens(trainer), dict[str, Dense]()
    start = {name: value.clone() for name, value in trainer.weights()[0].items() if "local_experts" in name}
    expected = {name: value.clone() for name, value in start.items()}
    fewest = 10**9
    for _ in range(STEPS):
        rate = max(inner_optimizers(trainer)[0].param_groups, key=lambda group: group["lr"])["lr"]
        trainer.train_step()
        for name, (inputs, outputs) in tokens.of_all_ranks().items():
            fewest = min(fewest, len(inputs))
            for block, rows in _blocks(name, outputs.shape[1]).items():
                oracle = dense.setdefault(f"{name}[{block}]", Dense())
                own = outputs[:, rows]
                change = oracle.step(own.T @ inputs, inputs, own, rate)
                if expected:
                    expected[name][rows] -= change
    final = trainer.weights()[0]
    errors = {
        name: float((final[name] - value).norm() / (value - start[name]).norm()) for name, value in expected.items()
    }
    return errors, max((float((expected[name] - start[name]).abs().max()) for name in start), default=0.0), fewest


def _cells(rank: int, world: int) -> list[tuple[dict[str, float], float, int]]:
    found = []
    with any_megatron("fp64"):
        for cell in CELLS[world]:
            with opened(cell, _mkor) as trainer:
                found.append(_follow(trainer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, *(pytest.param(other, marks=pytest.mark.exhaustive) for other in (1, 4))])
def test_experts_follow_all_their_tokens(world: int) -> None:
    for errors, change, fewest in run_ranks(world, _cells)[0]:
        assert len(errors) == 2 * MOE["moe"] and change > 1e-4 and fewest > 0
        assert max(errors.values()) < 1e-10, errors
