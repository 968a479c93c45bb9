"""These functions say whether a CUDA graph records work instead of doing it, and refuse what cannot be recorded."""

from __future__ import annotations

import torch

__all__ = ["is_capturing", "refuse_capture"]


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured, which need not be the current device."""
    if device.type != "cuda":
        return False
    if device.index is None or device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, what: str) -> None:
    """Refuse work that a replay would do wrong, because memory that a capture makes is made again by each replay.

    Args:
        device: Where the work is done.
        what: What is met for the first time; the message begins with it.

    Raises:
        RuntimeError: The device's stream is being captured.
    """
    if is_capturing(device):
        raise RuntimeError(
            f"{what} cannot be captured in a graph: take a step on the same weights, with gradients for the same "
            "parameters, before the capture (again after a checkpoint is loaded)"
        )
