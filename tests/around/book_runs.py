"""How a user holds a model and an optimizer: in one process, under DistributedDataParallel, under FSDP2.

A run offers what events and entry points act on, and the *ways* in which its framework lets a user clear gradients and
edit weights; the play-book makes an event of each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from book_kinds import Kind, network
from saved_files import through_a_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["LOOPS", "Run"]

SAMPLES = 6


class Run:
    """A model in training, in one process.

    Attributes:
        offers: What events and entry points may ask for, see `book_events`.
        module: The user's model.
        model: What is called.
        optimizer: What the user steps.
    """

    framework: ClassVar[str] = "plain"
    world: ClassVar[int] = 1
    offers: ClassVar[frozenset[str]] = frozenset({"loop", "whole", "copies", "groups", "state", "alone", "dcp"})

    before: ClassVar[tuple[int, ...]] = (0, 1)
    """Steps before an event."""
    middle: ClassVar[str] = "mid.weight"
    """A matrix without a bias."""

    def __init__(self, kind: Kind, start: Mapping[str, Tensor] | None = None) -> None:
        self.kind = kind
        self.module: Any = network(kind)
        if start is not None:
            with torch.no_grad():
                for name, value in self.module.named_parameters():
                    value.copy_(start[name])
        self.model: Any = self.wrapped(self.module)
        self.optimizer: Any = None
        self.build(self.first_groups())

    @classmethod
    def start(cls) -> None:
        """Called once on every rank."""

    @classmethod
    def stop(cls) -> None:
        """Called once at the end."""

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.world > 1 else 0

    def wrapped(self, module: nn.Module) -> nn.Module:
        return module

    # --- building -------------------------------------------------------------------------------------------------

    def named(self) -> dict[str, Any]:
        """Parameters by the names of the unwrapped model."""
        return dict(self.module.named_parameters())

    def first_groups(self) -> list[dict[str, Any]]:
        """Matrices, and the rest without decay."""
        named = list(self.named().items())
        return [
            {"params": [pair for pair in named if pair[1].dim() > 1]},
            {"params": [pair for pair in named if pair[1].dim() < 2], "weight_decay": 0.0},
        ]

    def present_groups(self) -> list[dict[str, Any]]:
        """Groups as they are now, for another optimizer to be built on."""
        names = {id(value): name for name, value in self.named().items()}
        return [
            {
                **{key: value for key, value in group.items() if key not in ("params", "param_names")},
                "params": [(names.get(id(value), f"late.{at}"), value) for at, value in enumerate(group["params"])],
            }
            for group in self.inner.param_groups
        ]

    def build(self, groups: Any) -> None:
        """Another optimizer in the place of this one, which nobody takes leave of."""
        self.optimizer = self.kind.build(groups)
        self.capture()

    def capture(self) -> None:
        """Statistics, where the type wants them."""
        if getattr(self.inner, "needs_capture", False):
            self.inner.capture(self.model)

    @property
    def inner(self) -> Any:
        """What has param groups and states."""
        return self.optimizer

    @property
    def first(self) -> Any:
        """A module at the beginning."""
        return self.module.up

    @property
    def last(self) -> Any:
        """A module at the end."""
        return self.module.down

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Param groups, where a user writes rates."""
        return self.optimizer.param_groups

    def close(self) -> None:
        """The end of the run."""

    # --- training -------------------------------------------------------------------------------------------------

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * index + self.rank)
        inputs = torch.randn(SAMPLES, 6, generator=generator)
        return inputs.to(self.kind.dtype), torch.randn(SAMPLES, 4, generator=generator).to(self.kind.dtype)

    def loss(self, index: int) -> Tensor:
        """A forward pass."""
        inputs, targets = self.batch(index)
        weight = next(iter(self.module.parameters()))
        found = self.model(inputs.to(weight.dtype))
        return (found - targets.to(found.dtype)).square().mean()

    def forward_alone(self, index: int) -> None:
        """A forward pass of the user's model, by whichever rank calls it."""
        self.module(self.batch(index)[0])

    def backward(self, index: int, factor: float = 1.0) -> Tensor:
        """Gradients of a batch."""
        loss = self.loss(index)
        (loss * factor).backward()
        return loss.detach()

    def step(self) -> Any:
        return self.optimizer.step()

    def report(self, loss: Tensor) -> None:
        """The loss, where the type asks for it."""
        if getattr(self.inner, "needs_loss", False):
            self.inner.record_loss(loss)

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def train(self, index: int) -> None:
        """A whole step."""
        self.report(self.backward(index))
        self.step()
        self.clear()

    # --- what a user has ------------------------------------------------------------------------------------------

    @property
    def ways_to_clear(self) -> dict[str, Callable[[], Any]]:
        """Every way to get rid of gradients."""

        def each(act: Callable[[Any], Any]) -> Callable[[], Any]:
            return lambda: [act(value) for value in self.module.parameters() if value.grad is not None]

        return {
            "optimizer.zero_grad()": lambda: self.optimizer.zero_grad(),
            "optimizer.zero_grad(set_to_none=False)": lambda: self.optimizer.zero_grad(set_to_none=False),
            "model.zero_grad()": lambda: self.model.zero_grad(),
            "model.zero_grad(set_to_none=False)": lambda: self.model.zero_grad(set_to_none=False),
            "p.grad = None": each(lambda value: setattr(value, "grad", None)),
            "p.grad.zero_()": each(lambda value: value.grad.zero_()),
        }

    @property
    def ways_to_edit(self) -> dict[str, Callable[[], Any]]:
        """Every way to change weights."""
        return {
            "in place": self._in_place,
            "by p.data = …": self._rebound,
            "by model.load_state_dict": lambda: self.module.load_state_dict(self._edited()),
            "by model.load_state_dict(assign=True)": lambda: self.module.load_state_dict(self._edited(), assign=True),
        }

    def _edited(self) -> dict[str, Tensor]:
        return {name: value.detach() * 0.5 for name, value in self.module.state_dict().items()}

    def _in_place(self) -> None:
        with torch.no_grad():
            for value in self.module.parameters():
                value.mul_(0.5)

    def _rebound(self) -> None:
        for value in self.module.parameters():
            value.data = value.data * 0.5

    def weights(self) -> dict[str, Tensor]:
        """Whole weights, copied. A call of all ranks."""
        return {name: whole(value) for name, value in self.named().items()}

    def saved(self) -> Any:
        """A checkpoint: weights and states, through a file. A call of all ranks."""
        return through_a_file({"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, saved: Any) -> None:
        """Go on from a checkpoint."""
        self.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def fresh(self) -> Run:
        """Another run that begins with these weights and groups."""
        self.build(self.present_groups())
        return self

    def rebuilt(self) -> Run:
        """What a new process would make of a checkpoint, which knows nothing but that and the groups' options."""
        new = type(self)(self.kind, start=self.weights())
        new.regroup(self)
        new.optimizer.load_state_dict(self.carried())
        return new

    def carried(self) -> Any:
        """States as another process gets them."""
        return through_a_file(self.optimizer.state_dict())

    def regroup(self, other: Run) -> None:
        """As the other's groups are; what is not of its model is copied."""
        named = self.named()
        for (_, value), (_, old) in zip(named.items(), other.named().items(), strict=True):
            value.requires_grad_(old.requires_grad)
        groups = other.present_groups()
        if [[name for name, _ in group["params"]] for group in groups] == [
            [name for name, _ in group["params"]] for group in self.first_groups()
        ]:
            return
        for group in groups:
            group["params"] = [
                (name, named[name] if name in named else nn.Parameter(value.detach().clone()))
                for name, value in group["params"]
            ]
        self.build(groups)


def whole(value: Any) -> Tensor:
    found = value.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).clone()


class DDP(Run):
    """Two ranks that hold the model alike."""

    framework = "DDP"
    world = 2
    offers = frozenset({"loop", "whole", "groups", "state", "ranks", "dcp"})

    def wrapped(self, module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module)


class FSDP2(Run):
    """Two ranks with half of every parameter each."""

    framework = "FSDP2"
    world = 2
    offers = frozenset({"loop", "groups", "state", "ranks", "dcp"})

    def wrapped(self, module: nn.Module) -> nn.Module:
        return fully_shard(module)

    def carried(self) -> Any:
        return copy.deepcopy(self.optimizer.state_dict())

    def saved(self) -> Any:
        return copy.deepcopy({"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()})


LOOPS: Iterable[type[Run]] = (Run, DDP, FSDP2)
