"""MKOR's statistics, from the hooks to the vectors of a factor step; which matrices there are, with their biases."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rankwise.optimizers.backward_reduction import BackwardReduction, twin_group
from rankwise.optimizers.base import ShardedOptimizer
from rankwise.optimizers.capture import Capture, Describe, Record, describe_linear
from rankwise.optimizers.factors import LayerSignature
from rankwise.optimizers.layer_statistics import (
    LayerVectors,
    layer_vectors,
    reduce_statistics,
    refuse_broken_factors,
)
from rankwise.optimizers.options import MKOROptions, OptionError
from rankwise.optimizers.routing import Route
from rankwise.optimizers.sources import framework_advice
from rankwise.optimizers.unit import StepUnit
from rankwise.sharding import MatrixTask, Traffic

__all__ = ["CapturingOptimizer"]

logger = logging.getLogger(__name__)


class CapturingOptimizer(ShardedOptimizer):
    """An optimizer whose matrix rule needs the inputs and the output gradients of linear layers."""

    options: MKOROptions

    def _detach(self) -> None:
        super()._detach()
        self._capture: Capture | None = None
        self._loss_scale: Callable[[], float] | None = None
        self._records: dict[str, Record] = {}
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
                step: with ``torch.amp.GradScaler``, pass ``scaler.get_scale``. An engine's own scale is known.
            last_micro_batch: Whether the present backward pass is the last before the step; the statistics then travel
                while it runs, otherwise in ``step()``. Known for ``DistributedDataParallel``.
            describe: Recognises linear modules, see :class:`rankwise.optimizers.capture.Capture`.

        Raises:
            OptionError: No parameter of this optimizer belongs to a linear module of ``model``.
        """
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self.attach(self._plain.replicated_over(model.process_group))
            last_micro_batch = last_micro_batch or partial(getattr, model, "require_backward_grad_sync")
            model = model.module
        self._loss_scale = loss_scale
        self._learn_roles(model)
        names = {id(parameter): name for name, parameter in self.parameters_by_name.items()}

        def wanted(module: nn.Module, parameter: nn.Parameter) -> bool:
            name = names.get(id(parameter))
            return name is not None and self._routes[name].rule == "matrix"

        if self._capture is not None:
            self._capture.remove()
        self._capture = Capture(model, wanted, window, describe)
        self._records = {names[id(parameter)]: record for parameter, record in self._capture.records.items()}
        self._reduction = self._capture.listener = self._reduce_early(last_micro_batch)
        for name, chosen in self._routes.items():
            if chosen.rule == "matrix" and name not in self._records:
                self._routes[name] = Route("fallback", "no linear module uses it")
        self._forget_plans()
        self._refuse_if_idle()
        self._captured()

    def _captured(self) -> None:
        """Called at the end of :meth:`capture`."""

    def release(self) -> None:
        """Take the hooks of :meth:`capture` off the model: others will train it."""
        if self._capture is not None:
            self._capture.remove()

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
        for key in unit.keys("matrix"):
            record, position = self._records[key], unit.group_position[key]
            bias = self._bundled_bias(key, unit)
            inputs, outputs, transposed = record.shape
            signature = LayerSignature(outputs, inputs, bias is not None, transposed, position)
            tasks.append(MatrixTask(key, (key,) if bias is None else (key, bias), signature, signature.cost))
        return tasks

    def _bundled_bias(self, key: str, unit: StepUnit) -> str | None:
        record = self._records[key]
        if record.bias is None:
            return None
        names = {id(parameter): name for name, parameter in self.parameters_by_name.items()}
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

    # --- statistics ---------------------------------------------------------------------------------------------

    def _drop_statistics(self, unit: StepUnit) -> None:
        """Statistics gathered for a step that takes none must not be added to those of the next one."""
        if self._reduction is not None:
            self._reduction.abandon()
        for key in unit.scratch["statistics"]:
            self._records[key].clear()

    def _prepare_capture(self, step: int) -> None:
        assert self._capture is not None
        # A factor step that turns out to have been undone comes again.
        again = self.options.skip_nonfinite and (step - 1) % self.options.update_interval == 0
        self._capture.enabled = again or step % self.options.update_interval == 0

    def _reduced_statistics(self, unit: StepUnit) -> dict[str, LayerVectors]:
        """Statistics of every matrix of the unit over all ranks."""
        assert self._capture is not None
        keys: list[str] = unit.scratch["statistics"]
        divisor = self._gradient_divisor(unit)
        if self._reduction is not None:
            first = unit is next(iter(self._units.values()))
            reduced = self._reduction.take(keys, first, lambda key: self.matrix_states.get(key, {}).get("failures"))
            refuse_broken_factors(keys, [self._reduction.failures[key] for key in keys])
            like = torch.empty(0, dtype=unit.dtype, device=unit.device)
            found = [layer_vectors(a.to(like), tokens.to(like), g.to(like), divisor) for a, tokens, g in reduced]
            return dict(zip(keys, found, strict=True))
        sums = [self._capture.take(self._records[key].parameter) for key in keys]
        failures = [self.matrix_states.get(key, {}).get("failures") for key in keys]
        vectors, failures_of_all = reduce_statistics(unit, sums, failures, divisor)
        # The one wait for the device of a factor step.
        refuse_broken_factors(keys, failures_of_all.tolist())
        return dict(zip(keys, vectors, strict=True))

    def _gradient_divisor(self, unit: StepUnit) -> float | Tensor:
        """What the framework divides summed gradients by: ranks, and the loss scale."""
        told: Callable[[], float | Tensor] | None = getattr(self._source, "gradient_divisor", None)
        if told is not None:
            return told()
        loss_scale = self._loss_scale or getattr(self._source, "loss_scale", None)
        return unit.layout.world_size * (float(loss_scale()) if callable(loss_scale) else 1.0)
