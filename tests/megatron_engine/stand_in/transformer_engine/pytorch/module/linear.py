"""STAND-IN: the linear layer, with tensor and sequence parallelism inside."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, constant, mark


class LinearFunction(torch.autograd.Function):
    """One node of the graph: collectives, products, and the weight's gradient where it is accumulated."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None, module: Any) -> Tensor:
        ctx.module, ctx.shape = module, inp.shape
        ctx.save_for_backward(inp, weight)
        ctx.with_bias = bias is not None
        mode, group, sequence = module.parallel_mode, module.tp_group, module.sequence_parallel
        total = gathered(inp, group) if mode == "column" and sequence else inp
        module.keep_amax("scaling_fwd", 0, total)
        module.keep_amax("scaling_fwd", 1, weight)
        out = total @ weight.t()
        if mode == "row" and module.tp_size > 1:
            out = scattered(out, group) if sequence else reduced(out, group)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        inp, weight = ctx.saved_tensors
        module = ctx.module
        mode, group, sequence = module.parallel_mode, module.tp_group, module.sequence_parallel
        module.keep_amax("scaling_bwd", 0, grad)
        bias = grad.flatten(0, -2).sum(0) if ctx.with_bias else None
        if mode == "row" and sequence:
            grad = gathered(grad, group)
        dgrad = None
        if ctx.needs_input_grad[0]:
            dgrad = grad @ weight
            if mode == "column" and module.tp_size > 1:
                dgrad = scattered(dgrad, group) if sequence else reduced(dgrad, group)
        wgrad = None
        if ctx.needs_input_grad[1]:
            total = gathered(inp, group) if mode == "column" and sequence else inp
            wgrad = weight_gradient(module, weight, grad.flatten(0, -2), total.flatten(0, -2))
        return dgrad, wgrad, bias, None


def weight_gradient(module: Any, weight: Any, grad: Tensor, inp: Tensor) -> Tensor:
    """Of a weight; in the main gradient where it is to be accumulated there, and then nothing else."""
    found = grad.t() @ inp
    if module.fuse_wgrad_accumulation:
        weight.main_grad += found
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight)
    return found


def gathered(part: Tensor, group: Any) -> Tensor:
    """Tokens of all ranks."""
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts)


def reduced(whole: Tensor, group: Any) -> Tensor:
    """Sums over ranks."""
    whole = whole.contiguous().clone()
    dist.all_reduce(whole, group=group)
    return whole


def scattered(whole: Tensor, group: Any) -> Tensor:
    """This rank's tokens of sums over ranks."""
    return reduced(whole, group).chunk(group.size())[group.rank()].contiguous()


class ParallelLinear(TransformerEngineBaseModule):
    """What the linear layers share: sizes and marks of weight and bias by parallel mode."""

    def set_up(
        self, sizes: tuple[int, int], parallel_mode: str | None, tp_group: Any, tp_size: int, sequence_parallel: bool
    ) -> None:
        """Sizes of this rank's part."""
        assert parallel_mode in ("row", "column", None)
        self.in_features, self.out_features = sizes
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.set_tensor_parallel_group(tp_group)
        self.parallel_mode = parallel_mode
        if parallel_mode == "column":
            self.out_features //= self.tp_size
        elif parallel_mode == "row":
            self.in_features //= self.tp_size
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel

    def add_weight(self, number: str, dtype: torch.dtype, device: Any, init: Any, tracker: Any) -> None:
        """A weight and its bias; a bias that is switched off is an empty tensor, and no parameter."""
        weight = torch.empty(self.out_features, self.in_features, device=device, dtype=dtype)
        init = init or (lambda tensor: nn.init.normal_(tensor, 0.0, 0.023))
        self.register_parameter(f"weight{number}", Parameter(weight), init_fn=init, get_rng_state_tracker=tracker)
        if self.use_bias:
            bias = torch.empty(self.out_features, device=device, dtype=dtype)
            self.register_parameter(f"bias{number}", Parameter(bias), init_fn=constant(0.0))
        else:
            setattr(self, f"bias{number}", torch.empty(0, dtype=dtype, device=device))

    def mark_parameters(self, numbers: list[str]) -> None:
        """Without a mode, too, a weight is marked as cut by rows."""
        for number in numbers:
            mark(getattr(self, f"weight{number}"), 1 if self.parallel_mode == "row" else 0)
            bias = getattr(self, f"bias{number}")
            if self.use_bias and self.parallel_mode == "row":
                bias.sequence_parallel = self.sequence_parallel
            elif self.use_bias and self.parallel_mode == "column":
                mark(bias, 0)

    def returned(self, out: Tensor, bias: Any) -> Any:
        """With the bias, where that is to be added later."""
        return (out, bias) if self.return_bias else out


class Linear(ParallelLinear):
    """A linear layer."""

    def __init__(
        self,
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
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
    ) -> None:
        super().__init__()
        self.set_up((in_features, out_features), parallel_mode, tp_group, tp_size, sequence_parallel)
        self.fuse_wgrad_accumulation, self.save_original_input = fuse_wgrad_accumulation, save_original_input
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.rng_tracker_name, self.ub_name = rng_tracker_name, ub_name
        self.add_weight("", params_dtype or torch.get_default_dtype(), device, init_method, get_rng_state_tracker)
        self.reset_parameters()
        self.mark_parameters([""])

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False) -> Any:
        """Of (..., features)."""
        self.init_fp8_metadata()
        self.check_types(inp)
        out = LinearFunction.apply(inp, self.weight, self.bias if self.apply_bias else None, self)
        return self.returned(out, self.bias)
