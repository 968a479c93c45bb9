"""Norms of updates and weights by layer: those of the whole model, on every layout, and what measuring costs."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from megatron_cells import DISTRIBUTED, OVERLAPPED, Cell
from megatron_harness import Trainer, opened
from megatron_types import maker
from ranks import once, run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patches.cpu import cpu_megatron
from megatron_patches.norms import next_iteration
from megatron_patches.registry import RankwiseConfig
from rankwise.options.validation import OptionError

LAYER = {"rankwise_log_norms": "layer"}
CELLS: dict[str, tuple[str, Cell]] = {
    "PP2 tied": ("ldadam", Cell(pp=2, tied=True, optimizer=LAYER, **DISTRIBUTED)),
    "EP2": ("mars-m", Cell(ep=2, moe=4, optimizer=LAYER, **DISTRIBUTED)),
    "TP2 bf16": ("mars-adamw", Cell(tp=2, precision="bf16", optimizer={"rankwise_log_norms": "weight"})),
}
FURTHER: dict[str, tuple[str, Cell]] = {
    "overlapped": ("mkor", Cell(optimizer=LAYER, **OVERLAPPED)),
    "fp16": ("sonew", Cell(precision="fp16", optimizer=LAYER, **DISTRIBUTED)),
    "layer-wise": ("mars-shampoo", Cell(precision="bf16", optimizer={"rankwise_layer_wise": True, **LAYER})),
    "16 bits beside bf16 weights": (
        "sonew",
        Cell(precision="bf16", optimizer={"use_precision_aware_optimizer": True, **LAYER}, **DISTRIBUTED),
    ),
    "TP2 distributed": ("mars-m", Cell(tp=2, sp=True, optimizer=LAYER, **DISTRIBUTED)),
    "VPP2": ("mars-lion", Cell(pp=2, vpp=2, layers=4, microbatches=4, optimizer=LAYER, **DISTRIBUTED)),
    "EP2 experts": ("mkor-h", Cell(ep=2, moe=4, optimizer={"rankwise_log_norms": "weight"})),
}
EXPERT = re.compile(r"\.experts\.")


def _measured(trainer: Trainer) -> dict[str, Any]:
    """One rank's reading after a step, and rank 0's whole weights before and after it."""
    trainer.train_step()
    trainer.optimizer.read_health()
    before, _ = trainer.weights()
    trainer.train_step()
    after, _ = trainer.weights()
    health = trainer.optimizer.read_health()
    again = trainer.optimizer.read_health()
    assert not any("norm/" in name for name in again)
    return {"norms": {k: v for k, v in health.items() if "norm/" in k}, "before": before, "after": after}


def _all(rank: int, world: int, cells: dict[str, tuple[str, Cell]]) -> dict[str, Any]:
    found = {}
    with cpu_megatron():
        for label, (name, cell) in cells.items():
            with opened(cell, maker(name)) as trainer:
                found[label] = _measured(trainer)
    return found


@once
def seen(further: bool) -> list[dict[str, Any]]:
    return run_ranks(2, _all, FURTHER if further else CELLS)


def _expected(found: dict[str, Any], by: str) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, weight in found["after"].items():
        layer = re.match(r"decoder\.layers\.\d+", name)
        label = name if by == "weight" else layer[0] if layer else name.rpartition(".")[0]
        for kind, values in (("update_norm", weight - found["before"][name]), ("weight_norm", weight)):
            key = f"{'experts/' if EXPERT.search(name) else ''}{kind}/{label}"
            squares[key] = squares.get(key, 0.0) + float(values.double().square().sum())
    return {key: value**0.5 for key, value in squares.items()}


def _check(ranks: list[dict[str, Any]], label: str, by: str) -> None:
    stages = [rank[label]["norms"] for rank in ranks]
    together: dict[str, float] = {}
    for stage in stages:
        for key, value in stage.items():
            assert together.setdefault(key, value) == value  # whoever has it has the same
    assert together == pytest.approx(_expected(ranks[0][label], by), rel=1e-5)


@pytest.mark.parametrize("label", CELLS)
def test_they_are_those_of_the_whole_model(label: str) -> None:
    _check(seen(False), label, CELLS[label][1].optimizer["rankwise_log_norms"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("label", FURTHER)
def test_they_are_those_of_the_whole_model_on_further_layouts(label: str) -> None:
    _check(seen(True), label, FURTHER[label][1].optimizer["rankwise_log_norms"])


class _Counted(TorchDispatchMode):
    """Operations that a device would launch, what they read and write, and whether the host waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if "detach" not in name:
            self.names.append(name)
            written = [args[0]] if name.endswith("_.List") else [result]
            self.bytes += sum(t.nbytes for t in [*_tensors([args, kwargs]), *_tensors(written)])
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in _tensors(part)] if isinstance(value, list | tuple) else []


def _costs(rank: int, world: int) -> list[tuple[int, int, int]]:
    """Operations and bytes that each of four steps adds, and the elements that are stepped here."""
    found = []
    cell = Cell(optimizer={**LAYER, "rankwise_log_interval": 2}, **DISTRIBUTED)
    with cpu_megatron(), opened(cell, maker("mars-m")) as trainer:
        (wrapper,) = trainer.optimizer.chained_optimizers
        elements = sum(w.numel() for g in wrapper.param_groups for w in g["params"])
        begin, end = wrapper.norms.begin, wrapper.norms.end

        def counted(call: Any) -> Any:
            def run(inner: Any) -> None:
                with counter:
                    call(inner)

            return run

        wrapper.norms.begin, wrapper.norms.end = counted(begin), counted(end)
        for step in range(6):
            counter = _Counted()
            trainer.train_step()
            # The first that is measured asks the other ranks for their layers.
            assert step == 1 or not any("local_scalar" in name for name in counter.names)
            found.append((len(counter.names), counter.bytes, elements))
    return found


def test_only_every_so_many_steps_cost_anything_and_those_little() -> None:
    for steps in run_ranks(2, _costs):
        assert [operations > 0 for operations, *_ in steps] == [False, True] * 3
        operations, size, elements = steps[3]
        # Read and negated, added to, and two norms: 28 bytes an element in fp32, as a step of AdamW's moves.
        assert operations <= 16 and size < 28 * elements + 20_000


def test_the_iteration_is_the_training_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next_iteration() is None
    module = ModuleType("megatron.training.global_vars")
    module.get_args = lambda: SimpleNamespace(curr_iteration=41)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    assert next_iteration() == 42


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rankwise_log_norms": "layers"}, "rankwise_log_norms='layers' is invalid: it must be one of layer, weight"),
        ({"rankwise_log_interval": 0}, "rankwise_log_interval=0 is invalid: it must be a number of steps, at least 1"),
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        RankwiseConfig(optimizer="mars-m", lr=0.1, **given)
