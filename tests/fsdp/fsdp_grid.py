"""The cells of the table in docs/fsdp-parity.md: every type, in every setting, beside one process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from ranks import run_ranks
from shard_settings import MIXED, SETTINGS
from sharded_models import BATCH, Case, Network, Run, batch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rankwise import MARS, MKOR, LDAdam, SONew

STEPS, MICRO_BATCHES, SEEDS = 10, 2, 3
# A third of most gradients' norms, so that clipping acts in every step.
CLIPPING = 0.3
REFERENCE = "AdamW"
# A gradient that vanishes is rounding, which AdamW would make a whole step; this damps it.
_EPS = 1e-5
_MARS = {"eps": _EPS, "lr": 5e-3}
_MKOR = {"eps": _EPS, "lr": 5e-3, "update_interval": 3, "factor_dtype": "float32"}
_HYBRID = {"hybrid": True, "hybrid_min_steps": 6, "hybrid_patience": 1, "hybrid_beta": 10.0}
TYPES: dict[str, Case] = {
    REFERENCE: (torch.optim.AdamW, {"eps": _EPS, "lr": 5e-3}),
    "MARS-AdamW": (MARS, _MARS),
    "MARS-Lion": (MARS, {**_MARS, "variant": "lion", "lr": 1e-3}),
    "MARS-Shampoo": (MARS, {**_MARS, "variant": "shampoo", "lr": 1e-2, "ns_dtype": "float32"}),
    "MARS-M": (MARS, {**_MARS, "variant": "muon", "lr": 1e-2, "ns_dtype": "float32"}),
    "SONew": (SONew, {"eps": _EPS, "lr": 5e-3, "band": 2, "gamma": 0.1}),
    "LDAdam": (LDAdam, {"eps": _EPS, "lr": 5e-3, "rank": 3}),
    "MKOR": (MKOR, _MKOR),
    "MKOR-H": (MKOR, {**_MKOR, **_HYBRID}),  # it switches half-way
    "SONew, default gamma": (SONew, {"eps": _EPS, "lr": 5e-3}),
}
"""As in the tables of the other frameworks."""

FP32 = tuple(SETTINGS)
BF16 = ("rows-2", "rows-3", "rows-4", "columns-2", "hybrid-4", "tensor-4", "experts-4", "offload-2")
CUTS = (2, 3, 4)

Weights = dict[str, Tensor]


class Errors(NamedTuple):
    """How far weights are from others.

    Attributes:
        largest: Difference of a weight, relative to the largest change.
        mean: Difference, relative to the mean change.
    """

    largest: float
    mean: float


class GridRun(Run):
    """One rank's training, or one process's: micro-batches, clipped gradients, bf16 computation if it is wanted.

    Args:
        label: One of `TYPES`.
        setting: One of `SETTINGS`; None for one process.
        precision: ``fp32`` or ``bf16``.
        seed: Seed of weights and samples.
        cuts: Into how many each micro-batch is cut: the same samples, their gradients rounded otherwise.
        noise: Relative error added to every gradient element.
    """

    def __init__(
        self, label: str, setting: str | None, precision: str, seed: int = 0, cuts: int = 1, noise: float = 0.0
    ) -> None:
        self._half = precision == "bf16"
        super().__init__(TYPES[label], setting, seed=seed, **({"policy": MIXED} if self._half else {}))
        self._seed, self._alone, self._pieces = seed, setting is None, MICRO_BATCHES * cuts
        self._noise, self._generator = noise, torch.Generator().manual_seed(1)
        self.norms: list[float] = []

    def backward(self) -> Tensor:
        """Gradients of all micro-batches, clipped."""
        tokens, classes = batch(self.count, self._seed)
        size = BATCH // self._pieces
        share = size // self.parts
        total = torch.zeros(())
        for first in range(0, BATCH, size):
            mine = slice(first + self.part * share, first + (self.part + 1) * share)
            loss = nn.functional.cross_entropy(self._logits(tokens[mine]), classes[mine]) / self._pieces
            loss.backward()
            total += loss.detach()
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        for parameter in parameters if self._noise else ():
            parameter.grad *= 1 + self._noise * torch.randn(parameter.shape, generator=self._generator)
        self.norms.append(clip(parameters, CLIPPING))
        return total

    def _logits(self, tokens: Tensor) -> Tensor:
        rare = self.count % 3 == 2
        if not (self._half and self._alone):
            return self.model(tokens, rare=rare).float()
        # What MixedPrecisionPolicy does: bf16 copies of fp32 weights, whose gradients return in bf16.
        rounded = {name: value.bfloat16() for name, value in self.model.named_parameters()}
        return torch.func.functional_call(self.model, rounded, (tokens,), {"rare": rare}).float()


def clip(parameters: Sequence[Tensor], most: float) -> float:
    """`torch.nn.utils.clip_grad_norm_`, which knows no gradients of several meshes; returns the norm."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    norms = [
        nn.utils.get_total_norm([value.grad for value in own if value.grad is not None]) for own in by_mesh.values()
    ]
    total = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for own in by_mesh.values():
        nn.utils.clip_grads_with_norm_(own, most, total)
    return float(total)


def _norm(parameters: Sequence[Tensor]) -> Tensor:
    found = nn.utils.get_total_norm([value.grad for value in parameters if value.grad is not None])
    return found.full_tensor() if isinstance(found, DTensor) else found


# --- figures --------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """What runs in one set of processes."""

    precision: str
    setting: str

    def __str__(self) -> str:
        return f"{self.precision}-{self.setting}"


def _all_on_rank(rank: int, world: int, cell: Cell, labels: Sequence[str], seeds: int) -> dict[Any, Weights]:
    """The whole weights after training, by type and seed."""
    found = {}
    for label in labels:
        for seed in range(seeds):
            run = GridRun(label, cell.setting, cell.precision, seed).train(STEPS)
            assert min(run.norms) > CLIPPING, "a step was not clipped"
            found[label, seed] = run.weights()
    return found


@functools.cache
def _alone(label: str, precision: str, seed: int, cuts: int = 1, noise: float = 0.0) -> Weights:
    return GridRun(label, None, precision, seed, cuts, noise).train(STEPS).weights()


def _errors(found: Weights, expected: Weights, seed: int) -> Errors:
    start = {name: parameter.detach() for name, parameter in Network(seed=seed).named_parameters()}
    gaps, changes = (
        torch.cat([(weights[name] - others[name]).abs().view(-1) for name in start]).double()
        for weights, others in ((found, expected), (expected, start))
    )
    gaps = gaps.nan_to_num(nan=torch.inf)
    return Errors(float(gaps.max() / changes.max()), float(gaps.mean() / changes.mean()))


def _median(errors: Sequence[Errors]) -> Errors:
    return Errors(*(float(np.median(values)) for values in zip(*errors, strict=True)))


@functools.cache
def cut_response(label: str, precision: str, seeds: int) -> Errors:
    """How far rounding moves one process: its micro-batches cut into others, the worst cut."""
    found = [
        _median(
            [
                _errors(_alone(label, precision, seed, cuts), _alone(label, precision, seed), seed)
                for seed in range(seeds)
            ]
        )
        for cuts in CUTS
    ]
    return Errors(*(max(values) for values in zip(*found, strict=True)))


@functools.cache
def noise_response(label: str, seeds: int) -> Errors:
    """How far gradient noise of the size of fp32 rounding moves one process."""
    found = [
        _errors(_alone(label, "fp32", seed, noise=1e-7), _alone(label, "fp32", seed), seed) for seed in range(seeds)
    ]
    return Errors(*(max(values) for values in zip(*found, strict=True)))


def measured(cell: Cell, labels: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """A row for each type, AdamW's first: the medians over the seeds; ranks end alike."""
    every = (REFERENCE, *labels)
    ranks = run_ranks(SETTINGS[cell.setting].world, _all_on_rank, cell, every, seeds, timeout=1800.0)
    for key, weights in ranks[0].items():
        assert all(torch.equal(other[key][name], weights[name]) for other in ranks[1:] for name in weights), key
    rows = []
    for label in every:
        errors = [_errors(ranks[0][label, seed], _alone(label, cell.precision, seed), seed) for seed in range(seeds)]
        rows.append({**cell._asdict(), "type": label, "seeds": seeds, **_median(errors)._asdict()})
    return rows
