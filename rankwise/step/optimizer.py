"""The step pipeline common to all optimizers: find the fragments, run the rules, commit."""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rankwise.kernels import graphs
from rankwise.kernels.native.building import SWITCH
from rankwise.options.fields import Options
from rankwise.routing.roles import Rule
from rankwise.sharding import Fragment, Layout, LayoutError, MatrixTask, SlicedMatrix, gather_together
from rankwise.sharding.sources import TensorContents, real_view, refuse_unreadable
from rankwise.step.element_states import ElementStates
from rankwise.step.entries import Entry, cut_into_entries
from rankwise.step.fitting import as_shapes, check_shape
from rankwise.step.live_groups import LiveGroups, form_of
from rankwise.step.matrix_states import MatrixState
from rankwise.step.reports import Reports
from rankwise.step.table import UnitKey
from rankwise.step.undo import Unsettled, any_not_finite, undone_where, zeroed_where
from rankwise.step.unit import Bucket, StepUnit, refuse_difference
from rankwise.version import __version__

__all__ = ["ShardedOptimizer", "deferred_steps"]

logger = logging.getLogger(__name__)
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


class ShardedOptimizer(LiveGroups, Reports):
    """Base of all rankwise optimizers.

    Element states (one value per parameter element) live in ``self.state`` with the shape of the tensor the framework
    handed over, so that its checkpoints carry them; matrix states live in ``self.matrix_states``, by parameter name,
    on their owner only.
    """

    instances: ClassVar[weakref.WeakSet[ShardedOptimizer]] = weakref.WeakSet()
    """Every living optimizer, for frameworks to notice that one of ours was replaced."""
    sums_cover_fallback: ClassVar[bool] = False
    """Whether per-parameter sums are taken over parameters on the fallback too."""

    one_by_one: ClassVar[bool] = False
    """Whether stacks of matrices are no faster than single ones on CPUs."""

    def __init__(self, params: Any, options: Options, extra_defaults: Mapping[str, Any] | None = None) -> None:
        super().__init__(params, options, extra_defaults)
        ShardedOptimizer.instances.add(self)

    def _detach(self) -> None:
        super()._detach()
        self.announce: Callable[[str], None] = logger.info
        self._announced = False

    # --- what only some rules need of a training loop -----------------------------------------------------------

    needs_capture: ClassVar[bool] = False
    """Whether the rule learns from what the layers of the model compute; see :meth:`capture`."""

    @property
    def needs_loss(self) -> bool:
        """Whether the rule learns from the loss; see :meth:`record_loss`."""
        return False

    @property
    def switched(self) -> bool:
        """Whether another rule has taken over for good, which needs neither."""
        return False

    def capture(
        self,
        model: nn.Module,
        window: Any = None,
        loss_scale: Callable[[], float] | None = None,
        last_micro_batch: Callable[[], bool] | None = None,
        describe: Any = None,
    ) -> None:
        """Watch the model's layers, where the rule needs it; see :meth:`rankwise.MKOR.capture`."""

    def release(self) -> None:
        """Undo :meth:`capture`."""

    def record_loss(self, loss: Tensor | float) -> None:
        """Report a micro-batch's loss, where the rule needs it; see :meth:`rankwise.MKOR.record_loss`."""

    # --- what a subclass declares -------------------------------------------------------------------------------

    @abstractmethod
    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        """Update weights and states in place."""

    # --- plans --------------------------------------------------------------------------------------------------

    def plan_ahead(self, units: Sequence[Sequence[tuple[Tensor, int]]]) -> None:
        """Plan every ``step()`` call before the first one.

        Args:
            units: For each call, the tensors it will find in ``param_groups`` and the positions of their groups there.
        """
        for members in units:
            tensors = [tensor for tensor, _ in members]
            positions = [position for _, position in members]
            if _unit_key(tensors, positions) not in self._units:
                self._new_unit(tensors, positions)

    def _unit(self) -> StepUnit:
        key = tuple((at, *map(id, group["params"])) for at, group in enumerate(self.param_groups) if group["params"])
        unit = self._units.get(key)
        if self._follow_changes(unit):
            unit = None
        if unit is None:
            positions = [position for position, group in enumerate(self.param_groups) for _ in group["params"]]
            return self._new_unit(self._tensors(), positions, dict(enumerate(self.param_groups)))
        if not self._announced:
            # The second visit: by now every group has been planned.
            self._announced = True
            self.announce(self.summary())
        return unit

    def _new_unit(
        self, tensors: list[Tensor], positions: list[int], groups: Mapping[int, Mapping[str, Any]] | None = None
    ) -> StepUnit:
        graphs.refuse_capture(_device_dtype(tensors or list(self.parameters_by_name.values()))[0], "the first step")
        key, loads, owner_of = _unit_key(tensors, positions), self._loads, dict(self._owner_of)
        unit = self._units[key] = self._build_unit(tensors, positions, groups)
        unit.key, unit.forms = key, list(map(form_of, tensors))

        def plan() -> dict[str, str]:
            self._refuse_other_shapes(unit)
            self._plan(unit)
            self._warn_of_nameless()
            self._refuse_strange(unit, self.matrix_states.everything())
            return self._settings(unit)

        try:
            unit.compare_across_ranks(plan)
        except BaseException:
            # A half-planned unit must not be found by the next step, which would train without the matrix rule.
            del self._units[key]
            self._loads, self._owner_of = loads, owner_of
            raise
        return unit

    def _refuse_other_shapes(self, unit: StepUnit) -> None:
        """Compare this rank's model with what others report of parameters that it may hold nothing of."""
        for key, shape in unit.layout.shapes.items():
            info = unit.infos[key]
            own = info.shape if self._base_name(key) == key else info.matrix_shape
            if tuple(own) != tuple(shape):
                raise LayoutError(
                    f"'{key}' has shape {tuple(own)} in the model of rank {self.rank} and {tuple(shape)} in that of a "
                    "rank that stores it; all data-parallel ranks must hold the same model."
                )

    def _settings(self, unit: StepUnit) -> dict[str, str]:
        """What must be alike on all ranks: the options, and those of the unit's groups, which schedulers may change."""
        texts = self._chosen(unit.planned_groups)
        if unit.device.type == "cpu":
            # Copies of a weight on ranks that round differently would drift apart.
            texts[f"the form of the CPU kernels (environment variable {SWITCH}=0 makes them alike)"] = (
                unit.kernels.__name__
            )
        product, option = self.product_type(unit), self.product_option
        if product is not None and getattr(self.options, option) == "auto":
            name = f"the type of the products (set {option} to 'float32' or 'bfloat16' on all ranks)"
            texts[name] = str(product).removeprefix("torch.")
        # Another version may send something else at the same place.
        return {"the version of rankwise": __version__, "the optimizer": type(self).__name__, **texts}

    def _chosen(self, groups: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
        """The options, and those of param groups by their position, in words."""
        shared = set(self.options.names()).difference(self.group_options, ("lr",))
        found = {name: getattr(self.options, name) for name in sorted(shared)}
        for position, group in groups.items():
            names = [name for name in (*self.defaults, "fallback") if name in group]
            found.update({f"param group {position}: {name}": group[name] for name in names})
        # A tensor's text names its device, and would have to be waited for.
        return {name: repr(value) for name, value in found.items() if not isinstance(value, Tensor)}

    def _plan(self, unit: StepUnit) -> None:
        """Plan the unit's collectives once; subclasses with matrix tasks extend this."""

    def _choose_owners(
        self, unit: StepUnit, tasks: Sequence[MatrixTask], slices: Mapping[str, SlicedMatrix] | None = None
    ) -> None:
        """Spread a unit's tasks, some of them slices, over the ranks, considering the units planned before."""
        if tasks:
            comm_dtype = getattr(self.options, "comm_dtype", None)
            # The loads of ranks outside the unit would be unknown to its own.
            loads = unit.plan_exchange(
                tasks, [] if unit.apart else self._loads, comm_dtype, self._owner_of, self.one_by_one, slices
            )
            self._loads = self._loads if unit.apart else loads
            assert unit.exchange is not None
            self._owner_of.update(unit.exchange.plan.owners)

    def _build_unit(
        self, tensors: list[Tensor], positions: list[int], groups: Mapping[int, Mapping[str, Any]] | None
    ) -> StepUnit:
        contents: list[TensorContents] = []
        entries: list[Entry] = []

        def look() -> list[Fragment]:
            # What the framework stores is checked here, and may be wrong on one rank alone.
            contents.extend(self._source.contents(tensor) for tensor in tensors)
            entries.extend(self._entries(contents))
            return [entry.fragment for entry in entries]

        ranks_apart: Callable[[Tensor], Any] = getattr(self._source, "ranks_apart", lambda tensor: None)
        apart = next((ranks for ranks in map(ranks_apart, tensors) if ranks is not None), None)
        ranks = apart or self._source.group
        try:
            layout = Layout.share(look, ranks, self._source.replicated)
        except LayoutError:
            # Raised on all ranks alike; options that differ cut parameters otherwise, and say more.
            settings = self._chosen(dict(enumerate(self.param_groups)) if groups is None else groups)
            refuse_difference([("", theirs) for theirs in gather_together(lambda: settings, ranks)])
            raise
        if groups is None:
            places = zip(positions, contents, strict=True)
            groups = {position: self.param_groups[content.group] for position, content in places}
        unit = self._assemble(tensors, contents, positions, groups, entries, layout)
        unit.apart = apart is not None
        return unit

    def imagine(self, units: Sequence[Sequence[Sequence[TensorContents]]], replicated: bool = False) -> list[StepUnit]:
        """Plan for ranks that need not exist; nothing of this optimizer changes.

        Args:
            units: For each ``step()`` call, for each rank, what its tensors store.
            replicated: See :class:`rankwise.sharding.Layout`.

        Returns:
            The units as rank 0 would plan them.
        """
        present = self._loads, self._owner_of
        self._loads, self._owner_of = [], {}
        groups = dict(enumerate(self.param_groups))
        found = []
        try:
            for ranks in units:
                cut = [self._entries(contents) for contents in ranks]
                parts = tuple(tuple(entry.fragment for entry in entries) for entries in cut)
                positions = [content.group for content in ranks[0]]
                layout = Layout(parts, replicated=replicated)
                found.append(self._assemble([], ranks[0], positions, groups, cut[0], layout))
                self._plan(found[-1])
        finally:
            self._loads, self._owner_of = present
        return found

    def _entries(self, contents: Sequence[TensorContents]) -> list[Entry]:
        return cut_into_entries(contents, {name: info for name, (info, _) in self._catalog.items()}, self._routes)

    def _assemble(
        self,
        tensors: list[Tensor],
        contents: Sequence[TensorContents],
        positions: list[int],
        groups: Mapping[int, Mapping[str, Any]],
        entries: list[Entry],
        layout: Layout,
    ) -> StepUnit:
        # Of groups whose tensors other ranks hold; parameters that were moved are registered with their group.
        position_of = {content.group: position for content, position in zip(contents, positions, strict=True)}
        names = {key: self._base_name(key) for key in layout.shapes}
        group_position = {key: self._group_position(self._catalog[name][1], position_of) for key, name in names.items()}
        # Of some groups this rank may hold nothing.
        others = {position: self.param_groups[position] for position in set(group_position.values()) - set(groups)}
        # A rank may hold nothing at all; it works on the type and device of the others all the same.
        device, dtype = _device_dtype(tensors or list(self.parameters_by_name.values()))
        declared = [
            self.element_states(entry.info, entry.route.rule, groups[positions[entry.fragment.tensor]])
            for entry in entries
        ]
        return StepUnit(
            tensors=tensors,
            tensor_groups=[content.group for content in contents],
            positions=positions,
            planned_groups={position: dict(group) for position, group in (others | dict(groups)).items()},
            layout=layout,
            entries=entries,
            states=ElementStates(tensors, entries if tensors else [], declared, dtype),
            infos={key: self._catalog[name][0] for key, name in names.items()},
            routes={key: self._routes[name] for key, name in names.items()},
            group_position=group_position,
            device=device,
            dtype=dtype,
            sum_all=self.sums_cover_fallback,
        )

    def _group_position(self, group: int, position_of: Mapping[int, int]) -> int:
        """Where a constructor's group is in ``param_groups`` now; this rank may hold none of its tensors."""
        return position_of.get(group, group if group < len(self.param_groups) else 0)

    def _refuse_strange(self, unit: StepUnit, states: Mapping[str, MatrixState]) -> None:
        """Compare the states of matrices that this rank owns with what a planned unit expects of them."""
        initial = self.work(unit).matrix_state
        for task in unit.exchange.owned() if unit.exchange is not None else ():
            found = states.get(task.key)
            if found:
                expected = as_shapes(initial(task, torch.device("meta")))
                for name, shapes in expected.items():
                    if name in found:
                        check_shape(self.identity, task.key, name, found[name].shape, shapes)

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
        self._prepare_for_graphs(unit)
        self.settle([unit.key])
        opened = self._open(unit)
        if opened is not None:
            weights, grads = opened
            if self.options.skip_nonfinite:
                self._update_if_finite(unit, weights, grads)
            else:
                self._update(unit, self._buckets(unit, weights, grads))
            self._close(unit, weights)
            if unit is next(iter(self._units.values())):
                self.health.add("steps", 1.0)
            if unit.exchange is not None:
                self.matrix_states.drop_foreign(unit.exchange.plan.owners, unit.layout.rank)
        return loss

    def _prepare_for_graphs(self, unit: StepUnit) -> None:
        """Refuse captures whose replays would not be further steps.

        Raises:
            RuntimeError: The step is being captured, and something it depends on would be frozen.
        """
        if self._counts_on_device(unit):
            self.health.accumulate_on(unit.device)
        if not graphs.is_capturing(unit.device):
            return
        name = type(self).__name__
        if not self.capturable:
            known = "capturable" in self.options.names()
            fix = "build it with capturable=True" if known else "leave step() out of the graph"
            raise RuntimeError(
                f"{name}.step() cannot be captured in a graph, which would repeat one step's number; {fix}"
            )
        rates = [self.param_groups[position]["lr"] for position in set(unit.positions)]
        if any(isinstance(rate, Tensor) and rate.device != unit.device for rate in rates):
            raise RuntimeError(
                f"{name}: lr is a tensor on another device than the weights, which a graph cannot read; make it one on "
                f"{unit.device}, and change it in place"
            )

    def _counts_on_device(self, unit: StepUnit) -> bool:
        """Whether the host knows no step counts; on CPUs, which have no graphs, it always does."""
        return self.capturable and getattr(unit.kernels, "STEPS_ON_DEVICE", False)

    def _open(self, unit: StepUnit) -> tuple[list[Tensor | None], list[Tensor | None]] | None:
        """Flat working views of weights and gradients; None for tensors without a gradient.

        Where every rank has the whole parameters, a missing gradient is missing on all of them
        (``DistributedDataParallel`` and DeepSpeed see to it), and the parameter is left alone as in one process.
        """
        # Ranks with shards must take part in every collective alike: no gradient is a gradient of zero.
        zeros = unit.layout.world_size > 1 and not unit.layout.replicated
        if not zeros and all(tensor.grad is None for tensor in unit.tensors):
            return None
        for tensor in unit.tensors:
            if tensor.grad is not None and (type(tensor.grad) is not Tensor or tensor.grad.is_sparse):
                self._refuse_gradient(tensor, tensor.grad)
        weights: list[Tensor | None] = []
        grads: list[Tensor | None] = []
        stepped: list[Tensor] = []
        for tensor in unit.tensors:
            grad = tensor.grad
            if grad is None and not zeros:
                weights.append(None)
                grads.append(None)
                continue
            weight = real_view(tensor.detach()).to(unit.dtype).contiguous().view(-1)
            weights.append(weight)
            if grad is None:
                grads.append(torch.zeros_like(weight))
            else:
                # Gradients of complex parameters may be conjugates by name only.
                grads.append(real_view(grad.detach().resolve_conj()).to(unit.dtype).reshape(-1))
            stepped.append(tensor)
        self._count_steps(unit, stepped)
        return weights, grads

    def _refuse_gradient(self, tensor: Tensor, grad: Tensor) -> None:
        name = type(self).__name__
        if grad.is_sparse:
            raise RuntimeError(f"{name} does not support sparse gradients; use dense embeddings.")
        refuse_unreadable(name, f"{self._name_of(tensor) or 'parameter'}.grad", grad)

    def _update_if_finite(
        self, unit: StepUnit, weights: Sequence[Tensor | None], grads: Sequence[Tensor | None]
    ) -> None:
        """Update, and leave every weight and state as it was if a gradient is not finite on any rank."""
        stepped = [index for index, weight in enumerate(weights) if weight is not None]
        changed = [weight for weight in weights if weight is not None]
        counts = []
        for index in stepped:
            unit.states.runs(self.state, index)  # allocates what is missing, to be zero if the step is undone
            state = self.state[unit.tensors[index]]
            counts.append((state["step"], state["step"] - 1))
            changed += [value for name, value in state.items() if isinstance(value, Tensor) and name != "step"]
        broken = any_not_finite(unit, self._judged(unit, grads))
        self.health.add("skipped_steps", broken)
        finite = zeroed_where(broken, grads)
        unsettled = Unsettled.of(broken, counts)
        with undone_where(broken, changed, self.matrix_states, counts, self.counted_states):
            self._update(unit, self._buckets(unit, weights, finite))
        self._unsettled[unit.key] = unsettled

    def _judged(self, unit: StepUnit, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """What must be finite for a step to count."""
        return [grad for grad in grads if grad is not None]

    def _count_steps(self, unit: StepUnit, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if "step" not in self.state[tensor]:
                graphs.refuse_capture(tensor.device, "the first step of a parameter")
                # On the CPU, as torch.optim keeps it: reading it costs no device synchronisation.
                self.state[tensor]["step"] = torch.zeros((), dtype=torch.float32, device=self._count_device(tensor))
        counts = [self.state[tensor]["step"] for tensor in tensors]
        if counts and self._counts_on_device(unit):
            torch._foreach_add_(counts, 1.0)
            return
        for count in counts:
            count += 1

    def _buckets(
        self, unit: StepUnit, weights: Sequence[Tensor | None], grads: Sequence[Tensor | None]
    ) -> list[Bucket]:
        found: dict[tuple[int, Rule, int | None], Bucket] = {}
        views = partial(unit.states.views, self.state)
        counts = partial(self._counts_of, unit)
        # What only the device knows cannot be grouped by.
        known = not self._counts_on_device(unit)
        for entry in unit.entries:
            tensor = entry.fragment.tensor
            weight, grad = weights[tensor], grads[tensor]
            if weight is None or grad is None:
                continue
            count = int(self.state[unit.tensors[tensor]]["step"]) if known else None
            position = unit.positions[tensor]
            key = (position, entry.route.rule, count)
            bucket = found.get(key)
            if bucket is None:
                group = self.param_groups[position]
                bucket = found[key] = Bucket(group, entry.route.rule, count, [], [], [], views, counts)
            offset, numel = entry.fragment.offset, entry.fragment.numel
            bucket.entries.append(entry)
            bucket.weights.append(weight[offset : offset + numel])
            bucket.grads.append(grad[offset : offset + numel])
        return list(found.values())

    def _counts_of(self, unit: StepUnit, entries: Sequence[Entry]) -> Tensor:
        return torch.stack([self.state[unit.tensors[entry.fragment.tensor]]["step"] for entry in entries])

    def _close(self, unit: StepUnit, weights: Sequence[Tensor | None]) -> None:
        for tensor, weight in zip(unit.tensors, weights, strict=True):
            if weight is not None and weight.data_ptr() != tensor.data_ptr():
                target = real_view(tensor)
                target.copy_(weight.view(target.shape))


def _unit_key(tensors: Sequence[Tensor], positions: Sequence[int]) -> UnitKey:
    members: dict[int, list[int]] = {}
    for tensor, position in zip(tensors, positions, strict=True):
        members.setdefault(position, [position]).append(id(tensor))
    return tuple(tuple(members[position]) for position in sorted(members))


def _device_dtype(tensors: Sequence[Tensor]) -> tuple[torch.device, torch.dtype]:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise RuntimeError(
            f"the parameters of one step lie on {sorted(map(str, devices))}; use one optimizer per device."
        )
    wide = (torch.float64, torch.complex128)
    dtype = torch.float64 if any(tensor.dtype in wide for tensor in tensors) else torch.float32
    return (devices.pop() if devices else torch.device("cpu")), dtype
