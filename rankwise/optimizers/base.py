"""The step pipeline common to all optimizers: find the fragments, run the rules, commit."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from rankwise.health import Health
from rankwise.optimizers.options import OptionError, Options
from rankwise.optimizers.routing import ParameterInfo, Route, RoutingPolicy, Rule, info_of, route
from rankwise.optimizers.unit import (
    Bucket,
    Entry,
    LayoutSource,
    Slice,
    StepUnit,
    TensorContents,
    cut_into_matrices,
)
from rankwise.sharding import Layout, Traffic

__all__ = ["Explanation", "MatrixState", "ShardedOptimizer", "StateTypes", "WholeParameters", "deferred_steps"]

MatrixState = dict[str, Tensor]
StateTypes = Mapping[str, torch.dtype | None]
logger = logging.getLogger(__name__)
_COMMON_TOTALS = ("bytes_sent", "collectives", "matrices_updated", "steps")
_deferrals = 0


@contextmanager
def deferred_steps() -> Iterator[None]:
    """Make every optimizer's ``step()`` inert: frameworks step once on zero gradients while they set themselves up."""
    global _deferrals
    _deferrals += 1
    try:
        yield
    finally:
        _deferrals -= 1


@dataclass(frozen=True)
class Explanation:
    """What happens to one parameter, as reported by :meth:`ShardedOptimizer.explain`."""

    name: str
    shape: tuple[int, ...]
    rule: str
    reason: str
    owner: int | None
    state_bytes: int

    def __str__(self) -> str:
        owner = "-" if self.owner is None else str(self.owner)
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.name}  {shape}  {self.rule} ({self.reason})  owner {owner}  {self.state_bytes} B"


class StoredRun(NamedTuple):
    """A run of a parameter in an optimizer tensor, with views of its element states."""

    key: str
    shape: tuple[int, ...]
    start: int
    end: int
    offset: int
    states: dict[str, Tensor]


class WholeParameters:
    """The layout of plain PyTorch: every tensor of the param groups is a whole parameter of this process."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.replicated = False
        self._contents: dict[int, TensorContents] = {}

    def replicated_over(self, group: dist.ProcessGroup) -> WholeParameters:
        """The same parameters, held alike by every rank of a data-parallel group."""
        source = WholeParameters()
        source.group, source.replicated, source._contents = group, dist.get_world_size(group) > 1, self._contents
        return source

    def register(self, tensor: Tensor, name: str, group: int) -> None:
        """Name a parameter of the constructor."""
        whole = Slice(name, 0, tensor.numel(), 0)
        self._contents[id(tensor)] = TensorContents(group, (whole,) if tensor.numel() else ())

    def contents(self, tensor: Tensor) -> TensorContents:
        """See :class:`LayoutSource`."""
        try:
            return self._contents[id(tensor)]
        except KeyError:
            raise RuntimeError(
                f"step() met a tensor of shape {tuple(tensor.shape)} that was not among the constructor's parameters. "
                "A framework replaced the parameters; import deepspeed_plugin before deepspeed.initialize so that "
                "the optimizer is told their layout."
            ) from None


class ShardedOptimizer(Optimizer, ABC):
    """Base of all rankwise optimizers.

    Element states (one value per parameter element) live in ``self.state`` with the shape of the tensor the framework
    handed over, so that its checkpoints carry them; matrix states live in ``self.matrix_states``, by parameter name,
    on their owner only.
    """

    instances: ClassVar[weakref.WeakSet[ShardedOptimizer]] = weakref.WeakSet()
    """Every living optimizer, for frameworks to notice that one of ours was replaced."""
    options_type: ClassVar[type[Options]]
    health_means: ClassVar[tuple[str, ...]] = ()
    """Metrics of :attr:`health` beyond the common ones, reported as means."""
    health_totals: ClassVar[tuple[str, ...]] = ()
    """The same, reported as totals over ranks."""
    sums_cover_fallback: ClassVar[bool] = False
    """Whether per-parameter sums are taken over parameters on the fallback too."""

    def __init__(self, params: Any, options: Options, extra_defaults: Mapping[str, Any] | None = None) -> None:
        self.options = options
        self.matrix_states: dict[str, MatrixState] = {}
        self._loaded_matrix_states: dict[str, MatrixState] = {}
        self._catalog: dict[str, tuple[ParameterInfo, int]] = {}
        self._routes: dict[str, Route] = {}
        self.health = self._new_health()
        self._reported = Traffic()
        self.parameters_by_name: dict[str, Tensor] = {}
        self._plain = WholeParameters()
        self._source: LayoutSource = self._plain
        self._units: dict[tuple[int, ...], StepUnit] = {}
        self._loads: list[float] = []
        self.announce: Callable[[str], None] = logger.info
        self._announced = False
        defaults = {name: getattr(options, name) for name in self.group_options}
        super().__init__(params, {**defaults, **(extra_defaults or {})})
        self._refuse_if_idle()
        ShardedOptimizer.instances.add(self)

    # --- what a subclass declares -------------------------------------------------------------------------------

    group_options: ClassVar[tuple[str, ...]]
    """Options that may differ between param groups."""

    structural_options: ClassVar[tuple[str, ...]] = ("fallback",)
    """Keys of a param group on which routes and shapes of states depend."""

    copied_attributes: ClassVar[tuple[str, ...]] = (
        "options",
        "matrix_states",
        "_loaded_matrix_states",
        "_catalog",
        "_routes",
        "parameters_by_name",
    )
    """What ``copy.deepcopy`` and ``pickle`` take along besides torch's own."""

    @property
    @abstractmethod
    def policy(self) -> RoutingPolicy:
        """Which parameters take the matrix rule."""

    @abstractmethod
    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """Names of a parameter's per-element states, and their type (None: that of the computation)."""

    @abstractmethod
    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        """Update weights and states in place."""

    def _adjust_route(self, info: ParameterInfo, group: Mapping[str, Any], chosen: Route) -> Route:
        """Last word on a parameter's route."""
        return chosen

    # --- param groups -------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and route its parameters; see :class:`torch.optim.Optimizer`.

        Raises:
            OptionError: A value of the group is outside its range.
        """
        if isinstance(param_group, dict):
            self._validate_group(param_group)
        super().add_param_group(param_group)
        self._route_group(len(self.param_groups) - 1)
        self._forget_plans()

    def reroute(self) -> None:
        """Route again by what is known of the parameters by now; see :func:`rankwise.optimizers.routing.annotate`.

        Names become those of the annotation. Does nothing once there is state, which is kept by name.

        Raises:
            OptionError: No parameter takes this optimizer's own rule any more.
        """
        if self.state or self.matrix_states or self._loaded_matrix_states:
            return
        self._catalog.clear()
        self._routes.clear()
        self.parameters_by_name.clear()
        for index in range(len(self.param_groups)):
            self._route_group(index)
        self._forget_plans()
        self._refuse_if_idle()

    def _route_group(self, index: int) -> None:
        group = self.param_groups[index]
        names: Sequence[str | None] = group.get("param_names") or [None] * len(group["params"])
        for position, (parameter, name) in enumerate(zip(group["params"], names, strict=True)):
            info = info_of(parameter, name, f"group{index}.param{position}")
            if info.name in self._catalog:
                info = replace(info, name=f"{info.name}@group{index}.param{position}")
            self._catalog[info.name] = (info, index)
            self.parameters_by_name[info.name] = parameter
            chosen = route(info, self.policy, group.get("fallback"))
            self._routes[info.name] = self._adjust_route(info, group, chosen)
            self._plain.register(parameter, info.name, index)

    def _forget_plans(self) -> None:
        self._units.clear()
        self._loads = []

    def _validate_group(self, group: Mapping[str, Any]) -> None:
        values = {name: getattr(self.options, name) for name in self.options.names()}
        values.update({name: group[name] for name in self.group_options if name in group})
        type(self.options)(**values)
        for name in self.options.names():
            if name in group and name not in self.group_options and group[name] != getattr(self.options, name):
                raise OptionError(
                    f"{type(self).__name__}: {name}={group[name]!r} in a param group is invalid: it must be the same "
                    f"for all groups; pass it to the constructor (groups may set {', '.join(self.group_options)})"
                )

    def _refuse_if_idle(self) -> None:
        if any(chosen.rule == "matrix" for chosen in self._routes.values()):
            return
        reasons = ", ".join(sorted({chosen.reason for chosen in self._routes.values()}))
        raise OptionError(
            f"{type(self).__name__} would update none of the {len(self._routes)} parameters with its own rule (all are "
            f"on the first-order fallback: {reasons}). Pass parameters with matrices, loosen 'exclude', or use AdamW."
        )

    # --- frameworks ---------------------------------------------------------------------------------------------

    def attach(self, source: LayoutSource) -> None:
        """Tell the optimizer how a framework stores the parameters it was constructed with.

        Args:
            source: Names the parameters in each tensor that ``step()`` will meet.
        """
        self._source = source
        self._forget_plans()

    # --- the step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters from their gradients.

        Args:
            closure: Reevaluates the model and returns the loss.

        Returns:
            The closure's value, if given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if _deferrals:
            return loss
        unit = self._unit()
        opened = self._open(unit)
        if opened is not None:
            weights, grads = opened
            self._update(unit, self._buckets(unit, weights, grads))
            self._close(unit, weights)
            if unit is next(iter(self._units.values())):
                self.health.add("steps", 1.0)
            self._forget_foreign_states(unit)
        return loss

    def _unit(self) -> StepUnit:
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        key = tuple(id(tensor) for tensor in tensors)
        unit = self._units.get(key)
        if unit is None:
            positions = [position for position, group in enumerate(self.param_groups) for _ in group["params"]]
            unit = self._units[key] = self._build_unit(tensors, positions, dict(enumerate(self.param_groups)))
            self._plan(unit)
            unit.compare_across_ranks((type(self).__name__, self.options))
        elif not self._announced:
            # The second visit: by now every group has been planned.
            self._announced = True
            self.announce(self.summary())
        return unit

    def _plan(self, unit: StepUnit) -> None:
        """Plan the unit's collectives once; subclasses with matrix tasks extend this."""

    def _build_unit(
        self, tensors: list[Tensor], positions: list[int], groups: Mapping[int, Mapping[str, Any]]
    ) -> StepUnit:
        contents = [self._source.contents(tensor) for tensor in tensors]
        infos = {name: info for name, (info, _) in self._catalog.items()}
        named = list(cut_into_matrices(contents, infos, self._routes))
        layout = Layout.share([fragment for _, fragment in named], self._source.group, self._source.replicated)
        position_of = {content.group: position for content, position in zip(contents, positions, strict=True)}
        key_info = {key: infos[self._base_name(key)] for key in layout.shapes}
        # A rank may hold nothing at all; it works on the type and device of the others all the same.
        device, dtype = self._device_dtype(tensors or list(self.parameters_by_name.values()))
        return StepUnit(
            tensors=tensors,
            tensor_groups=[content.group for content in contents],
            positions=positions,
            planned_groups={position: dict(group) for position, group in groups.items()},
            layout=layout,
            entries=[
                Entry(index, fragment, infos[name], self._routes[name]) for index, (name, fragment) in enumerate(named)
            ],
            infos=key_info,
            routes={key: self._routes[self._base_name(key)] for key in layout.shapes},
            group_position={
                key: self._group_position(self._catalog[self._base_name(key)][1], position_of) for key in layout.shapes
            },
            device=device,
            dtype=dtype,
            sum_all=self.sums_cover_fallback,
        )

    def _group_position(self, group: int, position_of: Mapping[int, int]) -> int:
        """Where a constructor's group is in ``param_groups`` now; this rank may hold none of its tensors."""
        return position_of.get(group, group if group < len(self.param_groups) else 0)

    def _base_name(self, key: str) -> str:
        return key if key in self._catalog else key.rpartition("[")[0]

    @staticmethod
    def _device_dtype(tensors: Sequence[Tensor]) -> tuple[torch.device, torch.dtype]:
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise RuntimeError(
                f"the parameters of one step lie on {sorted(map(str, devices))}; use one optimizer per device."
            )
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        return (devices.pop() if devices else torch.device("cpu")), dtype

    def _open(self, unit: StepUnit) -> tuple[list[Tensor | None], list[Tensor | None]] | None:
        """Flat working views of weights and gradients; None for tensors without a gradient."""
        collective = unit.layout.world_size > 1
        if not collective and all(tensor.grad is None for tensor in unit.tensors):
            return None
        if any(tensor.grad is not None and tensor.grad.is_sparse for tensor in unit.tensors):
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients; use dense embeddings.")
        weights: list[Tensor | None] = []
        grads: list[Tensor | None] = []
        for tensor in unit.tensors:
            grad = tensor.grad
            if grad is None and not collective:
                weights.append(None)
                grads.append(None)
                continue
            weights.append(tensor.detach().to(unit.dtype).contiguous().view(-1))
            if grad is None:
                # Ranks must take part in every collective alike: no gradient is a gradient of zero.
                grads.append(torch.zeros(tensor.numel(), dtype=unit.dtype, device=tensor.device))
            else:
                grads.append(grad.detach().to(unit.dtype).reshape(-1))
            self._count_step(tensor)
        return weights, grads

    def _count_step(self, tensor: Tensor) -> None:
        state = self.state[tensor]
        if "step" not in state:
            # On the CPU, as torch.optim keeps it: reading it costs no device synchronisation.
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
        state["step"] += 1

    def _buckets(
        self, unit: StepUnit, weights: Sequence[Tensor | None], grads: Sequence[Tensor | None]
    ) -> list[Bucket]:
        found: dict[tuple[int, Rule, int], Bucket] = {}
        for entry in unit.entries:
            tensor = entry.fragment.tensor
            weight, grad = weights[tensor], grads[tensor]
            if weight is None or grad is None:
                continue
            step = int(self.state[unit.tensors[tensor]]["step"])
            position = unit.positions[tensor]
            key = (position, entry.route.rule, step)
            bucket = found.get(key)
            if bucket is None:
                group = self.param_groups[position]
                bucket = found[key] = Bucket(group, entry.route.rule, step, [], [], [], self._state_views(unit))
            offset, numel = entry.fragment.offset, entry.fragment.numel
            bucket.entries.append(entry)
            bucket.weights.append(weight[offset : offset + numel])
            bucket.grads.append(grad[offset : offset + numel])
        return list(found.values())

    def _close(self, unit: StepUnit, weights: Sequence[Tensor | None]) -> None:
        for tensor, weight in zip(unit.tensors, weights, strict=True):
            if weight is not None and weight.data_ptr() != tensor.data_ptr():
                tensor.copy_(weight.view(tensor.shape))

    # --- element states -----------------------------------------------------------------------------------------

    def _state_views(self, unit: StepUnit) -> Callable[[str, Sequence[Entry]], list[Tensor]]:
        def views(name: str, entries: Sequence[Entry]) -> list[Tensor]:
            found = []
            for entry in entries:
                stored = self._element_state(unit, entry.fragment.tensor, name)
                start = self._state_offsets(unit, entry.fragment.tensor, name)[entry.index]
                found.append(stored.view(-1)[start : start + entry.fragment.numel])
            return found

        return views

    def _element_state(self, unit: StepUnit, tensor: int, name: str) -> Tensor:
        """The stored state, allocated on first use: of the tensor's shape, or compact if only some fragments use it."""
        owner = unit.tensors[tensor]
        state = self.state[owner]
        if name not in state:
            offsets = self._state_offsets(unit, tensor, name)
            entries = [entry for entry in unit.entries if entry.fragment.tensor == tensor]
            group = unit.planned_groups[unit.positions[tensor]]
            users = [entry for entry in entries if entry.index in offsets]
            dtype = (
                next(self.element_states(entry.info, entry.route.rule, group)[name] for entry in users) or unit.dtype
            )
            shape = owner.shape if len(users) == len(entries) else (sum(entry.fragment.numel for entry in users),)
            state[name] = torch.zeros(shape, dtype=dtype, device=owner.device)
        return state[name]

    def _state_offsets(self, unit: StepUnit, tensor: int, name: str) -> dict[int, int]:
        cache: dict[tuple[int, str], dict[int, int]] = unit.scratch.setdefault("state_offsets", {})
        if (tensor, name) not in cache:
            group = unit.planned_groups[unit.positions[tensor]]
            entries = [entry for entry in unit.entries if entry.fragment.tensor == tensor]
            users = [entry for entry in entries if name in self.element_states(entry.info, entry.route.rule, group)]
            offsets, position = {}, 0
            for entry in users:
                offsets[entry.index] = entry.fragment.offset if len(users) == len(entries) else position
                position += entry.fragment.numel
            cache[(tensor, name)] = offsets
        return cache[(tensor, name)]

    # --- matrix states ------------------------------------------------------------------------------------------

    def _matrix_state(self, key: str, initial: Callable[[], MatrixState]) -> MatrixState:
        """An owned matrix's states: those held, else those loaded from a checkpoint, else fresh ones."""
        state = self.matrix_states.get(key)
        if state is None:
            state = initial()
            loaded = self._loaded_matrix_states.pop(key, None)
            if loaded is not None:
                # A checkpoint may have been read into another device's memory.
                state = {
                    name: value.to(state[name].device) if name in state else value for name, value in loaded.items()
                }
            self.matrix_states[key] = state
        return state

    def _forget_foreign_states(self, unit: StepUnit) -> None:
        """Drop loaded states of matrices that another rank owns: they would only take memory and go stale."""
        if self._loaded_matrix_states and unit.exchange is not None:
            for key, owner in unit.exchange.plan.owners.items():
                if owner != unit.layout.rank:
                    self._loaded_matrix_states.pop(key, None)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of optimizer state this rank holds: ``{"element": …, "matrix": …}``."""
        element = sum(
            value.numel() * value.element_size()
            for state in self.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor) and name != "step"
        )
        matrix = sum(
            value.numel() * value.element_size() for state in self.matrix_states.values() for value in state.values()
        )
        return {"element": element, "matrix": matrix}

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`torch.optim.Optimizer.state_dict`, plus this rank's matrix states by parameter name.

        Where a framework saves only one rank's dictionary (parameters replicated), the owners' states are collected
        first; every rank must then call this.
        """
        result = super().state_dict()
        states = {**self._loaded_matrix_states, **self.matrix_states}
        if self._source.replicated and self._source.group is not None:
            everyone: list[dict[str, MatrixState]] = [{} for _ in range(dist.get_world_size(self._source.group))]
            dist.all_gather_object(everyone, states, group=self._source.group)
            states = {key: state for rank_states in everyone for key, state in rank_states.items()}
        result["matrix_states"] = {key: dict(state) for key, state in states.items()}
        result["rankwise"] = self.identity
        result["layout"] = [self._layout_record(tensor) for group in self.param_groups for tensor in group["params"]]
        return result

    @property
    def identity(self) -> str:
        """What a checkpoint must have been written by for its states to be ours: class and structural choices."""
        return type(self).__name__

    def load_extra_state(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what is neither weight, element state nor matrix state."""

    def _layout_record(self, tensor: Tensor) -> dict[str, Any]:
        """What ``tensor`` stores, in plain data, so that a checkpoint can be read on another layout."""
        for unit in self._units.values():
            index = next((i for i, candidate in enumerate(unit.tensors) if candidate is tensor), None)
            if index is None:
                continue
            entries = [entry for entry in unit.entries if entry.fragment.tensor == index]
            return {
                "group": unit.tensor_groups[index],
                "runs": [
                    [
                        entry.key,
                        list(entry.fragment.shape),
                        entry.fragment.start,
                        entry.fragment.end,
                        entry.fragment.offset,
                    ]
                    for entry in entries
                ],
                # Per run, where its part of the state begins; None if its rule keeps no such state.
                "states": {
                    name: [self._state_offsets(unit, index, name).get(entry.index) for entry in entries]
                    for name in self.state[tensor]
                    if name != "step"
                },
            }
        return {"group": 0, "runs": [], "states": {}}

    # --- moving to another layout -------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's position among the data-parallel ranks."""
        group = self._source.group
        return 0 if group is None else dist.get_rank(group)

    @property
    def layout_source(self) -> LayoutSource:
        """The framework's description of the param groups' tensors."""
        return self._source

    def plan_ahead(self, units: Sequence[Sequence[tuple[Tensor, int]]]) -> None:
        """Plan every ``step()`` call before the first one.

        Args:
            units: For each call, the tensors it will find in ``param_groups`` and the positions of their groups there.
        """
        for members in units:
            tensors = [tensor for tensor, _ in members]
            key = tuple(id(tensor) for tensor in tensors)
            if key not in self._units:
                groups = {
                    position: self.param_groups[self._source.contents(tensor).group] for tensor, position in members
                }
                unit = self._units[key] = self._build_unit(tensors, [position for _, position in members], groups)
                self._plan(unit)
                unit.compare_across_ranks((type(self).__name__, self.options))

    def storage(self) -> Iterator[tuple[Tensor, list[StoredRun]]]:
        """Every planned tensor with its runs and views of its element states, allocated if they were not."""
        for unit in self._units.values():
            views = self._state_views(unit)
            for index, tensor in enumerate(unit.tensors):
                group = unit.planned_groups[unit.positions[index]]
                runs: list[StoredRun] = []
                for entry in unit.entries:
                    if entry.fragment.tensor == index:
                        names = self.element_states(entry.info, entry.route.rule, group)
                        fragment = entry.fragment
                        states = {name: views(name, [entry])[0] for name in names}
                        runs.append(
                            StoredRun(entry.key, fragment.shape, fragment.start, fragment.end, fragment.offset, states)
                        )
                yield tensor, runs

    def adopt(
        self,
        matrix_states: Mapping[str, MatrixState],
        steps: Mapping[int, Tensor],
        param_groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Take over matrix states, step counts by group and hyper-parameters from another layout's checkpoint."""
        self.matrix_states = {}
        self._loaded_matrix_states = {
            key: {name: value.to(self._state_device()) for name, value in state.items()}
            for key, state in matrix_states.items()
        }
        for unit in self._units.values():
            for tensor, group_index in zip(unit.tensors, unit.tensor_groups, strict=True):
                step = steps.get(group_index)
                if step is not None:
                    self.state[tensor]["step"] = step.clone()
        for group, saved in zip(self.param_groups, param_groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    def _state_device(self) -> torch.device:
        return next((unit.device for unit in self._units.values()), torch.device("cpu"))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore; element states keep the type they were saved with, matrix states go to whoever owns them now."""
        before = self._structure()
        super().load_state_dict(state_dict)
        self._restore_types(state_dict)
        if self._structure() != before:
            self._route_again()
        self.matrix_states = {}
        self._loaded_matrix_states = {
            key: {name: value.clone() for name, value in state.items()}
            for key, state in state_dict.get("matrix_states", {}).items()
        }

    def _restore_types(self, state_dict: Mapping[str, Any]) -> None:
        # torch casts floating-point states to the parameter's type, which would round fp32 states of bf16 weights.
        saved_ids: Iterable[Any] = (key for group in state_dict["param_groups"] for key in group["params"])
        tensors = (tensor for group in self.param_groups for tensor in group["params"])
        for key, tensor in zip(saved_ids, tensors, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    # Copies, the count included: it is advanced in place.
                    device = value.device if name == "step" else tensor.device
                    self.state[tensor][name] = value.to(device=device, copy=True)

    def _structure(self) -> list[list[Any]]:
        return [[group.get(name) for name in self.structural_options] for group in self.param_groups]

    def _route_again(self) -> None:
        for name, (info, index) in self._catalog.items():
            group = self.param_groups[index]
            self._routes[name] = self._adjust_route(info, group, route(info, self.policy, group.get("fallback")))
        self._forget_plans()

    # --- copies -------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.copied_attributes}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's load_state_dict comes here too, with states and groups alone.
        if "options" in state:
            self._prepare_copy()
        super().__setstate__(state)
        for name, parameter in state.get("parameters_by_name", {}).items():
            self._plain.register(parameter, name, self._catalog[name][1])

    def _prepare_copy(self) -> None:
        """Create what a copy does not take over: plans, and everything that belongs to a framework."""
        self._plain = WholeParameters()
        self._source = self._plain
        self._units = {}
        self._loads = []
        self.announce = logger.info
        self._announced = False
        self.health = self._new_health()
        self._reported = Traffic()

    def _new_health(self) -> Health:
        return Health(self.health_means, (*_COMMON_TOTALS, *self.health_totals))

    # --- reports ------------------------------------------------------------------------------------------------

    def read_health(self) -> dict[str, float]:
        """What happened since the last reading; every data-parallel rank must call it.

        Returns:
            Per step: ``matrices_updated``, ``collectives`` and ``bytes_sent`` (summed over ranks); and the optimizer's
            own metrics, see its ``health_means`` and ``health_totals``.
        """
        total = Traffic()
        for unit in self._units.values():
            sent = unit.total_traffic
            total.collectives += sent.collectives
            total.bytes += sent.bytes
        self.health.add("collectives", total.collectives - self._reported.collectives)
        self.health.add("bytes_sent", total.bytes - self._reported.bytes)
        self._reported = total
        found = self.health.read(self._source.group)
        ranks = 1 if self._source.group is None else dist.get_world_size(self._source.group)
        steps = max(found.pop("steps") / ranks, 1.0)
        return {name: value / steps if name in _COMMON_TOTALS else value for name, value in found.items()}

    def owners(self) -> dict[str, int]:
        """Owner rank of every planned matrix."""
        return {
            key: owner
            for unit in self._units.values()
            if unit.exchange is not None
            for key, owner in unit.exchange.plan.owners.items()
        }

    def summary(self) -> str:
        """One line: matrices routed, balance over owners, state of this rank, bytes it sends to owners per step."""
        exchanges = [unit.exchange for unit in self._units.values() if unit.exchange is not None]
        matrices = sum(len(unit.keys("matrix")) for unit in self._units.values())
        total = sum(len(unit.layout.shapes) for unit in self._units.values())
        mean = sum(self._loads) / max(len(self._loads), 1)
        balance = f", owners' load max/mean {max(self._loads) / mean:.2f}" if mean else ""
        held = self.state_bytes()
        sent = sum(exchange.bytes_per_gather for exchange in exchanges)
        return (
            f"rankwise {type(self).__name__}: {matrices} of {total} tensors take its rule, the rest the first-order "
            f"fallback{balance}; state on this rank {held['element'] / 2**20:.1f} MiB by element and "
            f"{held['matrix'] / 2**20:.1f} MiB in matrices; {sent / 2**20:.2f} MiB sent to owners per step"
        )

    def explain(self) -> list[Explanation]:
        """One line per parameter: rule, why, owner, bytes of optimizer state on this rank."""
        owners = self.owners()
        element = self._element_bytes()
        lines = []
        for name, (info, _) in self._catalog.items():
            keys = [key for key in (*owners, *self.matrix_states, name) if self._base_name(key) == name]
            matrix = sum(
                value.numel() * value.element_size()
                for key in dict.fromkeys(keys)
                for value in self.matrix_states.get(key, {}).values()
            )
            owner = next((owners[key] for key in keys if key in owners), None)
            chosen = self._routes[name]
            lines.append(
                Explanation(name, info.shape, chosen.rule, chosen.reason, owner, element.get(name, 0) + matrix)
            )
        return lines

    def _element_bytes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for unit in self._units.values():
            for entry in unit.entries:
                name = self._base_name(entry.key)
                state = self.state[unit.tensors[entry.fragment.tensor]]
                for state_name, value in state.items():
                    if state_name != "step" and entry.index in self._state_offsets(
                        unit, entry.fragment.tensor, state_name
                    ):
                        found[name] = found.get(name, 0) + entry.fragment.numel * value.element_size()
        return found
