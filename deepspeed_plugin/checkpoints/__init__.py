"""This room saves, finds, judges and loads checkpoints of DeepSpeed engines with our optimizers, in any layout."""

from __future__ import annotations

from deepspeed_plugin.checkpoints.converting import convert
from deepspeed_plugin.checkpoints.loading import load_checkpoint
from deepspeed_plugin.checkpoints.saving import save_checkpoint
from rankwise.layout.chunked_vectors import CheckpointError

__all__ = ["CheckpointError", "convert", "load_checkpoint", "save_checkpoint"]
