"""Element-wise updates for CPUs: block after block, so that every temporary stays in the cache.

A pass over a list of fragments reads and writes main memory once, whatever the number of operations. It is the plain
form (:mod:`rankwise.kernels.lists`) on a block at a time, but for AdamW, which torch has in one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rankwise.kernels import lists
from rankwise.kernels.passes import Pass, Tensors
from rankwise.kernels.sizes import check_lengths

__all__ = ["block_size", "run", "squared_norm", "squared_norms"]

_BLOCK = 65536
"""Elements of a block per thread: with it and half a dozen temporaries the second-level cache is about full."""


def block_size() -> int:
    """Elements that all threads together work on at a time."""
    return _BLOCK * torch.get_num_threads()


def run(update: Pass) -> None:
    """Do a pass, in place; arguments as for :func:`rankwise.kernels.lists.run`, but "step" leaves directions alone."""
    if isinstance(update.scalars.step, Tensor):
        lists.run(update)
        return
    if update.rule == "adamw" and update.factors is None and update.references is None:
        _adamw_(update, update.grads)
        return
    scalars = replace(update.scalars, lr=float(update.scalars.lr))
    factors = None if update.factors is None else update.factors.split(1)
    form = {"adamw": _clipped_adamw_, "step": _step_}.get(update.rule, lists.run)
    for index, block in _blocks(*update.fields.values()):
        form(update.on([[tensor] for tensor in block], None if factors is None else factors[index], scalars))


def squared_norm(block: Tensor) -> Tensor:
    """Squared 2-norm, summed in fp64: then a parameter has the same norm however it is cut."""
    wide = block.double()
    return torch.dot(wide, wide)


def squared_norms(tensors: Tensors, references: Tensors | None = None, k: float = 0.0) -> Tensor:
    """As :func:`rankwise.kernels.lists.squared_norms`, without keeping what is measured."""
    sums = torch.zeros(len(tensors), dtype=torch.float64)
    for index, (block, *other) in _blocks(tensors, *(() if references is None else (references,))):
        sums[index] += squared_norm(lists.corrected([block], other, k)[0] if other else block)
    return sums


def _blocks(*fields: Tensors) -> Iterator[tuple[int, list[Tensor]]]:
    """Index of the fragment, and the block of each list."""
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


def _step_(block: Pass) -> None:
    """The factor joins the rate: the scaled directions need not be kept."""
    (param,), (direction,), scalars = block.fields["param"], block.grads, block.scalars
    rate = float(scalars.lr)
    lists.decay_([param], rate, scalars.weight_decay)
    param.add_(direction, alpha=-rate * (1.0 if block.factors is None else float(block.factors)))


def _clipped_adamw_(block: Pass) -> None:
    _adamw_(block, lists.gradients(block))


def _adamw_(update: Pass, grads: Tensors) -> None:
    """Torch's kernel."""
    fields, scalars = update.fields, update.scalars
    check_lengths(*fields.values())
    if not grads:
        return
    # Of a type that no default changes: bfloat16 has no 257.
    count = torch.tensor(float(scalars.step), dtype=torch.float32)
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
