"""A language model of plain PyTorch modules, for every framework, and its trainer under Megatron."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.enums import ModelType
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron_cells import HIDDEN, LENGTH, VOCABULARY
from megatron_harness import Trainer
from megatron_weights import initial
from torch import Tensor, nn


class Layer(nn.Module):
    """Attention of one head and a gated linear unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.mix = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, h: Tensor) -> Tensor:
        query, key, value = self.mix(self.first_norm(h)).chunk(3, dim=-1)
        scores = query @ key.transpose(-1, -2) * HIDDEN**-0.5
        mask = torch.ones(LENGTH, LENGTH).triu(1).bool()
        h = h + self.out(scores.masked_fill(mask, -torch.inf).softmax(-1) @ value)
        return h + self.down(nn.functional.silu(self.up(self.second_norm(h))))


class Model(nn.Module):
    """A causal language model; its forward pass is called as that of Megatron's GPT.

    Args:
        mean: Return the mean loss, as DeepSpeed's users do, not that of every token.
    """

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.mean, self.model_type = mean, ModelType.encoder_or_decoder
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.final_norm = nn.LayerNorm(HIDDEN)
        self.output_layer = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(initial(name, tuple(parameter.shape)))

    def sharded_state_dict(self, prefix: str = "", offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """What Megatron's checkpoints hold of it."""
        return sharded_state_dict_default(self.layers, f"{prefix}layers.", offsets, metadata) | {
            key: value
            for name in ("word_embeddings", "final_norm", "output_layer")
            for key, value in sharded_state_dict_default(
                getattr(self, name), f"{prefix}{name}.", offsets, metadata
            ).items()
        }

    def set_input_tensor(self, _: Any) -> None:
        """Called by Megatron's schedules: what the stage before sent."""

    def forward(self, inputs: Tensor, positions: Any, mask: Any, labels: Tensor) -> Tensor:
        h = self.word_embeddings(inputs)
        for layer in self.layers:
            h = layer(h)
        logits = self.output_layer(self.final_norm(h))
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.mean() if self.mean else losses.view_as(labels)


class PlainTrainer(Trainer):
    """Megatron's data parallelism, optimizer and schedule around the model above."""

    def _chunk(self, stage: int) -> nn.Module:
        chunk = DistributedDataParallel(self.config, self.cell.ddp_config(), Model(mean=False))
        chunk.vp_stage = None
        return chunk
