"""Recorded trajectories of the official MKOR classes, replayed from raw inputs and output gradients.

The quirks of that code that are not options of the package live here: the first statistics vector is dropped, resets
go to the identity on both sides, vectors are divided by the number of micro-batches (and ranks) once too often.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from golden_io import load_golden
from torch import Tensor

from rankwise.mkor.formulas import precondition, rank1_inverse_update, stabilize
from rankwise.updates.lamb import lamb_direction, trust_ratio
from rankwise.updates.sgd import sgd_direction

OFFICIAL = ("sgd_fp32", "adam_seq_accum_scale", "sgd_fp16factors", "forced_reset", "lamb_bertclass", "dist2_official")
HKOR = ("hkor_exact_sm", "hkor_stabilizer")
RTOL, RTOL_FP16 = 1e-5, 5e-3


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))


class Layers:
    """What the recordings hold of a network: raw statistics and gradients by step and layer."""

    def __init__(self, meta: dict[str, Any], arrays: dict[str, Tensor]) -> None:
        self.meta, self.arrays = meta, arrays
        self.count = len(meta["dims"]) - 1
        self.excluded = set(meta["sgd_layers"])
        self.half = meta["half_precision"]
        self.world = meta.get("world_size", 1)

    def has_bias(self, layer: int) -> bool:
        return bool(self.meta["bias"][layer])

    def gradient(self, layer: int, step: int) -> Tensor:
        parts = [self.arrays[f"L{layer}_gW"][step]]
        if self.has_bias(layer):
            parts.append(self.arrays[f"L{layer}_gb"][step, :, None])
        return torch.cat(parts, 1)

    def recorded_update(self, layer: int, step: int) -> Tensor:
        parts = [self.arrays[f"L{layer}_pW"][step]]
        if self.has_bias(layer):
            parts.append(self.arrays[f"L{layer}_pb"][step, :, None])
        return torch.cat(parts, 1)

    def vectors(self, layer: int, step: int) -> tuple[Tensor, Tensor]:
        """The statistics as the official code sees them: clamped by entry, over-divided, perhaps in half precision."""
        micro_batches, scale = self.meta["grad_accum_steps"], self.meta["grad_scale"]
        bound = self.meta["clipping_value"] or math.inf
        a_ranks, g_ranks = [], []
        for rank in range(self.world):
            prefix = f"rank{rank}_" if self.world > 1 else ""
            x, dy = self.arrays[f"{prefix}L{layer}_a"][step], self.arrays[f"{prefix}L{layer}_dy"][step]
            x, dy = x.reshape(micro_batches, -1, x.shape[-1]), dy.reshape(micro_batches, -1, dy.shape[-1])
            if self.has_bias(layer):
                x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
            a_ranks.append((x / micro_batches).clamp(-bound, bound).sum(0).mean(0))
            g_ranks.append((x.shape[1] * dy / (micro_batches * scale)).clamp(-bound, bound).sum(0).mean(0))
        a = torch.stack(a_ranks).mean(0) / self.world
        g = torch.stack(g_ranks).mean(0) / self.world
        return (a.half(), g.half()) if self.half else (a, g)


class OfficialFactors(Layers):
    """Factor sequence of the package and BERT classes."""

    def __init__(self, meta: dict[str, Any], arrays: dict[str, Tensor]) -> None:
        super().__init__(meta, arrays)
        # One list per side (inputs, output gradients), one entry per layer.
        self.inverses: tuple[list[Any], list[Any]] = ([None] * self.count, [None] * self.count)
        self.reset = ([True] * self.count, [True] * self.count)

    def update(self, step: int) -> None:
        for side in (0, 1):
            for layer in sorted(set(range(self.count)) - self.excluded):
                vector = self.vectors(layer, step)[side]
                if self.reset[side][layer]:
                    self.inverses[side][layer] = torch.eye(len(vector), dtype=vector.dtype)
                    self.reset[side][layer] = False
                else:
                    inverse = rank1_inverse_update(self.inverses[side][layer], vector, self.meta["gamma"], "official")
                    self.inverses[side][layer] = inverse
                    if inverse.abs().max() > 2:
                        self.reset[0][layer] = self.reset[1][layer] = True

    def precondition(self, layer: int, step: int) -> Tensor:
        left, right = (None, None) if layer in self.excluded else (self.inverses[1][layer], self.inverses[0][layer])
        return precondition(self.gradient(layer, step), left, right, "sum_of_norms", self.has_bias(layer))


@pytest.mark.parametrize("case", OFFICIAL)
def test_official_trajectory(case: str) -> None:
    meta, arrays = load_golden(f"mkor_{case}")
    replay = OfficialFactors(meta, arrays)
    rtol = RTOL_FP16 if replay.half else RTOL
    factor_steps = 0
    for step in range(meta["steps"]):
        if case == "forced_reset" and step == 3:
            replay.inverses[0][0] = replay.inverses[0][0] * 6
        if case == "forced_reset" and step == 6:
            replay.inverses[1][1] = replay.inverses[1][1] * 5
        if arrays["is_factor_step"][step]:
            factor_steps += 1
            replay.update(step)
        for layer in range(replay.count):
            assert relative_error(replay.precondition(layer, step), replay.recorded_update(layer, step)) <= rtol
            if layer in replay.excluded:
                continue
            if arrays["is_factor_step"][step]:
                a, g = replay.vectors(layer, step)
                assert relative_error(a, arrays[f"L{layer}_abar"][step]) <= rtol
                assert relative_error(g, arrays[f"L{layer}_gbar"][step]) <= rtol
            assert relative_error(replay.inverses[0][layer], arrays[f"L{layer}_Ainv"][step]) <= rtol
            assert relative_error(replay.inverses[1][layer], arrays[f"L{layer}_Ginv"][step]) <= rtol
            if f"L{layer}_flags" in arrays:
                assert [side[layer] for side in replay.reset] == arrays[f"L{layer}_flags"][step].tolist()
    assert factor_steps == int(arrays["is_factor_step"].sum()) >= 4


@pytest.mark.parametrize("case", HKOR)
def test_hkor_trajectory(case: str) -> None:
    """The older class: rule E, a missing square root on the gradient side, one KL clip instead of the rescaling."""
    meta, arrays = load_golden(f"mkor_{case}")
    layers = Layers(meta, arrays)
    kl_clip, lr = meta["inner_kwargs"]["kl_clip"], meta["inner_kwargs"]["lr"]
    decay, retention = meta["gamma"], 1.0 - meta["stabilization_factor"]
    inverses: tuple[list[Any], list[Any]] = ([None] * layers.count, [None] * layers.count)
    blend = ([False] * layers.count, [False] * layers.count)
    blends = 0
    for step in range(meta["steps"]):
        if arrays["is_factor_step"][step]:
            for side in (0, 1):
                for layer in sorted(set(range(layers.count)) - layers.excluded):
                    vector = layers.vectors(layer, step)[side]
                    if inverses[side][layer] is None:
                        inverses[side][layer] = torch.eye(len(vector))
                    if blend[side][layer]:
                        blends += 1
                        inverses[side][layer] = stabilize(inverses[side][layer], 0.0, retention)
                        blend[side][layer] = False
                    # Their gradient side weighs g g^T by (1 - decay)^2.
                    vector = vector if side == 0 else vector * math.sqrt(1.0 - decay)
                    inverses[side][layer] = rank1_inverse_update(inverses[side][layer], vector, decay, "ema")
                    if side == 0 and inverses[0][layer].abs().max() > 2:
                        blend[0][layer] = blend[1][layer] = True
        updates, inner = [], 0.0
        for layer in range(layers.count):
            grad = layers.gradient(layer, step)
            left, right = (None, None) if layer in layers.excluded else (inverses[1][layer], inverses[0][layer])
            updates.append(precondition(grad, left, right, rescale=None))
            inner += float((updates[-1] * grad).sum()) * lr**2
        clip = min(1.0, math.sqrt(kl_clip / inner))
        for layer, update in enumerate(updates):
            assert relative_error(clip * update, layers.recorded_update(layer, step)) <= RTOL
            if layer not in layers.excluded:
                assert relative_error(inverses[0][layer], arrays[f"L{layer}_Ainv"][step]) <= RTOL
                assert relative_error(inverses[1][layer], arrays[f"L{layer}_Ginv"][step]) <= RTOL
                assert [blend[0][layer], blend[1][layer]] == arrays[f"L{layer}_flags"][step].tolist()
    assert (blends > 0) == (case == "hkor_stabilizer")


@pytest.mark.parametrize("case", ["sgd_fp32", "sgd_fp16factors", "forced_reset", "dist2_official", *HKOR])
def test_sgd_weights(case: str) -> None:
    meta, arrays = load_golden(f"mkor_{case}")
    options = meta["inner_kwargs"]
    for name, gradient in _tensors(meta):
        weight, buffer = arrays[name][0], None
        for grad in arrays[gradient]:
            buffer, direction = sgd_direction(
                grad, buffer, weight, options.get("momentum", 0.0), weight_decay=options.get("weight_decay", 0.0)
            )
            weight = weight - options["lr"] * direction
        moved = arrays[name][-1] - arrays[name][0]
        assert relative_error(weight - arrays[name][0], moved) <= RTOL


def test_lamb_weights() -> None:
    meta, arrays = load_golden("mkor_lamb_bertclass")
    options = meta["inner_kwargs"]
    for name, gradient in _tensors(meta):
        weight = arrays[name][0]
        moments = [torch.zeros_like(weight), torch.zeros_like(weight)]
        for grad in arrays[gradient]:
            *moments, direction = lamb_direction(grad, *moments, weight, weight_decay=options["weight_decay"])
            ratio = trust_ratio(weight.norm(), direction.norm())
            weight = weight - options["lr"] * ratio * direction
        moved = arrays[name][-1] - arrays[name][0]
        assert relative_error(weight - arrays[name][0], moved) <= RTOL


def test_formulas() -> None:
    """Dense float64 inverses of every rule, the stabilizer and one preconditioned matrix."""
    meta, arrays = load_golden("mkor_formulas")
    gamma = meta["gamma"]
    identity = torch.eye(meta["d"], dtype=torch.float64)
    names = {"ema": "ema_inverse", "official": "code_inverse", "paper_literal": "paper_inverse"}
    for rule, name in names.items():
        inverse = identity
        for vector, expected in zip(arrays["v"], arrays[name], strict=True):
            inverse = rank1_inverse_update(inverse, vector, gamma, rule)
            assert relative_error(inverse, expected) <= 1e-9
    inverse, triggered = identity, []
    for vector, expected in zip(arrays["v"], arrays["ema_inverse_stab"], strict=True):
        stable = stabilize(inverse, meta["eps"], meta["zeta"], "max_entry")
        triggered.append(not torch.equal(stable, inverse))
        inverse = rank1_inverse_update(stable, vector, gamma, "ema")
        assert relative_error(inverse, expected) <= 1e-9
    assert triggered == arrays["ema_stab_triggered"].tolist()
    assert any(triggered)
    factors = arrays["ema_inverse_w_last"], arrays["ema_inverse"][-1]
    assert relative_error(precondition(arrays["G"], *factors, rescale=None), arrays["precond"]) <= 1e-9
    assert relative_error(precondition(arrays["G"], *factors), arrays["precond_rescaled"]) <= 1e-9


def _tensors(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """Names of the recorded weights and of the gradients their inner optimizer got."""
    layers = range(len(meta["dims"]) - 1)
    weights = [(f"L{i}_W", f"L{i}_pW") for i in layers]
    return weights + [(f"L{i}_b", f"L{i}_pb") for i in layers if meta["bias"][i]]
