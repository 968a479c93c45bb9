"""This module declares the options of MKOR and of its first-order backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankwise.mkor.backends import FirstOrder
from rankwise.mkor.vector_windows import MOST_VECTORS, window_length
from rankwise.options import shared
from rankwise.options.checks import (
    LARGEST,
    Check,
    Choice,
    Flag,
    FloatType,
    Fraction,
    Integer,
    InvalidError,
    Number,
    OrNone,
    is_number,
)
from rankwise.options.fields import Options, option

__all__ = ["MKOROptions"]


@dataclass(frozen=True)
class _Stabilizer(Check):
    """Checks a threshold and the share that is retained above it."""

    kind = float
    count = 2
    optional = True

    def __call__(self, value: Any, default: Any) -> Any:
        """Return the pair, or None, if it is valid."""
        if value is None:
            return None
        pair = isinstance(value, tuple | list) and len(value) == 2 and all(map(is_number, value))
        if not pair or not (0 < value[0] <= LARGEST and 0 <= value[1] <= 1):
            raise InvalidError(f"it must be {self.range}", f"the default is {list(default)}")
        return tuple(value)

    @property
    def range(self) -> str:
        """The values that are allowed, in words."""
        return "[threshold > 0, retention in [0, 1]] or null"


_OF_MEANS: Mapping[str, Any] = {"update_interval": 10, "factor_decay": 0.95}
_OF_SKETCHES: Mapping[str, Any] = {"update_interval": 1, "factor_decay": 0.998}
"""Defaults that depend on what the factors follow."""


@dataclass(frozen=True)
class MKOROptions(Options):
    """Options of :class:`rankwise.MKOR`."""

    owner: ClassVar[str] = "MKOR"
    lr: float | Tensor = shared.lr(1e-3)
    backend: str = option(
        "adamw",
        Choice("adamw", "lamb", "sgd"),
        "First-order rule after preconditioning. It also serves everything else.",
    )
    factor_decay: float | None = option(
        None, OrNone(Fraction(with_zero=False)), 'Factor momentum. None: 0.95; 0.998 with rule "sketch".'
    )
    update_interval: int | None = option(
        None,
        OrNone(Integer(1, unit="steps")),
        "Steps from one factor update to the next; the preconditioner is applied at every step. None: 10; 1 with rule "
        '"sketch".',
    )
    rule: str = option(
        "official",
        Choice("official", "ema", "paper_literal", "sketch"),
        'The published code, the paper\'s derivation, or ("paper_literal") the printed formula, which is the inverse '
        'of nothing. "sketch": as "official", but the factors follow random combinations of the rows and columns of '
        'the gradient itself: nothing is captured or sent, and no bias rides along. "official" keeps vectors, linear '
        "in the width; the others keep square matrices.",
    )
    sketch_gain: float = option(
        0.04,
        Number(above=True),
        'Of rule "sketch": mean square of the entries of each vector; larger ones follow the gradient faster.',
    )
    stabilizer: tuple[float, float] | None = option(
        (2.0, 0.9),
        _Stabilizer(),
        "Norm above which a factor is blended with the identity, and the share of it that stays; None: never.",
    )
    stabilizer_norm: str = option(
        "row_sum", Choice("row_sum", "max_entry"), 'Norm of the stabilizer; "max_entry" as in the published code.'
    )
    rescale: str | None = option(
        "joint", Choice("joint", None), '"joint" keeps the gradient\'s Frobenius norm; None does not rescale.'
    )
    max_factor_dim: int = option(
        16384,
        Integer(1),
        "Sides above it get no factor; a matrix with both sides above takes the backend alone.",
    )
    factor_dtype: str = option(
        "bfloat16",
        FloatType(),
        'Storage type of the factor inverses; with rule "official" a wider one keeps more vectors, down to its own '
        "rounding. All arithmetic outside the products is float32, or float64 for float64 parameters.",
    )
    product_dtype: str = option(
        "auto",
        FloatType(auto=True, narrow=False),
        "Type of the operands of the preconditioning's products, to which the gradient and either product are rounded;"
        ' sums are at least float32. "auto": "bfloat16" for bfloat16 factors where that is the fastest of the machine '
        "(Nvidia GPUs from sm_80 and AMD's; CPUs with AVX512-BF16, AMX or Arm's instructions for it), else "
        '"float32"; "float64" for float64 parameters. A machine with bfloat16 products runs them several times as '
        "fast, one without 15 to 70 times as slow; data-parallel ranks of both kinds must name a type.",
    )
    state_dtype: str | Mapping[str, str] | None = shared.state_dtype("exp_avg", "exp_avg_sq", "momentum_buffer")
    state_rounding: str = shared.state_rounding()
    comm_dtype: str | None = shared.comm_dtype()
    tp_mode: str = option(
        "exact",
        Choice("exact", "block"),
        'Under tensor parallelism, "exact" (factors of whole matrices) or "block" (every shard is a matrix '
        "of its own); no effect elsewhere.",
    )
    hybrid: bool = option(
        False,
        Flag(),
        "MKOR-H: drop the factors for good once the loss has passed its knee, which the next four define.",
    )
    hybrid_beta: float = option(
        0.1, Number(above=True), "Share of the mean decrease of the loss below which a step counts as slow."
    )
    hybrid_patience: int = option(20, Integer(1, unit="steps"), "Consecutive slow steps it takes.")
    hybrid_min_steps: int = option(100, Integer(2, unit="steps"), "Steps before the first check.")
    hybrid_ema: float = option(0.95, Fraction(), "Decay of the loss averages.")
    output_gain: float = option(1.0, Number(above=True), "Factor on g, whose natural scale is often far below 1.")
    betas: tuple[float, float] = shared.betas((0.9, 0.999), 'Moment decay rates of "adamw" and "lamb".')
    eps: float = shared.eps("Added to the root of the second moment.")
    weight_decay: float = shared.weight_decay(
        'Decoupled with "adamw"; inside the trust ratio with "lamb"; added to the gradient with "sgd".'
    )
    weight_decay_method: str = shared.weight_decay_method()
    lr_scale: Mapping[str, float] | None = shared.lr_scale()
    momentum: float = option(0.9, Fraction(), 'Of "sgd".', per_group=True)
    nesterov: bool = option(False, Flag(), 'Nesterov momentum, of "sgd".')
    exclude: Sequence[str] = shared.exclude("not preconditioned")
    blocks: Mapping[str, Any] | None = shared.blocks()
    split_heads: bool = shared.split_heads()
    offload_compute: str = shared.offload_compute()
    transition_steps: int = shared.transition_steps()
    skip_nonfinite: bool = shared.skip_nonfinite()
    store_param_remainders: bool = shared.store_param_remainders()

    @property
    def sketches(self) -> bool:
        """Whether factors follow the gradient, and not the inputs and outputs of layers."""
        return self.rule == "sketch"

    @property
    def interval(self) -> int:
        """Steps from one factor update to the next."""
        return int(self.value_of("update_interval"))

    @property
    def decay(self) -> float:
        """Factor momentum."""
        return float(self.value_of("factor_decay"))

    @property
    def window(self) -> int:
        """Vectors of each factor inverse where rule "official" keeps a window of them; 0 for dense factors."""
        return window_length(self.decay, getattr(torch, self.factor_dtype)) if self.rule == "official" else 0

    def value_of(self, key: str) -> Any:
        """Return the value of an option, with the default that its rule decides."""
        decided = _OF_SKETCHES if self.sketches else _OF_MEANS
        given = getattr(self, key)
        return decided.get(key) if given is None else given

    @property
    def varying(self) -> tuple[str, ...]:
        """Options of param groups that the backend reads."""
        read = ("lr", *FirstOrder(self.backend, self.nesterov).rates)
        return tuple(name for name in self.per_group() if name in read)

    def unread(self) -> Mapping[str, tuple[str, str]]:
        """Return options that belong to other backends, another rule or MKOR-H, with the reason and the fix."""
        of_backend = ("betas", "eps") if self.backend == "sgd" else ("momentum", "nesterov")
        other = "'adamw' or 'lamb'" if self.backend == "sgd" else "'sgd'"
        reasons = {
            key: (f"backend={self.backend!r} does not read it", f"leave it out, or set backend to {other}")
            for key in of_backend
        }
        theirs = ("output_gain", "stabilizer", "stabilizer_norm") if self.sketches else ("sketch_gain",)
        reasons |= {
            key: (f"rule={self.rule!r} does not read it", "leave it out, or choose another rule") for key in theirs
        }
        if not self.hybrid:
            knee = [key for key in self.names() if key.startswith("hybrid_")]
            reasons |= {key: ("nothing reads it without hybrid", "leave it out, or set hybrid to true") for key in knee}
        return reasons

    def _check_together(self) -> None:
        self._refuse_unread()
        if self.window > MOST_VECTORS:
            self._fail(
                "factor_decay",
                f"it must leave no more than {MOST_VECTORS} vectors above the rounding of factor_dtype with rule "
                f"'official', not {self.window}",
                "lower it, or set rule to 'ema' or 'sketch', whose factors are dense",
            )
        if self.backend != "adamw" and self.weight_decay_method != "decoupled":
            self._fail(
                "weight_decay_method",
                f"it must be 'decoupled' with backend={self.backend!r}, whose decay is inside its direction",
                "set it to 'decoupled', or backend to 'adamw'",
            )
        if self.nesterov and self.momentum == 0:
            self._fail(
                "nesterov", "it must go with a momentum above 0", "set momentum to e.g. 0.9, or nesterov to false"
            )
