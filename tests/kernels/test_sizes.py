"""No wrong size reaches compiled code: it would read and write whatever lies behind a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rankwise.kernels import native
from rankwise.kernels.passes import FIELDS, Pass, Scalars
from rankwise.mkor import native as mkor
from rankwise.mkor.workspace import Workspace
from rankwise.sonew import native as sonew
from rankwise.sonew.chain_runs import ChainRun, Margins

LONG, SHORT = 100_000, 10


def lists(count: int, wrong: int) -> list[list[Tensor]]:
    """Of two tensors each; the second of one list is too short, or too long."""
    return [[torch.zeros(8), torch.zeros(LONG if at == wrong else SHORT)] for at in range(count)]


@pytest.mark.parametrize("wrong", range(5))
@pytest.mark.compiled
def test_lists_must_be_of_one_length(wrong: int) -> None:
    scalars = Scalars(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, step=2, k=0.5, advance=True)
    for rule, names in FIELDS.items():
        for fields in (names, (*names, "reference")):
            if wrong < len(fields):
                with pytest.raises(ValueError, match="tensor 1 has [0-9]+ elements in one list and"):
                    native.run(Pass(rule, dict(zip(fields, lists(len(fields), wrong), strict=True)), scalars))
    if wrong < 2:
        with pytest.raises(ValueError, match="tensor 1 has [0-9]+ elements in one list and"):
            native.squared_norms(*lists(2, wrong), 0.5)


@pytest.mark.compiled
def test_margins_must_be_those_of_the_band() -> None:
    options: Any = {"betas": (0.9, 0.99), "eps": 1e-8, "gamma": 0.0, "step": 1, "graft": "none", "graft_eps": 1e-8}

    def call(margins: list[Margins | None], runs: int = 1) -> None:
        fields = [[torch.zeros(SHORT)] for _ in range(3)]
        edges = [[torch.zeros(SHORT)] for _ in range(2)]
        out = [torch.zeros(SHORT)]
        sonew.sonew_directions([ChainRun(0, None)] * runs, *fields, edges, margins, out=out, **options)

    call([Margins(torch.zeros(5, 2), torch.zeros(5, 2))])
    for left, right in (((4, 2), (5, 2)), ((5, 2), (5, 1))):
        with pytest.raises(ValueError, match="has the shape .* but must have .5, 2."):
            call([Margins(torch.zeros(left), torch.zeros(right))])
    with pytest.raises(ValueError, match="1 gradients come with 2 runs"):
        call([None], runs=2)


def with_products(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    """As on a processor with matrix tiles; nothing may be called."""

    class Refused:
        def __getattr__(self, name: str) -> Callable[..., None]:
            raise AssertionError(f"{name} was reached")

    for module in modules:
        monkeypatch.setattr(module, "products", Refused)


@pytest.mark.parametrize(
    ("parts", "left", "right"), [((47, 6), 6, 9), ((48, 5), 6, 9), ((48, 6), 5, 9), ((48, 6), 6, 8), ((48,), 7, 8)]
)
def test_factors_must_be_those_of_the_gradient(
    monkeypatch: pytest.MonkeyPatch, parts: tuple[int, ...], left: int, right: int
) -> None:
    with_products(monkeypatch, mkor)
    grads, out = ([torch.zeros(size) for size in parts] for _ in range(2))
    sides = (torch.zeros(size, size, dtype=torch.bfloat16) for size in (left, right))
    with pytest.raises(ValueError, match="has the shape .* but must have"):
        mkor.precondition_into(out, grads, (6, 8), *sides, Workspace())
