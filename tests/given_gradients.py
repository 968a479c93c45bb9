"""A small network whose gradients are given, in memory that stays: what a graph of its step reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class Training:
    """A stack of linear layers with an optimizer, and a learning rate that is changed in place.

    Args:
        kind: Class of the optimizer.
        options: Its options; they go before the learning rate and the weight decay that are usual here.
        widths: Widths of the layers.
        device: Device of everything.
    """

    def __init__(
        self, kind: Any, options: Mapping[str, Any], widths: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(*width) for width in pairwise(widths))).to(device)
        self.lr = torch.tensor(0.01, device=device)
        self.optimizer = kind(self.model.named_parameters(), **{"lr": self.lr, "weight_decay": 0.1, **options})
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def prepare(self, index: int) -> None:
        """Write the gradients and the learning rate of a step."""
        generator = torch.Generator().manual_seed(index)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
        self.lr.fill_(0.01 / (1 + index))

    def step(self, index: int) -> None:
        """One step."""
        self.prepare(index)
        self.optimizer.step()

    def captured(self, steps: int) -> torch.cuda.CUDAGraph:
        """A graph of the step after as many ordinary ones, whose gradients are prepared.

        As PyTorch asks: what runs before a capture runs on another stream than the default one.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for index in range(steps):
                self.step(index)
        torch.cuda.current_stream().wait_stream(side)
        self.prepare(steps)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.optimizer.step()
        return graph

    def values(self) -> list[Tensor]:
        """Weights and states, flattened."""
        states = [*self.optimizer.state.values(), *self.optimizer.matrix_states.values()]
        found = [*self.model.parameters(), *(value for state in states for value in state.values())]
        return [value.detach().cpu().reshape(-1) for value in found]
