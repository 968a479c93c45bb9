"""LDAdam's error buffers in 8 bits, under every layout, against one process whose buffers are quantized in fp64.

The oracle keeps fp64 buffers; after each step it rounds them, parameter by parameter, by a quantizer that searches its
scales: it knows nothing of how ranks have cut them, but for the columns that tensor parallelism gave them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from oracles import codes_by_search
from ranks import run_ranks
from simulated import LAYOUTS, Case, Framework, Model, gradients, run_of, world_group
from torch import Tensor

from rankwise import LDAdam
from rankwise.kernels.low_precision_runs import SIGNED, LowPrecisionRuns, blocks_of
from rankwise.kernels.quantization import encode_
from rankwise.layout.layout_source import Slice

STEPS = 6
# Blocks with gaps between their rows.
OPTIONS = {"rank": 2, "blocks": {"c.weight": {"q": 3, "k": 3, "groups": 2}}}
IN_8_BITS = Case("ldadam-int8", LDAdam, {**OPTIONS, "error_dtype": "int8"})
IN_FULL = Case("ldadam", LDAdam, OPTIONS)

Held = list[tuple[Slice, Tensor]]


def _follow(rank: int, world: int, layouts: Sequence[str]) -> dict[str, Held]:
    found = {}
    for place, layout in enumerate(layouts):
        framework = Framework(layout, IN_8_BITS, torch.float64, rank, world, world_group())
        # Opened into the gradients' memory, or not.
        framework.spends_gradients = place % 2 == world % 2
        for _ in range(STEPS):
            framework.step()
        lines = {line.name: line.rule for line in framework.optimizer.explain()}
        assert lines["c.weight[q]"] == lines["c.weight[k]"] == "matrix", "buffers of a fused weight are one"
        found[layout] = framework.pieces()
    return found


def _round(error: Tensor, cuts: set[tuple[int, int] | None]) -> None:
    """Each matrix of a stack, and each block of columns, for itself."""
    for columns in cuts:
        block = error if columns is None else error[:, slice(*columns)]
        for matrix in block if block.dim() == 3 else [block]:
            *_, values = codes_by_search(matrix.reshape(-1).numpy())
            matrix.copy_(torch.from_numpy(values).view(matrix.shape))


def _expected(pieces: Sequence[Slice], rounded: bool = True) -> dict[str, Tensor]:
    model = Model(torch.float64)
    optimizer = IN_FULL.optimizer(model)
    named = dict(model.named_parameters())
    for step in range(STEPS):
        for name, parameter in named.items():
            parameter.grad = gradients(step)[name].double()
        optimizer.step()
        for name, parameter in named.items():
            error = optimizer.state[parameter].get("error")
            if error is not None and rounded:
                _round(error, {piece.columns for piece in pieces if piece.key == name})
    return {name: parameter.detach() for name, parameter in named.items()}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_follows_the_oracle(world: int) -> None:
    layouts = LAYOUTS if world in (1, 2) else ("flat", "cut", "views", "tensor")
    outcomes = [_follow(0, 1, layouts)] if world == 1 else run_ranks(world, _follow, layouts)
    for layout in layouts:
        held = [each for outcome in outcomes for each in outcome[layout]]
        pieces = [piece for piece, _ in held]
        expected, exact = _expected(pieces), _expected(pieces, rounded=False)
        start = {name: parameter.detach() for name, parameter in Model(torch.float64).named_parameters()}
        rounding = max(float((expected[name] - exact[name]).abs().max()) for name in exact)
        error = max(float((values - run_of(expected[piece.key], piece)).abs().max()) for piece, values in held)
        moved = max(float((expected[name] - start[name]).abs().max()) for name in exact)
        assert error <= 1e-10 * moved < 1e-4 * rounding, layout


@pytest.mark.parametrize("layout", ["flat", "views"])
def test_spent_gradients_are_what_is_quantized(layout: str) -> None:
    """Of fused weights, too: no memory of its own for any buffer."""
    framework = Framework(layout, IN_8_BITS, torch.float32)
    framework.spends_gradients = True
    framework.step()
    (unit,) = framework.optimizer.planned_units
    spent: dict[str, list[Tensor]] = {}
    kept: dict[str, list[Tensor]] = {}
    for entry in unit.stored_entries:
        tensor, part = unit.tensors[entry.shard.tensor], entry.shard
        if entry.route.rule == "matrix":
            spent.setdefault(entry.key, []).append(tensor.grad.view(-1)[part.offset : part.offset + part.numel])
            plan = unit.states.plan_codes("error", [(entry, slice(0, part.numel))])
            kept.setdefault(entry.key, []).append(unit.states.codes(framework.optimizer.state, "error", plan)[0][0])
    assert "c.weight" in spent
    for key, parts in spent.items():
        values = torch.cat(parts)
        codes = torch.zeros(values.numel(), dtype=SIGNED)
        exponents = torch.zeros(blocks_of(0, values.numel()), dtype=torch.int8)
        encode_([values], LowPrecisionRuns([codes], [exponents], [0], [0]))
        assert torch.equal(torch.cat(kept[key]), codes), key


def _resumed(rank: int, world: int, layouts: Sequence[str]) -> list[tuple[Held, Held]]:
    found = []
    for layout in layouts:
        whole, again = (Framework(layout, IN_8_BITS, torch.float32, rank, world, world_group()) for _ in range(2))
        for _ in range(3):
            whole.step()
        saved = whole.optimizer.state_dict()
        for state in saved["state"].values():
            assert state.get("error", torch.zeros(0, dtype=SIGNED)).dtype == SIGNED
        for _ in range(3):
            again.step()
        with torch.no_grad():
            for (_, target), (_, source) in zip(again.pieces(), whole.pieces(), strict=True):
                target.copy_(source)
        again.optimizer.load_state_dict(saved)
        for framework in (whole, again):
            for _ in range(3):
                framework.step()
        found.append((whole.pieces(), again.pieces()))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_dictionary_resumes_bitwise(world: int) -> None:
    layouts = ("replicated", "flat", "cut", "views")
    outcomes = [_resumed(0, 1, layouts)] if world == 1 else run_ranks(world, _resumed, layouts)
    for outcome in outcomes:
        for whole, again in outcome:
            assert all(torch.equal(one, other) for (_, one), (_, other) in zip(whole, again, strict=True))
