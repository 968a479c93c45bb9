"""The types of the play-book: every name of ours, and for every option that changes a mechanism a variant of each.

Nothing is listed by hand but what tiny models need: names come from :mod:`rankwise.names`, variants from the fields of
the options, so that a new name or option has its rows without a word here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rankwise.names import BY_NAME
from rankwise.options.by_pattern import StateDtypes
from rankwise.options.checks import Check, Choice, Flag, FloatType, OrNone
from rankwise.options.fields import Option

__all__ = ["ADAMW", "KINDS", "Kind", "variants"]

RATE, DECAY = 2.0**-7, 0.125
"""Exact in every type, so that a rate may become a tensor."""
_TINY: Mapping[str, Mapping[str, Any]] = {
    "LDAdam": {"rank": 2},
    "MKOR": {"update_interval": 1, "factor_dtype": "float32"},
    "MARS": {"ns_dtype": "float32"},
}
"""What matrices of ten rows need, and what makes a product the same on every machine."""
_OF_SKETCHES = {"rule": "sketch"}
_NOT_ALONE = ("comm_dtype", "tp_mode")
"""Options of what travels or is cut: one process has neither."""


@dataclass(frozen=True)
class Kind:
    """A type with its options.

    Attributes:
        name: As the page has it.
        optimizer: Our name of it, or ``adamw`` for torch's.
        options: The constructor's, rates apart.
        varied: Whether it is a variant of an option.
    """

    name: str
    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    varied: bool = False

    @property
    def is_adamw(self) -> bool:
        """Whether it is what the others are judged by."""
        return self.optimizer == "adamw"

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return torch.bfloat16 if self.options.get("store_param_remainders") else torch.float32

    @property
    def width(self) -> int:
        """Width of the network: tensors below 4,096 elements have no states in 8 bits."""
        return 64 if "int8" in self.options.values() else 10

    def build(self, groups: Any) -> Any:
        """The optimizer on groups of named parameters."""
        if self.is_adamw:
            return torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY)
        return BY_NAME[self.optimizer].optimizer(groups, **{"lr": RATE, "weight_decay": DECAY, **self.options})


ADAMW = Kind("adamw", "adamw")


def _plain(name: str) -> Kind:
    known = BY_NAME[name]
    tiny = {k: v for k, v in _TINY.get(known.optimizer.__name__, {}).items()}
    return Kind(name, name, {**tiny, **known.preset})


KINDS: dict[str, Kind] = {name: _plain(name) for name in BY_NAME}
KINDS["mkor-sketch"] = Kind("mkor-sketch", "mkor", {"factor_dtype": "float32", **_OF_SKETCHES})


def _others(known: Option) -> Iterator[Any]:
    """Values of an option that take another way through the code than its default."""
    check: Check = known.check.check if isinstance(known.check, OrNone) else known.check
    if isinstance(check, Flag):
        yield not known.default
    elif isinstance(check, Choice):
        yield from (choice for choice in check.choices if choice != known.default)
    elif isinstance(check, StateDtypes):
        yield from ("bfloat16", "int8")
    elif isinstance(check, FloatType):
        yield from (dtype for dtype in ("bfloat16", "float32") if dtype != known.default)
    if isinstance(known.check, OrNone) and known.default is not None:
        yield None


def variants(names: Any = None) -> dict[str, Kind]:
    """By name: each type once with every other value of every option that chooses a mechanism."""
    found = {}
    for base in [KINDS[name] for name in names or KINDS]:
        for key, known in BY_NAME[base.optimizer].optimizer.options_type.table().items():
            if key in BY_NAME[base.optimizer].preset or key in _NOT_ALONE:
                continue
            for value in _others(known):
                if base.options.get(key, known.default) != value:
                    name = f"{base.name} {key}={value}"
                    found[name] = Kind(name, base.optimizer, {**base.options, key: value}, varied=True)
    return found


class Network(nn.Module):
    """Matrices of three shapes, with and without bias, and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, width)
        self.mid = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(torch.tanh(self.mid(torch.tanh(self.up(x))))))


def network(kind: Kind, seed: int = 0) -> Network:
    """The same weights for every type."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return Network(kind.width).to(kind.dtype)
