r"""This module writes the source of the SONew kernel for a band, because Triton has no arrays of registers.

A tile of a run has BLOCK lanes, of which the first and the last PAD repeat neighbours of the tile. Every lane advances
the statistics of its element, takes those of the next ``band`` lanes, and factors its window ``j .. j + band`` in
registers, by the order recursion of :func:`rankwise.sonew.banded.banded_factors` over all windows inside it. What it
subtracts from later elements moves to their lanes.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["kernel_source", "padding", "scratch_of", "shape_of"]

_INDENT = "    "

_HEAD = """
@jit
def {name}_kernel(
    table: tl.tensor, tiles: tl.tensor, borders: tl.tensor, partials: tl.tensor,
    beta1: tl.tensor, share1: tl.tensor, beta2: tl.tensor, share2: tl.tensor, eps: tl.tensor, tolerance: tl.tensor,
    scale: tl.tensor, graft_scale1: tl.tensor, graft_scale2: tl.tensor, graft_eps: tl.tensor,
    STEPS_ON_DEVICE: tl.constexpr, SQUARES_ON_DEVICE: tl.constexpr, GRAFT: tl.constexpr, BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    run = tl.load(tiles + 2 * program)
    row = table + run * {width}
    start = tl.load(tiles + 2 * program + 1)
    length = tl.load(row + {length})
    borders += program * {border}
    partials += 2 * program
    lanes = tl.arange(0, BLOCK)
    size = (tl.minimum(start + (BLOCK - {padded}), length) - start).to(tl.int32)
    own = (lanes >= {pad}) & (lanes < {pad} + size)
    whole = (lanes >= {pad}) & (lanes < BLOCK - {pad})
    fast = (size == BLOCK - {padded}) & wide(row, {length})
    damping = number_of(eps, run, STEPS_ON_DEVICE)
"""

_TAIL = """
update = update * number_of(scale, run, STEPS_ON_DEVICE)
if fast:
    put(row, {out}, start, update, lanes, whole, {pad}, True)
else:
    put(row, {out}, start, update, lanes, own, {pad}, False)
total = tl.where(own, update, 0.0).to(tl.float64)
tl.store(partials, tl.sum(total * total, axis=0))
if GRAFT == 1:
    corrected = diagonal * number_of(graft_scale2, run, SQUARES_ON_DEVICE)
    graft = momentum * number_of(graft_scale1, run, STEPS_ON_DEVICE) / (tl.sqrt_rn(corrected) + graft_eps)
elif GRAFT == 2:
    graft = grad
elif GRAFT == 3:
    graft = momentum * number_of(graft_scale1, run, STEPS_ON_DEVICE)
else:
    graft = tl.full((BLOCK,), 0.0, tl.float32)
total = tl.where(own, graft, 0.0).to(tl.float64)
tl.store(partials + 1, tl.sum(total * total, axis=0))
"""


def padding(band: int) -> int:
    """Return how many lanes at either end of a tile repeat its neighbours; a multiple of 4 allows wide loads."""
    return -(-band // 4) * 4


def shape_of(band: int) -> tuple[int, int]:
    """Return lanes and warps of a program: a lane with more neighbours in registers leaves a thread fewer lanes."""
    return (1024, 4) if band <= 1 else (512, 8) if band <= 3 else (256, 8)


def scratch_of(elements: float, band: int) -> float:
    """Return the bytes that a pass needs beside its tensors: for every tile its place, two sums and its neighbours."""
    pad = padding(band)
    return elements * (16 + 16 + 4 * (3 + band) * 2 * pad) / (shape_of(band)[0] - 2 * pad)


def kernel_source(band: int) -> str:
    """Return the source of a band's kernel, ``sonew_<band>_kernel``."""
    pad, fields = padding(band), 3 + band
    names = {
        "name": f"sonew_{band}",
        "pad": pad,
        "padded": 2 * pad,
        "out": fields,
        "length": fields + 1,
        "width": fields + 6,
        "border": fields * 2 * pad,
    }
    body = [*_statistics(band, pad, fields), *_factors(band), *_product(band), *_TAIL.format(**names).splitlines()]
    return _HEAD.format(**names) + "".join(f"{_INDENT}{line}\n" for line in body)


def _statistics(band: int, pad: int, fields: int) -> Iterator[str]:
    """Write the lines that read every field with its neighbours, advance it and store it."""
    if band:
        yield f"beside = (lanes < {pad}) | ((lanes >= {pad} + size) & (lanes < {2 * pad} + size))"
        yield f"place = tl.where(lanes < {pad}, lanes, lanes - size)"
        yield f"reach = reach_of(row, {fields}, start, lanes, {pad}, BLOCK)"
    edges = [f"edge{distance}" for distance in range(1, band + 1)]
    names = ("grad", "momentum", "diagonal", *edges)
    yield from _in_both_ways(
        [f"{name} = get(row, {field}, start, lanes, OWN, {pad}, FAST)" for field, name in enumerate(names)]
    )
    for field, name in enumerate(names) if band else ():
        side = f"tl.load(borders + {field * 2 * pad} + place, mask=beside, other=0.0)"
        yield f"{name} = tl.where(own, {name}, {side})"
    yield "momentum = beta1 * momentum + share1 * grad"
    yield "diagonal = beta2 * diagonal + share2 * (grad * grad)"
    for distance, edge in enumerate(edges, start=1):
        yield f"product = grad * shifted(grad, {distance}, BLOCK)"
        yield f"{edge} = beta2 * {edge} + tl.where(reach >= {distance}, share2 * product, 0.0)"
    stores = [f"put(row, {field}, start, {name}, lanes, OWN, {pad}, FAST)" for field, name in enumerate(names)]
    yield from _in_both_ways(stores[1:])


def _in_both_ways(lines: list[str]) -> Iterator[str]:
    """Write lines twice: with wide accesses for a full tile at multiples of 16 bytes, and element by element."""
    for condition, mask, fast in (("if fast:", "whole", "True"), ("else:", "own", "False")):
        yield condition
        yield from (_INDENT + line.replace("OWN", mask).replace("FAST", fast) for line in lines)


def _factors(band: int) -> Iterator[str]:
    """Write the lines for the coefficients ``psi<i>`` of a lane's window and its conditional variance ``schur``.

    A window of k + 1 elements begins s lanes after this one. ``a<k>_<s>_<i>`` and ``b<k>_<s>_<i>`` are the i-th
    coefficients in the regressions of its first and its last element on the others, ``vf`` and ``vl`` the conditional
    variances of these elements, ``rf`` and ``rl`` the reciprocals.
    """
    yield "h0 = diagonal + damping"
    for shift in range(1, band + 1):
        yield f"h{shift} = shifted(h0, {shift}, BLOCK)"
    for distance in range(1, band + 1):
        yield f"e{distance}_0 = edge{distance}"
        for shift in range(1, band - distance + 1):
            yield f"e{distance}_{shift} = shifted(edge{distance}, {shift}, BLOCK)"
    for shift in range(band + 1) if band else ():
        yield f"vf0_{shift} = h{shift}"
        yield f"vl0_{shift} = h{shift}"
        yield f"rf0_{shift} = 1.0 / h{shift}"
        yield f"rl0_{shift} = rf0_{shift}"
        yield f"ok0_{shift} = h{shift} == h{shift}"
    yield "schur = h0"
    for order in range(1, band + 1):
        for shift in range(band - order + 1):
            yield from _window(order, shift, last=order == band)
        # A window that leaves its chain has no edges beyond it, and gives what the window up to its end gives.
        yield f"schur = tl.where(ok{order}_0, vf{order}_0, schur)"
        for i in range(1, order + 1):
            before = f"psi{i}" if i < order else "0.0"
            yield f"psi{i} = tl.where(ok{order}_0, a{order}_0_{i}, {before})"


def _window(k: int, s: int, last: bool) -> Iterator[str]:
    """Write the lines that lead from order k - 1 of the windows at s and s + 1 to order k of the window at s."""
    tag, first, second = f"{k}_{s}", f"{k - 1}_{s}", f"{k - 1}_{s + 1}"
    explained = "".join(f" - a{first}_{i} * e{k - i}_{s + i}" for i in range(1, k))
    yield f"partial = e{k}_{s}{explained}"
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
    sound = f"(vf{tag} > tolerance * h{s}) & (vl{tag} > tolerance * h{s + k})"
    yield f"ok{tag} = ok{first} & ok{second} & {sound}"
    if not last:
        yield "reciprocal = 1.0 / unexplained"
        yield f"rf{tag} = rf{first} * reciprocal"
        yield f"rl{tag} = rl{second} * reciprocal"


def _product(band: int) -> Iterator[str]:
    """Write the lines for ``update``, the product of the factors with the momentum."""
    yield "residual = momentum"
    for distance in range(1, band + 1):
        yield f"residual -= psi{distance} * shifted(momentum, {distance}, BLOCK)"
    yield "whitened = tl.where(schur == 0.0, 0.0, residual / schur)"
    yield "update = whitened"
    for distance in range(1, band + 1):
        yield f"update -= shifted(psi{distance} * whitened, -{distance}, BLOCK)"
