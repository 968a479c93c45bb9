"""What is trained: a model, its batches in an order that the seed alone decides, and its loss."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.convergence.data import images, packaged_text, text
from benchmarks.gpu.whole_models import LanguageModel as Network
from benchmarks.gpu.whole_models import Shape
from rankwise.launch.models import build_model
from rankwise.launch.sampler import WindowSampler, validation_batches

__all__ = ["Task", "captured", "make_task", "shape_of"]

_CPU = torch.device("cpu")


class Task(ABC):
    """A model and its data.

    Attributes:
        model: With weights drawn from the seed.
        clip: Largest norm of the whole gradient, if there is one.
        keeps_gradients: Whether gradients stay where they are in memory, so that nobody may set them to None.
    """

    model: nn.Module
    clip: float | None = None
    keeps_gradients = False

    def begin_at(self, step: int) -> None:  # noqa: B027 - most tasks have nothing to do
        """Go on at a step, as if those before it had been taken; the model's weights are the caller's."""

    def capture(self) -> bool:
        """Make of forward and backward a graph that is replayed, where the task can; whether it did."""
        return False

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

    def __init__(
        self, data: str, pixels: int, widths: tuple[int, ...], batch: int, seed: int, device: torch.device = _CPU
    ) -> None:
        self.train, self.held_out = (rows.to(device) for rows in images(data, pixels))
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
        self.model.to(device)

    def loss(self, step: int) -> Tensor:
        """See the base class; steps come in order.

        Raises:
            ValueError: This is not the step after the last one.
        """
        if step != self._next:
            raise ValueError(f"step {step} comes after {self._next - 1}: the order of the images goes on from there")
        return self._loss(self.train[self._rows()])

    def begin_at(self, step: int) -> None:
        """See the base class."""
        while self._next < step:
            self._rows()

    def _rows(self) -> Tensor:
        self._next += 1
        if not self._epoch:
            order = torch.randperm(len(self.train), generator=self._order)
            self._epoch = list(order[: len(order) // self.batch * self.batch].split(self.batch))
        return self._epoch.pop()

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
        device: Where it is trained; weights and windows are those of a CPU.

    Attributes:
        validation_windows: How many the validation loss is the mean of.
    """

    validation_windows = 512
    _AT_ONCE = 64

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        window: int,
        batch: int,
        clip: float,
        seed: int,
        device: torch.device = _CPU,
    ) -> None:
        self.clip = clip
        self.corpus = text()
        self.window = window
        self._sampler = WindowSampler(self.corpus.train, window, batch, 1, 1, seed)
        torch.manual_seed(seed)
        size = self.corpus.vocab_size
        model = build_model("gpt2", vocab_size=size, layers=layers, hidden=hidden, heads=heads, seq_len=window)
        self.model = model.to(device)
        self._device = device

    def loss(self, step: int) -> Tensor:
        """See the base class."""
        return self._losses(self._sampler.batch(step, 0, 0).to(self._device)).mean()

    def _losses(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens[:, :-1]).logits
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return losses.view(len(tokens), -1).mean(1)

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """See the base class."""
        batches = validation_batches(self.corpus.validation, self.window, self.validation_windows, self._AT_ONCE, 0, 1)
        losses = torch.cat([self._losses(tokens.to(self._device)) for tokens, _ in batches])
        return {"validation_loss": float(losses.mean())}


class Decoder(Task):
    """GPT-2's shape, of torch alone, on the packaged text; windows are cut out on the device, and graphs can be made.

    Args:
        layers: Blocks.
        hidden: Width.
        heads: Heads of attention.
        window: Tokens that a sample predicts.
        batch: Samples of a step.
        clip: See the base class.
        corpus: Name of the text, see :mod:`benchmarks.convergence.corpus`.
        tokens: "bytes", or "bpe" and the number of tokens: byte pairs that were learned from the text itself.
        products: Type of the products of forward and backward, "bfloat16" (by autocast) or "float32".
        parts: Equal parts of a batch that go through the model one after the other, for want of memory.
        seed: Seed of weights and order.
        device: Where it is trained; weights and windows are those of a CPU.

    Attributes:
        validation_windows: How many the validation loss is the mean of.
    """

    validation_windows = 4096
    _TOKENS_AT_ONCE = 1 << 14  # of the validation: beside a graph, whose memory stays its own
    _STEPS_AHEAD = 64  # whose windows are sent together: a copy waits for all that the device has to do

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        window: int,
        batch: int,
        clip: float,
        corpus: str,
        tokens: str,
        products: str,
        parts: int = 1,
        *,
        seed: int,
        device: torch.device = _CPU,
    ) -> None:
        if batch % parts:
            raise ValueError(f"parts is {parts}: it must divide the batch, which has {batch} samples")
        self.clip, self.window, self._device, self._parts = clip, window, device, parts
        self.corpus = packaged_text(corpus, tokens)
        self._train, self._held_out = (_signed(part, device) for part in (self.corpus.train, self.corpus.validation))
        self._sampler = WindowSampler(self.corpus.train, window, batch, 1, 1, seed)
        torch.manual_seed(seed)
        self.model = Network(shape_of(layers, hidden, heads, window, self.corpus.vocab_size)).to(device)
        self._products = getattr(torch, products)
        self._reach = torch.arange(window + 1, device=device)
        self._samples = torch.zeros(batch, window + 1, dtype=torch.long, device=device)
        self._ahead: tuple[int, Tensor] = -1, torch.empty(0)
        self._last = torch.zeros((), device=device)
        self._passes: Callable[[], None] = self._forward_and_backward

    def loss(self, step: int) -> Tensor:
        """See the base class."""
        self._samples.copy_(self._windows(self._train, self._starts(step)))
        return self._loss(self._samples)

    def gradient(self, step: int) -> Tensor:
        """See the base class."""
        self._samples.copy_(self._windows(self._train, self._starts(step)))
        self._passes()
        return self._last.clone()

    def capture(self) -> bool:
        """See the base class; where a graph fails or repeats something else, calls do it, and a warning says so."""
        if self._device.type == "cuda" and not self.keeps_gradients:
            try:
                passes = captured(self._forward_and_backward)
                self._compare(passes)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                warnings.warn(f"forward and backward are called, not replayed: {error}", stacklevel=2)
            else:
                self._passes, self.keeps_gradients = passes, True
            torch.cuda.empty_cache()  # of the calls: the graph has memory of its own
        return self.keeps_gradients

    def _compare(self, replay: Callable[[], None]) -> None:
        """Compare a replay with the calls that it repeats, on the same windows and with others in between.

        Raises:
            RuntimeError: It gives another gradient.
        """
        found = []
        for passes, step in ((self._forward_and_backward, 0), (self._forward_and_backward, 1), (replay, 0)):
            self._samples.copy_(self._windows(self._train, self._starts(step)))
            passes()
            gradients = [param.grad.flatten() for param in self.model.parameters() if param.grad is not None]
            found.append(torch.cat([self._last[None], *gradients]))
        calls, _, repeated = found
        # Each time sums may be taken in another order.
        if not torch.linalg.vector_norm(repeated - calls) <= 0.05 * torch.linalg.vector_norm(calls[1:]):
            raise RuntimeError("the graph gives another gradient")

    def _forward_and_backward(self) -> None:
        """The gradient of the samples, in place if there is one: what a graph repeats."""
        parameters = list(self.model.parameters())
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        self._last.zero_()
        for samples in self._samples.chunk(self._parts):
            loss = self._loss(samples) / self._parts
            loss.backward()
            self._last.add_(loss.detach())
        if self.clip is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip)

    def _loss(self, samples: Tensor) -> Tensor:
        with torch.autocast(self._device.type, self._products, self._products != torch.float32):
            return self.model(samples)

    def _starts(self, step: int) -> Tensor:
        """Where a step's windows begin."""
        block, place = divmod(step, self._STEPS_AHEAD)
        if block != self._ahead[0]:
            steps = range(block * self._STEPS_AHEAD, (block + 1) * self._STEPS_AHEAD)
            starts = np.stack([self._sampler.positions(one) for one in steps])
            self._ahead = block, torch.from_numpy(starts).to(self._device)
        return self._ahead[1][place]

    def _windows(self, tokens: Tensor, starts: Tensor) -> Tensor:
        # Tokens of two bytes have a sign there, for want of operations without.
        found = tokens[starts[:, None] + self._reach].long()
        return found & 0xFFFF if tokens.dtype == torch.int16 else found

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """See the base class."""
        last = len(self._held_out) - self.window - 1
        starts = np.linspace(0, last, min(self.validation_windows, last // self.window + 1), dtype=np.int64)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for chosen in torch.from_numpy(starts).to(self._device).split(max(1, self._TOKENS_AT_ONCE // self.window)):
            total += len(chosen) * self._loss(self._windows(self._held_out, chosen)).double()
        return {"validation_loss": float(total) / len(starts)}


def shape_of(layers: int, hidden: int, heads: int, window: int, tokens: int) -> Shape:
    """A decoder in GPT-2's shape, its embedding rounded up to 64 rows.

    Args:
        layers: Blocks.
        hidden: Width.
        heads: Heads of attention.
        window: Longest sample.
        tokens: Number of different tokens.
    """
    rows = -(-tokens // 64) * 64
    return Shape("gpt2", layers, hidden, heads, heads, 4 * hidden, rows, window, 1, "gpt2-small")


def _signed(tokens: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    return torch.from_numpy(tokens.view(np.int16) if tokens.dtype == np.uint16 else tokens).to(device)


def captured(work: Callable[[], None], cuda: Any = torch.cuda) -> Callable[[], None]:
    """A graph of work on the current CUDA device, which reads and writes the same memory whenever it is called.

    Args:
        work: Called three times before, as libraries need it: what it writes is not what it reads.
        cuda: What makes streams and graphs.
    """
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for _ in range(3):
            work()
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        work()
    return graph.replay


_TASKS: dict[str, Callable[..., Task]] = {
    "autoencoder": Autoencoder,
    "language model": LanguageModel,
    "decoder": Decoder,
}


def make_task(description: Mapping[str, Any], seed: int, device: torch.device = _CPU) -> Task:
    """A task from its description in a :class:`~benchmarks.convergence.experiment.Run`.

    Args:
        description: ``kind`` and the keywords of that task.
        seed: Seed of weights and order.
        device: Where it is trained.
    """
    keywords = dict(description)
    return _TASKS[keywords.pop("kind")](**keywords, seed=seed, device=device)
