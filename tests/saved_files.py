"""What a user saves and loads."""

from __future__ import annotations

import io
from typing import Any

import torch

__all__ = ["through_a_file"]


def through_a_file(value: Any) -> Any:
    """Saved and loaded as torch does by default."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
