"""SONew's formulas against the one recording whose damping the class does not offer; see step/test_golden.py."""

from __future__ import annotations

import torch
from golden_io import load_golden
from oracles import one_sided_l1_damping

from rankwise.sonew.formulas import graft_direction, graft_ratio
from rankwise.sonew.rule import direction, statistics


def test_damping_relative_to_a_row() -> None:
    """The published JAX code's, with its RMSprop graft: every parameter after every step, one flat chain each."""
    meta, arrays = load_golden("sonew_jax_tridiag_rmspgraft_releps_f64")
    options = meta["hyperparameters"]
    (beta1, beta2), graft_eps = options["betas"], options.get("graft_eps", 1e-8)
    assert meta["T"] >= 6 and meta["n_params"] >= 1
    for i in range(meta["n_params"]):
        weights = arrays[f"p{i}_0"].flatten()
        m, d, q, *edges = (torch.zeros_like(weights) for _ in range(3 + options["band"]))
        for step in range(1, meta["T"] + 1):
            g = arrays[f"g{i}_{step}"].flatten()
            m, d, edges = statistics(g, m, d, edges, (beta1, beta2))
            m_hat, d_hat = m / (1 - beta1**step), d / (1 - beta2**step)
            e_hat = [e / (1 - beta2**step) for e in edges]
            if "one_dimensional_params" in options and arrays[f"p{i}_0"].dim() == 1:
                update = m_hat / (d_hat.sqrt() + graft_eps)
            else:
                update = direction(m_hat, d_hat, e_hat, one_sided_l1_damping(options["eps"], d_hat, e_hat), 0.0)
                graft, q = graft_direction("rmsprop", g, m_hat, d, d_hat, graft_eps, q, g.norm(), beta2)
                update = update * graft_ratio(graft.square().sum(), update.square().sum())
            weights = weights - meta["lr_per_step"][step - 1] * (update + options["weight_decay"] * weights)
            expected, previous = arrays[f"p{i}_{step}"].flatten(), arrays[f"p{i}_{step - 1}"].flatten()
            assert (weights - expected).abs().max() < 1e-9 * (expected - previous).abs().max(), (i, step)
