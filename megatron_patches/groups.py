"""This module returns a rank's process groups, from Megatron's global state or from an explicit collection."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from rankwise.comm.local_groups import local_group
from rankwise.layout.layout_source import TensorParallel

__all__ = ["ParallelGroups"]


class ParallelGroups:
    """The groups that an optimizer's layout is shared over.

    A dense parameter is held, in pieces and copies, by the ranks of its pipeline stage: tensor, context and data
    parallel. An expert's is held by the ranks of its expert-tensor and expert-data-parallel groups.

    Args:
        collection: The user's ``pg_collection``; None for Megatron's global groups.
        blocks: Whether every tensor-parallel shard is a matrix of its own.
    """

    def __init__(self, collection: ProcessGroupCollection | None = None, blocks: bool = False) -> None:
        self._collection = collection
        self._blocks = blocks

    def _find(self, names: str | Sequence[str], default: Any) -> Any:
        for name in [names] if isinstance(names, str) else names:
            if (given := getattr(self._collection, name, None)) is not None:
                return given
        return default()

    def tensor(self, expert: bool) -> tuple[int, int]:
        """Return this rank's position among the tensor-parallel ranks that share matrices, and their number."""
        return (0, 1) if self._blocks else self._tensor(expert)

    def block(self, expert: bool) -> int | None:
        """Return this rank's position among tensor-parallel ranks that have matrices of their own; None otherwise."""
        rank, ways = self._tensor(expert)
        return rank if self._blocks and ways > 1 else None

    def _tensor(self, expert: bool) -> tuple[int, int]:
        group = self._tensor_group(expert)
        return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def sharing(self, expert: bool) -> dist.ProcessGroup | None:
        """Return the tensor-parallel ranks that share matrices, if there are several."""
        return None if self.tensor(expert)[1] == 1 else self._tensor_group(expert)

    def tensor_parallel(self, expert: bool, stage: dist.ProcessGroup) -> TensorParallel | None:
        """Return the tensor-parallel groups of a stage if they share matrices. A collective of the stage's ranks.

        Args:
            expert: Whether to return the groups over which experts are cut.
            stage: Result of :meth:`stage`.
        """
        group = self._tensor_group(expert)
        return None if group is None or self.tensor(expert)[1] == 1 else TensorParallel.among(stage, group)

    def again(self, expert: bool) -> tuple[int, int]:
        """Return this rank's position among the ranks over which weights are cut once more, and their number."""
        name = "expert_gtp_weight_remat" if expert else "gtp_weight_remat"
        find = getattr(parallel_state, f"get_{name}_group", lambda check_initialized: None)
        group = self._find("expt_gtp_remat" if expert else "gtp_remat", partial(find, check_initialized=False))
        return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def alike(self, expert: bool) -> int:
        """Return this rank's position among the ranks that hold the same rows of weights that are cut once more."""
        if self.again(expert)[1] == 1:
            return self.data(expert)[0]
        find = parallel_state.get_expert_data_parallel_group
        if not expert:
            find = partial(parallel_state.get_data_parallel_group, with_context_parallel=True)
        return dist.get_rank(self._find("expt_dp" if expert else "dp_cp", partial(find, with_gtp_remat=False)))

    def data(self, expert: bool) -> tuple[int, int]:
        """Return this rank's position among the ranks that gradients are averaged over, and their number."""
        group = self._data(expert)
        return dist.get_rank(group), dist.get_world_size(group)

    @property
    def averaging(self) -> dist.ProcessGroup:
        """The ranks that dense parameters' gradients are averaged over."""
        return self._data(False)

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """One rank of every pipeline stage, this one among them."""
        group: dist.ProcessGroup = self._find("pp", parallel_state.get_pipeline_model_parallel_group)
        return group

    @property
    def expert_rank(self) -> int:
        """Number of this rank's expert-parallel share of the experts."""
        group = self._find("ep", lambda: parallel_state.get_expert_model_parallel_group(False))
        return 0 if group is None else dist.get_rank(group)

    @property
    def whole_stage(self) -> dist.ProcessGroup:
        """All ranks of this rank's pipeline stage."""
        group: dist.ProcessGroup = self._find(
            "tp_dp_cp", lambda: parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        )
        return group

    def stage(self, expert: bool) -> dist.ProcessGroup:
        """Return the ranks that hold pieces or copies of this rank's parameters. A collective of these ranks."""
        if self.tensor(expert)[1] == 1:
            return self._data(expert)
        return self._expert_stage() if expert else self.whole_stage

    def _tensor_group(self, expert: bool) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup | None
        if expert:
            group = self._find("expt_tp", lambda: parallel_state.get_expert_tensor_parallel_group(False))
        else:
            group = self._find("tp", lambda: parallel_state.get_tensor_model_parallel_group(False))
        return group

    def _data(self, expert: bool) -> dist.ProcessGroup:
        group: dist.ProcessGroup
        if expert:
            group = self._find(["expt_dp_gtp_remat", "expt_dp"], parallel_state.get_expert_data_parallel_group)
        else:
            default = partial(parallel_state.get_data_parallel_group, with_context_parallel=True)
            group = self._find(["dp_cp_gtp_remat", "dp_cp"], default)
        return group

    def _expert_stage(self) -> dist.ProcessGroup:
        tensor = self._find("expt_tp", parallel_state.get_expert_tensor_parallel_group)
        rows: list[list[int]] = [[] for _ in range(dist.get_world_size(self._data(True)))]
        dist.all_gather_object(rows, dist.get_process_group_ranks(tensor), group=self._data(True))
        return local_group(sorted({rank for row in rows for rank in row}))
