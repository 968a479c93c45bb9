"""MKOR's gradients preconditioned together, in the interpreter, against the pure functions in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("triton")

from preconditioning import preconditioned_together  # noqa: E402
from simulated import Conv1D  # noqa: E402

from rankwise import MKOR  # noqa: E402
from rankwise.kernels import lists as foreach  # noqa: E402
from rankwise.kernels import triton  # noqa: E402
from rankwise.kernels.dispatch import using  # noqa: E402
from rankwise.mkor import formulas as mkor  # noqa: E402
from rankwise.mkor import product_groups as arrangement  # noqa: E402
from rankwise.mkor.preconditioned_matrices import MKORRule  # noqa: E402
from rankwise.mkor.preconditioning import Gradient  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreter")

BF16 = torch.bfloat16


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def factor(length: int, seed: int, dtype: torch.dtype) -> Tensor:
    half = torch.randn(length, length, generator=generator(seed)) / length**0.5
    return (half @ half.T + 0.1 * torch.eye(length)).to(dtype)


def made(
    rows: int,
    columns: int,
    seed: int,
    sides: str = "left right",
    bias: str = "",
    cuts: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Gradient:
    """A gradient in several runs of its weight and, if it has one, two of its bias, as a ``row`` or a ``column``."""
    source = generator(seed)
    weights = torch.randn(rows * columns, generator=source).tensor_split(cuts)
    length = {"": 0, "row": columns, "column": rows}[bias]
    biases = torch.randn(length, generator=source).tensor_split([2]) if bias else ()
    left = factor(rows + (bias == "row"), seed, dtype) if "left" in sides else None
    right = factor(columns + (bias == "column"), seed + 1, dtype) if "right" in sides else None
    return Gradient(rows, columns, weights, biases, bias == "row", left, right)


def whole(gradient: Gradient, runs: Sequence[Tensor]) -> Tensor:
    """The matrix that the runs make up, in fp64."""
    count = len(gradient.weights)
    weight = torch.cat(list(runs[:count])).double().view(gradient.rows, gradient.columns)
    if not gradient.biases:
        return weight
    bias = torch.cat(list(runs[count:])).double()
    return torch.cat([weight, bias[None]]) if gradient.turned else torch.cat([weight, bias[:, None]], dim=1)


def wanted(gradient: Gradient, rescale: str | None = "joint") -> Tensor:
    sides = (None if side is None else side.double() for side in (gradient.left, gradient.right))
    return mkor.precondition(whole(gradient, gradient.runs), *sides, rescale)


def by_gradient(gradients: Sequence[Gradient], runs: Sequence[Any]) -> list[Tensor]:
    found, first = [], 0
    for gradient in gradients:
        last = first + len(gradient.runs)
        found.append(whole(gradient, runs[first:last]))
        first = last
    return found


def mixed(dtype: torch.dtype = torch.float32) -> list[Gradient]:
    """Alike and not, aligned and not, with one factor or two, with and without a bias, in one run and in several."""
    return [
        made(16, 24, 0, dtype=dtype),
        made(13, 11, 1, dtype=dtype, cuts=(5, 30)),
        made(16, 24, 2, dtype=dtype, cuts=(24 * 4,)),
        made(16, 23, 3, dtype=dtype, bias="column"),
        made(13, 11, 4, dtype=dtype, bias="column", sides="left", cuts=(6,)),
        made(13, 11, 5, dtype=dtype, bias="column", sides="right"),
        made(9, 8, 6, dtype=dtype, bias="row", cuts=(8, 30)),
        made(9, 7, 7, dtype=dtype, bias="row", sides="left"),
        made(16, 24, 8, dtype=dtype, sides="right"),
        made(16, 24, 9, dtype=dtype, sides="right"),
        made(16, 24, 10, dtype=dtype),
        made(1, 70, 11, dtype=dtype, sides="left"),
    ]


def run(gradients: list[Gradient], product: torch.dtype, rescale: bool, in_fp32: bool) -> list[Tensor]:
    from rankwise.mkor.cuda import preconditioning_together as together

    before = [run.clone() for gradient in gradients for run in gradient.runs]
    if in_fp32:
        out = [[torch.empty_like(run) for run in gradient.runs] for gradient in gradients]
        together.precondition_into(out, gradients, product, rescale)
        found = by_gradient(gradients, [run for runs in out for run in runs])
    else:
        runs, factors = preconditioned_together(gradients, product, rescale)
        assert (factors is not None) == rescale and all(run.dtype == product for run in runs)
        scaled = runs if factors is None else [run.float() * each for run, each in zip(runs, factors, strict=True)]
        found = by_gradient(gradients, scaled)
    after = [run for gradient in gradients for run in gradient.runs]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), "gradients are only read"
    return found


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("rescale", ["joint", None])
@pytest.mark.parametrize("product", [torch.float32, BF16])
def test_all_of_them(
    product: torch.dtype, rescale: str | None, in_fp32: bool, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rankwise.mkor.cuda import gradient_passes

    monkeypatch.setattr(gradient_passes, "TILE", 64)
    gradients = mixed(product)
    found = run(gradients, product, rescale is not None, in_fp32)
    bound = 2e-6 if product == torch.float32 else 0.012
    for gradient, matrix in zip(gradients, found, strict=True):
        expected = wanted(gradient, rescale)
        assert (matrix - expected).norm() < bound * expected.norm(), gradient.shape
    passes = ["_gather_kernel"]
    passes += ["_squares_kernel", "_choose_kernel"] if rescale else []
    assert launches == passes + ["_finish_kernel"] * (in_fp32 or rescale is not None)


@pytest.mark.parametrize("limit", [1, 500, 10**6])
def test_in_parts(limit: int, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwise.mkor.cuda import preconditioning_together as together

    monkeypatch.setattr(together, "AT_ONCE", limit)
    gradients = mixed()
    for gradient, matrix in zip(gradients, run(gradients, torch.float32, True, in_fp32=True), strict=True):
        assert (matrix - wanted(gradient)).norm() < 2e-6 * matrix.norm()
    assert launches.count("_gather_kernel") == {1: len(gradients), 500: 8, 10**6: 1}[limit]


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("product", [torch.float32, BF16])
def test_in_the_gradients_own_memory(product: torch.dtype, rescale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwise.mkor.cuda import gradient_passes
    from rankwise.mkor.cuda import preconditioning_together as together

    monkeypatch.setattr(gradient_passes, "TILE", 64)
    gradients = mixed(product)
    side = gradients[3].right
    assert side is not None
    side.zero_()  # the gradient itself is the result, where there is rescaling
    elsewhere = run(gradients, product, rescale, in_fp32=True)
    together.precondition_into([gradient.runs for gradient in gradients], gradients, product, rescale)
    found = by_gradient(gradients, [run for gradient in gradients for run in gradient.runs])
    assert all(torch.equal(*pair) for pair in zip(found, elsewhere, strict=True))


def test_every_size_at_once_or_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = run(mixed(), torch.float32, True, in_fp32=False)
    monkeypatch.setattr(arrangement, "_SMALL", 0)
    for pair in zip(stacked, run(mixed(), torch.float32, True, in_fp32=False), strict=True):
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_the_gradient_where_there_is_no_norm(value: float, in_fp32: bool) -> None:
    """Of that matrix alone; in the type of the products but where fp32 is asked for."""
    gradients = mixed(BF16)
    for place in (1, 3, 8):
        side = gradients[place].right
        assert side is not None
        side.fill_(value)
    found = run(gradients, BF16, True, in_fp32)
    for place, (gradient, matrix) in enumerate(zip(gradients, found, strict=True)):
        raw = whole(gradient, gradient.runs)
        if place in (1, 3, 8):
            assert torch.equal(matrix, raw if in_fp32 else raw.to(BF16).double())
        else:
            assert (matrix - wanted(gradient)).norm() < 0.012 * matrix.norm()


def test_identity_factors_change_no_bit() -> None:
    plain = made(16, 24, 0)
    gradient = Gradient(16, 24, plain.weights, (), False, torch.eye(16), torch.eye(24))
    for in_fp32 in (False, True):
        (found,) = run([gradient], torch.float32, True, in_fp32)
        assert torch.equal(found, whole(gradient, gradient.runs))


def test_a_gradient_without_factors_is_refused() -> None:
    with pytest.raises(ValueError, match="without any factor"):
        run([made(4, 4, 0, sides="")], BF16, True, in_fp32=False)


# --- the optimizer ---------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """With biases and without, transposed, divided into blocks of rows and of columns."""

    def __init__(self) -> None:
        super().__init__()
        attention = nn.ModuleDict({"attn": nn.ModuleDict({"c_attn": Conv1D(24, 8)})})
        self.h = nn.ModuleList([attention])
        self.first, self.own, self.parts = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(24, 24)
        self.last = nn.Linear(24, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.parts(self.h[0]["attn"]["c_attn"](self.own(self.first(x)))))  # type: ignore[index, no-any-return]


def trained(form: Any, missing: bool = False, **options: Any) -> dict[str, Tensor]:
    """Weights after four steps, two of them factor steps; a layer is in a group of its own."""
    torch.manual_seed(0)
    model = Network()
    named = dict(model.named_parameters())
    apart = [(name, value) for name, value in named.items() if name.startswith("own")]
    rest = [(name, value) for name, value in named.items() if not name.startswith("own")]
    gain = "sketch_gain" if options.get("rule") == "sketch" else "output_gain"
    settings = {"lr": 1e-2, "weight_decay": 0.1, "update_interval": 2, gain: 5.0, **options}
    settings |= {"blocks": {"parts.weight": {"a": 5, "b": 12, "c": 7}}, "factor_dtype": "float32"}
    optimizer = MKOR([{"params": rest}, {"params": apart, "weight_decay": 0.5}], product_dtype="float32", **settings)
    optimizer.capture(model)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(7, 6, generator=generator(step)) + 0.5).square().mean().backward()
        if missing and step % 2 == 0:
            model.first.bias.grad = model.own.weight.grad = None
        with using(form):
            optimizer.step()
    left = "left" if options.get("rule") == "sketch" else "left_vectors"
    if "max_factor_dim" not in options:
        assert {f"{left}[{name}]" for name in "abc"} <= set(optimizer.matrix_states["parts.weight"])
    assert {f"{left}[{name}]" for name in "qkv"} <= set(optimizer.matrix_states["h.0.attn.c_attn.weight"])
    return {name: value.detach() for name, value in named.items()}


OPTIONS: list[dict[str, Any]] = [
    {"backend": "lamb"},
    {"weight_decay_method": "cautious"},
    {"missing": True},
    {"rule": "sketch"},
    {"rule": "sketch", "backend": "sgd", "max_factor_dim": 8},
]
MORE: list[dict[str, Any]] = [
    {},
    {"rescale": None},
    {"backend": "sgd", "momentum": 0.5},
    {"max_factor_dim": 8},
    {"rule": "sketch", "missing": True},
]


@pytest.mark.parametrize(
    "options", [*OPTIONS, *(pytest.param(more, marks=pytest.mark.exhaustive) for more in MORE)], ids=str
)
def test_the_weights_are_the_same(options: dict[str, Any], launches: list[str]) -> None:
    plain = trained(foreach, **options)
    assert not launches
    for name, weight in trained(triton, **options).items():
        torch.testing.assert_close(weight, plain[name], rtol=0.0, atol=2e-5, msg=lambda text, name=name: name + text)
    assert launches.count("_gather_kernel") == 4 if "backend" not in options else launches.count("_gather_kernel") > 4


@pytest.mark.parametrize("at_once", [300, *(pytest.param(few, marks=pytest.mark.exhaustive) for few in (1, 10**6))])
@pytest.mark.parametrize(
    "options",
    [{"max_factor_dim": 8}, *(pytest.param(other, marks=pytest.mark.exhaustive) for other in ({}, {"rescale": None}))],
    ids=str,
)
def test_planned_or_not_the_bits_are_the_same(
    options: dict[str, Any], at_once: int, monkeypatch: pytest.MonkeyPatch, launches: list[str]
) -> None:
    from rankwise.mkor.cuda import preconditioning_together as together

    monkeypatch.setattr(together, "AT_ONCE", at_once)
    planned = trained(triton, **options)
    count = len(launches)
    monkeypatch.setattr(MKORRule, "_flat_gradients", lambda self: None)
    cut_anew = trained(triton, **options)
    assert len(launches) == 2 * count
    assert all(torch.equal(planned[name], weight) for name, weight in cut_anew.items())


def test_a_profiler_sees_what_is_planned() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        trained(triton)
    assert [event.count for event in found.key_averages() if event.key == "rankwise: compute in place"] == [4]
