"""The optimizers on the Triton kernels, in the interpreter, against the same optimizers without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rankwise import MARS, LDAdam, SONew
from rankwise.kernels import lists as foreach
from rankwise.kernels import triton
from rankwise.kernels.dispatch import using

pytest.importorskip("triton")

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mars-adamw": (MARS, {"variant": "adamw"}),
    "mars-bf16-reference": (MARS, {"variant": "adamw", "reference_dtype": "bfloat16"}),
    "mars-lion": (MARS, {"variant": "lion", "clip": None}),
    "mars-muon": (MARS, {"variant": "muon", "ns_dtype": "float32"}),
    "mars-muon-cans": (MARS, {"variant": "muon", "ns_dtype": "float32", "ns_coefficients": "cans"}),
    "mars-shampoo-cautious": (
        MARS,
        {"variant": "shampoo", "ns_dtype": "float32", "weight_decay_method": "cautious", "capturable": True},
    ),
    "sonew-1": (SONew, {"band": 1}),
    "sonew-2": (SONew, {"band": 2, "graft": "momentum"}),
    "ldadam": (LDAdam, {"rank": 3}),
    "ldadam-bf16-error": (LDAdam, {"rank": 3, "error_dtype": "bfloat16"}),
    "ldadam-int8-error": (LDAdam, {"rank": 3, "error_dtype": "int8"}),
    "ldadam-no-error": (LDAdam, {"rank": 3, "error_feedback": False}),
}


def _trained(name: str, module: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 12))
    kind, options = KINDS[name]
    optimizer = kind(list(model.named_parameters()), lr=1e-2, weight_decay=0.1, **options)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(16, 9, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        with using(module):
            optimizer.step()
    return {key: value.detach().clone() for key, value in model.named_parameters()}


@pytest.mark.parametrize("name", KINDS)
def test_the_weights_are_the_same(name: str, interpreter: None) -> None:
    plain, fused = _trained(name, foreach), _trained(name, triton)
    for key, weight in plain.items():
        torch.testing.assert_close(fused[key], weight, rtol=0.0, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["mars-adamw", "sonew-1", "ldadam", "mars-muon"])
def test_the_kernels_are_what_ran(name: str, launches: list[str]) -> None:
    _trained(name, triton)
    assert len(launches) >= 4 * 3
    if name == "ldadam":
        # Three matrices of two shapes, whose first step is another.
        assert launches.count("_moments_kernel") == 3 * 2
