"""What a training loop does between two steps, and what may be said of it: the next step is as if it had not been."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rankwise import MKOR

STEPS, MICRO_BATCHES, WIDTH = 5, 2, 6


class Layers(nn.Module):
    """Two linear layers, one of them called twice, under checkpoints of either kind if asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)
        self.reentrant: bool | None = None

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.twice(torch.tanh(self.twice(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


def batch(number: int, rank: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank)) + 0.2


@dataclass
class Loop:
    """A training loop in one framework.

    Attributes:
        model: What is called.
        module: The module with the weights.
        optimizer: The user's.
        rank: This rank.
        backward: Propagates a loss back.
        step: Takes a step, and clears gradients.
        clear: Ways to throw gradients away.
    """

    model: Callable[[Tensor], Tensor]
    module: nn.Module
    optimizer: Any
    rank: int = 0
    backward: Callable[[Tensor], None] = lambda loss: loss.backward()
    step: Callable[[], None] = lambda: None
    clear: dict[str, Callable[[], None]] = field(default_factory=dict)

    def loss(self, number: int) -> Tensor:
        return self.model(batch(number, self.rank)).square().mean()


def plain_step(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def torch_ways(module: nn.Module, optimizer: Any) -> dict[str, Callable[[], None]]:
    def one_by_one() -> None:
        for parameter in module.parameters():
            parameter.grad = None

    return {
        "model": module.zero_grad,
        "model in place": lambda: module.zero_grad(set_to_none=False),
        "optimizer": optimizer.zero_grad,
        "optimizer in place": lambda: optimizer.zero_grad(set_to_none=False),
        "one by one": one_by_one,
    }


def thrown_away(loop: Loop, number: int, way: str, factor: float) -> None:
    loop.backward(loop.loss(number + 50) * factor)
    loop.clear[way]()


def frozen(loop: Loop, number: int) -> None:
    loop.module.requires_grad_(False)
    x = batch(number + 50, loop.rank).requires_grad_()
    loop.model(x).sum().backward()
    loop.module.requires_grad_(True)


def penalty(loop: Loop, number: int) -> None:
    x = batch(number + 50, loop.rank).requires_grad_()
    (grad,) = torch.autograd.grad(loop.model(x).sum(), x, create_graph=True)
    grad.square().sum().backward(inputs=[x])


def of_the_weights(loop: Loop, number: int) -> None:
    torch.autograd.grad(loop.loss(number + 50), list(loop.module.parameters()), allow_unused=True)


def for_the_input(loop: Loop, number: int) -> None:
    x = batch(number + 50, loop.rank).requires_grad_()
    loop.model(x).sum().backward(inputs=[x])


def evaluated(loop: Loop, number: int) -> None:
    loop.loss(number + 50)


def of_a_copy(loop: Loop, number: int) -> None:
    twin = copy.deepcopy(loop.module)
    twin(batch(number + 50, loop.rank)).sum().backward()


def failed(loop: Loop, number: int) -> None:
    """A backward pass that ends halfway."""
    x = batch(number + 50, loop.rank).requires_grad_()
    x.register_hook(_fail)
    try:
        loop.model(x).sum().backward()
    except _StopError:
        loop.clear["model"]()


def loaded(loop: Loop, number: int) -> None:
    """What has just been saved is loaded: gradients stay, and so must what was seen of them."""
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())


class _StopError(RuntimeError):
    pass


def _fail(grad: Tensor) -> None:
    raise _StopError


Event = Callable[[Loop, int], None]
WITHOUT_GRADIENTS: dict[str, Event] = {
    "frozen": frozen,
    "penalty": penalty,
    "gradients asked for": of_the_weights,
    "inputs": for_the_input,
    "evaluated": evaluated,
    "copied": of_a_copy,
    "loaded": loaded,
}
"""They leave gradients as they are, and may come between two micro-batches."""


def trajectory(loop: Loop, event: Event | None, between: bool = False, reentrant: bool | None = None) -> list[Tensor]:
    """The weights after some steps.

    Args:
        loop: Begins afresh.
        event: Comes before every step but the first.
        between: Whether it comes between two micro-batches, rather than before the first.
        reentrant: The kind of checkpoints.
    """
    for part in loop.module.modules():
        if isinstance(part, Layers):
            part.reentrant = reentrant
    for number in range(STEPS):
        for micro in range(MICRO_BATCHES):
            if event is not None and number and micro == int(between):
                event(loop, number)
            loop.backward(loop.loss(2 * number + micro))
        loop.step()
    return [parameter.detach().clone() for parameter in loop.module.parameters()]


def mkor(module: nn.Module, model: nn.Module | None = None) -> MKOR:
    optimizer = MKOR(module.named_parameters(), lr=1e-2, update_interval=2)
    optimizer.capture(module if model is None else model)
    return optimizer


def adamw(module: nn.Module, model: nn.Module | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


KINDS: dict[str, Callable[..., Any]] = {"AdamW": adamw, "MKOR": mkor}
