"""STAND-IN: classes of quantized tensors, of which there are none here."""

from __future__ import annotations

import torch


class QuantizedTensor(torch.Tensor):
    """A tensor that is stored in few bits."""
