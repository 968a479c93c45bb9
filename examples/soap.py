r"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al., arXiv 2409.11321, Algorithm 3).

One file outside the package gives it a DeepSpeed ``"type"``, a Megatron ``--optimizer`` with its flags, FSDP2 and plain
PyTorch; see docs/extending.md. With ``RANKWISE_RULES=examples/soap.py`` in the environment, or ``import soap``:

>>> {"optimizer": {"type": "SOAP", "params": {"lr": 3e-3, "precondition_frequency": 10}}}     # DeepSpeed's JSON
--optimizer soap --soaprw-precondition-frequency 10 --lr 3e-3                                 # Megatron
>>> optimizer = SOAP(model.named_parameters(), lr=3e-3)                                       # PyTorch, FSDP2

What the paper leaves open follows its authors' code:

- The first gradient of a matrix initialises ``L`` and ``R`` and their eigenvectors, and nothing else: neither moments
  nor the weight move, and the step does not count for the bias corrections.
- The basis is refreshed after the weight has stepped, by one step of power iteration and QR; before it, eigenvectors
  are sorted by their Rayleigh quotients, and the second moments with them.
- ``M`` is an average in the original space, as in the paper, so that it needs no rotation when the basis moves.
- A side longer than ``max_precond_dim`` keeps its own axes: SOAP is one-sided there, and Adam where both are.

Unlike that code, embeddings and heads take AdamW, as vectors do; and weights decay before the step, not after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankwise.extension import (
    MatrixOptimizer,
    MatrixSpec,
    Options,
    State,
    checks,
    option,
    options_as_keywords,
    register,
    shared,
)

__all__ = ["SOAP", "SOAPOptions", "SOAPSpec", "soap"]


# --- the algorithm ----------------------------------------------------------------------------------------------------


def soap(G: Tensor, state: dict[str, Tensor], t: int, betas: tuple[float, float], eps: float, frequency: int) -> Tensor:
    r"""One step of one matrix: Algorithm 3, line by line.

    .. math::
        G' &= Q_L^T G\, Q_R, \qquad M \leftarrow \beta_1 M + (1 - \beta_1) G, \qquad M' = Q_L^T M\, Q_R \\
        V &\leftarrow \beta_2 V + (1 - \beta_2)\, G' \odot G' \\
        N &= Q_L \frac{M' / (1 - \beta_1^t)}{\sqrt{V / (1 - \beta_2^t)} + \epsilon}\, Q_R^T \\
        L &\leftarrow \beta_2 L + (1 - \beta_2)\, G G^T, \qquad R \leftarrow \beta_2 R + (1 - \beta_2)\, G^T G

    Args:
        G: Gradient (m, n).
        state: ``exp_avg`` is M, ``exp_avg_sq`` is V, both (m, n); ``L`` and ``Q_L`` (m, m), ``R`` and ``Q_R`` (n, n)
            are not there for a side that keeps its axes. Changed in place.
        t: Steps before this one: 0 for the step that only initialises.
        betas: Decay rates of M; of V, L and R.
        eps: Added to the root.
        frequency: Steps from one refresh of the eigenvectors to the next.

    Returns:
        N (m, n), of which lr times is subtracted from the weight; zeros where t is 0.
    """
    M, V, (beta1, beta2) = state["exp_avg"], state["exp_avg_sq"], betas
    N = torch.zeros_like(G)
    if t > 0:
        rotated = into_eigenbasis(G, state)
        M.lerp_(G, 1 - beta1)
        momentum = into_eigenbasis(M, state)
        # Adam, in the rotated space.
        V.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        direction = (momentum / (1 - beta1**t)) / ((V / (1 - beta2**t)).sqrt() + eps)
        N = out_of_eigenbasis(direction, state)
    # The caller steps the weight by N; what follows is for the steps after this one.
    if "L" in state:
        state["L"].lerp_(G @ G.mT, 1 - beta2)
    if "R" in state:
        state["R"].lerp_(G.mT @ G, 1 - beta2)
    for statistic, basis, axis in (("L", "Q_L", 0), ("R", "Q_R", 1)):
        if basis not in state:
            continue
        if t == 0:
            # Solvers of some devices raise on what is not finite, on one rank alone; the statistics keep it.
            finite = state[statistic].nan_to_num(0.0, 0.0, 0.0)
            state[basis].copy_(torch.linalg.eigh(finite).eigenvectors.flip(1))
        elif t % frequency == 0:
            refresh_(state[basis], state[statistic], V, axis)
    return N


def refresh_(Q: Tensor, P: Tensor, V: Tensor, axis: int) -> None:
    """Algorithm 4: ``Q`` becomes the Q of ``QR(P Q)``, its columns in the order of their Rayleigh quotients.

    Args:
        Q: Eigenvectors, as columns; overwritten.
        P: Their matrix.
        V: Second moments, which are sorted with the vectors.
        axis: Of V, along which the vectors count.
    """
    image = P @ Q
    order = (Q * image).sum(0).argsort(descending=True, stable=True)
    Q.copy_(torch.linalg.qr(image.index_select(1, order)).Q)
    V.copy_(V.index_select(axis, order))


def into_eigenbasis(X: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """``Q_L^T X Q_R``, without the Q of a side that keeps its axes."""
    X = state["Q_L"].mT @ X if "Q_L" in state else X
    return X @ state["Q_R"] if "Q_R" in state else X


def out_of_eigenbasis(X: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """``Q_L X Q_R^T``, without the Q of a side that keeps its axes."""
    X = state["Q_L"] @ X if "Q_L" in state else X
    return X @ state["Q_R"].mT if "Q_R" in state else X


# --- what the frameworks need to know ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SOAPOptions(Options):
    """Options of :class:`SOAP`."""

    # Flags begin with its lower-case form; Megatron has flags that begin with --soap.
    owner: ClassVar[str] = "SOAPRW"
    lr: float | Tensor = shared.lr(3e-3)
    betas: tuple[float, float] = shared.betas((0.95, 0.95), "Decay rates of the momentum and of everything squared.")
    eps: float = shared.eps("Added to the bias-corrected root.")
    weight_decay: float = shared.weight_decay("Decoupled decay, times lr.")
    weight_decay_method: str = shared.weight_decay_method()
    precondition_frequency: int = option(
        10, checks.Integer(1), "Steps from one refresh of the eigenvectors to the next.", per_group=True
    )
    max_precond_dim: int = option(
        10_000, checks.Integer(0), "Longest side that is rotated; longer ones keep their axes.", structural=True
    )
    state_dtype: str | Mapping[str, str] | None = shared.state_dtype("exp_avg", "exp_avg_sq")
    state_rounding: str = shared.state_rounding()
    comm_dtype: str | None = shared.comm_dtype()
    exclude: Sequence[str] = shared.exclude()
    blocks: Mapping[str, Any] | None = shared.blocks()
    split_heads: bool = shared.split_heads()
    lr_scale: Mapping[str, float] | None = shared.lr_scale()
    transition_steps: int = shared.transition_steps()
    skip_nonfinite: bool = shared.skip_nonfinite()
    store_param_remainders: bool = shared.store_param_remainders()


def of_side(axis: int) -> Callable[[int, int, Mapping[str, Any]], tuple[int, int] | None]:
    """The shape of what is kept of the rows (0) or columns (1) of a matrix; None if there are too many."""

    def shape(rows: int, columns: int, group: Mapping[str, Any]) -> tuple[int, int] | None:
        size = (rows, columns)[axis]
        return (size, size) if size <= group["max_precond_dim"] else None

    return shape


class SOAPSpec(MatrixSpec):
    """The moments have a value for each element; statistics and eigenvectors belong to the two sides."""

    states = (
        State("exp_avg"),
        State("exp_avg_sq"),
        State("L", of_side(0)),
        State("R", of_side(1)),
        State("Q_L", of_side(0)),
        State("Q_R", of_side(1)),
    )


class SOAP(MatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner (arXiv 2409.11321).

    Linear weights take it; vectors, embeddings and heads take AdamW with the same lr, betas and eps.

    Example:
        >>> optimizer = SOAP(model.named_parameters(), lr=3e-3, weight_decay=0.1)
    """

    spec_class = SOAPSpec
    first_update = 2

    @options_as_keywords(SOAPOptions)
    def __init__(self, params: Any, options: SOAPOptions) -> None:
        super().__init__(params, options)

    def update(self, gradient: Tensor, states: dict[str, Tensor], step: int, group: Mapping[str, Any]) -> Tensor:
        """See :func:`soap`."""
        return soap(gradient, states, step - 1, group["betas"], group["eps"], group["precondition_frequency"])

    def operations(self, rows: int, columns: int) -> float:
        """Three rotations and two statistics, each of about two products."""
        return 8.0 * rows * columns * (rows + columns)


register("SOAP", SOAP, ready={"lr": 3e-3, "betas": [0.95, 0.95], "weight_decay": 0.1})
# Under Megatron from 0.18 on, which has an optimizer "soap" of its own.
register("SOAP-RW", SOAP)
