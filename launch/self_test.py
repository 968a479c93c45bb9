"""Two ranks follow trajectories that one process has recorded, if this environment computes, sends and cuts rightly.

The tests of rankwise hold one process to the published implementations; this holds the ranks of this machine to one
process. Gradients are closed formulas, so that nothing depends on generators of random numbers or on other machines.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankwise.launch.environment import leave_groups
from rankwise.layout.layout_source import LayoutSource, Slice, TensorContents
from rankwise.names import BY_NAME

__all__ = ["OPTIONS", "RECORDED", "TOLERANCE", "differences", "record", "trajectory"]

RECORDED = Path(__file__).parent / "recorded" / "trajectories.json"
STEPS = 4
TOKENS = 8
TOLERANCE = 1e-8
"""Relative tolerance of float64 results, over the largest change of a parameter, as only the order of sums differs."""

_EXACT: dict[str, Any] = {"weight_decay": 0.1}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "mars-adamw": {"lr": 0.01, **_EXACT},
    "mars-lion": {"lr": 0.003, **_EXACT},
    "mars-shampoo": {"lr": 0.02, "ns_dtype": "float64", **_EXACT},
    "mars-m": {"lr": 0.01, "ns_dtype": "float64", **_EXACT},
    "sonew": {"lr": 0.01, "band": 2, **_EXACT},
    "ldadam": {"lr": 0.01, "rank": 2, **_EXACT},
    "mkor": {"lr": 0.01, "update_interval": 2, "factor_dtype": "float64", **_EXACT},
    "mkor-sketch": {"lr": 0.01, "factor_dtype": "float64", **_EXACT},
}


class _Model(nn.Module):
    """Two layers whose shapes are odd enough to be cut inside a row, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(7, 12), nn.Linear(12, 9), nn.Parameter(torch.empty(5))
        self.double()
        for index, parameter in enumerate(self.parameters()):
            parameter.data.copy_(_wave(parameter.shape, 0.1 * index))


def _wave(shape: torch.Size | tuple[int, ...], phase: float) -> Tensor:
    """Return numbers between -1 and 1 without a pattern that a matrix would reflect."""
    places = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(places * (1 + 0.37 * phase) + 0.01 * places.square() + phase).view(shape)


class _Shard(LayoutSource):
    """This rank's share of all parameters laid end to end, as ZeRO cuts them."""

    def __init__(self, model: nn.Module, rank: int, world: int) -> None:
        self.group = dist.group.WORLD if world > 1 else None
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self.share = -(-sum(sizes.values()) // world)
        self.rank = rank
        self.tensor = torch.zeros(self.share, dtype=torch.float64)
        slices, position = [], 0
        for name, size in sizes.items():
            first, last = max(position, rank * self.share), min(position + size, (rank + 1) * self.share)
            if first < last:
                slices.append(Slice(name, first - position, last - position, first - rank * self.share))
            position += size
        self._contents = TensorContents(0, tuple(slices))
        self.tensor.copy_(self.mine([parameter.detach() for parameter in model.parameters()]))

    def contents(self, tensor: Tensor) -> TensorContents:
        """Return this rank's share, whatever the tensor."""
        return self._contents

    def mine(self, values: list[Tensor]) -> Tensor:
        """Return this rank's share of values of all parameters, padded."""
        flat = torch.cat([value.reshape(-1) for value in values])
        part = flat[self.rank * self.share : (self.rank + 1) * self.share]
        return torch.cat([part, part.new_zeros(self.share - len(part))])


def trajectory(name: str, rank: int = 0, world: int = 1) -> list[float]:
    """Return all ranks' weights after the last step; a collective.

    Args:
        name: Name of the optimizer, a key of :data:`OPTIONS`.
        rank: Rank of this process.
        world: Number of ranks.
    """
    model, named = _Model(), BY_NAME[name]
    optimizer = named.optimizer(model.named_parameters(), **{**named.preset, **OPTIONS[name]})  # type: ignore[arg-type]
    optimizer.capture(model)
    shard = _Shard(model, rank, world)
    optimizer.param_groups[0]["params"] = [shard.tensor]
    optimizer.attach(shard)
    for step in range(STEPS):
        gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for inputs, outputs, layer, place in _signals(model, step):
            gradients[place] += outputs.mT @ inputs / TOKENS
            gradients[place + 1] += outputs.sum(0) / TOKENS
            tokens = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
            shown = inputs[tokens].clone().requires_grad_()
            (layer(shown) * outputs[tokens]).sum().mul(world / TOKENS).backward()
        gradients[0] += _wave(gradients[0].shape, 3.0 + step)
        model.zero_grad(set_to_none=True)
        shard.tensor.grad = shard.mine(gradients)
        optimizer.step()
    parts = [torch.empty_like(shard.tensor) for _ in range(world)]
    dist.all_gather(parts, shard.tensor) if world > 1 else parts[0].copy_(shard.tensor)
    whole: list[float] = torch.cat(parts)[: sum(parameter.numel() for parameter in model.parameters())].tolist()
    return whole


def _signals(model: _Model, step: int) -> Iterator[tuple[Tensor, Tensor, nn.Linear, int]]:
    """Yield inputs and output gradients of each layer, and the place of its weight among the parameters."""
    places = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    for name, layer in (("up", model.up), ("down", model.down)):
        phase = step + 0.5 * places[f"{name}.weight"]
        inputs, outputs = _wave((TOKENS, layer.in_features), phase), _wave((TOKENS, layer.out_features), phase + 0.7)
        yield inputs + 0.3, outputs, layer, places[f"{name}.weight"]


def record() -> dict[str, list[float]]:
    """Return the content of :data:`RECORDED`: trajectories' ends in one process, and under "" the first weights."""
    start = torch.cat([parameter.detach().reshape(-1) for parameter in _Model().parameters()]).tolist()
    return {"": start, **{name: trajectory(name) for name in OPTIONS}}


def differences(found: Mapping[str, list[float]]) -> dict[str, float]:
    """Return each optimizer's largest distance from the recorded weights, relative to the largest recorded change."""
    recorded = {name: torch.tensor(values, dtype=torch.float64) for name, values in _recorded().items()}
    start = recorded.pop("")
    far = {}
    for name, values in recorded.items():
        weights = torch.tensor(found.get(name, []), dtype=torch.float64)
        whole = weights.shape == values.shape
        far[name] = float((weights - values).abs().max() / (values - start).abs().max()) if whole else math.inf
    return far


def _recorded() -> dict[str, list[float]]:
    values: dict[str, list[float]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return values


def _main(target: Path) -> None:
    """Run one rank of the self-test; the first rank writes the weights of all."""
    dist.init_process_group("gloo")
    weights = {name: trajectory(name, dist.get_rank(), dist.get_world_size()) for name in OPTIONS}
    if dist.get_rank() == 0:
        target.write_text(json.dumps(weights), encoding="utf-8")
    leave_groups()


if __name__ == "__main__":
    # It is imported as a module of its package, so that classes have one identity.
    importlib.import_module("rankwise.launch.self_test")._main(Path(sys.argv[1]))
