"""MKOR on CPUs works where the gradients lie: it only reads them, and a step makes nothing of a matrix's size."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated import Conv1D
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rankwise import MKOR
from rankwise.comm.exchange import MatrixExchange
from rankwise.kernels import lists as foreach
from rankwise.kernels import native
from rankwise.kernels.dispatch import using
from rankwise.mkor import windows
from rankwise.mkor.factors import KroneckerFactors
from rankwise.mkor.workspace import SPACE
from tests.ranks import run_ranks

WIDTH = 48
BACKENDS = ("adamw", "sgd", "lamb")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, WIDTH, bias=False)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), plain, Conv1D(9, WIDTH))


def started(model: nn.Module, **options: Any) -> MKOR:
    optimizer = MKOR(model.named_parameters(), lr=1e-2, update_interval=2, **options)
    optimizer.capture(model)
    return optimizer


def backward(model: nn.Module, optimizer: MKOR, step: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()


class LargeStorages(TorchDispatchMode):
    """Names of the operations whose result lies in memory that none of them had before, of so many elements or more."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.names, self.kept = elements, [], []  # type: ignore[var-annotated]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known:
                if leaf.untyped_storage().nbytes() >= self.elements * leaf.element_size():
                    self.names.append(str(func))
        return result


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_only_read(backend: str) -> None:
    model = network()
    optimizer = started(model, backend=backend)
    for step in range(3):
        backward(model, optimizer, step)
        places = {name: p.grad.data_ptr() for name, p in model.named_parameters() if p.grad is not None}
        before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        assert len(before) == 7
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and torch.equal(parameter.grad, before[name])
            assert parameter.grad.data_ptr() == places[name]


def _replicated(rank: int, world: int) -> bool:
    """A matrix without a bias that is a batch of its own: on its owner the exchange stacks it without a copy."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 5, bias=False)))
    optimizer = started(model)
    model(torch.randn(7, 6, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
    grad = model.module[0].weight.grad
    before = grad.clone()
    optimizer.step()
    return torch.equal(grad, before)


def test_gradients_of_replicas_are_only_read() -> None:
    assert run_ranks(2, _replicated) == [True, True]


@pytest.mark.parametrize("factor_step", [False, True])
def test_a_step_makes_nothing_as_large_as_a_matrix(factor_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first steps, with AdamW: then the states and the workspace are there."""
    monkeypatch.setitem(windows._TILE, "cpu", WIDTH)  # a row of J is there at a time
    model = network()
    optimizer = started(model, factor_decay=0.5)  # a window is shorter than a side
    for step in range(4 + factor_step):
        backward(model, optimizer, step)
        with LargeStorages(WIDTH * WIDTH) as seen:
            optimizer.step()
        assert step >= 1 or seen.names, "the first step has to make states"
    assert seen.names == []


def _weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


ONE_SIDED = {"factor_dtype": "float32", "max_factor_dim": WIDTH + 1}
"""All buffers are of one type, and a product begins or ends at another one of them."""


@pytest.mark.parametrize("options", [*({"backend": backend} for backend in BACKENDS), {"rescale": None}, ONE_SIDED])
def test_stacked_and_in_place_give_the_same_bits(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for one_by_one in (True, False):
        monkeypatch.setattr(MatrixExchange, "one_by_one_on", ("cpu",) if one_by_one else ())
        model = network()
        optimizer = started(model, **options)
        for step in range(4):
            backward(model, optimizer, step)
            optimizer.step()
            assert optimizer.health.read()["matrices_updated"] == 4
        results.append([*_weights(model), *(t for state in optimizer.matrix_states.values() for t in state.values())])
    assert all(itertools.starmap(torch.equal, zip(*results, strict=True)))


def test_other_kernels_take_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of matrix after matrix reads norms back, for which the host of a device would wait."""
    monkeypatch.setattr(KroneckerFactors, "apply_to_one", None)
    model = network()
    optimizer = started(model)
    backward(model, optimizer, 0)
    with using(foreach):
        optimizer.step()
    monkeypatch.undo()
    assert sum(map(torch.Tensor.count_nonzero, _weights(model)[1::2])), "they have moved"


def _without_gradients(kernels: Any) -> list[Tensor]:
    """Weights after steps in which a bias, and of another layer the weight, had no gradient."""
    with using(kernels):
        model = network()
        optimizer = started(model, factor_dtype="float32")
        for step, missing in enumerate((0, 2, 0, 2)):
            backward(model, optimizer, step)
            model[missing].bias.grad = None
            model[2 - missing].weight.grad = None
            still = [model[missing].bias, model[2 - missing].weight]
            before = [parameter.clone() for parameter in still]
            optimizer.step()
            assert all(itertools.starmap(torch.equal, zip(still, before, strict=True))), "they stay where they are"
        return _weights(model)


@pytest.mark.compiled
def test_a_missing_gradient_counts_as_zero() -> None:
    """Of a bias or of a weight: the other one is preconditioned, as in the stacks of other kernels."""
    for found, expected in zip(_without_gradients(native), _without_gradients(foreach), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rule_with_sums_over_ranks_steps_everything_at_once(backend: str) -> None:
    """LAMB's collective must come once on every rank, however many matrices lie whole on it."""
    model = network()
    optimizer = started(model, backend=backend)
    apply, sizes = optimizer._first_order.apply, []

    def spy(unit: Any, buckets: Any) -> None:
        sizes.append(sum(len(bucket.entries) for bucket in buckets))
        apply(unit, buckets)

    optimizer._first_order.apply = spy  # type: ignore[method-assign]
    backward(model, optimizer, 0)
    optimizer.step()
    assert sizes == ([7] if backend == "lamb" else [1] * 7 + [0])


def test_the_switch_gives_the_workspace_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = started(model, hybrid=True)
    spaces: list[Callable[[], bool]] = []
    for step in range(3):
        backward(model, optimizer, step)
        optimizer.step()
        (unit,) = optimizer.planner.units.values()
        spaces.append(SPACE in unit.notes)  # type: ignore[arg-type]
        optimizer.switch.is_over = step == 1
    assert spaces == [True, True, False]
