"""``python -m benchmarks.gpu.race_cases PAPER DEVICE``: kernels of a paper at odd sizes, for a checker."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import rankwise
from benchmarks.models import fill_gradients

__all__ = ["PAPERS", "run_paper"]

_SIDES = ((37, 91), (65, 130), (129, 257), (91, 37))
"""Outputs and inputs of layers: no power of two among them, some larger than a tile."""
_STEPS = 3  # The second is of another kind than the first, and the third repeats it.
_MARS, _SONEW, _LDADAM, _MKOR = rankwise.MARS, rankwise.SONew, rankwise.LDAdam, rankwise.MKOR
PAPERS: Mapping[str, tuple[tuple[Callable[..., Any], dict[str, Any]], ...]] = {
    "mars": (
        *((_MARS, {"variant": variant}) for variant in ("adamw", "lion", "shampoo", "muon")),
        (_MARS, {"variant": "adamw", "state_dtype": "int8"}),
        (_MARS, {"variant": "muon", "state_dtype": "int8"}),
    ),
    "sonew": (
        *((_SONEW, {"band": band}) for band in (0, 1, 2, 4)),
        (_SONEW, {"band": 1, "chain": "tensor"}),
        (_SONEW, {"band": 1, "state_dtype": "int8"}),
    ),
    "ldadam": (
        (_LDADAM, {"rank": 5}),
        (_LDADAM, {"rank": 5, "error_dtype": "int8"}),
        (_LDADAM, {"rank": 5, "state_dtype": "int8"}),
    ),
    "mkor": (
        (_MKOR, {"update_interval": 1}),
        (_MKOR, {"update_interval": 1, "backend": "lamb"}),
        (_MKOR, {"rule": "sketch"}),
        (_MKOR, {"update_interval": 1, "state_dtype": "int8"}),
    ),
}


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for outputs, inputs in _SIDES)


def run_paper(paper: str, device: torch.device) -> int:
    """Step each of a paper's settings; how many there are.

    Raises:
        FloatingPointError: A weight is not finite.
    """
    for kind, options in PAPERS[paper]:
        torch.manual_seed(0)
        model = _Layers().to(device)
        optimizer = kind(list(model.named_parameters()), lr=1e-3, **options)
        if optimizer.needs_capture:
            optimizer.capture(model)
        for step in range(_STEPS):
            fill_gradients(model, step)
            optimizer.step()
            model.zero_grad()
        if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
            raise FloatingPointError(f"{kind.__name__} {options}: a weight is not finite")
        print(f"{kind.__name__} {options}", flush=True)
    return len(PAPERS[paper])


if __name__ == "__main__":
    run_paper(sys.argv[1], torch.device(sys.argv[2]))
