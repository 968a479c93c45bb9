from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton_runs import assert_runs_close  # noqa: E402

from rankwise.sonew import rule as updates
from rankwise.sonew.formulas import graft_direction

BETAS, EPS, GAMMA, STEP = (0.9, 0.95), 1e-3, 1e-2, 3


class Run(NamedTuple):
    start: int
    chain: int | None


class Parameter:
    """A parameter before a step, whole, and after it in double precision by the plain functions."""

    def __init__(self, shape: tuple[int, int], band: int, chain: str, generator: torch.Generator) -> None:
        self.shape, self.band, self.chain = shape, band, chain
        self.length = shape[1] if chain == "row" else None
        past = [self._chains(torch.randn(shape, generator=generator)) for _ in range(3)]
        fields = [torch.zeros_like(past[0]) for _ in range(2 + band)]
        for grad in past:
            momentum, diagonal, edges = updates.statistics(grad, fields[0], fields[1], fields[2:], BETAS)
            fields = [momentum, diagonal, *edges]
        grad = self._chains(torch.randn(shape, generator=generator))
        self.before = [field.reshape(-1).clone() for field in (grad, *fields)]
        wide = [field.double() for field in (grad, *fields)]
        momentum, diagonal, edges = updates.statistics(wide[0], wide[1], wide[2], wide[3:], BETAS)
        corrections = [1 - beta**STEP for beta in BETAS]
        direction = updates.direction(
            momentum / corrections[0], diagonal / corrections[1], [e / corrections[1] for e in edges], EPS, GAMMA
        )
        self.grad, self.momentum, self.diagonal = wide[0], momentum, diagonal
        self.after = [field.reshape(-1) for field in (direction, momentum, diagonal, *edges)]

    def _chains(self, value: Tensor) -> Tensor:
        return value if self.chain == "row" else value.reshape(-1)

    def graft(self, kind: str) -> Tensor | None:
        corrections = [1 - beta**STEP for beta in BETAS]
        graft, _ = graft_direction(
            kind, self.grad, self.momentum / corrections[0], self.diagonal, self.diagonal / corrections[1], eps=1e-4
        )
        return None if graft is None else graft.reshape(-1)

    def halo(self, start: int, end: int) -> tuple[Tensor, Tensor] | None:
        """Neighbours of a cut as the ranks exchange them: zero beyond the parameter."""
        if start == 0 and end == self.before[0].numel():
            return None
        left, right = torch.zeros(2, 3 + self.band, self.band)
        for field, value in enumerate(self.before):
            for offset in range(self.band):
                if 0 <= start - self.band + offset:
                    left[field, offset] = value[start - self.band + offset]
                if end + offset < value.numel():
                    right[field, offset] = value[end + offset]
        return left.contiguous(), right.contiguous()


def step(pieces: list[tuple[Parameter, int, int]], band: int, graft: str, in_place: bool, offset: int = 0):  # noqa: ANN201
    """One launch on cuts of parameters; directions, states and the two norms of every piece."""
    from rankwise.sonew.cuda import sonew_directions

    fields: list[list[Tensor]] = [[] for _ in range(3 + band)]
    for parameter, start, end in pieces:
        for column, value in zip(fields, parameter.before, strict=True):
            storage = torch.empty(end - start + offset)
            column.append(storage[offset:].copy_(value[start:end]))
    out = fields[0] if in_place else [torch.full_like(value, torch.nan) for value in fields[0]]
    squares = sonew_directions(
        [Run(start, parameter.length) for parameter, start, _ in pieces],
        fields[0],
        fields[1],
        fields[2],
        fields[3:],
        [parameter.halo(start, end) if band else None for parameter, start, end in pieces],
        betas=BETAS,
        eps=EPS,
        gamma=GAMMA,
        step=STEP,
        graft=graft,
        graft_eps=1e-4,
        out=out,
    )
    return out, fields[1:], squares


def check(pieces: list[tuple[Parameter, int, int]], band: int, graft: str, in_place: bool, offset: int = 0) -> None:
    out, states, (direction_squares, graft_squares) = step(pieces, band, graft, in_place, offset)
    for index, (parameter, start, end) in enumerate(pieces):
        wanted = [value[start:end] for value in parameter.after]
        assert_runs_close([out[index]], wanted[:1], 1e-4)
        assert_runs_close([column[index] for column in states], wanted[1:], 1e-6)
        grafted = parameter.graft(graft)
        norms = torch.stack(
            [wanted[0].square().sum(), torch.zeros(()) if grafted is None else grafted[start:end].square().sum()]
        )
        torch.testing.assert_close(
            torch.stack([direction_squares[index], graft_squares[index]]), norms, rtol=1e-4, atol=0
        )


@pytest.fixture
def short_tiles(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles per run, of one row each."""
    from rankwise.sonew import cuda as sonew

    monkeypatch.setattr(sonew, "shape_of", lambda band: (1, 1))


CUTS = (0, 1, 3, 40, 40, 101, 102, 210)


@pytest.mark.parametrize("chain", ["row", "tensor"])
@pytest.mark.parametrize("band", [0, 1, 2, 4])
def test_any_cut_gives_the_whole_result(short_tiles: None, band: int, chain: str) -> None:
    generator = torch.Generator().manual_seed(band)
    parameter = Parameter((10, 21), band, chain, generator)
    pieces = [(parameter, start, end) for start, end in zip(CUTS, CUTS[1:], strict=False)]
    check(pieces, band, "adam", in_place=True, offset=1)


@pytest.mark.parametrize("band", [1, 3, 8])
def test_many_parameters(short_tiles: None, band: int) -> None:
    """Rows shorter than the band, one row, one column; aligned."""
    generator = torch.Generator().manual_seed(band)
    shapes, chains = [(6, 5), (1, 70), (9, 1), (1, 1)][: 4 if band < 8 else 3], ["row", "tensor"]
    parameters = [Parameter(shape, band, chain, generator) for shape in shapes for chain in chains]
    check([(p, 0, p.before[0].numel()) for p in parameters], band, "momentum", in_place=False)


@pytest.mark.parametrize("graft", ["adam", "adam_official", "sgd", "momentum", "none"])
def test_graft_norms(short_tiles: None, graft: str) -> None:
    parameter = Parameter((4, 25), 1, "row", torch.Generator().manual_seed(7))
    check([(parameter, 0, 100), (parameter, 30, 77)], 1, graft, in_place=False)


def test_without_gather(short_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Triton 3.2, with scans in its place."""
    from rankwise.sonew import cuda as sonew
    from rankwise.sonew import cuda_tiles

    monkeypatch.setattr(sonew, "of_thread", cuda_tiles._of_thread_by_scan)
    parameter = Parameter((3, 11), 2, "row", torch.Generator().manual_seed(8))
    check([(parameter, 0, 33)], 2, "sgd", in_place=True)


def test_two_launches_and_the_sums_for_any_number_of_runs(short_tiles: None, launches: list[str]) -> None:
    parameter = Parameter((1, 90), 1, "tensor", torch.Generator().manual_seed(9))
    counts = []
    for pieces in ([(0, 90)], [(0, 1)], [(i, i + 9) for i in range(0, 90, 9)]):
        launches.clear()
        step([(parameter, *piece) for piece in pieces], 1, "adam", in_place=True)
        counts.append(list(launches))
    assert counts == [["_border_kernel", "sonew_1_kernel", "_sum_kernel"]] * 3


def test_edges_are_dropped_where_they_are_degenerate(short_tiles: None) -> None:
    """Proportional neighbours have no conditional variance; the same gradient for ever, no damping."""
    from rankwise.sonew.cuda import sonew_directions

    grad = torch.tensor([1.0, 2.0, 4.0, 8.0, 0.0, 0.0, 1.0, -1.0])
    for band in (1, 3):
        fields = [grad.clone(), *(torch.zeros(8) for _ in range(2 + band))]
        out = [torch.empty(8)]
        sonew_directions(
            [Run(0, None)],
            *([field] for field in fields[:3]),
            [[field] for field in fields[3:]],
            [None],
            betas=(0.5, 0.5),
            eps=0.0,
            gamma=1e-2,
            step=1,
            graft="none",
            graft_eps=0.0,
            out=out,
        )
        wanted = torch.where(grad == 0, 0.0, 1 / grad)
        torch.testing.assert_close(out[0], wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"graft": "rmsprop"}, "must be one of"), ({"gamma": 1.0}, "must be in"), ({"band": 9}, "more than the 8")],
)
def test_what_the_kernel_cannot_do_is_refused(change: dict[str, Any], message: str) -> None:
    from rankwise.sonew.cuda import sonew_directions

    options = {"graft": "adam", "gamma": 0.0, "band": 1} | change
    covariances: list[list[Tensor]] = [[] for _ in range(options.pop("band"))]
    with pytest.raises(ValueError, match=message):
        sonew_directions(
            [], [], [], [], covariances, [], betas=BETAS, eps=EPS, step=1, graft_eps=0.0, out=[], **options
        )


def test_the_tiles_of_the_device(interpreter: None) -> None:
    generator = torch.Generator().manual_seed(1)
    for band, size in ((0, 2100), (1, 2100), (4, 1100)):
        parameter = Parameter((1, size), band, "tensor", generator)
        check([(parameter, 0, size), (parameter, 17, 600)], band, "adam", in_place=True)
