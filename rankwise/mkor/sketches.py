"""What factors follow with rule "sketch": one random combination of a gradient's rows, and one of its columns.

With a gradient ``D`` (o, i) and signs ``e``, ``D e`` has the second moment ``D D^T`` and ``D^T e`` has ``D^T D``: the
factors of Shampoo (Gupta et al., arXiv:1802.09568), which MKOR's rank-1 updates follow without a layer's inputs. The
owner of a matrix has its gradient anyway, so nothing is captured and nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from hashlib import blake2b, shake_256

import torch
from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.mkor.layer_signature import LayerSignature
from rankwise.statistics.factor_vectors import LayerVectors

__all__ = ["Sketches", "sign_table"]

_KEPT = 0.95
"""Share of a factor that stays when it forgets: the published decay."""
_OFFSETS = 2**16
"""Places in the table at which signs may begin: so many steps go by until a side is likely to see the same again."""


class Sketches:
    """Vectors for the factors of a step; the same on any rank, whatever the order of the matrices.

    Args:
        due: Matrices whose factors move, with the number of this step of each.
        table: Of :func:`sign_table`, for the longest side.
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
        """What a matrix's factors keep of themselves at this update.

        They forget now and then, as much at a time as ``official`` does by default: of a smaller share of it, a number
        in bfloat16 would lose nothing at all.
        """
        updates = 1 + (self._due[key] - 1) // self._interval
        return 1.0 if updates % self._forgets_every else self._kept_then

    def of(self, tasks: Sequence[MatrixTask], gradients: Sequence[Tensor]) -> dict[str, LayerVectors]:
        """The combinations of gradients, of inputs and of outputs; "tokens" are 0 where a gradient is.

        Args:
            tasks: Matrices of one signature.
            gradients: Those of the weights, 1-D, as they lie.
        """
        signature: LayerSignature = tasks[0].signature
        shape = (signature.outputs, signature.inputs)
        shape = shape[::-1] if signature.transposed else shape
        like = gradients[0]
        by_row, by_column = (torch.empty(len(tasks), length, dtype=like.dtype, device=like.device) for length in shape)
        for place, (task, gradient) in enumerate(zip(tasks, gradients, strict=True)):
            matrix, step = gradient.view(shape), self._due[task.key]
            torch.mv(matrix, self._signs("columns", step, shape[1]).to(like.dtype), out=by_row[place])
            torch.mv(matrix.T, self._signs("rows", step, shape[0]).to(like.dtype), out=by_column[place])
        found = (value.to(self._table.dtype) for value in (by_row, by_column))
        outputs, inputs = reversed([*found]) if signature.transposed else found
        seen = (outputs.abs().amax(1) + inputs.abs().amax(1) != 0).to(outputs.dtype).split(1)
        return dict(zip([task.key for task in tasks], zip(inputs, outputs, seen, strict=True), strict=True))

    def _signs(self, side: str, step: int, length: int) -> Tensor:
        # Not of the matrix: nothing is added up over several, and names change with what is put around modules.
        start = _offset(side, step)
        return self._table[start : start + length]


def sign_table(longest: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Signs that stretches of up to so many are taken from; the same everywhere and for ever."""
    return _drawn_signs(_OFFSETS + longest).to(device, dtype)


@lru_cache(maxsize=16)  # all matrices of a step ask for two
def _offset(side: str, step: int) -> int:
    return int.from_bytes(blake2b(f"{side} {step}".encode(), digest_size=8).digest(), "big") % _OFFSETS


@cache
def _drawn_signs(length: int) -> Tensor:
    drawn = torch.frombuffer(bytearray(shake_256(b"signs").digest(-(-length // 8))), dtype=torch.uint8)
    places = torch.arange(8, dtype=torch.uint8, device="cpu")
    bits = drawn[:, None].bitwise_right_shift(places).bitwise_and(1).flatten()[:length]
    return bits.to(torch.int8) * 2 - 1
