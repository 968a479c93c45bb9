"""States of matrices saved where a weight was divided into other logical matrices than it is now."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import TypeVar

from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.states.parameter_table import ParameterTable

__all__ = ["ChangedBlocks", "start_afresh", "without_blocks"]

logger = logging.getLogger(__name__)
Value = TypeVar("Value")
_TAG = re.compile(r"\[([A-Za-z_][\w.]*)\]")
"""A block's mark in a key; a place in a stack, or a slice, is numbers."""


class ChangedBlocks:
    """Tells which saved states belong to the present matrices.

    Args:
        spec: The optimizer's name, and whether blocks are matrices of their own.
        table: The parameters and their blocks.
    """

    def __init__(self, spec: OptimizerSpec, table: ParameterTable) -> None:
        self._spec, self._table = spec, table

    def carried(self, states: Mapping[str, Mapping[str, Value]], announce: bool = True) -> dict[str, dict[str, Value]]:
        """States of the matrices that go on; the rest start afresh, which is said once.

        Args:
            states: By matrix, as saved.
            announce: Whether to say it.
        """
        kept: dict[str, dict[str, Value]] = {}
        lost: dict[str, None] = {}
        names: dict[str, None] = {}
        for key, state in states.items():
            own = {name: value for name, value in state.items() if self.belongs(key, name)}
            if len(own) < len(state):
                lost[self._table.base_name(key)] = None
                names |= {name: None for name in state if name not in own}
            if own:
                kept[key] = own
        if lost and announce:
            logger.warning("%s: %s", self._spec.name, start_afresh(lost, names))
        return kept

    def belongs(self, key: str, state: str) -> bool:
        """Whether a state of a matrix means the same now.

        Args:
            key: The matrix, as saved.
            state: Name of the state.
        """
        name = self._table.base_name(key)
        blocks = {block.name for block in self._table.blocks.get(name, ())}
        if self._spec.owns_blocks:
            return self._is_mark(_TAG.findall(key[len(name) :]), blocks)
        # A factor of the inputs is that of every block.
        shared = state.partition("[")[0] not in self._spec.block_states
        return shared or self._is_mark(_TAG.findall(state), blocks)

    @staticmethod
    def _is_mark(tags: list[str], blocks: set[str]) -> bool:
        return tags[-1] in blocks if tags else not blocks


def start_afresh(weights: Collection[str], states: Collection[str]) -> str:
    """What is said of states that do not go on.

    Args:
        weights: Weights of the matrices.
        states: Names of the states.
    """
    names = list(weights)
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    lost = ", ".join(dict.fromkeys(map(without_blocks, states)))
    return (
        f"the checkpoint has the states ({lost}) of {listed} for another division of these weights into logical "
        "matrices (option 'blocks'; \"none\" takes a weight for one matrix): they start afresh. Weights and element "
        "states go on."
    )


def without_blocks(key: str) -> str:
    """The key of a matrix or of a state, without the names of blocks."""
    return _TAG.sub("", key)
