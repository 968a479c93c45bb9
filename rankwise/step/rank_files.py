"""Files of one rank each: parts of parameters say nothing of their place, so that they must return to their rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from rankwise.sharding import gather_together
from rankwise.sharding.layout_source import LayoutSource

__all__ = ["WRITTEN_BY", "refuse_parts_of_others", "this_rank"]

WRITTEN_BY = "written_by"
"""Of a dictionary that has parts of parameters: the rank that wrote it, and the number of ranks."""


def this_rank() -> list[int]:
    """This rank and the number of ranks."""
    return [dist.get_rank(), dist.get_world_size()] if dist.is_initialized() else [0, 1]


def refuse_parts_of_others(owner: str, state_dict: Mapping[str, Any], source: LayoutSource) -> None:
    """Compare with the rank that loads; a collective where the parameters are parts too.

    Args:
        owner: Owner of the message: the optimizer.
        state_dict: As ``optimizer.state_dict()`` returned it, somewhere.
        source: Where this optimizer's parameters lie.

    Raises:
        ValueError: On all ranks, if one of them has another one's parts.
    """
    written = state_dict.get(WRITTEN_BY)
    if written is not None:
        source.connect()
        gather_together(lambda: _refuse(owner, list(written)), source.group)


def _refuse(owner: str, written: list[int]) -> None:
    if written != this_rank():
        raise ValueError(
            f"{owner}: the state dictionary is invalid, being that of rank {written[0]} of {written[1]}: with parts of "
            "parameters it must be loaded by the rank that wrote it, but this is rank {} of {}; ".format(*this_rank())
            + "save with torch.distributed.checkpoint, from get_optimizer_state_dict, which suits any ranks"
        )
