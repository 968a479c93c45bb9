"""What users do to ``Optimizer.state`` between two steps: matrix states follow it, or it is refused before a step."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import NoReturn

import torch
from torch import Tensor

from rankwise.comm.votes import all_vote
from rankwise.plan.notes import Note
from rankwise.plan.planner import Planner
from rankwise.plan.step_unit import StepUnit
from rankwise.plan.transition import Transition
from rankwise.states.element_states import States
from rankwise.states.param_remainders import REMAINDER

__all__ = ["MARKED", "FollowedStates"]

logger = logging.getLogger(__name__)

MARKED: Note[bool] = Note("whether states carry what torch's checkpoint functions look for")
_FOLLOWED: Note[tuple[Sequence[int], tuple[int, ...]]] = Note("tensors and states of the last step")
_SEEN: Note[dict[int, tuple[int, ...]]] = Note("identities of the states that each tensor had in its last step")
_MATRIX_PLACES: Note[dict[str, set[int]]] = Note("the tensors that have something of each matrix with an owner")

_RESET = "to begin afresh, remove all states of the parameter (optimizer.state.pop(parameter))"


class FollowedStates:
    """Lets no matrix state outlive the states of its parameter in ``Optimizer.state``, which users clear and replace.

    A parameter's step count is what its states are known by: torch keeps it among them, and nothing but a user puts
    another one in its place. Without one the parameter is fresh in everything. With another one of the same number its
    states have been moved or copied; with one of another number, or of another parameter, they are states to which the
    matrix states do not belong. A step that finds the same objects as the last one did asks no further.

    Args:
        planner: Knows the parameters, and their tensors.
        transition: What is fresh takes no part in it.

    Attributes:
        counts: Those of the last steps, by their tensors.
    """

    def __init__(self, planner: Planner, transition: Transition) -> None:
        self._planner, self._transition = planner, transition
        self._spec, self._table, self._matrix_states = planner.spec, planner.table, planner.matrix_states
        self._rounds = 0
        self.counts: dict[Tensor, Tensor] = {}
        self._names: dict[Tensor, frozenset[str]] = {}

    # --- all states ---------------------------------------------------------------------------------------------

    def accept(self, states: States) -> None:
        """Take the present states for this optimizer's: they have been loaded or dropped, with those of matrices."""
        self.counts = {tensor: own["step"] for tensor, own in states.items() if "step" in own}
        self._names = {}

    def is_reset(self, states: States) -> bool:
        """Whether a user has removed all states there were."""
        return not states and len(self.counts) > 0

    def put_back(self, states: States, tensors: Iterable[Tensor]) -> None:
        """Count on, by the other ranks' side, where this rank has removed states that others still have."""
        logger.warning(
            "%s: rank %d alone has removed states from optimizer.state that other ranks still have. Its averages begin "
            "anew, and steps are counted on, with the matrix states that there are; remove states on all ranks alike, "
            "or call forget_states() on all of them.",
            self._spec.name,
            self._planner.rank,
        )
        for tensor in tensors:
            states[tensor]["step"] = self.counts[tensor]
            self._names.pop(tensor, None)

    def drop_orphans(self, states: States) -> None:
        """Drop the matrix states of parameters whose other states are gone, where tensors are parameters."""
        gone = [tensor for tensor in self.counts if "step" not in states.get(tensor, ())]
        names = {self._planner.name_of(tensor) for tensor in gone}.difference([None])
        if names:
            present = self._matrix_states.everything()
            self._matrix_states.drop([key for key in present if self._table.base_name(key) in names])

    def agree(self, what: str, unit: StepUnit | None = None) -> bool:
        """Whether all ranks have removed states, of a unit or of all; only ranks that have ask (:func:`all_vote`).

        Where ranks step matrices together, each takes from its own states how far they are, and waits for the others.
        """
        found = unit or next(iter(self._planner.units.values()), None)
        if found is None or found.exchange is None or found.layout.group is None:
            return True
        # A rank that holds nothing has nothing to remove.
        alone = found.layout.world_size == 1 or not found.layout.all_hold
        return alone or all_vote(f"{found.token}/{self._rounds}/{what}", found.layout.group)

    # --- a step -------------------------------------------------------------------------------------------------

    def follow(self, unit: StepUnit, states: States, stepped: Sequence[int]) -> list[str]:
        """Look at the states before a step.

        Args:
            unit: The unit of the step.
            states: The optimizer's.
            stepped: Indices of the tensors that take it.

        Returns:
            Matrices that had states, here or on other ranks, and are fresh now.

        Raises:
            RuntimeError: States were replaced by others to which the matrix states do not belong, or by tensors that no
                step can go on with; nothing has changed then.
        """
        self._rounds += 1
        present = (stepped, _objects(states))
        if present == unit.notes.get(_FOLLOWED):
            return []
        seen = unit.notes.obtain(_SEEN, dict)
        tensors = unit.tensors
        changed = [at for at in stepped if tuple(map(id, states[tensors[at]].values())) != seen.get(at)]
        if not changed:
            unit.notes[_FOLLOWED] = present
            return []
        fresh = [at for at in changed if "step" not in states[tensors[at]]]
        kept = sorted(set(changed).difference(fresh))
        for at in kept:
            self._judge(unit, states, at)
        for at in kept:
            self._take_up(unit, states, at)
            seen[at] = tuple(map(id, states[tensors[at]].values()))
        return self._begin(unit, states, fresh) if fresh else []

    def _judge(self, unit: StepUnit, states: States, at: int) -> None:
        tensor, own = unit.tensors[at], states[unit.tensors[at]]
        before, count = self.counts.get(tensor), own["step"]
        if count is not before and self._planner.is_plain and self._has_matrix(unit, at):
            if before is None:
                if int(count) and not self._transition.began:
                    self._refuse(tensor, "were put into optimizer.state by hand")
            elif int(count) != int(before):
                self._refuse(tensor, f"were replaced by those of another time (step {int(count)}, not {int(before)})")
            elif any(count is other for other in self.counts.values()):
                self._refuse(tensor, "were replaced by those of another parameter")
        present = self._names.get(tensor, frozenset()).difference(own, self._spec.optional_states)
        missing = sorted(present.intersection(unit.states.shapes(at)))
        if missing:
            raise RuntimeError(
                f"{self._spec.name}: the state {missing[0]!r} of {self._named(tensor)} is gone from optimizer.state, "
                f"while others are there: it must have all or none; put it back, or, {_RESET}"
            )
        unit.states.refuse_unfit(states, at, f"{self._spec.name}: the state {{!r}} of {self._named(tensor)}", _RESET)

    def _has_matrix(self, unit: StepUnit, at: int) -> bool:
        """Whether there are matrix states, on whatever rank, that belong to those of a tensor."""
        return len(self._spec.matrix_states) > 0 and any(at in places for places in _places(unit).values())

    def _refuse(self, tensor: Tensor, what: str) -> NoReturn:
        names = ", ".join(self._spec.matrix_state_names)
        raise RuntimeError(
            f"{self._spec.name}: the states of {self._named(tensor)} {what}, but its matrix states ({names}) are kept "
            f"beside optimizer.state and did not come with them; use state_dict() and load_state_dict(), or, {_RESET}"
        )

    def _named(self, tensor: Tensor) -> str:
        name = self._planner.name_of(tensor)
        return f"a tensor of {tensor.numel()} elements" if name is None else f"'{name}'"

    def _take_up(self, unit: StepUnit, states: States, at: int) -> None:
        """Go on with states that a user has moved or copied: counts lie where steps look for them."""
        tensor, own = unit.tensors[at], states[unit.tensors[at]]
        count, device = own["step"], self._spec.count_device(tensor)
        if not isinstance(count, Tensor):
            own["step"] = torch.tensor(float(count), dtype=torch.float32, device=device)
        elif count.device != device or count.dtype != torch.float32:
            own["step"] = count.to(device, torch.float32)
        unit.states.lay_in_rows(states, at)
        self.counts[tensor] = own["step"]
        self._names[tensor] = frozenset(own)

    def _begin(self, unit: StepUnit, states: States, fresh: Collection[int]) -> list[str]:
        """Make fresh what a step finds without a count, in everything that there is of it."""
        known = {at for at in fresh if unit.tensors[at] in self.counts}
        agreed = not known or self.agree(",".join(self._named(unit.tensors[at]) for at in sorted(known)), unit)
        for at in fresh:
            own, seen = states[unit.tensors[at]], unit.notes[_SEEN]
            seen.pop(at, None)
            for name in unit.states.shapes(at):
                # Nor what has been recorded for this very step.
                if name != REMAINDER and name not in self._spec.optional_states:
                    own.pop(name, None)
            self._names.pop(unit.tensors[at], None)
        if not agreed:
            self.put_back(states, [unit.tensors[at] for at in known])
            fresh, known = set(fresh) - known, set()
        names = {entry.info.name for entry in unit.entries if entry.shard.tensor in fresh}
        self._transition.leave(names)
        # torch's checkpoint functions look for the marks in states.
        unit.notes.drop(MARKED)
        return self._drop_matrices(unit, set(fresh), known)

    def _drop_matrices(self, unit: StepUnit, fresh: set[int], known: set[int]) -> list[str]:
        """Drop the states of matrices that begin with fresh tensors; of those known before, tell which."""
        everything = set(range(len(unit.tensors)))
        gone, told = [], []
        for key, places in _places(unit).items():
            # An owner that holds nothing of a matrix goes by all that it holds.
            if places & fresh if places else everything and everything <= known:
                gone.append(key)
            if (places or everything) & known:
                told.append(key)
        self._matrix_states.drop(gone)
        return told


def _objects(states: States) -> tuple[int, ...]:
    """What tells states from others that were put in their places, in a few calls for however many tensors."""
    return tuple(map(id, chain.from_iterable(map(dict.values, states.values()))))


def _places(unit: StepUnit) -> dict[str, set[int]]:
    """The tensors that are, or have something of, each matrix that has an owner; planned once."""
    found = unit.notes.get(_MATRIX_PLACES)
    if found is None:
        held: dict[str, set[int]] = {key: {at} for key, at in unit.key_tensors.items()}
        for entry in unit.entries if not held else ():
            held.setdefault(entry.key, set()).add(entry.shard.tensor)
        wholes = {part: key for key, matrix in unit.collectives.slices.items() for part in matrix.parts}
        owned = () if unit.exchange is None else unit.exchange.plan.owners
        found = {key: held.get(key) or held.get(wholes.get(key, key), set()) for key in owned}
        unit.notes[_MATRIX_PLACES] = found
    return found
