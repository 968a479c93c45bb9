"""Short runs of every type in every form, all calls of an optimizer made inside something; and what they leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from surrounding_kinds import Around
from torch import Tensor, nn

import rankwise
from rankwise.kernels import dispatch, lists

__all__ = ["FORMS", "TYPES", "Form", "Type", "bits", "network", "plain_run", "run", "same_bits"]

STEPS = 4


@dataclass(frozen=True)
class Type:
    """A class with options; whether it watches the model's layers."""

    cls: type[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    forms: tuple[str, ...] = ()

    @property
    def captures(self) -> bool:
        return self.cls is rankwise.MKOR and self.options.get("rule") != "sketch"


@dataclass(frozen=True)
class Form:
    """Options of states, the weights' type, and whether compiled kernels are left out."""

    options: Mapping[str, Any] = field(default_factory=dict)
    weights: torch.dtype = torch.float32
    in_lists: bool = False


TYPES: dict[str, Type] = {
    "MARS-AdamW": Type(rankwise.MARS, {"variant": "adamw"}),
    "MARS-Lion": Type(rankwise.MARS, {"variant": "lion"}),
    "MARS-Shampoo": Type(rankwise.MARS, {"variant": "shampoo"}),
    "MARS-M": Type(rankwise.MARS, {"variant": "muon"}),
    "MARS-M, float32": Type(rankwise.MARS, {"variant": "muon", "ns_dtype": "float32"}),
    "MARS-AdamW, exact": Type(rankwise.MARS, {"exact": True}),
    "SONew, diagonal": Type(rankwise.SONew, {"band": 0}),
    "SONew": Type(rankwise.SONew, {"band": 1}),
    "SONew, band 4": Type(rankwise.SONew, {"band": 4}),
    "LDAdam": Type(rankwise.LDAdam, {"rank": 4}),
    "MKOR": Type(rankwise.MKOR, {"update_interval": 2}),
    "MKOR, sketch": Type(rankwise.MKOR, {"rule": "sketch", "update_interval": 2}),
    "MKOR, float32": Type(rankwise.MKOR, {"rule": "sketch", "factor_dtype": "float32", "product_dtype": "float32"}),
    "MKOR-H": Type(rankwise.MKOR, {"update_interval": 2, "hybrid": True, "hybrid_min_steps": 2}),
}

FORMS: dict[str, Form] = {
    "compiled": Form(),
    "lists": Form(in_lists=True),
    "bfloat16 states": Form({"state_dtype": "bfloat16"}),
    "int8 states": Form({"state_dtype": "int8"}),
    "int8 states in lists": Form({"state_dtype": "int8"}, in_lists=True),
    "bfloat16 weights": Form(weights=torch.bfloat16),
    "remainders": Form({"store_param_remainders": True}, torch.bfloat16),
    "undone": Form({"skip_nonfinite": True}),
}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Matrices of more elements than 8 bits ask for, a norm, and biases."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Tanh(), nn.Linear(96, 64, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + 0.05)
    return model.to(dtype)


def propagate(model: nn.Module, index: int) -> Tensor:
    """The loss of a batch; its gradients are there."""
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(index + 1), dtype=torch.float32, device="cpu")
    loss = (model(values.to(next(model.parameters()).dtype)).float() - 1.0).square().mean()
    loss.backward()
    return loss.detach()


def bits(found: Any, name: str = "") -> dict[str, Any]:
    """Everything in nested dictionaries and lists, flat, by where it lies."""
    if isinstance(found, Mapping):
        return {key: value for part, inner in found.items() for key, value in bits(inner, f"{name}/{part}").items()}
    if isinstance(found, (list, tuple)):
        return bits(dict(enumerate(found)), name)
    return {name: found.detach().clone() if isinstance(found, Tensor) else found}


def same_bits(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Where two differ: in the type, in a bit, in the mark of inference mode."""
    wrong = sorted(found.keys() ^ wanted.keys())
    for name in found.keys() & wanted.keys():
        one, other = found[name], wanted[name]
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            alike = one.dtype == other.dtype and one.device == other.device and one.shape == other.shape
            if not alike or not torch.equal(one.nan_to_num(), other.nan_to_num()):
                wrong.append(f"{name}: {one.dtype} on {one.device}")
        elif type(one) is not type(other) or (one != other and one == one):
            wrong.append(f"{name}: {one!r} instead of {other!r}")
    return wrong


class Run:
    """A model and its optimizer, every call of which is made inside something."""

    def __init__(self, kind: Type, form: Form, around: Around) -> None:
        self.kind, self.form, self.around = kind, form, around
        self.model = network(form.weights)
        self.optimizer = self.built()

    def built(self) -> Any:
        options = {"lr": 1e-2, **self.kind.options, **self.form.options}
        with self.around():
            optimizer = self.kind.cls(self.model.named_parameters(), **options)
            if self.kind.captures:
                optimizer.capture(self.model)
        return optimizer

    def step(self, index: int, take: Callable[[], Any] | None = None) -> None:
        if self.kind.options.get("exact"):
            self.model.zero_grad()
            propagate(self.model, index + 1)
            with self.around():
                self.optimizer.record_reference()
        with self.around():
            self.optimizer.zero_grad()
        loss = propagate(self.model, index)
        with self.around():
            self.optimizer.record_loss(loss)
            (take or self.optimizer.step)()

    def resume(self) -> None:
        """By another optimizer, from a dictionary."""
        with self.around():
            saved = self.optimizer.state_dict()
            self.optimizer.release()
        self.optimizer = self.built()
        with self.around():
            self.optimizer.load_state_dict(saved)

    def left(self) -> dict[str, Any]:
        with self.around():
            health = self.optimizer.read_health()
            explained = [str(line) for line in self.optimizer.explain()]
            saved = self.optimizer.state_dict()
        weights = dict(self.model.named_parameters())
        assert not any(value.is_inference() for value in bits([saved, weights]).values() if isinstance(value, Tensor))
        return bits({"weights": weights, "saved": saved, "health": health, "explained": explained})


def run(kind: Type, form: Form, around: Around = nullcontext, take: Callable[[Run], Any] | None = None) -> Any:
    """What a run leaves that is saved and resumed on its way.

    Args:
        kind: The type.
        form: The form.
        around: What every call is made inside.
        take: Makes what takes the steps of an optimizer; None: its own method.
    """
    with dispatch.using(lists) if form.in_lists else nullcontext():
        live = Run(kind, form, around)
        for index in range(STEPS):
            live.step(index, None if take is None else take(live))
            if index == STEPS // 2:
                live.resume()
        return live.left()


@cache
def plain_run(kind: str, form: str) -> Any:
    """The run with nothing around it."""
    return run(TYPES[kind], FORMS[form])
