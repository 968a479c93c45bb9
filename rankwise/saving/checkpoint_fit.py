"""Checks that saved states are those of an optimizer's parameters, before any of them is taken over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.kernels.low_precision_runs import is_coded
from rankwise.layout.agreement import gather_together
from rankwise.layout.layout_source import LayoutSource
from rankwise.plan.checkpoint_mismatch import MisfitError, check_shape, refuse_strange
from rankwise.plan.planner import Planner
from rankwise.saving.states_by_parameter import (
    COUNT,
    RECORD,
    REPLICA,
    WITH_STATES,
    extras_of,
    matrices_of,
    owners_in,
    steps_taken,
    without_matrices,
)
from rankwise.states.matrix_states import MatrixState, base_name
from rankwise.states.packed_states import packed_in
from rankwise.states.param_remainders import REMAINDER
from rankwise.states.parameter_table import Groups

__all__ = ["WRITTEN_BY", "CheckpointFit", "in_order_of", "same_groups", "this_rank"]

Names = Sequence[Sequence[str | None]]
"""Names of the parameters of each param group, in order; None where it is not known."""
WRITTEN_BY = "written_by"
"""Key of a dictionary that has parts of parameters: the rank that wrote it, and the number of ranks."""
_TORCHS = frozenset({"foreach", "maximize", "differentiable", "adjust_lr_fn"})


def same_groups(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are as many groups of as many parameters; torch itself refuses anything else."""
    return [len(group["params"]) for group in state_dict["param_groups"]] == [len(group["params"]) for group in groups]


def in_order_of(owner: str, state_dict: Mapping[str, Any], ours: Names) -> dict[str, Any]:
    """Reorder the parameters in each group of a state dictionary.

    torch matches element states by position alone, which is right only if both sides list their parameters alike.

    Args:
        owner: Name of the optimizer, for the message.
        state_dict: Dictionary with as many groups of as many parameters as ``ours``.
        ours: Names of the parameters in the order that is wanted.

    Returns:
        The reordered dictionary. It keeps its order where names are not known, or are all other ones: as in torch the
        place counts then, for the states of matrices too, which are kept by name.

    Raises:
        MisfitError: The names show that the parameters are not the same ones.
    """
    result = dict(state_dict)
    theirs = _saved_names(state_dict)
    known = [name for names in (*ours, *theirs) for name in names]
    if None in known or [list(names) for names in ours] == theirs:
        return result
    place = {name: (group, index) for group, names in enumerate(theirs) for index, name in enumerate(names)}
    mine = {name: (group, index) for group, names in enumerate(ours) for index, name in enumerate(names)}
    if any(set(names) != set(saved) for names, saved in zip(ours, theirs, strict=True)):
        moved = next((name for name in mine if name in place and place[name] != mine[name]), None)
        if moved is not None:
            raise MisfitError(
                f"{owner}: the checkpoint's parameters are invalid: they must be this optimizer's, in its groups, but "
                f"{moved!r} is number {place[moved][1]} of group {place[moved][0]} there and number {mine[moved][1]} "
                f"of group {mine[moved][0]} here; build the optimizer from the same named parameters in the same groups"
            )
        names_here = {name: ours[group][index] for name, (group, index) in place.items()}
        result["matrix_states"] = _renamed(state_dict.get("matrix_states", {}), names_here)
        return result
    result["param_groups"] = [
        _reordered(group, [place[name][1] for name in names])
        for group, names in zip(state_dict["param_groups"], ours, strict=True)
    ]
    return result


def _renamed(states: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """Rename the keys of states; the place in a stack is in brackets behind the name and is kept."""
    bases = {key: base_name(key, names) for key in states}
    return {names[base] + key[len(base) :] if base else key: states[key] for key, base in bases.items()}


def _reordered(group: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
    lists = {name: group[name] for name in ("params", "param_names") if len(group.get(name) or ()) == len(order)}
    return {**group, **{name: [values[index] for index in order] for name, values in lists.items()}}


def _saved_names(state_dict: Mapping[str, Any]) -> list[list[str | None]]:
    if "layout" not in state_dict and any(RECORD in group for group in state_dict["param_groups"]):
        # torch's functions have reordered the parameters for this optimizer, but not the saved list of names.
        return [[None] * len(group["params"]) for group in state_dict["param_groups"]]
    names: list[list[str | None]] = []
    records: Iterator[Mapping[str, Any]] = iter(state_dict.get("layout", ()))
    for group in state_dict["param_groups"]:
        count = len(group["params"])
        recorded = [next(records, {}).get("name") for _ in range(count)]
        listed = list(group.get("param_names") or ())
        # torch's own optimizers list the names in the group.
        names.append(listed if None in recorded and len(listed) == count else recorded)
    return names


class CheckpointFit:
    """Checks whether a state dictionary is one of this optimizer's."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self._spec, self._values, self._table = planner, planner.spec, planner.values, planner.table

    def fitted(self, state_dict: dict[str, Any], groups: Groups) -> dict[str, Any]:
        """Convert a dictionary to one that this optimizer would have written; a collective where parameters are cut.

        Raises:
            ValueError: Another optimizer has written it, or for other parameters, or another rank.
        """
        state_dict = {**extras_of(state_dict["param_groups"]), **state_dict}
        _refuse_parts_of_others(self._spec.identity, state_dict, self._planner.source)
        self._refuse_other_owners(state_dict)
        self._refuse_foreign(state_dict)
        if same_groups(state_dict, groups):
            names = [[self._planner.name_of(tensor) for tensor in group["params"]] for group in groups]
            state_dict = self._with_matrices(in_order_of(self._spec.identity, state_dict, names), names)
            self._refuse_unknown_matrices(state_dict)
            self._refuse_other_shapes(state_dict, groups)
            state_dict["param_groups"] = self._values.completed(groups, state_dict["param_groups"])
        return state_dict

    def _refuse_other_owners(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse another plan before the first step, when only some ranks of a replica get another one's states."""
        planner, fresh = self._planner, REPLICA in state_dict and not state_dict.get(COUNT)
        if fresh and planner.units and owners_in(state_dict[REPLICA]) != planner.owner_of:
            raise ValueError(
                f"{self._spec.identity}: the states of another replica are invalid here, because it has given its "
                "matrices to other ranks: replicas must begin alike; start all of them with this model, these options "
                "and this version of rankwise"
            )

    def _with_matrices(self, state_dict: dict[str, Any], names: Names) -> dict[str, Any]:
        """Move the states of matrices, which may be among those of parameters, to an entry of their own."""
        states = dict(state_dict["state"])
        matrices: dict[str, MatrixState] = {}
        for names_here, group in zip(names, state_dict["param_groups"], strict=True):
            for name, key in zip(names_here, group["params"], strict=True):
                matrices |= matrices_of(str(name), states.get(key, {}))
                if key in states:
                    states[key] = without_matrices(states[key])
        found = state_dict.get("matrix_states") or matrices
        converted = {key: self._spec.converted(state) for key, state in found.items()}
        return {**state_dict, "state": states, "matrix_states": converted}

    def refuse_foreign(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a dictionary that is not one of this optimizer's.

        Raises:
            ValueError: Another optimizer has written it, or it has unknown states or parameters.
        """
        self._refuse_foreign(state_dict)
        self._refuse_unknown_matrices(state_dict)

    def _refuse_foreign(self, state_dict: Mapping[str, Any]) -> None:
        ours = self._spec.identity
        theirs = state_dict.get("rankwise")
        if theirs not in (None, ours):
            raise ValueError(
                f"{ours}: the checkpoint's rankwise={theirs!r} is invalid: it names the optimizer that wrote it, "
                f"which must be {ours!r}; load it into that one, or load the weights alone"
            )
        if theirs is None and not self._have_matrices(state_dict):
            # Others have put the dictionary together and lost what belongs to no parameter.
            if not all(map(self._is_ours, state_dict["param_groups"])):
                raise ValueError(self._refusal_of_others())
            if self._spec.matrix_states and state_dict["state"]:
                raise ValueError(self._refusal_of_lost())
        if theirs == ours and state_dict.get(COUNT) == 0 and steps_taken(state_dict["state"]):
            # torch has filled a dictionary of this optimizer, which was fresh, with states of the same names.
            raise ValueError(self._refusal_of_others())
        if theirs == ours and state_dict.get(WITH_STATES) and not self._have_matrices(state_dict):
            raise ValueError(self._refusal_of_lost())

    def _is_ours(self, group: Mapping[str, Any]) -> bool:
        """Whether a group has our options, and none that only torch's own optimizers have."""
        return set(self._spec.group_options) <= set(group) and _TORCHS.isdisjoint(group)

    @staticmethod
    def _have_matrices(state_dict: Mapping[str, Any]) -> bool:
        return "matrix_states" in state_dict or any(matrices_of("", state) for state in state_dict["state"].values())

    def _refusal_of_lost(self) -> str:
        spec = self._spec
        return (
            f"{spec.identity}: the state dictionary has lost its matrix states "
            f"({', '.join(spec.matrix_state_names)}), which are stored among a parameter's states as 'matrix.<name>'; "
            "save all that optimizer.state_dict() returns, and load a flattened dictionary into a new optimizer"
        )

    def _refusal_of_others(self) -> str:
        return (
            f"{self._spec.identity}: the state dictionary was written by another optimizer than rankwise's, "
            "torch.optim.AdamW for example, whose states mean something else; "
            "load it into that one, or go on from it with continue_from(), which keeps what means the same and starts "
            "the other states afresh"
        )

    def _refuse_unknown_matrices(self, state_dict: Mapping[str, Any]) -> None:
        ours, names = self._spec.identity, self._spec.matrix_state_names
        for key, state in state_dict.get("matrix_states", {}).items():
            if self._table.base_name(key) not in self._table.catalog:
                raise ValueError(
                    f"{ours}: the checkpoint's matrix_states has {key!r}, which is invalid: it must be the name of one "
                    f"of this optimizer's parameters ({', '.join(list(self._table.catalog)[:3])}, ...); build the "
                    "optimizer from the same named parameters"
                )
            unknown = sorted(name for name in state if name.partition("[")[0] not in names)
            if unknown:
                raise ValueError(
                    f"{ours}: the checkpoint's matrix_states[{key!r}] has {unknown[0]!r}, which is invalid: it must be "
                    f"one of {', '.join(names) or 'none'}; load it with the version that wrote it"
                )

    def refuse_misfits(self, matrix_states: Mapping[str, MatrixState]) -> None:
        """Refuse states of other shapes than this rank's matrices have.

        Raises:
            MisfitError: A state has another shape; the message names the first one.
        """
        for unit in self._planner.units.values():
            refuse_strange(self._spec.identity, unit, matrix_states)

    def _refuse_other_shapes(self, state_dict: Mapping[str, Any], present: Groups) -> None:
        """Compare the states with this optimizer's parameters, by the options of the saved groups."""
        spec = self._spec
        matrices: Mapping[str, MatrixState] = state_dict.get("matrix_states", {})
        groups = []
        for group, saved in zip(present, state_dict["param_groups"], strict=True):
            groups.append({**group, **{key: value for key, value in saved.items() if key != "params"}})
            for tensor, key in zip(group["params"], saved["params"], strict=True):
                states = state_dict["state"].get(key)
                if states:
                    record = state_dict["layout"][key] if "layout" in state_dict else {}
                    self._refuse_misfit(present, tensor, states, groups[-1], record)
        for key, states in matrices.items():
            info, (_, position) = self._table.matrix_info(key), self._table.catalog[self._table.base_name(key)]
            # Only the planned owner knows the shapes of a slice, which are compared below.
            if info is not None and position < len(groups):
                for state, shapes in spec.shapes_of_states(info, groups[position]).items():
                    if state in states:
                        check_shape(spec.identity, key, state, states[state].shape, shapes)
        if spec.structures_of(groups) == spec.structures_of(present):
            self.refuse_misfits(matrices)

    def _refuse_misfit(
        self,
        groups: Groups,
        tensor: Tensor,
        states: Mapping[str, Any],
        group: Mapping[str, Any],
        record: Mapping[str, Any],
    ) -> None:
        try:
            self._planner.source.contents(tensor)
        except (LookupError, RuntimeError):
            return  # the step will say what is wrong
        owner = self._spec.identity
        # Shapes depend on no type.
        content, kept = self._planner.kept_in(groups, tensor, group, torch.float32)
        whole = self._planner.name_of(tensor)
        key = whole or ", ".join(part.key for part in content.slices[:3])
        for name, shape in kept.shapes(0).items():
            if name in states:
                check_shape(owner, key, name, self._opened_shape(key, name, states[name], record), [shape])
            elif whole is not None and "step" in states and name not in (REMAINDER, *self._spec.optional_states):
                raise MisfitError(
                    f"{owner}: the checkpoint's states of {key!r} are invalid: they must include {name!r}, as "
                    f"this optimizer's options say, but are {', '.join(map(repr, states))}; build it with the options "
                    "that the checkpoint was saved with, or load the weights alone"
                )

    def _opened_shape(self, key: str, name: str, state: Tensor, record: Mapping[str, Any]) -> Sequence[int]:
        """Shape of a saved state when opened."""
        packed = packed_in(record, name)
        if is_coded(state.dtype) if packed is None else not packed[0].fits(state):
            raise MisfitError(
                f"{self._spec.identity}: the state {name!r} of {key!r} is in codes that the dictionary does not "
                "explain: 'layout' must be in it as it was saved; save all that optimizer.state_dict() returns"
            )
        return state.shape if packed is None else packed[1]


def this_rank() -> list[int]:
    """This rank and the number of ranks."""
    return [dist.get_rank(), dist.get_world_size()] if dist.is_initialized() else [0, 1]


def _refuse_parts_of_others(owner: str, state_dict: Mapping[str, Any], source: LayoutSource) -> None:
    """Refuse parts of parameters that another rank has written: they do not tell their place.

    A collective where the parameters are parts too; all ranks refuse, if one of them has another one's parts.
    """
    written, present = state_dict.get(WRITTEN_BY), this_rank()
    fix = "save with torch.distributed.checkpoint, from get_optimizer_state_dict, which suits any ranks"
    if REPLICA in state_dict:
        fix = "start all replicas with as many ranks"

    def refuse() -> None:
        if written is not None and list(written) != present:
            raise ValueError(
                f"{owner}: the state dictionary is invalid here, because rank {written[0]} of {written[1]} wrote it: "
                f"with parts of parameters that rank must load it, but this is rank {present[0]} of {present[1]}; {fix}"
            )

    if REPLICA in state_dict:
        refuse()  # some of the replica's ranks may have got nothing, and would not come
    elif written is not None:
        source.connect()
        gather_together(refuse, source.group)
