"""Latent attention on CPU processes, where none of Megatron's own kinds of core attention serves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import multi_latent_attention
from megatron_harness import Trainer
from torch import Tensor, nn

from megatron_patches.cpu import cpu_megatron


class _Attention(nn.Module):
    """Of (tokens, batch, heads, size) each, whose values are of another size than keys."""

    def __init__(self, **given: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **more: Any) -> Tensor:
        parts = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        return F.scaled_dot_product_attention(*parts, is_causal=True).permute(2, 0, 1, 3).flatten(2)


class LatentTrainer(Trainer):
    """Of a cell that is ``latent``."""

    def _layers(self, vp_stage: int | None) -> Any:
        spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization=self.config.normalization)
        spec.submodules.self_attention.submodules.core_attention = _Attention
        return spec


class _AsFloat32(torch.overrides.TorchFunctionMode):
    """What is float64 is called float32, and stays what it is where it would be made so."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.type and len(args) == 1 and not kwargs:
                return "torch.cuda.FloatTensor"
        return func(*args, **(kwargs or {}))


@contextmanager
def any_megatron(precision: str) -> Iterator[None]:
    """``cpu_megatron()``, for latent attention and ``fp64`` as well."""
    with cpu_megatron(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_latent_attention, "TELinear", _Attention)  # its class is asked for
        if precision != "fp64":
            yield
            return
        with _AsFloat32():
            yield
