"""Element-wise updates for CPUs: block after block, so that every temporary stays in the cache.

A pass over a list of fragments reads and writes main memory once, whatever the number of operations. The signatures
are those of :mod:`rankwise.kernels.lists`, and so are the results but for the last bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rankwise.kernels.sizes import check_lengths
from rankwise.updates.adamw import Scalar, bias_corrections

__all__ = [
    "adamw_",
    "block_size",
    "mars_adamw_",
    "mars_lion_",
    "mars_momentum_",
    "mars_squared_norms",
    "scaled_step_",
    "squared_norm",
    "squared_norms",
]

Tensors = list[Tensor]

_BLOCK = 65536
"""Elements of a block per thread: with it and half a dozen temporaries the second-level cache is about full."""


def block_size() -> int:
    """Elements that all threads together work on at a time."""
    return _BLOCK * torch.get_num_threads()


def _blocks(*lists: Tensors) -> Iterator[tuple[int, list[Tensor]]]:
    """Index of the fragment, and the block of each list."""
    check_lengths(*lists)
    size = block_size()
    for index, tensors in enumerate(zip(*lists, strict=True)):
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
    return torch.empty(min(longest, block_size()), dtype=tensors[0].dtype, device=tensors[0].device)


def squared_norm(block: Tensor) -> Tensor:
    """Squared 2-norm, summed in fp64: then a parameter has the same norm however it is cut."""
    wide = block.double()
    return torch.dot(wide, wide)


def squared_norms(tensors: Tensors) -> Tensor:
    """Squared 2-norm of every tensor, (tensors,) in fp64."""
    sums = torch.zeros(len(tensors), dtype=torch.float64)
    for index, (block,) in _blocks(tensors):
        sums[index] += squared_norm(block)
    return sums


def mars_squared_norms(grads: Tensors, references: Tensors, k: float) -> Tensor:
    """Squared norms of the corrected gradients ``g + k (g - h)``, (fragments,) in fp64, without keeping them."""
    sums = torch.zeros(len(grads), dtype=torch.float64)
    if grads:
        space = _workspace(grads)
        for index, (grad, reference) in _blocks(grads, references):
            sums[index] += squared_norm(torch.lerp(reference, grad, 1.0 + k, out=space[: grad.numel()]))
    return sums


def adamw_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    lr: Scalar,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    correct_eps: bool = True,
) -> None:
    """AdamW in torch's fused kernel; arguments as for :func:`rankwise.kernels.lists.adamw_`."""
    _, correction2 = bias_corrections(betas, step)
    own_eps = eps if correct_eps else eps / correction2**0.5
    _fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, _count(step), lr, betas, own_eps, weight_decay)


def _count(step: int) -> Tensor:
    # Of a type that no default changes: bfloat16 has no 257.
    return torch.tensor(float(step), dtype=torch.float32)


def _fused_adamw_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    count: Tensor,
    lr: Scalar,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Torch's kernel; ``count`` is the step's number, of its own type."""
    if not params:
        return
    check_lengths(params, grads, exp_avgs, exp_avg_sqs)
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [count] * len(params),
        lr=lr if isinstance(lr, Tensor) else float(lr),
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def _clipped_blocks(
    grads: Tensors, references: Tensors, k: float, coefficients: Tensor | None, advance: bool, *others: Tensors
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """The clipped corrected gradient of every block, in a workspace, with the block of every other list."""
    if not grads:
        return
    space = _workspace(grads)
    factors = None if coefficients is None else coefficients.unbind()
    for index, (grad, reference, *rest) in _blocks(grads, references, *others):
        corrected = torch.lerp(reference, grad, 1.0 + k, out=space[: grad.numel()])
        if factors is not None:
            corrected.mul_(factors[index])
        if advance:
            reference.copy_(grad)
        yield corrected, rest


def mars_adamw_(
    params: Tensors,
    grads: Tensors,
    references: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    k: float,
    coefficients: Tensor | None,
    lr: Scalar,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    advance: bool,
) -> None:
    """MARS-AdamW from raw gradients; arguments as for :func:`rankwise.kernels.lists.mars_adamw_`."""
    bias_corrections(betas, step)  # refuses a wrong step before a reference moves on
    count = _count(step)
    lists = (params, exp_avgs, exp_avg_sqs)
    for clipped, (param, exp_avg, exp_avg_sq) in _clipped_blocks(grads, references, k, coefficients, advance, *lists):
        _fused_adamw_([param], [clipped], [exp_avg], [exp_avg_sq], count, lr, betas, eps, weight_decay)


def mars_momentum_(
    grads: Tensors,
    references: Tensors,
    exp_avgs: Tensors,
    *,
    k: float,
    coefficients: Tensor | None,
    beta1: float,
    advance: bool,
) -> None:
    """Momentum of the clipped corrected gradients; as :func:`rankwise.kernels.lists.mars_momentum_`."""
    for clipped, (exp_avg,) in _clipped_blocks(grads, references, k, coefficients, advance, exp_avgs):
        exp_avg.lerp_(clipped, 1.0 - beta1)


def mars_lion_(
    params: Tensors,
    grads: Tensors,
    references: Tensors,
    exp_avgs: Tensors,
    *,
    k: float,
    coefficients: Tensor | None,
    lr: Scalar,
    beta1: float,
    weight_decay: float,
    advance: bool,
) -> None:
    """MARS-Lion from raw gradients; arguments as for :func:`rankwise.kernels.lists.mars_lion_`."""
    rate = float(lr)
    for clipped, (param, exp_avg) in _clipped_blocks(grads, references, k, coefficients, advance, params, exp_avgs):
        exp_avg.lerp_(clipped, 1.0 - beta1)
        if weight_decay != 0.0:
            param.mul_(1.0 - rate * weight_decay)
        param.add_(torch.sign(exp_avg, out=clipped), alpha=-rate)


def scaled_step_(
    params: Tensors, directions: Tensors, ratios: Tensor | None, *, lr: Scalar, weight_decay: float
) -> None:
    """As :func:`rankwise.kernels.lists.scaled_step_`, but leaves ``directions`` alone."""
    rate = float(lr)
    factors = [1.0] * len(params) if ratios is None else ratios.tolist()
    for index, (param, direction) in _blocks(params, directions):
        if weight_decay != 0.0:
            param.mul_(1.0 - rate * weight_decay)
        param.add_(direction, alpha=-rate * factors[index])
