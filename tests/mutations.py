"""Random slips in option blocks and flags, the same for the same seed, and what an optimizer may do with them."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rankwise.routing.roles import annotate

NUMBERS: tuple[Any, ...] = (
    *(0, 1, 2, 3, 7, 33, 101, -1, -7, 500, 10**6, 10**9, 10**12, 2**63, 2**64, 10**400, -(10**400)),
    *(0.0, -0.0, 1e-3, 0.5, 0.9, 1.0, 1.5, 0.9999999999, 1e-30, 1e-300, 5e-324, -0.1, 1e3, 1e6, 1e7, 1e30, 1e300),
    *(math.nan, math.inf, -math.inf),
)
WORDS = (
    *("", "auto", "none", "None", "null", "true", "0.1", "1e-3", "bf16", "float32", "float16", "bfloat16", "half"),
    *(
        "adam",
        "adamw",
        "sgd",
        "lamb",
        "muon",
        "lion",
        "MARS-M",
        "row",
        "tensor",
        "exact",
        "block",
        "joint",
        "*",
        "zebra",
    ),
)
SHAPES: tuple[Any, ...] = (None, True, False, [], {}, [0.9], [0.9, 0.99], [0.9, 0.99, 0.5], [0, 0], [None, 0.9])
MORE: tuple[Any, ...] = (["a", "b"], [[0.9], 0.9], {"lr": 1}, ["*bias"], ["*0*", "*2*"], [0.5, 1.5], [True, False])
DTYPES = ("bfloat16", "float32", "float64", "float16")


def value(rng: random.Random) -> Any:
    """Of any kind."""
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(NUMBERS)
    return rng.choice(WORDS) if kind < 0.75 else rng.choice((*SHAPES, *MORE))


def near(rng: random.Random, present: Any) -> Any:
    """A value much like ``present``."""
    if isinstance(present, bool):
        return not present
    if isinstance(present, int | float):
        other = present if abs(present) > 1e300 else float(present)
        return rng.choice((present * rng.choice((0, 2, -1, 10, 1000)), "1", [present], other))
    if isinstance(present, list | tuple):
        return rng.choice((list(present)[::-1], [near(rng, part) for part in present], list(present) * 2, *present))
    return misspelt(rng, present) if isinstance(present, str) else value(rng)


def misspelt(rng: random.Random, word: str) -> str:
    """One slip of the pen."""
    if len(word) < 2:
        return word + rng.choice(string.ascii_lowercase)
    place = rng.randrange(len(word) - 1)
    return rng.choice(
        (
            word[:place] + word[place + 1 :],
            word[:place] + word[place] + word[place:],
            word[:place] + word[place + 1] + word[place] + word[place + 2 :],
            word[:place] + rng.choice(string.ascii_lowercase) + word[place + 1 :],
            word.upper(),
            word.replace("_", "-"),
            word + "s",
        )
    )


class Network(nn.Module):
    """Two linear layers, a norm and an embedding, with a loss whose gradients are all there."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 24)
        self.up = nn.Linear(24, 40)
        self.norm = nn.LayerNorm(40)
        self.down = nn.Linear(40, 24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(self.embedding(tokens)).tanh())).square().mean()


def trial(build: Callable[[nn.Module], Any], expected: Mapping[str, Any], steps: int = 2) -> None:
    """Build an optimizer and step it; whatever it raises is for the caller.

    Args:
        build: Makes it for a model.
        expected: Its options as they were written, which must be those it has.
        steps: How many.
    """
    torch.manual_seed(0)
    model = Network()
    annotate(model)
    optimizer = build(model)
    for key, written in expected.items():
        have = getattr(optimizer.options, key)
        assert have == (tuple(written) if isinstance(written, list) else written), (key, have, written)
    optimizer.capture(model)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randint(0, 12, (6,), generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
    options = optimizer.options
    if min(options.eps, getattr(options, "graft_eps", 1)) < torch.finfo(torch.float32).tiny:
        return  # a warning has said what becomes of weights without gradients
    broken = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    assert not broken, f"not finite without a word: {broken}"
