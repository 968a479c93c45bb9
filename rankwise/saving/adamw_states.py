"""Converts states of AdamW or Muon to ours and back, by parameter, as torch.optim's dictionaries have them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rankwise.plan.checkpoint_mismatch import MisfitError
from rankwise.plan.planner import Planner
from rankwise.plan.transition import Transition
from rankwise.saving.checkpoint_fit import in_order_of, same_groups
from rankwise.saving.state_takeover import StateTakeover, TakeoverTarget, plan_takeover
from rankwise.states.element_states import States
from rankwise.states.matrix_states import MatrixState
from rankwise.states.optimizer_spec import MOMENTS
from rankwise.states.parameter_table import Groups

__all__ = ["AdamWStates", "moment_names", "moments_of"]

logger = logging.getLogger(__name__)

MatrixStates = Mapping[str, MatrixState]


def moment_names(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Averages that the optimizer of a saved param group keeps, by AdamW's names; Muon keeps the first."""
    return MOMENTS[:1] if _is_muon(group) else MOMENTS


def _is_muon(group: Mapping[str, Any]) -> bool:
    return "ns_steps" in group or group.get("use_muon") in (True, 1)


def moments_of(state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Tensor]:
    """The averages among one parameter's states, under AdamW's names.

    Args:
        state: State of a saved optimizer.
        group: Its param group, which tells Muon's momentum, an average, from SGD's, a sum.
    """
    moments = {name: state[name] for name in MOMENTS if isinstance(state.get(name), Tensor)}
    if _is_muon(group) and isinstance(state.get("momentum_buffer"), Tensor):
        moments["exp_avg"] = state["momentum_buffer"]
    return moments


class AdamWStates:
    """Converts the states of AdamW and Muon to ours, and ours to AdamW's."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self._spec, self._table = planner, planner.spec, planner.table

    def targets(self, groups: Groups) -> dict[str, TakeoverTarget]:
        """All parameters as targets of a takeover, whichever rank holds them; the same on every rank."""
        targets = {}
        for name, (info, position) in self._table.catalog.items():
            rule = self._table.routes[name].rule
            moments = self._spec.moments(info, rule, groups[position])
            targets[name] = TakeoverTarget(tuple(info.shape), moments, rule)
        return targets

    def plan(self, saved: Mapping[str, Mapping[str, tuple[int, ...]]], groups: Groups) -> StateTakeover:
        """Plan a takeover, see :func:`rankwise.saving.state_takeover.plan_takeover`."""
        return plan_takeover(saved, self.targets(groups))

    def record(self, found: StateTakeover, began: int, elsewhere: Collection[str] = ()) -> dict[str, Any]:
        """Make what :class:`Transition` loads; an empty record ends an earlier transition."""
        transition = Transition()
        transition.begin(began, self._spec.options.transition_steps, {*found.afresh, *elsewhere})
        return {"transition": {}, **transition.state_dict()}

    def tell(self, found: StateTakeover, author: str, note: str = "") -> str:
        """Describe a takeover in one line, on the first rank; see :meth:`StateTakeover.told`."""
        told = found.told(self._spec.name, author, self._spec.options.transition_steps) + note
        if self._planner.rank == 0:
            logger.warning("%s", told)
        return told

    def translated(self, state_dict: Mapping[str, Any], groups: Groups) -> tuple[dict[str, Any], str]:
        """Convert another optimizer's dictionary to one that this optimizer would have written.

        Raises:
            ValueError: The dictionary has other parameters, or is one of ours.
        """
        owner = self._spec.identity
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"{owner}: continue_from() takes a state dictionary, not {type(state_dict).__name__}; pass what its "
                "state_dict() returns"
            )
        if state_dict.get("rankwise") is not None:
            raise ValueError(
                f"{owner}: the checkpoint's rankwise={state_dict['rankwise']!r} is invalid here: continue_from() takes "
                "the states of AdamW or Muon; load ours with load_state_dict()"
            )
        self._refuse_other_groups(state_dict, groups)
        names = [[self._planner.name_of(tensor) for tensor in group["params"]] for group in groups]
        theirs = in_order_of(owner, dict(state_dict), names)
        moments: dict[str, dict[str, Tensor]] = {}
        counts = [0]
        for own, saved in zip(groups, theirs["param_groups"], strict=True):
            for tensor, key in zip(own["params"], saved["params"], strict=True):
                state = theirs["state"].get(key, {})
                moments[str(self._planner.name_of(tensor))] = moments_of(state, saved)
                counts.append(int(state.get("step", saved.get("step", 0))))
        began = max(counts)
        shapes = {name: {m: tuple(value.shape) for m, value in found.items()} for name, found in moments.items()}
        # Muon counts no steps; where it has states, it counts as one step.
        began = began or int(any(moments.values()))
        found = self.plan(shapes, groups)
        told = self.tell(found, "another optimizer")
        state, param_groups = self._states(found, moments, groups, began)
        record = self.record(found, began)
        return {"state": state, "param_groups": param_groups, "rankwise": owner, "matrix_states": {}, **record}, told

    def _refuse_other_groups(self, state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        if not same_groups(state_dict, groups):
            ours, theirs = ([len(group["params"]) for group in these] for these in (groups, state_dict["param_groups"]))
            raise MisfitError(
                f"{self._spec.identity}: the checkpoint's param groups are invalid: they must have {ours} parameters, "
                f"but have {theirs}; build the optimizer from the same parameters in the same groups"
            )

    def _states(
        self, found: StateTakeover, moments: Mapping[str, Mapping[str, Tensor]], groups: Groups, began: int
    ) -> tuple[dict[int, dict[str, Tensor]], list[dict[str, Any]]]:
        states: dict[int, dict[str, Tensor]] = {}
        param_groups = []
        for group in groups:
            first = len(states)
            for tensor in group["params"]:
                name = str(self._planner.name_of(tensor))
                _, kept = self._planner.kept_in(groups, tensor, group, torch.float32)
                state_here = {"step": torch.tensor(float(began), dtype=torch.float32, device="cpu")} if began else {}
                taken = {state: moments[name][moment] for moment, state in found.carried.get(name, {}).items()}
                for state, shape in kept.shapes(0).items() if began else ():
                    if state not in taken:
                        taken[state] = torch.zeros(shape, dtype=torch.float32, device=tensor.device)
                    state_here[state] = taken[state]
                states[len(states)] = state_here
            keys = list(range(first, len(states)))
            param_groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": keys})
        return {key: state for key, state in states.items() if state}, param_groups

    def hand_over(
        self, groups: Groups, states: States, matrix_states: MatrixStates, transition: Transition, adamw: Optimizer
    ) -> None:
        """Give the states that AdamW has, too, to one of torch's optimizers, see ``ShardedOptimizer.hand_over``.

        Args:
            groups: Param groups.
            states: Element states by tensor.
            matrix_states: Matrix states of all matrices; empty where other ranks have some.
            transition: Transition from the optimizer before.
            adamw: The optimizer that gets the states.
        """
        target = adamw.state_dict()
        self._refuse_other_groups(target, groups)
        squares = self._squares(groups, matrix_states)
        handed_over: dict[Any, dict[str, Tensor]] = {}
        kept = gently = 0
        for own, theirs in zip(groups, target["param_groups"], strict=True):
            for tensor, key in zip(own["params"], theirs["params"], strict=True):
                name = str(self._planner.name_of(tensor))
                info, position = self._table.catalog[name]
                moments = self._spec.moments(info, self._table.routes[name].rule, groups[position])
                state = states.get(tensor, {})
                if "step" not in state:
                    continue
                step = state["step"].detach().clone() - transition.before(name)
                if tuple(moments) == MOMENTS and all(moment in state for moment in MOMENTS):
                    handed_over[key] = {"step": step, **{moment: state[moment].clone() for moment in MOMENTS}}
                    kept += 1
                elif name in squares and "betas" in theirs:
                    handed_over[key] = _gentle(tensor, step, squares[name] / tensor.numel(), theirs["betas"][1])
                    gently += 1
        adamw.load_state_dict({**target, "state": handed_over})
        told = f"{self._spec.name}: {kept} of {sum(len(group['params']) for group in groups)} parameters' moments go on"
        start = f"{gently} begin gently from the mean of their squared gradient, " if gently else ""
        logger.warning(
            "%s in %s; %sthe others start afresh there: begin with small learning rates.",
            told,
            type(adamw).__name__,
            start,
        )

    def _squares(self, groups: Groups, matrix_states: MatrixStates) -> dict[str, Tensor]:
        """Mean squared norms of gradients, for parameters all of whose matrices tell them."""
        parts_of: dict[str, list[Tensor | None]] = {}
        for key, state in matrix_states.items():
            name = self._table.base_name(key)
            if name in self._table.catalog:
                group = groups[self._table.catalog[name][1]]
                parts_of.setdefault(name, []).append(self._spec.squares(state, group) if state else None)
        known = {name: [part for part in parts if part is not None] for name, parts in parts_of.items()}
        return {name: torch.stack(parts).sum() for name, parts in known.items() if len(parts) == len(parts_of[name])}


def _gentle(tensor: Tensor, step: Tensor, square: Tensor, beta2: float) -> dict[str, Tensor]:
    """States of AdamW as if gradients of this mean square, and of no direction, had been seen.

    Without them, AdamW's first step would move every element by the whole rate; so its average grows over some steps.
    """
    second = square * (1.0 - beta2 ** step.to(square))
    average = torch.zeros_like(tensor, memory_format=torch.preserve_format)
    return {"step": step, "exp_avg": average, "exp_avg_sq": average + second.to(average)}
