"""States of matrices that were saved when a weight was divided into other logical matrices than now."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import TypeVar

from rankwise.saving.state_takeover import listed
from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.states.parameter_table import ParameterTable

__all__ = ["ChangedBlocks", "start_afresh", "without_blocks"]

logger = logging.getLogger(__name__)
Value = TypeVar("Value")
_TAG = re.compile(r"\[([A-Za-z_][\w.]*)\]")
"""Mark of a block in a key; the mark of a matrix of a stack, or of a slice, is a number."""


class ChangedBlocks:
    """Tells which saved states belong to the present matrices."""

    def __init__(self, spec: OptimizerSpec, table: ParameterTable) -> None:
        self._spec, self._table = spec, table

    def carried(self, states: Mapping[str, Mapping[str, Value]], announce: bool = True) -> dict[str, dict[str, Value]]:
        """Select the states that fit the present matrices; with ``announce``, warn of those that start afresh."""
        kept: dict[str, dict[str, Value]] = {}
        lost: dict[str, None] = {}
        names: dict[str, None] = {}
        for key, state in states.items():
            fitting = {name: value for name, value in state.items() if self.belongs(key, name)}
            if len(fitting) < len(state):
                lost[self._table.base_name(key)] = None
                names |= {name: None for name in state if name not in fitting}
            if fitting:
                kept[key] = fitting
        if lost and announce:
            logger.warning("%s: %s", self._spec.name, start_afresh(lost, names))
        return kept

    def belongs(self, key: str, state: str) -> bool:
        """Whether a saved state of a matrix means the same now."""
        name = self._table.base_name(key)
        blocks = {block.name for block in self._table.blocks.get(name, ())}
        if self._spec.owns_blocks:
            return self._is_mark(_TAG.findall(key[len(name) :]), blocks)
        # A factor of the inputs belongs to all blocks.
        by_block = {declared.name for declared in self._spec.matrix_states if declared.by_block}
        shared = state.partition("[")[0] not in by_block
        return shared or self._is_mark(_TAG.findall(state), blocks)

    @staticmethod
    def _is_mark(tags: list[str], blocks: set[str]) -> bool:
        return tags[-1] in blocks if tags else not blocks


def start_afresh(weights: Collection[str], states: Collection[str]) -> str:
    """Say that states of weights start afresh."""
    lost = ", ".join(dict.fromkeys(map(without_blocks, states)))
    return (
        f"the checkpoint has the states ({lost}) of {listed(weights)} for another division of these weights into "
        "logical matrices (option 'blocks'; \"none\" takes a weight for one matrix): they start afresh. Weights and "
        "element states go on."
    )


def without_blocks(key: str) -> str:
    """Remove the names of blocks from the key of a matrix or of a state."""
    return _TAG.sub("", key)
