"""MKOR's statistics, from the hooks to the vectors of a factor step; which matrices there are, with their biases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rankwise.mkor.factor_schedule import FactorSchedule
from rankwise.mkor.factors import LayerSignature
from rankwise.mkor.options import MKOROptions
from rankwise.options.validation import OptionError
from rankwise.routing.roles import Route
from rankwise.sharding import MatrixTask, Traffic
from rankwise.sharding.sources import framework_advice
from rankwise.statistics.early import BackwardReduction, twin_group
from rankwise.statistics.hooks import Capture, Describe, Record, describe_linear
from rankwise.statistics.scalers import watch_gradient_scalers
from rankwise.statistics.vectors import (
    GLIMPSE,
    LayerVectors,
    layer_vectors,
    reduce_statistics,
    refuse_broken_factors,
)
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.step.unit import StepUnit

__all__ = ["CapturingOptimizer"]

logger = logging.getLogger(__name__)

_FROZEN = "frozen when capture() was called; call it again once it is trained"


class CapturingOptimizer(ShardedOptimizer):
    """An optimizer whose matrix rule needs the inputs and the output gradients of linear layers."""

    options: MKOROptions
    copied_attributes: ClassVar[tuple[str, ...]] = (*ShardedOptimizer.copied_attributes, "_schedule")

    def __init__(self, params: Any, options: MKOROptions) -> None:
        self._schedule = FactorSchedule(options.update_interval)
        super().__init__(params, options)

    def _detach(self) -> None:
        super()._detach()
        self._capture: Capture | None = None
        self._loss_scale: Callable[[], float] | None = None
        self._unscaled_by: Tensor | None = None
        self._records: dict[str, Record] = {}
        self._frozen: dict[str, Tensor] = {}
        self._reduction: BackwardReduction | None = None
        self._twin: tuple[ProcessGroup, ProcessGroup] | None = None

    # --- capture ------------------------------------------------------------------------------------------------

    def capture(
        self,
        model: nn.Module,
        window: Any = None,
        loss_scale: Callable[[], float] | None = None,
        last_micro_batch: Callable[[], bool] | None = None,
        describe: Describe = describe_linear,
    ) -> None:
        """Hook the model's linear layers. Call once, before the first step.

        Args:
            model: The model whose parameters this optimizer updates. A ``DistributedDataParallel`` model also tells
                the optimizer its process group, over which statistics are then reduced and matrices distributed.
            window: Callable that identifies the current accumulation window, so that statistics of a step the
                framework skipped are dropped; by default a window ends with ``step()`` or ``zero_grad()``.
            loss_scale: What the loss is multiplied by before ``backward()``, where gradients are unscaled before the
                step. An engine's own scale is known, and ``torch.amp.GradScaler`` tells its own.
            last_micro_batch: Whether the present backward pass is the last before the step; the statistics then travel
                while it runs, otherwise in ``step()``. Known for ``DistributedDataParallel``.
            describe: Recognises linear modules, see :class:`rankwise.statistics.hooks.Capture`.

        Raises:
            OptionError: No parameter of this optimizer belongs to a linear module of ``model``.
        """
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self.attach(self._plain.replicated_over(model.process_group))
            last_micro_batch = last_micro_batch or partial(getattr, model, "require_backward_grad_sync")
            model = model.module
        self._loss_scale = loss_scale
        watch_gradient_scalers()
        self._learn_roles(model)
        names = {id(parameter): name for name, parameter in self.parameters_by_name.items()}

        def wanted(module: nn.Module, parameter: nn.Parameter) -> bool:
            name = names.get(id(parameter))
            return name is not None and self._routes[name].rule == "matrix"

        if self._capture is not None:
            self._capture.remove()
        self._capture = Capture(model, wanted, window, describe)
        self._capture.on_training_forward = self._refuse_unknown_replicas
        self._records = {names[id(parameter)]: record for parameter, record in self._capture.records.items()}
        self._reduction = self._capture.listener = self._reduce_early(last_micro_batch)
        self._frozen = {}
        for name, chosen in self._routes.items():
            if chosen.rule == "matrix" and name not in self._records:
                parameter = self.parameters_by_name[name]
                if not parameter.requires_grad:
                    self._frozen[name] = parameter
                self._routes[name] = Route("fallback", _FROZEN if name in self._frozen else "no linear module uses it")
        self._route_left_out()
        self._forget_plans()
        self._refuse_if_idle()
        self._captured()

    def _captured(self) -> None:
        """Called at the end of :meth:`capture`."""

    def release(self) -> None:
        """Take the hooks of :meth:`capture` off the model: others will train it."""
        if self._capture is not None:
            self._capture.remove()

    def _refuse_unknown_replicas(self, weights: Sequence[nn.Parameter]) -> None:
        """Refuse a model whose gradients are averaged over ranks of which the optimizer was told nothing.

        Raises:
            OptionError: ``DistributedDataParallel`` runs these layers, and the model it wraps was captured, not itself.
        """
        wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
        if wrapper is None or self._source.group is not None or wrapper.process_group.size() == 1:
            return
        replicated = {id(parameter) for parameter in wrapper.parameters()}
        if any(id(weight) in replicated for weight in weights):
            raise OptionError(
                "MKOR: capture() was given the model inside a DistributedDataParallel: every rank would precondition "
                "the same gradients by the statistics of its own batch, and the copies drift apart. Call "
                "optimizer.capture(ddp_model) with the wrapped model, before the first step."
            )

    def _reduce_early(self, is_last: Callable[[], bool] | None) -> BackwardReduction | None:
        group = self._source.group
        if is_last is None or group is None or group.size() == 1 or not self._records:
            return None
        if self._twin is None or self._twin[0] is not group:
            self._twin = (group, twin_group(group))
        return BackwardReduction(self._records, self._twin[1], is_last)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; statistics of a step that was skipped are forgotten."""
        super().zero_grad(set_to_none=set_to_none)
        # Nothing else of the window: a loss may be recorded between the forward pass and this call.
        if self._capture is not None:
            self._capture.clear()

    def gradients_unscaled(self, scale: Tensor, is_over: Callable[[], bool]) -> None:
        """Called by gradient scalers between the backward pass and the step, of whose skipping they say nothing.

        Args:
            scale: What this step's gradients have been divided by; the statistics have not been.
            is_over: Whether the scaler is done with this step.
        """
        self._unscaled_by = scale
        if self._capture is not None:
            self._capture.is_over = is_over

    def _discard_window(self) -> None:
        if self._capture is not None:
            self._capture.clear()

    # --- plan ---------------------------------------------------------------------------------------------------

    def _require_capture(self) -> None:
        if self._capture is None:
            raise OptionError(
                "MKOR has no statistics to precondition with: call optimizer.capture(model) before the first step, or "
                f"{framework_advice()}, which does it."
            )

    def _matrix_tasks(self, unit: StepUnit) -> list[MatrixTask]:
        """The unit's matrices; one whose bias is in the same param group of it takes it along."""
        unknown = [key for key in unit.keys("matrix") if key not in self._records]
        if unknown:
            raise OptionError(
                f"MKOR has no statistics of {', '.join(unknown)}, added after the capture: call "
                "optimizer.capture(model) again after add_param_group."
            )
        tasks = []
        names = {id(parameter): name for name, parameter in self.parameters_by_name.items()}
        for key in unit.keys("matrix"):
            record, position = self._records[key], unit.group_position[key]
            bias = self._bundled_bias(key, unit, names)
            inputs, outputs, transposed = record.shape
            signature = LayerSignature(outputs, inputs, bias is not None, transposed, position)
            tasks.append(MatrixTask(key, (key,) if bias is None else (key, bias), signature, signature.cost))
        return tasks

    def _bundled_bias(self, key: str, unit: StepUnit, names: Mapping[int, str]) -> str | None:
        record = self._records[key]
        if record.bias is None:
            return None
        name = names.get(id(record.bias))
        if name in unit.layout.shapes:
            return name if unit.group_position[name] == unit.group_position[key] else None
        if name is not None and self._catalog[name][1] == self._catalog[key][1]:
            logger.warning(
                "MKOR: '%s' is stepped apart from its weight and takes %s alone; a ZeRO-3 sub_group_size that keeps "
                "them together avoids it.",
                name,
                self.options.backend,
            )
        return None

    @property
    def further_traffic(self) -> list[Traffic]:
        """See the base class: the statistics."""
        return [] if self._reduction is None else [self._reduction.traffic]

    # --- when ---------------------------------------------------------------------------------------------------

    def _watch(self, unit: StepUnit, tasks: Sequence[MatrixTask]) -> None:
        """Plan which statistics the unit's steps look at: those of its matrices, and of layers not heard of yet."""
        left_out = self._schedule.left_out.intersection(unit.layout.shapes, self._records)
        keys = sorted({task.key for task in tasks} | left_out)
        places = {entry.key: entry.fragment.tensor for entry in unit.entries} if unit.tensors else {}
        unit.scratch["statistics"] = keys
        unit.scratch["tensors"] = {key: unit.tensors[places[key]] for key in keys} if places and _is_whole(unit) else {}

    def _step_counts(self, unit: StepUnit) -> dict[str, int]:
        """The number of this step of every watched matrix that takes it."""
        if not _is_whole(unit):
            return dict.fromkeys(unit.scratch["statistics"], unit.common_step(self.state))
        tensors: dict[str, Tensor] = unit.scratch["tensors"]
        return {key: int(self.state[tensor]["step"]) for key, tensor in tensors.items() if tensor.grad is not None}

    def _prepare_capture(self, unit: StepUnit, counts: Mapping[str, int]) -> None:
        """Listen to what may be due at the next step."""
        assert self._capture is not None
        tensors: dict[str, Tensor] = unit.scratch["tensors"]
        awaited = []
        for key in unit.scratch["statistics"]:
            count = counts[key] if key in counts else int(self.state.get(tensors[key], {}).get("step", 0))
            # A factor step that turns out to have been undone comes again.
            again = self.options.skip_nonfinite and self._schedule.is_due(key, count)
            if again or self._schedule.is_due(key, count + 1):
                awaited.append(key)
        # Vectors leave early only if they will be wanted: a layer that is not in use now may stay so.
        unit.scratch["certain"] = any(key in counts for key in awaited)
        unit.scratch["awaited"] = sorted({*awaited, *self._schedule.missed.intersection(unit.scratch["statistics"])})
        units = list(self._units.values())
        known = [other.scratch.get("awaited", other.scratch.get("statistics", ())) for other in units]
        records = [self._records[key] for keys in known for key in keys]
        self._capture.listen_to(records, any(other.scratch.get("certain", True) for other in units))

    def _drop_statistics(self, unit: StepUnit) -> None:
        """Statistics gathered for a step that takes none must not be added to those of the next one."""
        assert self._capture is not None
        self._unscaled_by = self._capture.is_over = None
        if self._reduction is not None and unit is next(reversed(self._units.values()), unit):
            self._reduction.abandon()
        for key in unit.scratch["statistics"]:
            record = self._records[key]
            if record.count and key in self._schedule.missed:
                self._schedule.glimpsed.add(key)
            record.clear()

    def _own_report(self, key: str) -> Tensor | None:
        """What this rank adds to the numbers of a matrix that all ranks are told: see :meth:`_note`."""
        failures = self.matrix_states.get(key, {}).get("failures")
        if key not in self._schedule.glimpsed:
            return failures
        device = self._records[key].sum_input.device
        return torch.full((), GLIMPSE, device=device) + (0 if failures is None else failures.to(device))

    def _note(
        self, unit: StepUnit, counts: Mapping[str, int], reports: Sequence[float], tokens: Sequence[float]
    ) -> None:
        """Learn from a factor step; the numbers are over all ranks, so that all of them decide alike."""
        schedule, keys = self._schedule, list(counts)
        refuse_broken_factors(keys, [float(int(report)) for report in reports])
        for key, report, number in zip(keys, reports, tokens, strict=True):
            schedule.note(key, counts[key], number > 0, report % 1 > 0)
        silent = sorted(counts.keys() - schedule.heard - schedule.left_out)
        found = sorted(schedule.left_out & schedule.heard)
        if silent and unit.layout.rank == 0:
            logger.warning(
                "MKOR: no input of %s has come by, which only %s sees therefore: its weight is used without calling "
                "its module (as nn.MultiheadAttention uses out_proj), or it is not in use yet. It gets factors once "
                "its module is called.",
                ", ".join(silent),
                self.options.backend,
            )
        if silent or found:
            schedule.left_out = (schedule.left_out | set(silent)) - set(found)
            for name in found:
                info, index = self._catalog[name]
                self._routes[name] = self._choose_rule(info, self.param_groups[index])
            self._route_left_out()
            unit.scratch["stale"] = True

    def _drop_untouched(self, keys: Sequence[str]) -> None:
        """Called with matrices that are left out: what was never changed of their states need not be kept."""

    def _route_left_out(self) -> None:
        for name in self._schedule.left_out.intersection(self._records):
            self._routes[name] = Route("fallback", "no input has come by: its module has not been called")

    def _warn_of_unfrozen(self) -> None:
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            for name in thawed:
                del self._frozen[name]
            logger.warning(
                "MKOR: %s was frozen when capture() was called and takes %s alone; call optimizer.capture(model) again "
                "for it to get factors.",
                ", ".join(thawed),
                self.options.backend,
            )

    def _unit(self) -> StepUnit:
        self._warn_of_unfrozen()
        # Here, between two rounds of steps: until then the units of one round are planned by the same routes.
        for old in [unit for unit in self._units.values() if unit.scratch.get("stale")]:
            self._drop_untouched(sorted(self._schedule.left_out.intersection(old.layout.shapes)))
            new = self._new_unit(old.tensors, old.positions, old.planned_groups)
            new.traffic = old.total_traffic
        return super()._unit()

    def read_health(self) -> dict[str, float]:
        """As in the base class, and ``layers_never_seen``: captured layers of which no input has come by so far."""
        unheard = self._records.keys() - self._schedule.heard if self._capture is not None else ()
        return {**super().read_health(), "layers_never_seen": float(len(unheard))}

    # --- statistics ---------------------------------------------------------------------------------------------

    def _reduced_statistics(self, unit: StepUnit, counts: Mapping[str, int]) -> dict[str, LayerVectors]:
        """Statistics over all ranks of some matrices of the unit.

        Args:
            unit: The unit.
            counts: The numbers of their steps.
        """
        assert self._capture is not None
        first = unit is next(iter(self._units.values()))
        if self._reduction is not None and first:
            # Not at the end of the round: in the first one nobody knows which unit is its last.
            self._reduction.forget_results()
        keys = list(counts)
        if not keys:
            return {}
        divisor = self._gradient_divisor(unit)
        if self._reduction is not None:
            reduced = self._reduction.take(keys, first, self._own_report)
            numbers_of = self._reduction.failures, self._reduction.tokens
            self._note(unit, counts, *([numbers[key] for key in keys] for numbers in numbers_of))
            like = torch.empty(0, dtype=unit.dtype, device=unit.device)
            found = [layer_vectors(a.to(like), tokens.to(like), g.to(like), divisor) for a, tokens, g in reduced]
            return dict(zip(keys, found, strict=True))
        sums = [self._capture.take(self._records[key].parameter) for key in keys]
        failures = [self._own_report(key) for key in keys]
        vectors, numbers = reduce_statistics(unit, sums, failures, divisor)
        # The one wait for the device of a factor step.
        self._note(unit, counts, *numbers.tolist())
        return dict(zip(keys, vectors, strict=True))

    def _gradient_divisor(self, unit: StepUnit) -> float | Tensor:
        """What the framework divides summed gradients by: ranks, and the loss scale."""
        told: Callable[[], float | Tensor] | None = getattr(self._source, "gradient_divisor", None)
        if told is not None:
            return told()
        loss_scale = self._loss_scale or getattr(self._source, "loss_scale", None)
        if callable(loss_scale):
            return unit.layout.world_size * float(loss_scale())
        if self._unscaled_by is not None:
            return unit.layout.world_size * self._unscaled_by.to(unit.device)
        return unit.layout.world_size

    # --- checkpoints --------------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        """When factors are due."""
        return {**super().extra_state(), "factor_schedule": self._schedule.state_dict()}

    def load_extra_state(self, state_dict: Mapping[str, Any]) -> None:
        """When factors are due; statistics gathered since the last step are dropped."""
        super().load_extra_state(state_dict)
        self._discard_window()
        if self._capture is not None:
            self._capture.listen_to_all()
        before = set(self._schedule.left_out)
        self._schedule.load_state_dict(state_dict.get("factor_schedule", {}))
        for unit in self._units.values():
            unit.scratch.pop("awaited", None)
            unit.scratch.pop("certain", None)
        if self._schedule.left_out != before:
            for name in before - self._schedule.left_out:
                info, index = self._catalog[name]
                self._routes[name] = self._choose_rule(info, self.param_groups[index])
            self._route_left_out()
            self._forget_plans()


def _is_whole(unit: StepUnit) -> bool:
    """Whether every rank has the whole parameters, so that each has a count of the steps in which it had a gradient."""
    return unit.layout.world_size == 1 or unit.layout.replicated
