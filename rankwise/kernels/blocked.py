"""Element-wise updates for CPUs: block after block, so that every temporary stays in the cache.

A pass over a list of shards reads and writes main memory once, whatever the number of operations. Blocks are many
and short: single operations of torch and one workspace serve them, as lists of one and fresh temporaries would cost as
much as the arithmetic. AdamW is torch's kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rankwise.kernels import lists
from rankwise.kernels.low_precision_runs import LowPrecisionRuns
from rankwise.kernels.opened_passes import norms_with_opened, run_opened
from rankwise.kernels.passes import FIELDS, Field, Pass, Scalars, Tensors
from rankwise.kernels.sizes import check_lengths

__all__ = ["block_size", "run", "squared_norm", "squared_norms"]

_BLOCK = 65536
"""Elements of a block per thread: with it and half a dozen temporaries the second-level cache is about full."""


def block_size() -> int:
    """Elements that all threads together work on at a time."""
    return _BLOCK * torch.get_num_threads()


def run(update: Pass) -> None:
    """Do a pass, in place; arguments as for :func:`rankwise.kernels.lists.run`, but "step" leaves directions alone."""
    if update.is_narrow:
        run_opened(update, run)
        return
    scalars, fields = update.scalars, {name: update.wide(name) for name in update.fields}
    if isinstance(scalars.step, Tensor) or update.is_cautious:
        lists.run(update)
        return
    if update.rule == "adamw" and update.factors is None and update.references is None:
        _adamw_(scalars, _count(scalars), fields)
        return
    rate, count, space, names = float(scalars.lr), _count(scalars), _workspace(update.grads), tuple(fields)
    by_rate = update.rule == "step"
    factors = None if update.factors is None else update.factors.tolist() if by_rate else update.factors.unbind()
    for index, tensors in _blocks(*fields.values()):
        block = dict(zip(names, tensors, strict=True))
        grad = _gradient(block, scalars.k, space)
        if scalars.advance and "reference" in block:
            block["reference"].copy_(block["grad"])
        if by_rate:
            _descend_(block["param"], grad, rate, rate if factors is None else rate * float(factors[index]), scalars)
            continue
        own = space[: grad.numel()] if grad is block["grad"] else grad
        if factors is not None:
            grad = torch.mul(grad, factors[index], out=own)
        if update.rule == "adamw":
            _adamw_(scalars, count, {name: [tensor] for name, tensor in block.items()} | {"grad": [grad]})
            continue
        momentum = block["exp_avg"].lerp_(grad, 1.0 - scalars.betas[0])
        if scalars.nesterov:
            momentum = torch.lerp(momentum, grad, scalars.nesterov, out=own)
        if update.rule == "nesterov":
            block["param"].copy_(momentum)
        if update.rule == "lion":
            _descend_(block["param"], torch.sign(momentum, out=own), rate, rate, scalars)


def squared_norm(block: Tensor) -> Tensor:
    """Squared 2-norm, summed in fp64: then a parameter has the same norm however it is cut."""
    wide = block.double()
    return torch.dot(wide, wide)


def squared_norms(tensors: Tensors, references: Field | None = None, k: float = 0.0) -> Tensor:
    """As :func:`rankwise.kernels.lists.squared_norms`, without keeping what is measured."""
    if isinstance(references, LowPrecisionRuns):
        return norms_with_opened(tensors, references, k, squared_norms)
    sums = torch.zeros(len(tensors), dtype=torch.float64)
    fields, space = {"grad": tensors, **({} if references is None else {"reference": references})}, _workspace(tensors)
    for index, block in _blocks(*fields.values()):
        named = dict(zip(fields, block, strict=True))
        sums[index] += squared_norm(_gradient(named, k, space))
    return sums


def _blocks(*fields: Tensors) -> Iterator[tuple[int, list[Tensor]]]:
    """Index of the shard, and the block of each list."""
    check_lengths(*fields)
    size = block_size()
    for index, tensors in enumerate(zip(*fields, strict=True)):
        numel = tensors[0].numel()
        if numel <= size:
            if numel:
                yield index, list(tensors)
            continue
        for start in range(0, numel, size):
            yield index, [tensor[start : start + size] for tensor in tensors]


def _workspace(tensors: Tensors) -> Tensor:
    """One block of the type of the tensors."""
    longest = max((tensor.numel() for tensor in tensors), default=0)
    return tensors[0].new_empty(min(longest, block_size())) if tensors else torch.empty(0)


def _gradient(block: Mapping[str, Tensor], k: float, space: Tensor) -> Tensor:
    """The gradient, or ``g + k (g - h)`` in the workspace."""
    grad = block["grad"]
    if "reference" not in block:
        return grad
    return torch.lerp(block["reference"].to(grad.dtype), grad, 1.0 + k, out=space[: grad.numel()])


def _descend_(param: Tensor, direction: Tensor, lr: float, rate: float, scalars: Scalars) -> None:
    """Decay, and a step of a rate that has the shard's factor in it: scaled directions need not be kept."""
    if scalars.weight_decay != 0.0:
        param.mul_(1.0 - lr * scalars.weight_decay)
    param.add_(direction, alpha=-rate)


def _count(scalars: Scalars) -> Tensor:
    # Of a type that no default changes: bfloat16 has no 257.
    return torch.tensor(float(scalars.step), dtype=torch.float32)


def _adamw_(scalars: Scalars, count: Tensor, fields: Mapping[str, Tensors]) -> None:
    """Torch's kernel; ``count`` is the step's number."""
    grads = fields["grad"]
    check_lengths(*(fields[name] for name in FIELDS["adamw"]))
    if not grads:
        return
    torch._fused_adamw_(
        fields["param"],
        grads,
        fields["exp_avg"],
        fields["exp_avg_sq"],
        [],
        [count] * len(grads),
        lr=scalars.lr if isinstance(scalars.lr, Tensor) else float(scalars.lr),
        beta1=scalars.betas[0],
        beta2=scalars.betas[1],
        weight_decay=scalars.weight_decay,
        eps=scalars.eps,
        amsgrad=False,
        maximize=False,
    )
