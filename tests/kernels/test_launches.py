"""A step's operations, counted: as many for six layers of one shape as for two."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from counted_launches import Launches, counts_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rankwise import MARS, LDAdam, SONew
from rankwise.comm.exchange import MatrixExchange
from rankwise.kernels import lists as foreach
from rankwise.kernels import triton
from rankwise.kernels.dispatch import using
from rankwise.layout.layout_source import LayoutSource, Slice, TensorContents

# Where a table of addresses is made on the host, which depends on what memory the allocator gave.
TABLES = {"lift_fresh", "set_"}


def operations(kind: Any, options: dict[str, Any], layers: int, module: Any) -> list[str]:
    """What the third step does for a model of equal layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    optimizer = kind(list(model.named_parameters()), **options)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        with using(module), Launches(counts_of(optimizer)) as counter:
            optimizer.step()
        assert step == 0 or counter.found
    return counter.found


@pytest.mark.parametrize("variant", ["adamw", "lion", "shampoo", "muon"])
def test_mars(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatrixExchange, "one_by_one_on", ())  # as on an accelerator
    options = {"variant": variant, "ns_dtype": "float32"}
    few, many = (operations(MARS, options, layers, foreach) for layers in (2, 6))
    assert few == many
    assert len(few) <= 75


@pytest.mark.parametrize(("kind", "options"), [(SONew, {"band": 1}), (LDAdam, {"rank": 2}), (MARS, {})])
def test_with_kernels(kind: Any, options: dict[str, Any], launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatrixExchange, "one_by_one_on", ())  # as on an accelerator
    counts = []
    for layers in (2, 6):
        launches.clear()
        found = operations(kind, options, layers, triton)
        # Triton's interpreter converts bfloat16 by torch's function, tile by tile.
        counts.append((len(launches), Counter(name for name in found if name not in {*TABLES, "_to_copy"})))
    assert counts[0] == counts[1]
    assert counts[0][0] > 0


class Longest(TorchDispatchMode):
    """The most tensors that an operation takes."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lists = [value for value in args if isinstance(value, list | tuple)]
        self.found = max([self.found, *(sum(isinstance(part, torch.Tensor) for part in value) for value in lists)])
        return func(*args, **(kwargs or {}))


def test_a_count_on_the_device_is_read_once_for_all_shards(interpreter: None) -> None:
    class Flat(LayoutSource):
        group = None

        def contents(self, tensor: torch.Tensor) -> TensorContents:
            return TensorContents(0, tuple(Slice(f"{index}", 0, 64, 64 * index) for index in range(20)))

    optimizer = MARS([(f"{index}", nn.Parameter(torch.randn(8, 8))) for index in range(20)], capturable=True)
    flat = nn.Parameter(torch.randn(20 * 64))
    optimizer.param_groups[0]["params"] = [flat]
    optimizer.attach(Flat())
    flat.grad = torch.randn_like(flat)
    with using(triton):
        optimizer.step()
        with Longest() as longest:
            optimizer.step()
    assert longest.found == 1
