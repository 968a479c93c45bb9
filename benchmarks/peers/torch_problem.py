"""The small problems on which the checks of torch's records run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Problem", "Trial", "close", "hear"]


def hear(optimizer: Any, model: nn.Module) -> None:
    """Let an optimizer of ours that takes statistics take them from a model; again after it was copied.

    Args:
        optimizer: Any.
        model: Whose parameters it has.
    """
    if getattr(optimizer, "needs_capture", False):
        optimizer.capture(model)


@dataclass(frozen=True)
class Trial:
    """A record, one of its inputs, and how an optimizer is made of both.

    Attributes:
        info: The record.
        options: Keywords of the constructor.
    """

    info: Any
    options: Mapping[str, Any]

    def build(self, params: Iterable[Any], model: nn.Module | None = None, **more: Any) -> Any:
        """The optimizer; MKOR's statistics come of the model.

        Args:
            params: As a user hands them over.
            model: Whose they are.
            more: Further keywords.
        """
        params = list(params)
        optimizer = self.info.optim_cls(params, **{**self._fresh(), **more})
        hear(optimizer, _layers(optimizer) if model is None else model)
        return optimizer

    def _fresh(self) -> dict[str, Any]:
        """A tensor of one optimizer's rate is not another's."""
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in self.options.items()}


class _Affine(nn.Module):
    """A linear layer, its weights laid out as asked for."""

    def __init__(self, dtype: torch.dtype, contiguous: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 16, dtype=dtype)
        if not contiguous:
            self.layer.weight = nn.Parameter(torch.randn(16, 12, 2, dtype=dtype)[..., 0])
            self.layer.bias = nn.Parameter(torch.randn(16, 2, dtype=dtype)[..., 0])

    def forward(self, inputs: Tensor) -> Tensor:
        """Loss (scalar) of inputs (samples, 12)."""
        return self.layer(inputs).square().sum()


def _layers(optimizer: Any) -> nn.Module:
    """Linear layers of the matrices that an optimizer was given without a model."""
    found = nn.ModuleList()
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.dim() == 2 and not parameter.is_complex():
            found.append(nn.Linear(*reversed(parameter.shape), bias=False))
            found[-1].weight = parameter
    return found


@dataclass
class Problem:
    """A layer, what it is given, and an optimizer of it.

    Attributes:
        trial: Says which optimizer.
        dtype: Of weights and inputs.
        contiguous: Whether the weights are.
        groups: Turns the named parameters into what the optimizer is given.
        options: Further keywords of the optimizer.
    """

    trial: Trial
    dtype: torch.dtype = torch.float32
    contiguous: bool = True
    groups: Callable[[nn.Module], Iterable[Any]] = lambda model: list(model.parameters())
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = _Affine(self.dtype, self.contiguous)
        self.inputs = torch.randn(3, 12, dtype=self.dtype)
        self.optimizer: Any = self.trial.build(self.groups(self.model), self.model, **self.options)

    def closure(self) -> Tensor:
        """Loss, with gradients."""
        self.optimizer.zero_grad()
        loss = self.model(self.inputs)
        loss.backward()
        return loss

    def train(self, steps: int) -> float:
        """Steps with a closure; the last loss before one."""
        return max([self.optimizer.step(self.closure).item() for _ in range(steps)][-1:], default=0.0)

    def twin(self, **changes: Any) -> Problem:
        """The same with weights of its own, and a fresh optimizer."""
        settings = {name: getattr(self, name) for name in ("trial", "dtype", "contiguous", "groups", "options")}
        other = Problem(**{**settings, **changes})
        other.model.load_state_dict(self.model.state_dict())
        return other

    def weights(self) -> list[Tensor]:
        """Copies of the weights."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def close(found: Any, expected: Any, what: str) -> None:
    """Compare tensors, numbers, texts and whatever holds them, nothing allowed but what is equal.

    Raises:
        AssertionError: Names what differs.
    """
    assert type(found) is type(expected) or isinstance(found, Tensor), f"{what}: {type(found)}, {type(expected)}"
    if isinstance(found, Mapping):
        assert found.keys() == expected.keys(), f"{what}: {sorted(map(str, found))}, {sorted(map(str, expected))}"
        for key, value in found.items():
            close(value, expected[key], f"{what}, {key!r}")
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected), f"{what}: {len(found)} items, {len(expected)}"
        for index, (value, other) in enumerate(zip(found, expected, strict=True)):
            close(value, other, f"{what}, {index}")
    elif isinstance(found, Tensor):
        same = found.dtype == expected.dtype and torch.equal(found, expected)
        assert same, f"{what}: {found.flatten()[:3]}, {expected.flatten()[:3]}"
    else:
        assert found == expected, f"{what}: {found!r}, {expected!r}"
