r"""Element states become codes in 8 bits (after block-wise quantization, arXiv 2110.02861) or in bfloat16.

Every :data:`BLOCK` elements of a parameter share a scale :math:`2^e`, the least that reaches the largest of them.

- *Signed* codes are integers :math:`|q| \le 127` with the value :math:`q \, 2^e`.
- *Root* codes keep second moments through :math:`r = \sqrt v`. Each has 3 bits of an exponent of its own and 5 digits:
  :math:`r / 2^e` is a whole number up to 63, or 32 to 63 times one of 2, 4, ... 64. The value is :math:`r^2`. The
  largest root is 4032 times the least, and no value but zero is kept as zero, so that an update that is divided by the
  root stays bounded.

With such scales nothing is rounded twice: a code stands for a number of bfloat16 (signed) or float32 (root), which is
encoded to the same code whatever other elements share its block, as long as the scale reaches them. A block with a
value that is not finite (or a negative second moment) is NaN throughout.

Rounding is to the nearest, halves to even; or it is stochastic, up with the probability of what is cut off. Its 16 bits
of noise are a function of a key, the number of the step and the place in the parameter (a counter-based generator),
and so do not depend on the layout or on a resume.

These plain forms take every device and floating-point type. :func:`rankwise.kernels.dispatch.quantization_for` chooses
faster ones, which have the same bits in float32.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rankwise.kernels.low_precision_runs import BFLOAT16, BLOCK, ROOT, SIGNED, LowPrecisionRuns, blocks_of

__all__ = ["BROKEN", "CODED", "Code", "add_decoded", "decode_", "encode_", "exponents_of", "key_of", "noise"]

BROKEN = 127
"""The exponent of a block that is NaN throughout."""


class Code(NamedTuple):
    """Limits of a kind of codes.

    Attributes:
        least: Smallest exponent.
        most: Largest exponent.
        beyond: Largest exponent that is lowered to ``most``; larger ones become :data:`BROKEN`.
        power: Exponent of the power of two just above the largest code.
        share: The largest code, divided by that power of two.
    """

    least: int
    most: int
    beyond: int
    power: int
    share: float


CODED = {
    # The largest codes stand for numbers of float32.
    SIGNED: Code(-126, 121, 122, 7, 127 / 128),
    # The squares of all roots that can be encoded are normal numbers of float32.
    ROOT: Code(-63, 52, 53, 12, 4032 / 4096),
}
"""Kinds of codes by their type."""

# Plain forms work on so many elements at a time, whole blocks, so that temporaries stay small.
_AT_ONCE = 1 << 20

_WORD = 0xFFFFFFFF


def key_of(name: str, state: str) -> int:
    """Return 32 bits that tell a state of a parameter from others."""
    return zlib.crc32(f"{state}/{name}".encode())


def decode_(values: Sequence[Tensor], kept: LowPrecisionRuns) -> None:
    """Overwrite values with what codes stand for.

    Args:
        values: 1-D tensors, one for each run.
        kept: Codes of the runs.
    """
    for value, part in _parts(values, kept):
        value.copy_(part.decoded(value.dtype))


def add_decoded(values: Sequence[Tensor], kept: LowPrecisionRuns, sums: Sequence[Tensor]) -> None:
    """Add what codes stand for to other values.

    Args:
        values: 1-D tensors, one for each run.
        kept: Codes of the runs.
        sums: 1-D tensors of the lengths of ``values``, which the sums go to; may be ``values``.
    """
    for (value, part), (total, _) in zip(_parts(values, kept), _parts(sums, kept), strict=True):
        torch.add(value, part.decoded(value.dtype), out=total)


def exponents_of(values: Sequence[Tensor], kept: LowPrecisionRuns) -> Tensor:
    """Return the exponents that runs of codes would have by these values alone.

    Args:
        values: 1-D tensors, one for each run.
        kept: Runs of codes, of which only types, places and lengths are read.

    Returns:
        (blocks of all runs) int8.
    """
    exponents = [part.exponents_of(part.roots(value)) for value, part in _parts(values, kept)]
    return torch.cat(exponents) if exponents else torch.empty(0, dtype=torch.int8, device="cpu")


def encode_(values: Sequence[Tensor], kept: LowPrecisionRuns, exponents: Tensor | None = None) -> None:
    """Overwrite codes and their exponents with what is kept of values.

    Args:
        values: 1-D tensors, one for each run.
        kept: Runs of codes.
        exponents: Exponents in the form of :func:`exponents_of`, at least as large; None: those of the values.
    """
    position = 0
    for value, part in _parts(values, kept):
        given = None
        if exponents is not None:
            given = exponents[position : position + part.exponents.numel()]
            position += part.exponents.numel()
        part.encode(value, given)


def noise(key: int, step: int | Tensor, places: Tensor) -> Tensor:
    """Return 16 bits for each place in a parameter, by an integer hash (C. Wellons, lowbias32); int64 as ``places``."""
    count = step.to(torch.int64) if isinstance(step, Tensor) else _integer(step, places.device)
    seed = _mixed((places >> 32) ^ _mixed((count & _WORD) ^ _mixed(_integer(key, places.device))))
    return _mixed((places & _WORD) ^ seed) >> 16


def _integer(value: int, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.int64, device=device)


def _mixed(word: Tensor) -> Tensor:
    word = (word ^ (word >> 16)) * 0x7FEB352D & _WORD
    word = (word ^ (word >> 15)) * 0x846CA68B & _WORD
    return word ^ (word >> 16)


class _RunPart(NamedTuple):
    """The part of a run that is worked on at a time: whole blocks but at the ends of the run."""

    codes: Tensor
    exponents: Tensor
    first: int
    key: int
    step: int | Tensor | None

    def encode(self, values: Tensor, given: Tensor | None) -> None:
        random = None
        if self.step is not None:
            places = self.first + torch.arange(values.numel(), dtype=torch.int64, device=values.device)
            random = noise(self.key, self.step, places)
        if self.codes.dtype == BFLOAT16:
            self.codes.copy_(_narrowed(values, random))
            return
        roots = self.roots(values)
        self.exponents.copy_(self.exponents_of(roots) if given is None else given)
        self.codes.copy_(_codes(roots, self._of_elements(), self.codes.dtype, random))

    def roots(self, values: Tensor) -> Tensor:
        """Return what the scale divides, values or their roots, in float32 at least."""
        wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        # Through float64, because a library's root in float32 need not be the nearest one.
        return wide.double().sqrt().to(wide.dtype) if self.codes.dtype == ROOT else wide

    def exponents_of(self, roots: Tensor) -> Tensor:
        code = CODED[self.codes.dtype]
        before = self.first % BLOCK
        largest = pad(roots.abs(), (before, -(before + roots.numel()) % BLOCK)).view(-1, BLOCK).amax(1)
        mantissas, exponents = torch.frexp(largest)
        wanted = exponents.to(torch.int32) - code.power + (mantissas > code.share)
        limited = torch.where(largest > 0, wanted, code.least).clamp_(code.least, code.most)
        return limited.masked_fill_(~largest.isfinite() | (wanted > code.beyond), BROKEN).to(torch.int8)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        wide = dtype if dtype == torch.float64 else torch.float32
        if self.codes.dtype == BFLOAT16:
            return self.codes.to(wide)
        exponents = self._of_elements()
        broken = exponents == BROKEN
        scales = _powers(exponents.masked_fill(broken, 0), wide).masked_fill_(broken, torch.nan)
        if self.codes.dtype == SIGNED:
            return self.codes.to(wide) * scales
        codes = self.codes.to(torch.int32)
        shifts = (codes >> 5).sub_(1).clamp_(min=0)
        return ((codes - 32 * shifts).to(wide) * _powers(shifts, wide) * scales).square()

    def _of_elements(self) -> Tensor:
        """Return an exponent for each element, int32."""
        before = self.first % BLOCK
        return self.exponents.to(torch.int32).repeat_interleave(BLOCK)[before : before + self.codes.numel()]


def _parts(values: Sequence[Tensor], kept: LowPrecisionRuns) -> Iterator[tuple[Tensor, _RunPart]]:
    kept.check(values)
    for at, (value, codes, first) in enumerate(zip(values, kept.codes, kept.firsts, strict=True)):
        exponents = kept.exponents[at] if kept.exponents else codes[:0]
        step = kept.step[at] if isinstance(kept.step, Tensor) and kept.step.dim() else kept.step
        start = 0
        while start < value.numel():
            end = min(value.numel(), start + _AT_ONCE - (first + start) % BLOCK)
            block = (first + start) // BLOCK - first // BLOCK
            shared = exponents[block : block + blocks_of(first + start, end - start)]
            yield value[start:end], _RunPart(codes[start:end], shared, first + start, kept.keys[at], step)
            start = end


def _codes(roots: Tensor, exponents: Tensor, dtype: torch.dtype, random: Tensor | None) -> Tensor:
    broken = exponents == BROKEN
    scaled = roots * _powers((-exponents).masked_fill_(broken, 0), roots.dtype)
    scaled.masked_fill_(broken, 0.0)
    if dtype == SIGNED:
        return _rounded(scaled, random).clamp_(-127.0, 127.0)
    shifts = (torch.frexp(scaled)[1].to(torch.int32) - 6).clamp_(0, 6)
    digits = _rounded(scaled * _powers(-shifts, roots.dtype), random)
    codes = digits.to(torch.int32) + 32 * shifts
    return torch.where(scaled > 0, codes.clamp_(1, 255), 0)


def _rounded(scaled: Tensor, random: Tensor | None) -> Tensor:
    # A whole number up to 127 and noise of 16 bits behind the point have an exact sum, and so stay as they are.
    return scaled.round() if random is None else torch.floor(scaled + random.to(scaled.dtype) * 2.0**-16)


def _narrowed(values: Tensor, random: Tensor | None) -> Tensor:
    """Round to bfloat16, and to the nearest wherever a value is not finite or would not stay so."""
    nearest = values.to(BFLOAT16)
    if random is None or values.dtype == BFLOAT16:
        return nearest
    bits = values.float().contiguous().view(torch.int32)
    cut = ((bits + random.to(torch.int32)) & -65536).view(torch.float32)
    return torch.where(cut.isfinite() & values.isfinite(), cut, nearest.float()).to(BFLOAT16)


def _powers(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return powers of two, made from their bits, because functions may round."""
    return ((exponents + 127) << 23).view(torch.float32).to(dtype)
