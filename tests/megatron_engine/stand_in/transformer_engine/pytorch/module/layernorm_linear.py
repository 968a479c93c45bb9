"""STAND-IN: a norm and a linear layer in one module, whose input is what the norm takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_engine.pytorch.module.base import constant
from transformer_engine.pytorch.module.linear import LinearFunction, ParallelLinear
from transformer_engine.pytorch.module.norms import normalized


class LayerNormLinear(ParallelLinear):
    """Normalizes, gathers the tokens under sequence parallelism, multiplies."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
    ) -> None:
        super().__init__()
        assert normalization in ("LayerNorm", "RMSNorm") and parallel_mode != "row"
        self.set_up((in_features, out_features), parallel_mode, tp_group, tp_size, sequence_parallel)
        self.fuse_wgrad_accumulation, self.eps, self.ub_name = fuse_wgrad_accumulation, eps, ub_name
        self.normalization, self.zero_centered_gamma = normalization, zero_centered_gamma
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        dtype = params_dtype or torch.get_default_dtype()
        self._add_norm(dtype, device)
        self.add_weight("", dtype, device, init_method, get_rng_state_tracker)
        self.reset_parameters()
        self.mark_parameters([""])

    def _add_norm(self, dtype: torch.dtype, device: Any) -> None:
        gain = Parameter(torch.empty(self.in_features, device=device, dtype=dtype))
        self.register_parameter("layer_norm_weight", gain, init_fn=constant(float(not self.zero_centered_gamma)))
        gain.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        if self.normalization == "RMSNorm":
            self.layer_norm_bias = None
            return
        shift = Parameter(torch.empty(self.in_features, device=device, dtype=dtype))
        self.register_parameter("layer_norm_bias", shift, init_fn=constant(0.0))
        shift.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False) -> Any:
        """Of (..., features), not yet normalized."""
        self.init_fp8_metadata()
        self.check_types(inp)
        rows = normalized(inp, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma)
        out = LinearFunction.apply(rows, self.weight, self.bias if self.apply_bias else None, self)
        return self.returned(out, self.bias)
