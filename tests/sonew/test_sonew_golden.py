"""SONew against recorded trajectories of the published torch and JAX codes (tests/golden/sonew_*.npz)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_io import load_golden
from oracles import one_sided_l1_damping
from torch import Tensor

from rankwise.sonew.formulas import direction, graft_direction, graft_ratio, statistics

# Allowed deviation, relative to the largest change of the step, and what was measured.
TOLERANCE = {
    "sonew_torch_tridiag_adamgraft_f32": 1e-3,  # 2e-5
    "sonew_torch_tridiag_defaults_f64": 1e-5,  # 7e-8: relative conditional variances down to 1e-9
    "sonew_torch_tridiag_wd_sched_f64": 1e-9,  # 1e-12
    "sonew_torch_tridiag_nograft_f64": 1e-9,  # 2e-13
    "sonew_torch_tridiag_edgedrop_f32": 1e-3,  # 3e-6
    "sonew_torch_diaglimit_f64": 1e-9,  # 9e-15
    "sonew_jax_diag_nograft_f64": 1e-9,  # 1e-13
    "sonew_jax_band4_adamgraft_f64": 1e-9,  # 3e-12
    "sonew_jax_tridiag_rmspgraft_releps_f64": 1e-9,  # 2e-12
}


def graft_of(meta: dict[str, Any]) -> tuple[str, float]:
    """Our name of the recorded graft and the constant its ratio adds to the norm of the update."""
    text = meta["hyperparameters"]["graft"]
    for start, name, tiny in (
        ("adam (official", "adam_official", 0.0),
        ("adam (bias-corrected)", "adam", 1e-12),
        ("normalised RMSprop", "rmsprop", 1e-16),
        ("none", "none", 0.0),
    ):
        if text.startswith(start):
            return name, tiny
    raise AssertionError(f"unknown graft in the recording: {text}")


def replay(meta: dict[str, Any], arrays: dict[str, Tensor], i: int, tolerance: float, band: int | None = None):
    """Yields, step by step, the weights of parameter i as one flat chain, and its statistics (m, d, e)."""
    options = meta["hyperparameters"]
    beta1, beta2 = options["betas"]
    kind, tiny = graft_of(meta)
    graft_eps = options.get("graft_eps", 1e-8)
    adam_fallback = "one_dimensional_params" in options and arrays[f"p{i}_0"].dim() == 1
    weights = arrays[f"p{i}_0"].flatten()
    m, d, q = torch.zeros_like(weights), torch.zeros_like(weights), torch.zeros_like(weights)
    edges = [torch.zeros_like(weights) for _ in range(options["band"] if band is None else band)]
    for step in range(1, meta["T"] + 1):
        g = arrays[f"g{i}_{step}"].flatten()
        m, d, edges = statistics(g, m, d, edges, (beta1, beta2))
        m_hat, d_hat = m / (1 - beta1**step), d / (1 - beta2**step)
        e_hat = [e / (1 - beta2**step) for e in edges]
        relative = str(options.get("eps_mode", "")).startswith("relative")
        eps = one_sided_l1_damping(options["eps"], d_hat, e_hat) if relative else options["eps"]
        if adam_fallback:
            update = m_hat / (d_hat.sqrt() + graft_eps)
        else:
            update = direction(m_hat, d_hat, e_hat, eps, tolerance)
            graft, q = graft_direction(kind, g, m_hat, d, d_hat, graft_eps, q, g.norm(), beta2)
            if graft is not None:
                update = update * graft_ratio(graft.square().sum(), update.square().sum(), tiny)
        weights = weights - meta["lr_per_step"][step - 1] * (update + options["weight_decay"] * weights)
        yield step, weights, m, d, edges


def deviation(meta: dict[str, Any], arrays: dict[str, Tensor], tolerance: float, band: int | None = None) -> float:
    """Largest deviation of any parameter after any step, relative to its largest change in that step."""
    worst = 0.0
    for i in range(meta["n_params"]):
        for step, weights, *_ in replay(meta, arrays, i, tolerance, band):
            expected, previous = arrays[f"p{i}_{step}"].flatten(), arrays[f"p{i}_{step - 1}"].flatten()
            worst = max(worst, ((weights - expected).abs().max() / (expected - previous).abs().max()).item())
    return worst


@pytest.mark.parametrize("name", TOLERANCE)
def test_trajectory(name):
    """Every recorded parameter after every step."""
    meta, arrays = load_golden(name)
    assert meta["T"] >= 6 and meta["n_params"] >= 1
    worst = deviation(meta, arrays, tolerance=0.0)
    print(f"{name}: {worst:.1e}")
    assert worst < TOLERANCE[name]


@pytest.mark.parametrize("name", [n for n in TOLERANCE if n.startswith("sonew_torch")])
def test_statistics_after_the_last_step(name):
    """The averages themselves, uncorrected, as the torch code keeps them."""
    meta, arrays = load_golden(name)
    bound = 1e-13 if name.endswith("f64") else 1e-6
    for i in range(meta["n_params"]):
        *_, (_, _, m, d, edges) = replay(meta, arrays, i, 0.0)
        for key, ours in (("m", m), ("d", d), ("e", edges[0])):
            recorded = arrays[f"aux_{key}{i}"]
            assert (ours - recorded).abs().max() <= bound * recorded.abs().max()


def test_edges_that_are_exactly_degenerate_drop_at_any_tolerance():
    """The recording's other edges keep at least 2.7 % of the variance, so the tolerance decides nothing else."""
    meta, arrays = load_golden("sonew_torch_tridiag_edgedrop_f32")
    for tolerance in (1e-6, 1e-4, 1e-2):
        assert deviation(meta, arrays, tolerance) < 1e-3


def test_recording_with_uncorrelated_neighbours_is_the_diagonal_method():
    """Every other gradient is zero there: nearest neighbours carry nothing, second neighbours do."""
    meta, arrays = load_golden("sonew_torch_diaglimit_f64")
    assert deviation(meta, arrays, 0.0, band=0) < 1e-9
    assert deviation(meta, arrays, 0.0, band=2) > 1e-3
