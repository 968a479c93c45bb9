"""Options of LDAdam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from rankwise.options import shared
from rankwise.options.checks import Flag, FloatType, Fraction, Integer, OrNone
from rankwise.options.fields import Options, option

__all__ = ["LDAdamOptions"]


@dataclass(frozen=True)
class LDAdamOptions(Options):
    """Options of :class:`rankwise.LDAdam`."""

    owner: ClassVar[str] = "LDAdam"
    lr: float | Tensor = shared.lr(1e-3)
    rank: int = option(
        16,
        Integer(1, why="lower the rank"),
        "Rank of the subspace; at most the short side is used.",
        structural=True,
    )
    rho: float = option(
        0.908, Fraction(with_one=True), "Share of the momentum in the matrix the basis follows.", per_group=True
    )
    betas: tuple[float, float] = shared.betas((0.908, 0.99), "Decay rates of the moments.")
    eps: float = shared.eps("Added to the bias-corrected root.")
    weight_decay: float = shared.weight_decay("Decoupled decay, times lr, of the full matrix.")
    weight_decay_method: str = shared.weight_decay_method()
    lr_scale: Mapping[str, float] | None = shared.lr_scale()
    error_feedback: bool = option(
        True, Flag(), "Keep what the projection drops and add it to the next gradient.", structural=True
    )
    error_dtype: str | None = option(
        None,
        OrNone(FloatType(quantized=True)),
        "Type of the error buffer; None: that of the computation. It holds the momentum too: bfloat16 halves its "
        'memory and rounds the momentum; "int8", block-wise quantization with a scale for every 64 elements, takes a '
        "quarter and rounds it more.",
    )
    state_dtype: str | Mapping[str, str] | None = shared.state_dtype(
        *("exp_avg", "exp_avg_sq", "error", "basis"),
        text=" Bases and moments of matrices are bfloat16 under either.",
    )
    state_rounding: str = shared.state_rounding()
    comm_dtype: str | None = shared.comm_dtype()
    exclude: Sequence[str] = shared.exclude()
    blocks: Mapping[str, Any] | None = shared.blocks()
    split_heads: bool = shared.split_heads()
    offload_compute: str = shared.offload_compute()
    transition_steps: int = shared.transition_steps()
    skip_nonfinite: bool = shared.skip_nonfinite()
    store_param_remainders: bool = shared.store_param_remainders()
    capturable: bool = shared.capturable()

    def _check_together(self) -> None:
        self._refuse_capturable_skips(self.capturable)
