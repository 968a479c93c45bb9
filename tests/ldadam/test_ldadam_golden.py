"""LDAdam's formulas against recordings of the official implementation, step by step; see step/test_golden.py.

The class follows all of them but the one with an exact SVD, which nothing of ours computes after the first step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_io import load_golden
from torch import Tensor

from rankwise.ldadam.formulas import basis_weights, effective_rank, project, projects_right, side_normalized
from rankwise.ldadam.low_rank_products import low_rank_rows
from rankwise.ldadam.rule import low_rank_moments, subspace_step
from rankwise.updates.orthonormal import initial_basis


def low_rank_parameters(meta: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Index and effective options of every low-rank matrix of a recording."""
    return [
        (i, {**meta["constructor"], **group})
        for group in meta["param_groups"]
        if group["enable_lowrank"]
        for i in group["idx"]
    ]


def with_exact_bases(C, U, M, V, step, betas, rho, eps, feedback):
    """The rule's step with the leading singular vectors in the place of the power iteration."""
    of_matrix, of_momentum = (1.0, 0.0) if step == 1 else basis_weights(step, betas[0], rho, feedback)
    basis = initial_basis(of_matrix * C + of_momentum * (U @ M), U.shape[-1])
    return basis, *low_rank_moments(*project(C, U, basis), M, V, step, betas, eps, feedback)


def replay(meta: dict[str, Any], arrays: dict[str, Tensor], i: int, options: dict[str, Any]):
    """Yields W, U, M, V of parameter i after every step."""
    W = arrays[f"p{i}_0"].clone()
    right, rank = projects_right(*W.shape), effective_rank(options["rank"], *W.shape)
    m, n = sorted(W.shape)
    U, M, V, buffer = W.new_zeros(m, rank), W.new_zeros(rank, n), W.new_zeros(rank, n), torch.zeros_like(W)
    for step, lr in enumerate(meta["lr_per_step"], start=1):
        combined = arrays[f"g{i}_{step}"] + buffer
        numbers = (tuple(options["betas"]), options["rho"], options["eps"], options.get("error_feedback", True))
        step_of = with_exact_bases if options.get("proj_method") == "svd" else subspace_step
        U, M, V, D = step_of(side_normalized(combined), U, M, V, step, *numbers)
        both = low_rank_rows(U, torch.stack([M, D]), 0, W.numel(), *W.shape, right)
        momentum, direction = (rows.view(W.shape) for rows in both)
        W = (1 - lr * options["weight_decay"]) * W - lr * direction
        if options.get("error_feedback", True):
            buffer = combined - momentum
        yield W, U, M, V


@pytest.mark.parametrize("name", ["ldadam_f64_noef_svd", "ldadam_f64_ef"])
def test_states_are_those_recorded(name: str) -> None:
    meta, arrays = load_golden(name)
    atol = meta["suggested_tol"]["atol"]
    for i, options in low_rank_parameters(meta):
        transpose = meta["side"][str(i)] == "right"
        for step, (W, U, M, V) in enumerate(replay(meta, arrays, i, options), start=1):
            proj, m, v = (arrays[f"{key}{i}_{step}"] for key in ("proj", "m", "v"))
            proj, m, v = (value.mT if transpose else value for value in (proj, m, v))
            signs = (U * proj).sum(dim=0).sign()
            for ours, theirs in ((W, arrays[f"p{i}_{step}"]), (V, v), (U * signs, proj), (M * signs[:, None], m)):
                # Rounding is relative: states larger than one get the tolerance relative to their largest entry.
                assert (ours - theirs).abs().max() <= atol * max(1.0, theirs.abs().max().item()), (i, step)


def test_abs_golden_reaches_negative_variances() -> None:
    """The recording that separates the absolute value from a clamp does contain negative estimates (O19)."""
    meta, arrays = load_golden("ldadam_f64_abs_branch")
    negative = 0
    for i, options in low_rank_parameters(meta):
        beta1, beta2 = options["betas"]
        previous = None
        for step, (_, U, M, V) in enumerate(replay(meta, arrays, i, options), start=1):
            if previous is not None:
                U0, M0, V0 = previous
                bias1, bias2 = 1 - beta1 ** (step - 1), 1 - beta2 ** (step - 1)
                R = U.mT @ U0
                mean = (R @ M0 / bias1).square()
                negative += int((R.square() @ (V0 / bias2 - (M0 / bias1).square()) + mean < 0).sum())
            previous = (U, M, V)
    assert negative == meta["measured"]["n_negative_before_abs"]
