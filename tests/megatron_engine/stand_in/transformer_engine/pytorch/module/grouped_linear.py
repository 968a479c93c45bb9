"""STAND-IN: several linear layers in one module, for rows that are sorted by layer; no collectives inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.module.linear import ParallelLinear, weight_gradient


class _Grouped(torch.autograd.Function):
    """One node of the graph for all of them."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, module: Any, splits: list[int], *tensors: Tensor) -> Tensor:
        weights, biases = tensors[: len(splits)], tensors[len(splits) :]
        ctx.module, ctx.splits, ctx.with_bias = module, splits, bool(biases)
        ctx.save_for_backward(inp, *weights)
        for place, part in enumerate(inp.split(splits)):
            module.keep_amax("scaling_fwd", place, part)
        parts = [part @ weight.t() for part, weight in zip(inp.split(splits), weights, strict=True)]
        return torch.cat([part + bias for part, bias in zip(parts, biases, strict=True)] if biases else parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        inp, *weights = ctx.saved_tensors
        grads, inputs = grad.split(ctx.splits), inp.split(ctx.splits)
        dgrad = torch.cat([part @ weight for part, weight in zip(grads, weights, strict=True)])
        wgrads = [
            weight_gradient(ctx.module, weight, *parts) for weight, *parts in zip(weights, grads, inputs, strict=True)
        ]
        biases = [part.sum(0) for part in grads] if ctx.with_bias else []
        return dgrad, None, None, *wgrads, *biases


class GroupedLinear(ParallelLinear):
    """Weights and biases are numbered from 0; a switched-off bias is an empty tensor."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.set_up((in_features, out_features), parallel_mode, tp_group, tp_size, sequence_parallel)
        self.fuse_wgrad_accumulation, self.save_original_input = fuse_wgrad_accumulation, save_original_input
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.rng_tracker_name, self.ub_name = rng_tracker_name, ub_name
        dtype = params_dtype or torch.get_default_dtype()
        numbers = [str(number) for number in range(num_gemms)]
        for number in numbers:
            self.add_weight(number, dtype, device, init_method, get_rng_state_tracker)
        self.reset_parameters()
        self.mark_parameters(numbers)

    def forward(self, inp: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None) -> Any:
        """Of (rows, features), and the number of rows of each layer."""
        self.init_fp8_metadata(self.num_gemms)
        self.check_types(inp)
        numbers = range(self.num_gemms)
        tensors = [getattr(self, f"weight{number}") for number in numbers]
        biases = [getattr(self, f"bias{number}") for number in numbers]
        splits = [int(count) for count in m_splits]
        out = _Grouped.apply(inp, self, splits, *tensors, *(biases if self.apply_bias else ()))
        return self.returned(out, biases)
