"""What an optimizer is told of its parameters by names, annotations and hooks, and what it says where it is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankwise
from rankwise import MARS, MKOR, LDAdam, SONew


class Conv1D(nn.Module):
    """GPT-2's linear layer: its weight is (inputs, outputs)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def linear(nf: int, nx: int) -> nn.Module:
    return nn.Linear(nx, nf, bias=False).double()


def body(layer: Callable[[int, int], nn.Module]) -> nn.ModuleDict:
    """GPT-2's layers by their names."""
    torch.manual_seed(0)
    sizes = {"attn": {"c_attn": (24, 8), "c_proj": (8, 8)}, "mlp": {"c_fc": (32, 8), "c_proj": (8, 32)}}
    blocks = [{part: nn.ModuleDict({n: layer(*s) for n, s in found.items()}) for part, found in sizes.items()}]
    return nn.ModuleDict({"h": nn.ModuleList(nn.ModuleDict(block) for block in blocks)})


def updates(model: nn.Module, params: Any, turned: bool) -> dict[str, Tensor]:
    """What a step of MARS-Shampoo adds to every weight, as (outputs, inputs)."""
    generator = torch.Generator().manual_seed(3)
    # Of modules alone is known that the joined projections are three matrices.
    options: dict[str, Any] = {"ns_dtype": "float64", "weight_decay": 0.0, "blocks": {"*c_attn*": "none"}}
    optimizer = MARS(params, lr=0.1, variant="shampoo", **options)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        outputs, inputs = weight.shape[::-1] if turned else weight.shape
        grad = torch.randn(outputs, inputs, dtype=torch.float64, generator=generator)
        weight.grad = (grad.T if turned else grad).contiguous()
    optimizer.step()
    moved = {name: weight.detach() - before[name] for name, weight in model.named_parameters()}
    return {name: change.T if turned else change for name, change in moved.items()}


@pytest.mark.parametrize("told", ["names", "annotated", "annotated, no names"])
def test_conv1d_moves_as_linear_does(told: str, caplog: pytest.LogCaptureFixture) -> None:
    plain, turned = body(linear), body(Conv1D)
    expected = updates(plain, plain.named_parameters(), False)
    if told != "names":
        rankwise.annotate(turned)
    params = turned.parameters() if told.endswith("no names") else turned.named_parameters()
    with caplog.at_level(logging.INFO, "rankwise"):
        found = updates(turned, params, True)
    for name, change in expected.items():
        torch.testing.assert_close(found[name], change, rtol=1e-9, atol=1e-12)
    notices = [record for record in caplog.records if "Conv1D" in record.getMessage()]
    assert len(notices) == (told == "names")


def test_linear_layers_of_the_same_names_are_left_alone() -> None:
    plain = body(linear)
    optimizer = MARS(plain.named_parameters(), variant="shampoo")
    assert not any(info.transposed for info, _ in optimizer.table.catalog.values())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9))


def step(network: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        network(torch.arange(8)).square().mean().backward()
        optimizer.step()


def nameless(caplog: pytest.LogCaptureFixture) -> int:
    return sum("named_parameters()" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("build", "warnings"),
    [
        (lambda m: MARS(m.parameters(), variant="muon"), 1),
        (lambda m: MARS(m.parameters(), variant="shampoo"), 1),
        (lambda m: LDAdam(m.parameters(), rank=2), 1),
        # Their rule is for embeddings and heads, too.
        (lambda m: MARS(m.parameters()), 0),
        (lambda m: SONew(m.parameters()), 0),
        (lambda m: MARS(m.named_parameters(), variant="muon"), 0),
        (lambda m: (rankwise.annotate(m), LDAdam(m.parameters(), rank=2))[1], 0),
    ],
    ids=["mars-m", "mars-shampoo", "ldadam", "mars-adamw", "sonew", "named", "annotated"],
)
def test_parameters_without_names_are_warned_of_once(build: Any, warnings: int, caplog: Any) -> None:
    network = model()
    with caplog.at_level(logging.WARNING, "rankwise"):
        step(network, build(network))
    assert nameless(caplog) == warnings


def test_a_captured_model_needs_no_names(caplog: pytest.LogCaptureFixture) -> None:
    network = model()
    optimizer = MKOR(network.parameters())
    optimizer.capture(network)
    with caplog.at_level(logging.WARNING, "rankwise"):
        step(network, optimizer)
    assert nameless(caplog) == 0


def test_a_weight_unfrozen_after_the_capture_is_named(caplog: pytest.LogCaptureFixture) -> None:
    network = model()
    network[1].weight.requires_grad_(False)
    optimizer = MKOR(network.named_parameters())
    optimizer.capture(network)
    with caplog.at_level(logging.WARNING, "rankwise"):
        step(network, optimizer)
        assert not caplog.records
        network[1].weight.requires_grad_(True)
        step(network, optimizer)
    row = {row.name: row for row in optimizer.explain()}["1.weight"]
    assert row.rule == "fallback" and "frozen when capture()" in row.reason
    (warning,) = caplog.records
    assert "1.weight was frozen" in warning.getMessage()
    optimizer.capture(network)
    for _ in range(6):  # the others are due at their 11th step
        step(network, optimizer)
    assert optimizer.matrix_states["1.weight"]["left_vectors"].any()


@pytest.mark.parametrize("backend", ["sgd", "adamw", "lamb"])
def test_one_cycle_turns_what_the_backend_reads(backend: str) -> None:
    network = model()
    optimizer = MKOR(network.named_parameters(), backend=backend)
    optimizer.capture(network)
    stock: Any = torch.optim.SGD if backend == "sgd" else torch.optim.AdamW
    other = stock(model().parameters(), lr=1e-3, **({"momentum": 0.9} if backend == "sgd" else {}))
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.1, total_steps=12) for each in (optimizer, other)]
    for _ in range(10):
        network(torch.arange(8)).square().mean().backward()
        optimizer.step()
        other.step()
        for scheduler in schedulers:
            scheduler.step()
        for key in ("momentum",) if backend == "sgd" else ("betas",):
            assert optimizer.param_groups[0][key] == other.param_groups[0][key]
    assert ("betas" in optimizer.defaults) == (backend != "sgd")
