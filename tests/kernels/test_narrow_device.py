"""States in 8 and 16 bits on a GPU: the plain functions' codes, steps as the other forms take them, graphs of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from given_gradients import Training  # noqa: E402
from narrow_cases import FIRSTS, LENGTHS, assert_same, runs_of, values_of  # noqa: E402
from test_narrow_passes import copies, fields_of  # noqa: E402

from rankwise import MARS, MKOR, LDAdam, SONew  # noqa: E402
from rankwise.kernels import lists as foreach  # noqa: E402
from rankwise.kernels import quantization, triton  # noqa: E402
from rankwise.kernels.dispatch import quantization_for, using  # noqa: E402
from rankwise.kernels.low_precision_runs import BFLOAT16, ROOT, SIGNED, LowPrecisionRuns  # noqa: E402
from rankwise.kernels.opened_passes import run_opened  # noqa: E402
from rankwise.kernels.passes import Pass, Scalars  # noqa: E402

DEVICE = torch.device("cuda:0")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def there(field: Any) -> Any:
    """On the device."""
    if isinstance(field, LowPrecisionRuns):
        step = field.step.to(DEVICE) if isinstance(field.step, Tensor) else field.step
        codes, exponents = (there(tensors) for tensors in (field.codes, field.exponents))
        return LowPrecisionRuns(codes, exponents, field.firsts, field.keys, step)
    return [value.to(DEVICE) for value in field]


def back(field: Any) -> Any:
    if isinstance(field, LowPrecisionRuns):
        return LowPrecisionRuns(back(field.codes), back(field.exponents), field.firsts, field.keys, field.step)
    return [value.cpu() for value in field]


@pytest.mark.parametrize("dtype, step", [(SIGNED, None), (ROOT, torch.tensor(7)), (BFLOAT16, 5), (SIGNED, 9)])
def test_codes_are_those_of_the_plain_form(dtype: torch.dtype, step: Any) -> None:
    plain = runs_of(LENGTHS, FIRSTS, dtype, step)
    ours = there(plain)
    values = [values_of(numel, dtype, seed) for seed, numel in enumerate(LENGTHS)]
    with using(triton):
        form = quantization_for(DEVICE, torch.float32)
    form.encode_(there(values), ours)
    quantization.encode_(values, plain)
    assert_same(back(ours), plain)
    opened = [torch.empty_like(value) for value in values]
    found = there(opened)
    form.decode_(found, ours)
    quantization.decode_(opened, plain)
    assert_same(back(found), opened)


@pytest.mark.parametrize("state", [SIGNED, BFLOAT16])
@pytest.mark.parametrize("rule", ["adamw", "lion", "momentum"])
def test_a_pass_is_that_of_opened_states(rule: Any, state: Any) -> None:
    fields = {name: there(field) for name, field in fields_of(rule, state, state, 7).items()}
    expected = copies(fields)
    scalars = Scalars(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=4, k=0.5, advance=True)
    factors = torch.rand(len(LENGTHS), device=DEVICE)
    triton.run(Pass(rule, fields, scalars, factors))
    run_opened(Pass(rule, expected, scalars, factors), triton.run)
    for name, field in fields.items():
        assert_same(back(field), back(expected[name]))


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (MARS, {"variant": "adamw"}),
    (MARS, {"variant": "lion"}),
    (MARS, {"variant": "lion", "clip": None}),
    (MARS, {"variant": "muon", "ns_dtype": "float32"}),
    (MARS, {"variant": "muon", "ns_dtype": "float32", "clip": None}),
    (SONew, {"band": 0}),
    (SONew, {"band": 1}),
    (LDAdam, {"rank": 8}),
]
WIDTHS = (96, 200, 96, 200)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_steps_are_those_of_the_other_form(kind: Any, options: dict[str, Any], dtype: str) -> None:
    found = {}
    for form in (triton, foreach):
        run = Training(kind, {**options, "state_dtype": dtype}, WIDTHS, DEVICE)
        start = [value.detach().clone() for value in run.model.parameters()]
        with using(form):
            for index in range(5):
                run.step(index)
        found[form] = [value.detach() - other for value, other in zip(run.model.parameters(), start, strict=True)]
    for ours, theirs in zip(found[triton], found[foreach], strict=True):
        # A last bit of the arithmetic can make another code of one element in many.
        assert (ours - theirs).norm() < 2e-2 * theirs.norm()
        assert ((ours - theirs).abs() < 1e-4 * theirs.abs().max()).float().mean() > 0.95


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_replays_are_steps(kind: Any, options: dict[str, Any]) -> None:
    options = {**options, "state_dtype": "int8"}
    run, twin = (Training(kind, {**options, **more}, WIDTHS, DEVICE) for more in ({"capturable": True}, {}))
    with using(triton):
        graph = run.captured(3)
        for index in range(3):
            twin.step(index)
        for index in range(3, 7):
            run.prepare(index)
            graph.replay()
            twin.step(index)
    for ours, theirs in zip(run.model.parameters(), twin.model.parameters(), strict=True):
        assert (ours - theirs).norm() < 1e-3 * theirs.norm()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_mkor_trains_as_in_the_other_form(hybrid: bool, dtype: str) -> None:
    inputs = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = []
    for form in (triton, foreach):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 200), nn.Tanh(), nn.Linear(200, 96)).to(DEVICE)
        named = list(model.named_parameters())
        optimizer = MKOR(named, lr=1e-3, hybrid=hybrid, update_interval=2, product_dtype="float32", state_dtype=dtype)
        optimizer.capture(model)
        losses = []
        with using(form):
            for _ in range(8):
                loss = (model(inputs) - inputs).square().mean()
                loss.backward()
                if hybrid:
                    optimizer.record_loss(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        found.append(torch.stack(losses))
    assert found[0][-1] < found[0][0]
    torch.testing.assert_close(found[0], found[1], rtol=1e-2 if dtype == "int8" else 1e-3, atol=0)
