"""Builds the unit of one ``step()`` call from its tensors: entries, layout, routes, element states."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.layout.agreement import gather_together, refuse_difference
from rankwise.layout.dtensors import is_sharded
from rankwise.layout.even_cuts import EvenCuts, EvenLayout
from rankwise.layout.fused_blocks import Block
from rankwise.layout.layout import Layout, LayoutError, Shard
from rankwise.layout.layout_source import LayoutSource, TensorContents
from rankwise.layout.logical_matrices import block_info
from rankwise.plan.step_unit import PlannedParameter, StepUnit
from rankwise.states.element_states import ElementStates, StateTypes
from rankwise.states.entries import Entry, cut_into_entries, entries_of_blocks
from rankwise.states.group_values import GroupValues
from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.states.param_remainders import refuse_wide_copies
from rankwise.states.parameter_table import Groups, ParameterTable

__all__ = ["UnitBuilder", "device_and_dtype", "dtype_of"]


class UnitBuilder:
    """Builds units, which have no owners of matrices yet."""

    def __init__(self, spec: OptimizerSpec, table: ParameterTable, values: GroupValues) -> None:
        self._spec, self._table, self._values = spec, table, values
        self._compared = False

    def build(
        self,
        source: LayoutSource,
        param_groups: Groups,
        tensors: list[Tensor],
        positions: list[int],
        groups: Mapping[int, Mapping[str, Any]] | None,
    ) -> StepUnit:
        """Build a unit; a collective of the ranks that hold its parameters.

        Args:
            source: Tells what the tensors store.
            param_groups: All groups of the optimizer.
            tensors: Tensors of the step.
            positions: Positions of their groups at the time of the step.
            groups: Those groups by position; None: the groups that the tensors' contents name.

        Raises:
            LayoutError: What the ranks hold does not fit together.
            RuntimeError: Their options differ.
        """
        source.connect()
        contents: list[TensorContents] = []
        entries: list[Entry] = []

        def look() -> list[Shard]:
            # What the framework stores may be wrong on one rank alone; all ranks must hear of it.
            contents.extend(source.contents(tensor) for tensor in tensors)
            entries.extend(self.entries(contents))
            if self._spec.options.store_param_remainders:
                places = zip(tensors, contents, strict=True)
                stored = {part.key: tensor for tensor, content in places for part in content.slices}
                refuse_wide_copies(self._spec.name, stored, self._table.parameters)
            return [entry.shard for entry in entries]

        apart = next((ranks for ranks in map(source.ranks_apart, tensors) if ranks is not None), None)
        ranks = apart or source.group
        try:
            layout = Layout.share(look, ranks, source.replicated)
        except LayoutError:
            # All ranks raised. Differing options cut parameters differently, and their message says more.
            settings = self._values.in_words(dict(enumerate(param_groups)) if groups is None else groups)
            refuse_difference([("", rank_settings) for rank_settings in gather_together(lambda: settings, ranks)])
            self._refuse_other_parameters(source, tensors, ranks)
            raise
        self._refuse_other_parameters(source, tensors, ranks)
        if groups is None:
            places = zip(positions, contents, strict=True)
            groups = {position: param_groups[content.group] for position, content in places}
        names = (str(source.name_of(tensor)) for tensor in tensors)
        tensor_of = {name: index for index, name in enumerate(names)} if source.missing_alike else None
        unit = self.assemble(param_groups, tensors, contents, positions, groups, entries, layout, tensor_of)
        return replace(unit, apart=apart is not None, spends_gradients=source.spends_gradients)

    def imagine(
        self, param_groups: Groups, ranks: Sequence[Sequence[TensorContents]] | EvenCuts, replicated: bool
    ) -> StepUnit:
        """Build the unit of the first of ranks that need not exist; see :meth:`Planner.imagine`."""
        groups = dict(enumerate(param_groups))
        if isinstance(ranks, EvenCuts):
            whole = [entry.shard for entry in self.entries([ranks.whole()])]
            if all(part.columns is None for part in whole):
                layout: Layout = EvenLayout(ranks, whole, self._table.base_name)
                first = ranks.contents(0)
                return self.assemble(param_groups, [], [first], [first.group], groups, self.entries([first]), layout)
            ranks = [[ranks.contents(rank)] for rank in range(ranks.world)]
        cut = [self.entries(contents) for contents in ranks]
        parts = tuple(tuple(entry.shard for entry in entries) for entries in cut)
        positions = [content.group for content in ranks[0]]
        layout = Layout(parts, replicated=replicated, imagined=True)
        return self.assemble(param_groups, [], ranks[0], positions, groups, cut[0], layout)

    def entries(self, contents: Sequence[TensorContents]) -> list[Entry]:
        """Cut tensors into shards, with the rules they take."""
        return cut_into_entries(contents, self._table.infos, self._table.routes)

    def assemble(
        self,
        param_groups: Groups,
        tensors: list[Tensor],
        contents: Sequence[TensorContents],
        positions: list[int],
        groups: Mapping[int, Mapping[str, Any]],
        entries: list[Entry],
        layout: Layout,
        tensor_of: Mapping[str, int] | None = None,
    ) -> StepUnit:
        """Put a unit together; see :meth:`build`."""
        # A rank that holds nothing works on the type and device of the others all the same.
        device, dtype = device_and_dtype(tensors or list(self._table.parameters.values()))
        # Parameters of tensors on other ranks keep the groups they were registered with.
        position_of = {content.group: position for content, position in zip(contents, positions, strict=True)}
        planned_groups = {place: dict(group) for place, group in {**dict(enumerate(param_groups)), **groups}.items()}
        parameters: dict[str, PlannedParameter] = {}
        blocks: dict[str, tuple[Block, ...]] = {}
        key_tensors: dict[str, int] = {}
        for key, shape in layout.shapes.items():
            name = self._table.base_name(key)
            group = self._table.catalog[name][1]
            position = position_of.get(group, group if group < len(param_groups) else 0)
            parameters[key] = whole = self._planned(name, position, planned_groups[position])
            if self._is_cut(name, shape):
                blocks[key] = self._table.blocks[name]
                infos = {block.key(key): block_info(whole.info, block, block.key(key)) for block in blocks[key]}
                parameters |= {block_key: replace(whole, info=info) for block_key, info in infos.items()}
            if tensor_of is not None:
                key_tensors |= dict.fromkeys([key, *(block.key(key) for block in blocks.get(key, ()))], tensor_of[name])
        types = [parameters[entry.key].states for entry in entries] if tensors else []
        of_empty = self.states_of_empty(tensors, entries, tensor_of or {}, planned_groups, positions)
        return StepUnit(
            tensors=tensors,
            contents=contents,
            stored=layout,
            layout=layout.cut(blocks),
            stored_entries=entries,
            entries=entries_of_blocks(entries, blocks, {key: planned.info for key, planned in parameters.items()}),
            states=ElementStates(tensors, entries if tensors else [], types, dtype, of_empty),
            parameters=parameters,
            device=device,
            dtype=dtype,
            spec=self._spec,
            key_tensors=key_tensors,
        )

    def _planned(self, name: str, position: int, group: Mapping[str, Any]) -> PlannedParameter:
        info, rule = self._table.catalog[name][0], self._table.routes[name].rule
        step_groups = self._spec.step_groups
        step_group = step_groups.place(position, step_groups.scale(info.own_name))
        states = self._table.element_states(info, rule, group)
        return PlannedParameter(info, rule, position, group, step_group, states)

    def _refuse_other_parameters(
        self, source: LayoutSource, tensors: Sequence[Tensor], ranks: dist.ProcessGroup | None
    ) -> None:
        """Refuse parameters that not all ranks have, where each must have a tensor of all; a collective then."""
        if not source.missing_alike:
            return
        signs = {str(source.name_of(tensor)): self._sign_of_copy(tensor) for tensor in tensors}
        everyone = gather_together(lambda: signs, ranks)
        names = [set(rank_signs) for rank_signs in everyone]
        odd = sorted(set().union(*names) - names[0].intersection(*names))
        if odd:
            without = [rank for rank, rank_signs in enumerate(names) if odd[0] not in rank_signs]
            raise LayoutError(
                f"the optimizers of ranks {without} have no '{odd[0]}', which others have; build it from the same "
                "parameters on all ranks that share a mesh"
            )
        for name in signs:
            strays = [rank for rank, rank_signs in enumerate(everyone) if rank_signs[name] != everyone[0][name]]
            if strays:
                raise LayoutError(
                    f"the parameter '{name}' is no DTensor, and its values on ranks {strays} differ from those on the "
                    "first: it must be a copy on all ranks that share a mesh; broadcast it, or, if each rank has its "
                    "own (as with experts), make it a DTensor with Shard(0) on a mesh of these ranks"
                )
        self._compared = True

    def _sign_of_copy(self, tensor: Tensor) -> str:
        """Digest of a copy that all ranks must share before the first step; "" for other tensors."""
        if self._compared or is_sharded(tensor) or tensor.is_meta:
            return ""
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return hashlib.blake2b(values.numpy().tobytes(), digest_size=16).hexdigest()

    def states_of_empty(
        self,
        tensors: Sequence[Tensor],
        entries: Sequence[Entry],
        tensor_of: Mapping[str, int],
        groups: Mapping[int, Mapping[str, Any]],
        positions: Sequence[int],
    ) -> dict[int, StateTypes]:
        """States of sharded tensors of which this rank has an empty part: all ranks have the same states."""
        held = {entry.shard.tensor for entry in entries}
        states = {}
        for name, index in tensor_of.items():
            if index not in held and is_sharded(tensors[index]):
                info, rule = self._table.catalog[name][0], self._table.routes[name].rule
                states[index] = self._table.element_states(info, rule, groups[positions[index]])
        return states

    def _is_cut(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the layout has a parameter's blocks in its place; not if another rank stores another shape."""
        table = self._table
        if name not in table.blocks or table.routes[name].rule != "matrix":
            return False
        return self._spec.owns_blocks and tuple(shape) == table.catalog[name][0].matrix_shape


def device_and_dtype(tensors: Sequence[Tensor]) -> tuple[torch.device, torch.dtype]:
    """Device and type in which a step on tensors computes.

    Raises:
        RuntimeError: The tensors lie on several devices.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise RuntimeError(
            f"the parameters of one step lie on {sorted(map(str, devices))}; use one optimizer per device."
        )
    return (devices.pop() if devices else torch.device("cpu")), dtype_of(tensors)


def dtype_of(tensors: Iterable[Tensor]) -> torch.dtype:
    """Type in which a step on tensors computes."""
    wide = (torch.float64, torch.complex128)
    return torch.float64 if any(tensor.dtype in wide for tensor in tensors) else torch.float32
