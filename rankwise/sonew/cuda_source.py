r"""This module writes the source of the SONew kernel for a band, because Triton has no arrays of registers.

A tile of a run is cut into rows of 32 threads, which take four neighbouring elements each. The first and the last
threads of a row repeat what lies beside it, so that values move between the threads of a row alone, without a barrier.
A thread advances the statistics of its elements, takes those of the next ``band`` elements from the next threads, and
factors the windows ``j .. j + band`` of its elements ``j`` in registers, by the order recursion of
:func:`rankwise.sonew.banded.banded_factors`; overlapping windows have their smaller windows in common. What an element
subtracts from later ones moves to their thread, the farthest first: sums do not depend on where a thread begins.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["ELEMENTS", "THREADS", "beside", "kernel_source", "scratch_of", "shape_of", "span_of"]

THREADS, ELEMENTS = 32, 4
"""Threads of a row, and elements of a thread."""

_INDENT = "    "

_HEAD = """
@jit
def {name}_kernel(
    table: tl.tensor, tiles: tl.tensor, borders: tl.tensor, partials: tl.tensor,
    beta1: tl.tensor, share1: tl.tensor, beta2: tl.tensor, share2: tl.tensor, eps: tl.tensor, tolerance: tl.tensor,
    scale: tl.tensor, graft_scale1: tl.tensor, graft_scale2: tl.tensor, graft_eps: tl.tensor, count: tl.tensor,
    STEPS_ON_DEVICE: tl.constexpr, SQUARES_ON_DEVICE: tl.constexpr, GRAFT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, IN_BLOCKS: tl.constexpr, COUNTS: tl.constexpr,
    MOMENTUM: tl.constexpr, MOMENTUM_AT: tl.constexpr, MOMENTUM_RANDOM: tl.constexpr,
    DIAGONAL: tl.constexpr, DIAGONAL_AT: tl.constexpr, DIAGONAL_RANDOM: tl.constexpr,
    EDGE: tl.constexpr, EDGE_AT: tl.constexpr, EDGE_RANDOM: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    run = tl.load(tiles + 2 * program)
    row = table + run * COLUMNS
    reached = tl.load(tiles + 2 * program + 1)
    borders += program * {border}
    partials += 2 * program
    damping = number_of(eps, run, STEPS_ON_DEVICE)
    if COUNTS:
        count = tl.load(count + run)
    start, low, high, fast = place_of_tile(row, reached, {fields}, ROWS, {beside}, IN_BLOCKS)
    lanes, own = lanes_of_rows(low, high, ROWS, {beside})
"""

_TAIL = """
total = tl.where(own, update, 0.0).to(tl.float64)
tl.store(partials, tl.sum(total * total))
if GRAFT == 1:
    corrected = diagonal * number_of(graft_scale2, run, SQUARES_ON_DEVICE)
    graft = momentum * number_of(graft_scale1, run, STEPS_ON_DEVICE) / (tl.sqrt_rn(corrected) + graft_eps)
elif GRAFT == 2:
    graft = grad
elif GRAFT == 3:
    graft = momentum * number_of(graft_scale1, run, STEPS_ON_DEVICE)
else:
    graft = tl.zeros_like(update)
total = tl.where(own, graft, 0.0).to(tl.float64)
tl.store(partials + 1, tl.sum(total * total))
"""


def beside(band: int) -> int:
    """Return how many threads at either end of a row repeat its neighbours."""
    return -(-band // ELEMENTS)


def shape_of(band: int) -> tuple[int, int]:
    """Return rows and warps of a program: a thread has one row or, if it needs few registers for each, two.

    Warps of AMD's have 64 threads. More than one of them for two rows would compute everything twice.
    """
    return 8, 4 if band <= 1 or torch.version.hip is not None else 8


def span_of(rows: int, threads: int) -> int:
    """Return the elements that a tile of these rows owns; of eight rows they are whole blocks of 64.

    Args:
        rows: Number of rows.
        threads: Threads at either end of each that own nothing.
    """
    return rows * ELEMENTS * (THREADS - 2 * threads)


def scratch_of(elements: float, band: int) -> float:
    """Return the bytes that a pass needs beside its tensors: for every tile its place, two sums and its neighbours."""
    threads = beside(band)
    return elements * (16 + 16 + 4 * (3 + band) * 2 * ELEMENTS * threads) / span_of(shape_of(band)[0], threads)


def kernel_source(band: int) -> str:
    """Return the source of a band's kernel, ``sonew_<band>_kernel``."""
    fields, threads = 3 + band, beside(band)
    names = {"name": f"sonew_{band}", "fields": fields, "beside": threads, "border": fields * 2 * ELEMENTS * threads}
    body = [*_statistics(band), *_factors(band), *_product(band), *_TAIL.splitlines()]
    return _HEAD.format(**names) + "".join(f"{_INDENT}{line}\n" for line in body)


def _of_thread(name: str, start: int = 0, end: int = ELEMENTS) -> list[str]:
    return [f"{name}_{element}" for element in range(start, end)]


def _kept(band: int) -> Iterator[tuple[str, str]]:
    """Name the statistics, and say how each is kept, in the words of the kernel's functions."""
    yield "momentum", "MOMENTUM, MOMENTUM_AT, MOMENTUM_RANDOM"
    yield "diagonal", "DIAGONAL, DIAGONAL_AT, DIAGONAL_RANDOM"
    for place in range(band):
        yield f"edge{place + 1}", f"EDGE, EDGE_AT + {place} * (EDGE_AT > 0) * COLUMNS_OF_CODES, EDGE_RANDOM"


def _statistics(band: int) -> Iterator[str]:
    """Write the lines that read every field with its neighbours, advance it and store it."""
    fields = [("grad", "tl.float32, 0, False"), *_kept(band)]
    where = f"ROWS, {beside(band)}"
    yield from _in_both_ways(
        [
            f"{name} = get(row, {field}, borders, reached, start, low, high, {how}, {where}, FAST)"
            for field, (name, how) in enumerate(fields)
        ]
    )
    if band:
        yield "# Warps have read what belongs to others before these overwrite it."
        yield "tl.debug_barrier()"
        yield f"{', '.join(_of_thread('reach'))} = reach_of(row, {len(fields)}, start, {where})"
    for name, _ in fields:
        yield f"{', '.join(_of_thread(name))} = apart({name})"
    yield from _later("grad", band)
    for element in range(ELEMENTS):
        grad = f"grad_{element}"
        yield f"momentum_{element} = beta1 * momentum_{element} + share1 * {grad}"
        yield f"diagonal_{element} = beta2 * diagonal_{element} + share2 * ({grad} * {grad})"
        for distance in range(1, band + 1):
            product = f"share2 * ({grad} * grad_{element + distance})"
            inside = f"tl.where(reach_{element} >= {distance}, {product}, 0.0)"
            yield f"edge{distance}_{element} = beta2 * edge{distance}_{element} + {inside}"
    for name, _ in fields[1:]:
        yield f"{name} = together({', '.join(_of_thread(name))})"
    yield from _in_both_ways(
        [
            f"put(row, {field}, {name}, count, reached, start, low, high, {how}, {where}, FAST, {len(fields)})"
            for field, (name, how) in enumerate(fields)
            if field
        ]
    )


def _in_both_ways(lines: list[str]) -> Iterator[str]:
    """Write lines twice: with wide accesses for a full tile at multiples of 16 bytes, and element by element."""
    for condition, fast in (("if fast:", "True"), ("else:", "False")):
        yield condition
        yield from (_INDENT + line.replace("FAST", fast) for line in lines)


def _later(name: str, count: int) -> Iterator[str]:
    """Write the lines that take as many further elements from the next threads."""
    for element in range(ELEMENTS, ELEMENTS + count):
        yield f"{name}_{element} = of_thread({name}_{element % ELEMENTS}, {element // ELEMENTS})"


def _factors(band: int) -> Iterator[str]:
    """Write the lines for the coefficients ``psi<i>`` of elements' windows, and for conditional variances ``schur``.

    A window of k + 1 elements begins with the s-th element from the thread's first one on. ``a<k>_<s>_<i>`` and
    ``b<k>_<s>_<i>`` are the i-th coefficients in the regressions of its first and its last element on the others,
    ``vf`` and ``vl`` the conditional variances of these elements, ``rf`` and ``rl`` the reciprocals.
    """
    for element in range(ELEMENTS):
        yield f"h_{element} = diagonal_{element} + damping"
        yield f"schur_{element} = h_{element}"
    yield from _later("h", band)
    for distance in range(1, band + 1):
        yield from _later(f"edge{distance}", band - distance)
    for shift in range(ELEMENTS + band) if band else ():
        yield f"vf0_{shift} = h_{shift}"
        yield f"vl0_{shift} = h_{shift}"
        yield f"rf0_{shift} = 1.0 / h_{shift}"
        yield f"rl0_{shift} = rf0_{shift}"
        yield f"ok0_{shift} = h_{shift} == h_{shift}"
    for order in range(1, band + 1):
        for shift in range(ELEMENTS + band - order):
            yield from _window(order, shift, last=order == band)
        # A window that leaves its chain has no edges beyond it, and gives what the window up to its end gives.
        for element in range(ELEMENTS):
            sound = f"ok{order}_{element}"
            yield f"schur_{element} = tl.where({sound}, vf{order}_{element}, schur_{element})"
            for i in range(1, order + 1):
                before = f"psi{i}_{element}" if i < order else "0.0"
                yield f"psi{i}_{element} = tl.where({sound}, a{order}_{element}_{i}, {before})"


def _window(k: int, s: int, last: bool) -> Iterator[str]:
    """Write the lines that lead from order k - 1 of the windows at s and s + 1 to order k of the window at s."""
    tag, first, second = f"{k}_{s}", f"{k - 1}_{s}", f"{k - 1}_{s + 1}"
    explained = "".join(f" - a{first}_{i} * edge{k - i}_{s + i}" for i in range(1, k))
    yield f"partial = edge{k}_{s}{explained}"
    yield f"on_last = partial * rl{second}"
    yield f"on_first = partial * rf{first}"
    for i in range(1, k):
        yield f"a{tag}_{i} = a{first}_{i} - on_last * b{second}_{i}"
        yield f"b{tag}_{i + 1} = b{second}_{i} - on_first * a{first}_{i}"
    yield f"a{tag}_{k} = on_last"
    yield f"b{tag}_1 = on_first"
    yield "unexplained = 1.0 - on_last * on_first"
    yield f"vf{tag} = vf{first} * unexplained"
    yield f"vl{tag} = vl{second} * unexplained"
    # A comparison with a NaN is false, so that a degenerate window never counts as sound.
    sound = f"(vf{tag} > tolerance * h_{s}) & (vl{tag} > tolerance * h_{s + k})"
    yield f"ok{tag} = ok{first} & ok{second} & {sound}"
    if not last:
        yield "reciprocal = 1.0 / unexplained"
        yield f"rf{tag} = rf{first} * reciprocal"
        yield f"rl{tag} = rl{second} * reciprocal"


def _product(band: int) -> Iterator[str]:
    """Write the lines for ``update``, the product of the factors with the momentum, and for its store."""
    yield from _later("momentum", band)
    for element in range(ELEMENTS):
        terms = "".join(f" - psi{k}_{element} * momentum_{element + k}" for k in range(1, band + 1))
        yield f"residual = momentum_{element}{terms}"
        yield f"whitened_{element} = tl.where(schur_{element} == 0.0, 0.0, residual / schur_{element})"
    # What comes from earlier elements: of each thread before, and then of this one.
    for element in range(ELEMENTS):
        yield f"taken_{element} = 0.0"
    for thread in range(-beside(band), 1):
        for element in range(ELEMENTS):
            distances = [d for d in range(band, 0, -1) if (element - d) // ELEMENTS == thread]
            if thread < 0 and not distances:
                continue
            # A sum that goes on in the next thread is computed in the earlier one, for the element of the later one.
            yield from (
                f"taken_{element} += psi{d}_{(element - d) % ELEMENTS} * whitened_{(element - d) % ELEMENTS}"
                for d in distances
            )
            if thread < 0:
                yield f"taken_{element} = of_thread(taken_{element}, -1)"
    for element in range(ELEMENTS):
        yield f"update_{element} = (whitened_{element} - taken_{element}) * number_of(scale, run, STEPS_ON_DEVICE)"
    yield f"update = together({', '.join(_of_thread('update'))})"
    where = f"count, reached, start, low, high, tl.float32, 0, False, ROWS, {beside(band)}"
    yield from _in_both_ways([f"put(row, {3 + band}, update, {where}, FAST, {3 + band})"])
