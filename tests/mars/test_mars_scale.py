"""``scale="rms"``: orthogonalised updates with the root mean square of AdamW's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rankwise import MARS
from rankwise.kernels import lists, native, triton
from rankwise.kernels.dispatch import using
from rankwise.mars.formulas import shape_factor
from rankwise.mars.rule import orthogonal_direction
from rankwise.options.validation import OptionError
from rankwise.routing.fused_shape import FusedShape
from rankwise.routing.roles import ParameterInfo, Role, attach_info

LR = 0.5
SHAPES = {"wide": (6, 40), "tall": (40, 6), "conv1d": (8, 24), "experts": (3, 10, 30), "qkv": (32, 12)}
# (name of the logical matrix, its rows and columns as the model means them, where it lies)
MATRICES: dict[str, list[tuple[tuple[int, int], Any]]] = {
    "wide": [((6, 40), slice(None))],
    "tall": [((40, 6), slice(None))],
    "conv1d": [((24, 8), slice(None))],
    "experts": [((10, 30), 0), ((10, 30), 1), ((10, 30), 2)],
    "qkv": [((16, 12), slice(0, 16)), ((8, 12), slice(16, 24)), ((8, 12), slice(24, 32))],
}


def _parameters(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in SHAPES.items():
        parameter = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype))
        parameter.grad = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
        fused = FusedShape((("q", 16), ("k", 8), ("v", 8))) if name == "qkv" else None
        attach_info(parameter, ParameterInfo(name, shape, Role.LINEAR, name == "conv1d", fused=fused))
        found[name] = parameter
    found["vector"] = torch.nn.Parameter(torch.ones(5, dtype=dtype))
    found["vector"].grad = torch.ones(5, dtype=dtype)
    return found


def _changes(form: ModuleType, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    parameters = _parameters(dtype)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = MARS(list(parameters.items()), lr=LR, clip=None, eps=0.0, ns_steps=12, **options)
    with using(form):
        optimizer.step()
    return {name: (before[name] - parameter.detach()) / LR for name, parameter in parameters.items()}


@pytest.mark.parametrize("variant", ["shampoo", "muon"])
@pytest.mark.parametrize(
    "form",
    [lists, pytest.param(native, marks=pytest.mark.compiled)],
    ids=["lists", "native"],
)
def test_each_logical_matrix_moves_as_far_as_under_adamw(form: ModuleType, variant: str) -> None:
    changes = _changes(form, torch.float64, variant=variant, scale="rms", ns_dtype="float64")
    for name, matrices in MATRICES.items():
        for _, place in matrices:
            change = changes[name][place]
            # Newton-Schulz leaves singular values between 0.68 and 1.2 of the polar factor's.
            assert 0.13 < change.square().mean().sqrt() < 0.25, (name, place)


@pytest.mark.parametrize(
    "form",
    [lists, pytest.param(native, marks=pytest.mark.compiled), triton],
    ids=["lists", "native", "triton"],
)
def test_only_the_factor_differs(form: ModuleType, request: pytest.FixtureRequest) -> None:
    if form is triton:
        pytest.importorskip("triton")
        request.getfixturevalue("interpreter")
    published = _changes(form, torch.float32, variant="shampoo", ns_dtype="float32")
    scaled = _changes(form, torch.float32, variant="shampoo", scale="rms", ns_dtype="float32")
    for name, matrices in MATRICES.items():
        for (rows, columns), place in matrices:
            factor = 0.2 * max(rows, columns) ** 0.5 / max(1.0, rows / columns) ** 0.5
            torch.testing.assert_close(scaled[name][place], published[name][place] * factor, rtol=1e-4, atol=1e-5)
    # One rate for matrices and fallback, where the published runs have two.
    torch.testing.assert_close(scaled["vector"], 2 * published["vector"], rtol=1e-5, atol=1e-6)


def test_the_step_is_the_formula() -> None:
    parameters = _parameters(torch.float64)
    change = _changes(lists, torch.float64, variant="shampoo", scale="rms", ns_dtype="float64")["tall"]
    gradient = parameters["tall"].grad
    assert gradient is not None
    direction = orthogonal_direction(gradient, "shampoo", 0.95, eps=0.0, steps=12)
    torch.testing.assert_close(change, direction * (0.2 * 40**0.5) / (40 / 6) ** 0.5, rtol=1e-12, atol=1e-12)


def test_what_was_published_stays_the_default() -> None:
    assert shape_factor("shampoo", 40, 10) == 2.0
    assert shape_factor("muon", 40, 10) == shape_factor("muon", 40, 10, "rms") == shape_factor("shampoo", 10, 40, "rms")
    with pytest.raises(ValueError, match="scale must be one of 'published', 'rms', .*, got 'adamw'"):
        shape_factor("muon", 2, 2, "adamw")  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", ["shampoo", "muon"])
@pytest.mark.parametrize(
    ("scale", "tall", "wide"),
    # rows, columns: (40, 10) and (10, 40); what NVIDIA's get_muon_scale_factor gives for Megatron's modes.
    [("spectral", 40**0.5, 40**0.5), ("unit_rms_norm", 2.0, 0.5), ("shape_scaling", 2.0, 1.0)],
)
def test_megatrons_modes_are_those_of_either_variant(variant: Any, scale: Any, tall: float, wide: float) -> None:
    assert (shape_factor(variant, 40, 10, scale), shape_factor(variant, 10, 40, scale)) == (tall, wide)
    as_rms = _changes(lists, torch.float64, variant=variant, scale="rms", ns_dtype="float64")
    changes = _changes(lists, torch.float64, variant=variant, scale=scale, ns_dtype="float64")
    for name, matrices in MATRICES.items():
        for (rows, columns), place in matrices:
            factor = shape_factor(variant, rows, columns, scale) / (0.2 * max(rows, columns) ** 0.5)
            torch.testing.assert_close(changes[name][place], as_rms[name][place] * factor, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(changes["vector"], as_rms["vector"])


@pytest.mark.parametrize("variant", ["adamw", "lion"])
def test_element_wise_variants_refuse_it(variant: str) -> None:
    message = rf"^MARS: scale='rms' is invalid: variant='{variant}' orthogonalises nothing.*; leave it out, or choose"
    with pytest.raises(OptionError, match=message):
        MARS([torch.nn.Parameter(torch.ones(4, 4))], variant=variant, scale="rms")
