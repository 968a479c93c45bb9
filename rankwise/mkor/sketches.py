"""With rule "sketch", factors follow one random combination of a gradient's rows, and one of its columns.

With a gradient ``D`` (o, i) and signs ``e``, ``D e`` has the second moment ``D D^T`` and ``D^T e`` has ``D^T D``. These
are the factors of Shampoo (Gupta et al., arXiv:1802.09568), which MKOR's rank-1 updates follow without a layer's
inputs. The owner of a matrix has its gradient anyway, so that nothing is captured and nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from hashlib import blake2b, shake_256

import torch
from torch import Tensor

from rankwise.comm.exchange import MatrixExchange
from rankwise.comm.owner_plan import MatrixTask
from rankwise.mkor.layer_signature import LayerSignature
from rankwise.statistics.factor_vectors import LayerVectors

__all__ = ["Sketches", "sign_table"]

_KEPT = 0.95
"""Share of a factor that stays when it forgets, which is the published decay."""
_OFFSETS = 2**16
"""Places in the table at which signs may begin; after about so many steps a side sees the same signs again."""


class Sketches:
    """Vectors for the factors of a step, which depend neither on the rank nor on the order of the matrices.

    Args:
        due: Matrices whose factors move, each with its number of this step.
        table: Table of :func:`sign_table` for the longest side.
        decay: Factor momentum.
        interval: Steps from one factor update to the next.
    """

    def __init__(self, due: Mapping[str, int], table: Tensor, decay: float, interval: int) -> None:
        self._due, self._table, self._interval = due, table, interval
        self._forgets_every = max(1, round(math.log(_KEPT) / math.log(decay)))
        self._kept_then = decay**self._forgets_every

    def __contains__(self, key: str) -> bool:
        return key in self._due

    def decay(self, key: str) -> float:
        """Return the share of a matrix's factors that stays at this update.

        They forget at some updates only, and then as much as ``official`` does by default: a number in bfloat16 would
        not lose a smaller share at all.
        """
        updates = 1 + (self._due[key] - 1) // self._interval
        return 1.0 if updates % self._forgets_every else self._kept_then

    def of(self, tasks: Sequence[MatrixTask], gradients: Sequence[Tensor]) -> dict[str, LayerVectors]:
        """Return combinations of gradients for inputs and outputs; "tokens" are 0 where a gradient is 0, else 1.

        Args:
            tasks: Matrices of one signature.
            gradients: Gradients of the weights, 1-D, in the order of their memory.
        """
        # Experts of a stack lie behind one another in memory, but their names do not follow in that order.
        order = sorted(range(len(tasks)), key=lambda place: _memory(gradients[place]))
        tasks, gradients = [tasks[place] for place in order], [gradients[place] for place in order]
        signature: LayerSignature = tasks[0].signature
        shape = (signature.outputs, signature.inputs)
        shape = shape[::-1] if signature.transposed else shape
        like = gradients[0]
        by_row, by_column = (torch.empty(len(tasks), length, dtype=like.dtype, device=like.device) for length in shape)
        steps = [self._due[task.key] for task in tasks]
        for places, matrices in _stacks([gradient.view(shape) for gradient in gradients], steps):
            for side, given, made in (("columns", matrices, by_row), ("rows", matrices.mT, by_column)):
                signs = self._signs(side, steps[places.start], given.shape[-1]).to(like.dtype)
                if given.dim() == 2:
                    torch.mv(given, signs, out=made[places.start])
                else:
                    torch.bmm(given, signs[:, None].expand(len(given), -1, -1), out=made[places, :, None])
        combinations = (value.to(self._table.dtype) for value in (by_row, by_column))
        outputs, inputs = reversed([*combinations]) if signature.transposed else combinations
        seen = (outputs.abs().amax(1) + inputs.abs().amax(1) != 0).to(outputs.dtype).split(1)
        return dict(zip([task.key for task in tasks], zip(inputs, outputs, seen, strict=True), strict=True))

    def _signs(self, side: str, step: int, length: int) -> Tensor:
        # Signs do not depend on the matrix: nothing is summed over matrices, and wrappers of modules change names.
        start = _offset(side, step)
        return self._table[start : start + length]


def _stacks(matrices: Sequence[Tensor], steps: Sequence[int]) -> Iterator[tuple[slice, Tensor]]:
    """Yield places of matrices, and what is one product's: a matrix, or on accelerators a stack that memory holds.

    Args:
        matrices: Contiguous matrices of one shape.
        steps: The number of each one's step; those of a stack have the same.
    """
    alone, first = matrices[0].device.type in MatrixExchange.one_by_one_on, 0
    places = [_memory(matrix) for matrix in matrices]
    while first < len(matrices):
        here, end, gap = matrices[first], first + 1, 0
        while not alone and end < len(matrices) and steps[end] == steps[first]:
            (memory, start), (before, last) = places[end], places[end - 1]
            gap = gap or start - last
            if memory != before or start - last != gap:
                break
            end += 1
        stack = here if end == first + 1 else here.as_strided((end - first, *here.shape), (gap, *here.stride()))
        yield slice(first, end), stack
        first = end


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return which storage holds a tensor, and where it begins there."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def sign_table(longest: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return signs from which stretches of up to ``longest`` are taken, equal on all machines and in all versions."""
    return _drawn_signs(_OFFSETS + longest).to(device, dtype)


@lru_cache(maxsize=16)  # all matrices of a step ask for two offsets
def _offset(side: str, step: int) -> int:
    return int.from_bytes(blake2b(f"{side} {step}".encode(), digest_size=8).digest(), "big") % _OFFSETS


@cache
def _drawn_signs(length: int) -> Tensor:
    drawn = torch.frombuffer(bytearray(shake_256(b"signs").digest(-(-length // 8))), dtype=torch.uint8)
    places = torch.arange(8, dtype=torch.uint8, device="cpu")
    bits = drawn[:, None].bitwise_right_shift(places).bitwise_and(1).flatten()[:length]
    return bits.to(torch.int8) * 2 - 1
