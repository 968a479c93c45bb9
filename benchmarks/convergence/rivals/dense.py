"""K-FAC with dense factors and Eva, in front of SGD: the relatives of MKOR, for fully connected models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["KFAC", "Eva", "Layer"]


@dataclass(eq=False)
class Layer:
    """A linear module with a bias and what its last forward and backward pass showed.

    Attributes:
        module: The module.
        inputs: Inputs of the last batch with a final 1, (samples, inputs + 1).
        output_grads: Output grads of the mean loss, (samples, outputs).
    """

    module: nn.Linear
    inputs: Tensor | None = None
    output_grads: Tensor | None = None

    def watch(self) -> Layer:
        """Hooks the module."""
        self.module.register_forward_hook(self._seen)
        return self

    def _seen(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        if output.requires_grad:
            rows = inputs[0].detach()
            self.inputs = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
            output.register_hook(self._returned)

    def _returned(self, grad: Tensor) -> None:
        self.output_grads = grad

    @property
    def grad(self) -> Tensor:
        """The gradient of weight and bias side by side, (outputs, inputs + 1)."""
        return torch.cat([self.module.weight.grad, self.module.bias.grad[:, None]], 1)

    def take(self, direction: Tensor) -> None:
        """Makes a direction of the shape of :attr:`grad` the gradient."""
        self.module.weight.grad.copy_(direction[:, :-1])
        self.module.bias.grad.copy_(direction[:, -1])


class _Preconditioned:
    """SGD behind a preconditioner of every linear layer.

    Args:
        model: All of whose parameters are linear layers'.
        lr: Learning rate.
        momentum: Momentum of SGD.
        interval: Steps between two updates of the statistics.
        decay: Decay of their averages.
        damping: See the classes.
        scale: "norm": the gradient's norm, layer by layer, as MKOR does; "kl": as K-FAC and Eva are published, all
            layers by ``min(1, sqrt(0.001 / sum of lr^2 <direction, gradient>))``.
    """

    _KL = 1e-3

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        momentum: float = 0.9,
        interval: int = 10,
        decay: float = 0.95,
        damping: float = 1e-2,
        scale: str = "norm",
    ) -> None:
        self.layers = [Layer(module).watch() for module in model.modules() if isinstance(module, nn.Linear)]
        self._sgd = torch.optim.SGD(model.parameters(), lr, momentum=momentum)
        self.param_groups = self._sgd.param_groups
        self.interval, self.decay, self.damping, self.scale = interval, decay, damping, scale
        self.kept: dict[Layer, dict[str, Tensor]] = {layer: {} for layer in self.layers}
        self._steps = 0

    @property
    def state(self) -> dict[Any, Any]:
        """SGD's, and the statistics."""
        return {**self._sgd.state, **self.kept}

    def zero_grad(self) -> None:
        """See torch."""
        self._sgd.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """See torch."""
        if self._steps % self.interval == 0:
            for layer in self.layers:
                self.observe(layer)
        self._steps += 1
        grads = [layer.grad for layer in self.layers]
        directions = [self.direction(layer, grad) for layer, grad in zip(self.layers, grads, strict=True)]
        for layer, factor, direction in zip(self.layers, self._scales(grads, directions), directions, strict=True):
            layer.take(factor * direction)
        self._sgd.step()

    def observe(self, layer: Layer) -> None:
        """Takes the last batch into the statistics of a layer."""
        raise NotImplementedError

    def direction(self, layer: Layer, grad: Tensor) -> Tensor:
        """A gradient preconditioned, before its scaling."""
        raise NotImplementedError

    def averaged(self, layer: Layer, **values: Tensor) -> list[Tensor]:
        """Running averages of a layer's statistics, which begin with their first values."""
        kept = self.kept[layer]
        for name, value in values.items():
            kept[name] = torch.lerp(value, kept[name], self.decay) if name in kept else value
        return [kept[name] for name in values]

    def _scales(self, grads: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        pairs = list(zip(grads, directions, strict=True))
        if self.scale == "norm":
            return [grad.norm() / direction.norm().clamp(min=1e-30) for grad, direction in pairs]
        lr = self.param_groups[0]["lr"]
        size = sum(lr**2 * (grad * direction).sum() for grad, direction in pairs)
        return [(self._KL / size.clamp(min=1e-30)).sqrt().clamp(max=1.0)] * len(pairs)


class KFAC(_Preconditioned):
    """Martens and Grosse, arXiv 1503.05671: dense Kronecker factors of the empirical Fisher, inverted.

    ``damping`` is split between the factors by their mean eigenvalues.
    """

    def observe(self, layer: Layer) -> None:
        """See the base class."""
        count = len(layer.inputs)
        inputs, outputs = self.averaged(
            layer,
            inputs=layer.inputs.T @ layer.inputs / count,
            # The gradients are of a mean over samples: times count they are a sample's own.
            outputs=layer.output_grads.T @ layer.output_grads * count,
        )
        share = (inputs.diagonal().mean() / outputs.diagonal().mean().clamp(min=1e-30)).sqrt()
        root = self.damping**0.5
        for name, factor, damping in (("right", inputs, root * share), ("left", outputs, root / share)):
            damped = factor + damping * torch.eye(len(factor))
            self.kept[layer][name] = torch.cholesky_inverse(torch.linalg.cholesky(damped))

    def direction(self, layer: Layer, grad: Tensor) -> Tensor:
        """See the base class."""
        return self.kept[layer]["left"] @ grad @ self.kept[layer]["right"]


class Eva(_Preconditioned):
    """Zhang et al., arXiv 2308.02123: mean input and mean output gradient in place of the factors.

    ``damping`` is added to the rank-1 matrix of the two vectors.
    """

    def observe(self, layer: Layer) -> None:
        """See the base class."""
        self.averaged(layer, right=layer.inputs.mean(0), left=layer.output_grads.sum(0))

    def direction(self, layer: Layer, grad: Tensor) -> Tensor:
        """See the base class."""
        left, right = self.kept[layer]["left"], self.kept[layer]["right"]
        share = (left @ grad @ right) / (self.damping + left.square().sum() * right.square().sum())
        return (grad - share * torch.outer(left, right)) / self.damping
