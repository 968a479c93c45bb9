"""What is trained: a model, its batches in an order that the seed alone decides, and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.convergence.data import images, text
from rankwise.launch.models import build_model
from rankwise.launch.sampler import WindowSampler, validation_batches

__all__ = ["Task", "make_task"]


class Task(ABC):
    """A model and its data.

    Attributes:
        model: With weights drawn from the seed.
        clip: Largest norm of the whole gradient, if there is one.
    """

    model: nn.Module
    clip: float | None = None

    @abstractmethod
    def loss(self, step: int) -> Tensor:
        """Loss of a step's batch, with its graph."""

    def gradient(self, step: int) -> Tensor:
        """Puts the gradient of a step's batch into the parameters; its loss, without a graph."""
        self.model.zero_grad()
        loss = self.loss(step)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return loss.detach()

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Losses of the model as it is, over all there is to measure them on."""


class Autoencoder(Task):
    """Fully connected, tanh, with the binary cross-entropy of the pixels in nats per image.

    Args:
        data: "digits" or "blobs".
        pixels: Pixels of a side.
        widths: Widths of the hidden layers down to the code; the way back mirrors them.
        batch: Images of a step; epochs are shuffled, and their last incomplete batch is left out.
        seed: Seed of weights and order.
    """

    def __init__(self, data: str, pixels: int, widths: tuple[int, ...], batch: int, seed: int) -> None:
        self.train, self.held_out = images(data, pixels)
        self.batch = batch
        self._order = torch.Generator().manual_seed(seed)
        self._epoch: list[Tensor] = []
        self._next = 0
        torch.manual_seed(seed)
        sides = [pixels**2, *widths]
        sides += sides[-2::-1]
        layers = [part for rows, columns in pairwise(sides) for part in (nn.Linear(rows, columns), nn.Tanh())]
        self.model = nn.Sequential(*layers[:-1])
        for layer in self.model[::2]:
            # With torch's own, a third of that variance, hardly anything reaches the code.
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def loss(self, step: int) -> Tensor:
        """See the base class; steps come in order.

        Raises:
            ValueError: This is not the step after the last one.
        """
        if step != self._next:
            raise ValueError(f"step {step} comes after {self._next - 1}: the order of the images goes on from there")
        self._next += 1
        if not self._epoch:
            order = torch.randperm(len(self.train), generator=self._order)
            self._epoch = list(order[: len(order) // self.batch * self.batch].split(self.batch))
        return self._loss(self.train[self._epoch.pop()])

    def everything(self) -> Tensor:
        """The loss on all images of the training set, with its graph."""
        return self._loss(self.train)

    def _loss(self, rows: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.model(rows), rows, reduction="sum") / len(rows)

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """See the base class; ``floor`` is the loss of perfect reconstructions."""
        floor = F.binary_cross_entropy(self.train, self.train, reduction="sum") / len(self.train)
        return {
            "train_loss": float(self.everything()),
            "validation_loss": float(self._loss(self.held_out)),
            "floor": float(floor),
        }


class LanguageModel(Task):
    """GPT-2's shape on bytes of the standard library's sources, in nats per byte.

    Args:
        layers: Blocks.
        hidden: Width.
        heads: Heads of attention.
        window: Bytes of a sample.
        batch: Samples of a step.
        clip: See the base class.
        seed: Seed of weights and order.

    Attributes:
        validation_windows: How many the validation loss is the mean of.
    """

    validation_windows = 512
    _AT_ONCE = 64

    def __init__(self, layers: int, hidden: int, heads: int, window: int, batch: int, clip: float, seed: int) -> None:
        self.clip = clip
        self.corpus = text()
        self.window = window
        self._sampler = WindowSampler(self.corpus.train, window, batch, 1, 1, seed)
        torch.manual_seed(seed)
        size = self.corpus.vocab_size
        self.model = build_model("gpt2", vocab_size=size, layers=layers, hidden=hidden, heads=heads, seq_len=window)

    def loss(self, step: int) -> Tensor:
        """See the base class."""
        return self._losses(self._sampler.batch(step, 0, 0)).mean()

    def _losses(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens[:, :-1]).logits
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return losses.view(len(tokens), -1).mean(1)

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """See the base class."""
        batches = validation_batches(self.corpus.validation, self.window, self.validation_windows, self._AT_ONCE, 0, 1)
        losses = torch.cat([self._losses(tokens) for tokens, _ in batches])
        return {"validation_loss": float(losses.mean())}


_TASKS: dict[str, Callable[..., Task]] = {"autoencoder": Autoencoder, "language model": LanguageModel}


def make_task(description: Mapping[str, Any], seed: int) -> Task:
    """A task from its description in a :class:`~benchmarks.convergence.experiment.Run`.

    Args:
        description: ``kind`` and the keywords of that task.
        seed: Seed of weights and order.
    """
    keywords = dict(description)
    return _TASKS[keywords.pop("kind")](**keywords, seed=seed)
