"""Language models for whole training steps: torch's flash attention, and nothing that a compiler breaks at."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["SHAPES", "LanguageModel", "Shape", "language_model"]


class Shape(NamedTuple):
    """Sizes of a model and of what goes through it at once.

    Attributes:
        family: "gpt2": learned positions, LayerNorm, GELU, biases; "llama": rotary positions, RMSNorm, SwiGLU, none.
        layers: Blocks.
        width: Width.
        heads: Heads of queries.
        key_heads: Heads of keys and values.
        inner: Width inside the feed-forward layers.
        vocabulary: Rows of the embedding, which is the head, too.
        length: Tokens of a sample.
        samples: Samples of a micro-batch.
        planned: Name of the model for ``rankwise plan``.
    """

    family: str
    layers: int
    width: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int
    length: int
    samples: int
    planned: str

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.length * self.samples

    def operations(self, parameters: int) -> float:
        """Of products for a token, forward and backward: six for each weight, and those of causal attention.

        Args:
            parameters: Elements of the weights that multiply; the embedding once, as the head.
        """
        return 6.0 * parameters + 6.0 * self.layers * self.width * self.length


SHAPES = {
    "gpt2-small": Shape("gpt2", 12, 768, 12, 12, 3072, 50304, 1024, 32, "gpt2-small"),
    "llama-1b": Shape("llama", 16, 2048, 32, 8, 8192, 128256, 2048, 4, "llama-1b"),
    "tiny": Shape("llama", 2, 64, 4, 2, 128, 512, 32, 2, "gpt2-small"),
}


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.key_heads, self.rotary = shape.heads, shape.key_heads, shape.family == "llama"
        self.size = shape.width // shape.heads
        bias = not self.rotary
        self.q_proj = nn.Linear(shape.width, shape.width, bias=bias)
        self.k_proj = nn.Linear(shape.width, shape.key_heads * self.size, bias=bias)
        self.v_proj = nn.Linear(shape.width, shape.key_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=bias)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.q_proj(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        key, value = (
            project(x).view(batch, length, self.key_heads, self.size).transpose(1, 2)
            for project in (self.k_proj, self.v_proj)
        )
        if self.rotary:
            query, key = _turned(query, turns), _turned(key, turns)
        grouped = self.heads != self.key_heads
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: pairs of features are turned by angles, of which ``turns`` has cosines and sines."""
    cosines, sines = turns.to(x.dtype).unbind()
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


class _FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gated = shape.family == "llama"
        bias = not self.gated
        if self.gated:
            self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=bias)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(functional.gelu(self.up_proj(x), approximate="tanh"))


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.family == "llama" else nn.LayerNorm
        self.attention_norm, self.mlp_norm = norm(shape.width), norm(shape.width)
        self.attention, self.mlp = _Attention(shape), _FeedForward(shape)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """A decoder; its output is the mean loss of guessing each next token.

    Args:
        shape: Its sizes.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width) if shape.family == "gpt2" else None
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.final_norm = nn.RMSNorm(shape.width) if shape.family == "llama" else nn.LayerNorm(shape.width)
        size = shape.width // shape.heads
        angles = torch.outer(torch.arange(shape.length), 10000.0 ** -(torch.arange(0, size, 2) / size))
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin())), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                short = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * shape.layers) ** 0.5 if short else 1.0))

    def forward(self, samples: Tensor) -> Tensor:
        """The loss of samples of tokens, one longer than the model's."""
        tokens, following = samples[:, :-1], samples[:, 1:]
        x = self.embed_tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.turns)
        logits = functional.linear(self.final_norm(x), self.embed_tokens.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), following.flatten())


def language_model(shape: Shape, device: torch.device) -> LanguageModel:
    """A model with its first weights."""
    torch.manual_seed(0)
    with device:
        return LanguageModel(shape)
