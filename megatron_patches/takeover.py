"""Our optimizers take over from checkpoints of Megatron's own: they ask by name, ranks agree, then states change.

What is read goes to memory of its own. No state of ours changes until every rank has found its whole part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch.nn import Parameter

from megatron_patches.adam_states import WEIGHT, AskedState, BucketPlaces, NamedPlaces, Stored, stored_step
from megatron_patches.layouts import MegatronLayout
from megatron_patches.records import Place, at_place, nested
from rankwise.checkpoint.named_vectors import take_moments
from rankwise.layout.agreement import gather_together
from rankwise.saving.state_takeover import listed
from rankwise.states.optimizer_spec import MOMENTS
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["TAKEOVER", "Takeover", "find_takeovers", "taken_over"]

TAKEOVER = "rankwise_takeover"
"""Key of the :class:`Takeover` in the state that a wrapper asks for."""
_AUTHOR = "Megatron's own optimizer"
_WAY_OUT = "pass --no-load-optim to start from the model's weights with all states afresh"
_ON_ITS_SIZES = (
    "go on with --use-distributed-optimizer on the tensor- and pipeline-parallel sizes that wrote the checkpoint, or "
    "let Megatron's optimizer save it there once more with --dist-ckpt-optim-fully-reshardable"
)

_T = TypeVar("_T")


class Takeover:
    """The takeover of one wrapper.

    Args:
        wrapper: Planned wrapper of our optimizer, or a stub without parameters.
        model_state: The model's sharded state, with names and offsets of tensors.
    """

    def __init__(self, wrapper: MegatronOptimizer, model_state: Any) -> None:
        self.wrapper, self._model_state = wrapper, model_state
        self._inner: ShardedOptimizer | None = wrapper.optimizer
        self._asked: dict[tuple[int, str], AskedState] = {}
        self._values: dict[tuple[int, str], Tensor] = {}
        self._lacking: dict[str, tuple[str, ...]] = {}
        self._in_buckets = False
        self._began = 0
        self._afresh: tuple[str, ...] = ()
        self._scaler: Mapping[str, Any] | None = None
        self._is_done = False

    # --- asking -------------------------------------------------------------------------------------------------

    def ask(self, stored: Stored, position: int | None) -> dict[str, Any]:
        """Return what must be read for the wrapper.

        Args:
            stored: The checkpoint.
            position: Position of the wrapper among several; None if there is one.
        """
        if self._inner is None:
            return {}
        self._in_buckets = stored.in_buckets and isinstance(self.wrapper, DistributedOptimizer)
        places = (
            BucketPlaces(self.wrapper, stored, position)
            if self._in_buckets
            else NamedPlaces(self.wrapper, self._model_state, stored, self._layout.layer_wise)
        )
        targets = self._inner.saved.succession.targets(self._inner.param_groups)
        held = {id(parameter): run for _, parameter, run in self._layout.main_weights()}
        whole = {id(parameter): parameter for parameter in places.parameters}
        for _, parameter, _ in self._layout.main_weights():
            whole.setdefault(id(parameter), parameter)
        for index, parameter in whole.items():
            name = self._layout.parameter_name(parameter)
            wanted = (WEIGHT, *targets[name].moments)
            requests = {state: places.ask(parameter, state, held.get(index, slice(0, 0))) for state in wanted}
            lacking = tuple(state for state in wanted if requests[state] is None)
            if WEIGHT in lacking and stored.in_buckets and parameter.dtype.itemsize < torch.float32.itemsize:
                raise ValueError(
                    f"the full-precision weight of '{name}' lies in the buffers of a distributed optimizer, whose "
                    f"layout this run does not have; {_ON_ITS_SIZES}"
                )
            if lacking:
                self._lacking[name] = lacking
            self._asked.update({(index, state): asked for state, asked in requests.items() if asked is not None})
        return {
            "states": {f"{number}": asked.request for number, asked in enumerate(self._asked.values())},
            "further": dict(places.further),
        }

    @property
    def lacking(self) -> dict[str, tuple[str, ...]]:
        """States that the checkpoint does not have for this rank, by parameter."""
        return self._lacking

    def agree(self, lacking: Iterable[Mapping[str, Sequence[str]]]) -> None:
        """Let no rank take a parameter's state of which some rank lacks its part.

        Args:
            lacking: Lacking states of every rank.
        """
        lacking_states: dict[str, set[str]] = {}
        for of_rank in lacking:
            for name, states in of_rank.items():
                lacking_states.setdefault(name, set()).update(states)
        self._lacking = {name: tuple(sorted(states)) for name, states in lacking_states.items()}

    # --- what was read ------------------------------------------------------------------------------------------

    def receive(self, read: Mapping[str, Any], common: Mapping[str, Any], model: Callable[[Parameter], Tensor]) -> int:
        """Check what was read, before anything changes.

        Args:
            read: The filled result of :meth:`ask`.
            common: The part of the checkpoint that all ranks share.
            model: Returns what was read for a parameter of the model.

        Returns:
            The number of steps that the other optimizer has taken.

        Raises:
            ValueError: A state is missing or belongs to another weight.
        """
        if self._inner is None:
            return 0
        for number, (place, asked) in enumerate(self._asked.items()):
            value = read["states"][f"{number}"].reshape(-1)
            self._values[place] = value[asked.run]
        further = read.get("further", {})
        scaler = further.get("grad_scaler") or _scaler_in(common)
        self._scaler = scaler if getattr(self.wrapper, "grad_scaler", None) else None
        for tensor, parameter, run in self._layout.main_weights():
            for state in (WEIGHT, *MOMENTS):
                value = self._values.get((id(parameter), state), tensor)
                if value.numel() != tensor.numel():
                    name = self._layout.parameter_name(parameter)
                    raise ValueError(f"'{name}' has {value.numel()} elements of its {state}")
            if self._in_buckets:
                self._compare(parameter, run, model(parameter))
        return stored_step(further, common.get("optimizer"))

    def _compare(self, parameter: Parameter, run: slice, model: Tensor) -> None:
        """Refuse a weight in a buffer, which has no name, if it does not round to the model's weight."""
        weight = self._values.get((id(parameter), WEIGHT))
        # Rounding to a narrower type has a scale.
        rounded = parameter.dtype.itemsize >= torch.float16.itemsize
        if weight is None or not rounded:
            return
        here = model.detach().reshape(-1)[run].to("cpu", parameter.dtype)
        if not torch.equal(weight.to("cpu", parameter.dtype), here):
            raise ValueError(
                f"the buffers of a distributed optimizer have another weight in the place of "
                f"'{self._layout.parameter_name(parameter)}': this run's layout differs; {_ON_ITS_SIZES}"
            )

    @property
    def afresh(self) -> tuple[str, ...]:
        """Return this rank's parameters without any moment to continue."""
        if self._inner is None:
            return ()
        return self._inner.saved.succession.plan(self._shapes(), self._inner.param_groups).afresh

    def settle(self, began: int, afresh: Iterable[str]) -> None:
        """Accept the takeover, when all ranks have what they need.

        Args:
            began: Most steps that the other optimizer has taken on any rank.
            afresh: Parameters of all ranks that start afresh, as Megatron saves one rank's record for all.
        """
        self._began, self._afresh = began, tuple(afresh)

    def _shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        assert self._inner is not None
        return {
            name: {moment: tuple(info.shape) for moment in MOMENTS if moment not in self._lacking.get(name, ())}
            for name, (info, _) in self._inner.table.catalog.items()
        }

    @property
    def state(self) -> dict[str, Any]:
        """Return what the wrapper will load."""
        if self._inner is None:
            return {}
        return {TAKEOVER: self, **({} if self._scaler is None else {"grad_scaler": self._scaler})}

    @torch.no_grad()
    def commit(self) -> None:
        """Take over full-precision weights, moments with one meaning, and counts; the model's weights are loaded."""
        inner = self._inner
        assert inner is not None
        if self._is_done:
            return
        self._is_done = True
        parameters = {id(tensor): parameter for tensor, parameter, _ in self._layout.main_weights()}
        rounded = []
        for tensor, parameter, run in self._layout.main_weights():
            name = self._layout.parameter_name(parameter)
            if WEIGHT in self._lacking.get(name, ()):
                tensor.copy_(parameter.detach().reshape(-1)[run].view_as(tensor))
                if tensor.dtype != parameter.dtype:
                    rounded.append(name)
            else:
                tensor.copy_(self._values[id(parameter), WEIGHT].view_as(tensor))

        def value(tensor: Tensor, moment: str) -> Tensor:
            return self._values[id(parameters[id(tensor)]), moment]

        take_moments(inner, self._shapes(), self._began, value, _AUTHOR, _rounded(rounded), self._afresh)
        self._values.clear()

    # --- the wrapper's tensors ----------------------------------------------------------------------------------

    @property
    def _layout(self) -> MegatronLayout:
        assert self._inner is not None
        layout = self._inner.planner.source
        assert isinstance(layout, MegatronLayout)
        return layout


def _scaler_in(common: Any) -> Any:
    holders = (holder for _, holder in nested(common) if isinstance(holder, Mapping))
    return next((holder["grad_scaler"] for holder in holders if holder.get("grad_scaler")), None)


def _rounded(names: Sequence[str]) -> str:
    if not names:
        return ""
    return (
        f" The checkpoint has no full-precision weights that fit {listed(names)}: they go on from the model's own type."
    )


def find_takeovers(state: Any) -> Iterator[tuple[Place, MutableMapping[Any, Any]]]:
    """Yield the dictionaries with a :class:`Takeover` in the state that is asked for, after where they lie."""
    for place, holder in nested(state):
        if isinstance(holder, MutableMapping) and isinstance(holder.get(TAKEOVER), Takeover):
            yield place, holder


class taken_over:  # noqa: N801 - used as a function.
    """Ask a checkpoint of Megatron's own optimizers for the states that ours take over. A collective of all ranks.

    Args:
        requested: What will be loaded; requests of our wrappers in it are replaced.
        stored: The checkpoint.
    """

    def __init__(self, requested: Any, stored: Stored) -> None:
        self._found = {place: (holder[TAKEOVER], holder) for place, holder in find_takeovers(requested)}
        self._model = dict(_parameter_places(requested))
        self._common = stored.common
        asked: list[dict[str, Any]] = []

        def ask() -> list[dict[str, tuple[str, ...]]]:
            asked.extend(takeover.ask(stored, _position(place)) for place, (takeover, _) in self._found.items())
            return [takeover.lacking for takeover, _ in self._found.values()]

        everyone = _everyone(ask)
        for index, (takeover, holder) in enumerate(self._found.values()):
            takeover.agree(lacking[index] for lacking in everyone)
            holder.clear()
            holder.update({TAKEOVER: asked[index]} if asked[index] else {})

    def __call__(self, loaded: Any) -> None:
        """Check what was read, and put it where our wrappers look for it. A collective of all ranks.

        Args:
            loaded: What Megatron read, which changes in place.

        Raises:
            ValueError: On all ranks: a rank cannot take over its part.
        """

        def receive() -> tuple[int, set[str]]:
            began, afresh = 0, set[str]()
            for place, (takeover, _) in self._found.items():
                read = at_place(loaded, place).get(TAKEOVER, {}) if takeover.wrapper.optimizer is not None else {}
                began = max(began, takeover.receive(read, self._common, lambda p: self._read(loaded, p)))
                afresh.update(takeover.afresh)
            return began, afresh

        everyone = _everyone(receive)
        began = max(steps for steps, _ in everyone)
        for takeover, _ in self._found.values():
            takeover.settle(began, {name for _, names in everyone for name in names} if began else ())
        for top in dict.fromkeys(place[0] for place in self._found if place):
            loaded[top] = {}
        for place, (takeover, _) in self._found.items():
            _put(loaded, place, takeover.state)

    def _read(self, loaded: Any, parameter: Parameter) -> Tensor:
        place = self._model.get(id(parameter))
        loaded_tensor = parameter if place is None else at_place(loaded, place)
        return loaded_tensor if isinstance(loaded_tensor, Tensor) else parameter


def _position(place: Place) -> int | None:
    return place[-1] if place and isinstance(place[-1], int) else None


def _everyone(work: Callable[[], _T]) -> list[_T]:
    """Return the results of some work on all ranks; if it fails on one rank, it fails on all."""

    def told() -> _T:
        try:
            return work()
        except Exception as error:
            text = str(error) if isinstance(error, ValueError) else repr(error)
            raise ValueError(f"this checkpoint of {_AUTHOR} cannot be continued: {text}; or {_WAY_OUT}") from error

    return gather_together(told, dist.group.WORLD)


def _parameter_places(state: Any) -> Iterator[tuple[int, Place]]:
    for place, sharded in nested(state):
        if isinstance(sharded, ShardedTensor | ShardedTensorFactory) and isinstance(sharded.data, Parameter):
            yield id(sharded.data), place


def _put(state: Any, place: Place, value: Mapping[str, Any]) -> None:
    if not place:
        state.clear()
        state.update(value)
        return
    for key in place[:-1]:
        state = state.setdefault(key, {})
    state[place[-1]] = value
