"""Parameter sets of named models: real modules without a forward pass, so that only the optimizer is measured."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["MODELS", "fill_gradients", "layer_set"]


class _Block(nn.Module):
    """The linear layers and norms of one transformer block."""

    def __init__(self, linears: dict[str, tuple[int, int]], width: int, bias: bool, norm: Callable[[int], nn.Module]):
        super().__init__()
        for name, (outputs, inputs) in linears.items():
            self.add_module(name, nn.Linear(inputs, outputs, bias=bias))
        self.attention_norm = norm(width)
        self.mlp_norm = norm(width)


class _LayerSet(nn.Module):
    """Embeddings and blocks; the head is tied to the token embedding."""

    def __init__(self, embeddings: dict[str, tuple[int, int]], blocks: list[_Block], norm: nn.Module) -> None:
        super().__init__()
        for name, (rows, width) in embeddings.items():
            self.add_module(name, nn.Embedding(rows, width))
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = norm

    @property
    def device(self) -> torch.device:
        """Where the parameters are; the published MKOR asks its model for it."""
        return self.final_norm.weight.device  # type: ignore[return-value]


def _gpt2(layers: int, width: int, embeddings: bool = True) -> _LayerSet:
    linears = {
        "c_attn": (3 * width, width),
        "c_proj": (width, width),
        "c_fc": (4 * width, width),
        "mlp_proj": (width, 4 * width),
    }
    blocks = [_Block(linears, width, True, nn.LayerNorm) for _ in range(layers)]
    tables = {"wte": (50257, width), "wpe": (1024, width)} if embeddings else {}
    return _LayerSet(tables, blocks, nn.LayerNorm(width))


def _llama(layers: int, width: int, feed_forward: int, key_value: int, vocabulary: int) -> _LayerSet:
    linears = {
        "q_proj": (width, width),
        "k_proj": (key_value, width),
        "v_proj": (key_value, width),
        "o_proj": (width, width),
        "gate_proj": (feed_forward, width),
        "up_proj": (feed_forward, width),
        "down_proj": (width, feed_forward),
    }
    blocks = [_Block(linears, width, False, nn.RMSNorm) for _ in range(layers)]
    embeddings = {"embed_tokens": (vocabulary, width)} if vocabulary else {}
    return _LayerSet(embeddings, blocks, nn.RMSNorm(width))


MODELS: dict[str, Callable[[], _LayerSet]] = {
    "tiny": lambda: _gpt2(2, 64),
    "gpt2-small": lambda: _gpt2(12, 768),
    # No embedding: all but the norms is the matrix rule's. Short enough for CPUs with slow products.
    "gpt2-layers": lambda: _gpt2(2, 384, embeddings=False),
    "llama-1b": lambda: _llama(16, 2048, 8192, 512, 128256),
    "llama-7b": lambda: _llama(32, 4096, 11008, 4096, 32000),
    # Four of the 32 blocks and no embedding: what a rank of a sharded run holds.
    "llama-7b-layers": lambda: _llama(4, 4096, 11008, 4096, 0),
}
"""Named parameter sets: GPT-2 small (124 M), two layers of half its width (3.6 M), Llama 3.2 1B (1.24 B), four layers
of Llama 7B (0.81 B), and a toy."""


def layer_set(name: str, device: str | torch.device = "cpu", seed: int = 0) -> _LayerSet:
    """Build a named parameter set in fp32.

    Args:
        name: Key of :data:`MODELS`.
        device: Where to put it.
        seed: Seed of the initial weights.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        return MODELS[name]()


def fill_gradients(model: nn.Module, seed: int) -> None:
    """Give every linear module a forward and a backward pass of one token, then every parameter a random gradient.

    The pass is for optimizers that read layer inputs and output gradients; its own gradients are overwritten. As in a
    real model, all forward passes come before the one backward pass.
    """
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    outputs, output_grads = [], []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            x = torch.randn(1, module.in_features, generator=generator, device=generator.device)
            outputs.append(module(x))
            output_grads.append(torch.randn(outputs[-1].shape, generator=generator, device=generator.device))
    torch.autograd.backward(outputs, output_grads)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.normal_(generator=generator).mul_(1e-3)
