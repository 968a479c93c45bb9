"""MKOR: Kronecker-factored preconditioning by rank-1 inverse updates, in front of a first-order optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rankwise.optimizers.backward_reduction import BackwardReduction, twin_group
from rankwise.optimizers.base import ShardedOptimizer
from rankwise.optimizers.capture import Capture, Describe, Record, describe_linear
from rankwise.optimizers.element_states import StateTypes
from rankwise.optimizers.factors import KroneckerFactors, LayerSignature
from rankwise.optimizers.first_order import FirstOrder
from rankwise.optimizers.hybrid import KneeDetector, LossWindow
from rankwise.optimizers.layer_statistics import (
    LayerVectors,
    layer_vectors,
    reduce_statistics,
    refuse_broken_factors,
)
from rankwise.optimizers.matrix_states import MatrixState
from rankwise.optimizers.options import MKOROptions, OptionError, Options, patterns
from rankwise.optimizers.routing import ParameterInfo, Role, Route, RoutingPolicy, Rule
from rankwise.optimizers.unit import Bucket, StepUnit
from rankwise.optimizers.work import StepWork
from rankwise.sharding import Batch, MatrixTask, Traffic

__all__ = ["MKOR"]

logger = logging.getLogger(__name__)


class MKOR(ShardedOptimizer):
    r"""Momentum-enabled Kronecker-factor-based optimizer with rank-1 updates, and MKOR-H (arXiv 2306.01685).

    Every ``update_interval`` steps the inverses of a layer's two factors move by one rank-1 update each, from the mean
    input ``a`` and the gradient ``g`` of a (virtual) bias; every step the gradient becomes
    :math:`G^{-1} D A^{-1}`, rescaled to the norm of ``D``, and goes to the backend. A layer's bias gradient rides along
    as one more column if weight and bias are in one param group. The owner of a matrix alone keeps its factors.

    The statistics come from module hooks: call :meth:`capture` once with the model. The DeepSpeed plugin does it.

    Args:
        params: Parameters, ``(name, parameter)`` pairs or param groups.
        lr: Learning rate.
        backend: First-order rule after preconditioning: "adamw", "lamb" or "sgd". It also serves everything else.
        factor_decay: Factor momentum.
        update_interval: Steps between factor updates; the preconditioner is applied at every step.
        rule: "official" (the published code), "ema" (the paper's derivation) or "paper_literal" (the printed
            formula, which is the inverse of nothing).
        stabilizer: (threshold, retention) of the norm-based stabilizer; None switches it off.
        stabilizer_norm: "row_sum" or "max_entry", the latter as in the published code.
        rescale: "joint" keeps the gradient's Frobenius norm; None does not rescale.
        max_factor_dim: Sides above it get no factor; a matrix with both sides above takes the backend alone.
        factor_dtype: Storage type of the factor inverses; the arithmetic is float32.
        comm_dtype: Type in which straddling matrices travel to their owners and back. None: their own, which rounds
            nothing; "bfloat16" halves the bytes.
        tp_mode: Under Megatron's tensor parallelism, "exact" (factors of whole matrices) or "block" (every shard is a
            matrix of its own); no effect elsewhere.
        hybrid: MKOR-H: drop the factors for good once the loss has passed its knee.
        hybrid_beta: See :class:`rankwise.optimizers.hybrid.KneeDetector`, like the following three.
        hybrid_patience: Consecutive slow steps it takes.
        hybrid_min_steps: Steps before the first check.
        hybrid_ema: Decay of the loss averages.
        output_gain: Factor on ``g``, whose natural scale is often far below 1.
        betas: Moment decay rates of "adamw" and "lamb".
        eps: Added to the root of the second moment.
        weight_decay: Decoupled with "adamw"; inside the trust ratio with "lamb"; added to the gradient with "sgd".
        momentum: Of "sgd".
        nesterov: Of "sgd".
        exclude: Name patterns that are not preconditioned.
        skip_nonfinite: Leave every weight and state as it was where a gradient of the step is infinite or NaN on any
            rank, and count it in :attr:`health`. Costs a copy of weights and states while a step runs.

    Raises:
        OptionError: A value is outside its range, or there is no matrix to precondition.
    """

    options_type: ClassVar[type[Options]] = MKOROptions
    options: MKOROptions
    health_totals = ("factors_updated", "factors_skipped")
    matrix_state_names = ("left", "right", "failures")
    group_options = ("lr", "betas", "eps", "weight_decay", "momentum")
    copied_attributes = (
        *ShardedOptimizer.copied_attributes,
        "_first_order",
        "_factors",
        "_detector",
        "_switched",
        "_losses",
    )
    sums_cover_fallback = True  # LAMB's trust ratios are per parameter, whatever its rule

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        backend: str = "adamw",
        factor_decay: float = 0.95,
        update_interval: int = 10,
        rule: str = "official",
        stabilizer: tuple[float, float] | None = (2.0, 0.9),
        stabilizer_norm: str = "row_sum",
        rescale: str | None = "joint",
        max_factor_dim: int = 16384,
        factor_dtype: str = "bfloat16",
        comm_dtype: str | None = None,
        tp_mode: str = "exact",
        hybrid: bool = False,
        hybrid_beta: float = 0.1,
        hybrid_patience: int = 20,
        hybrid_min_steps: int = 100,
        hybrid_ema: float = 0.95,
        output_gain: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        nesterov: bool = False,
        exclude: Sequence[str] = (),
        skip_nonfinite: bool = False,
    ) -> None:
        options = MKOROptions(
            lr=lr,
            backend=backend,
            factor_decay=factor_decay,
            update_interval=update_interval,
            rule=rule,
            stabilizer=tuple(stabilizer) if isinstance(stabilizer, list) else stabilizer,  # type: ignore[arg-type]
            stabilizer_norm=stabilizer_norm,
            rescale=rescale,
            max_factor_dim=max_factor_dim,
            factor_dtype=factor_dtype,
            comm_dtype=comm_dtype,
            tp_mode=tp_mode,
            hybrid=hybrid,
            hybrid_beta=hybrid_beta,
            hybrid_patience=hybrid_patience,
            hybrid_min_steps=hybrid_min_steps,
            hybrid_ema=hybrid_ema,
            output_gain=output_gain,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            exclude=patterns(exclude),
            skip_nonfinite=skip_nonfinite,
        )
        if options.rule == "paper_literal":
            logger.warning("MKOR: rule='paper_literal' is the printed formula; it amplifies what it should damp.")
        self._first_order = FirstOrder(options.backend, options.nesterov)
        self._factors = KroneckerFactors(options)
        self._detector = KneeDetector(
            options.hybrid_beta, options.hybrid_patience, options.hybrid_min_steps, options.hybrid_ema
        )
        self._switched = False
        self._losses = LossWindow()
        super().__init__(params, options)

    def _detach(self) -> None:
        super()._detach()
        self._capture: Capture | None = None
        self._loss_scale: Callable[[], float] | None = None
        self._records: dict[str, Record] = {}
        self._reduction: BackwardReduction | None = None
        self._twin: tuple[ProcessGroup, ProcessGroup] | None = None

    # --- routing ------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> RoutingPolicy:
        """Linear weights; embeddings and heads take the backend."""
        return RoutingPolicy(embeddings=False, exclude=self.options.exclude)

    def _adjust_route(self, info: ParameterInfo, group: Mapping[str, Any], chosen: Route) -> Route:
        if chosen.rule == "matrix" and info.role is Role.EXPERT:
            # Their inputs are padded to a capacity that depends on how many ranks there are, and so does their mean.
            return Route("fallback", "expert")
        if chosen.rule == "matrix" and len(info.shape) != 2:
            return Route("fallback", "only 2-D weights of linear modules are captured")
        if chosen.rule == "matrix" and min(info.shape) > self.options.max_factor_dim:
            return Route("fallback", f"both sides above {self.options.max_factor_dim}")
        return chosen

    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """Those of the backend."""
        return dict.fromkeys(self._first_order.states)

    # --- statistics ---------------------------------------------------------------------------------------------

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
        if self._switched:
            self._drop_factors()

    def _reduce_early(self, is_last: Callable[[], bool] | None) -> BackwardReduction | None:
        group = self._source.group
        if is_last is None or group is None or group.size() == 1 or not self._records:
            return None
        if self._twin is None or self._twin[0] is not group:
            self._twin = (group, twin_group(group))
        return BackwardReduction(self._records, self._twin[1], is_last)

    def record_loss(self, loss: Tensor | float) -> None:
        """MKOR-H: report a micro-batch's loss; a step uses the mean over micro-batches and ranks.

        Args:
            loss: Scalar, not multiplied by a loss scale.
        """
        if self.options.hybrid and not self._switched:
            self._losses.add(loss, None if self._capture is None else self._capture.window_id())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; statistics of a step that was skipped are forgotten."""
        super().zero_grad(set_to_none=set_to_none)
        # Not the losses: they may be recorded between the forward pass and this call.
        if self._capture is not None:
            self._capture.clear()

    def _discard_window(self) -> None:
        if self._capture is not None:
            self._capture.clear()
        self._losses.clear()

    # --- plan ---------------------------------------------------------------------------------------------------

    def _plan(self, unit: StepUnit) -> None:
        if self._capture is None:
            raise OptionError(
                "MKOR has no statistics to precondition with: call optimizer.capture(model) before the first step, or "
                "import deepspeed_plugin before deepspeed.initialize, which does it."
            )
        if self._switched:
            return
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
        self._choose_owners(unit, tasks)
        unit.scratch["statistics"] = [task.key for task in sorted(tasks, key=lambda task: task.key)]

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

    def work(self, unit: StepUnit) -> StepWork:
        """See the base class: LAMB's norms, the factors, and the vectors of factor steps."""
        tasks = [] if unit.exchange is None else [task for batch in unit.exchange.plan.batches for task in batch.tasks]
        # Two vectors per layer, the number of its tokens and of its failures.
        elements = sum(task.signature.outputs + task.signature.inputs + 2 for task in tasks)
        return StepWork(
            sums=(2,) if self.options.backend == "lamb" else (),
            matrix_state=lambda task, device: self._factors.fresh(task.signature, device),
            periodic=self._periodic_messages(unit, elements * unit.dtype.itemsize),
            period=self.options.update_interval,
            scalars=(8,) * (bool(tasks) and not all(unit.layout.ranks)) + (16,) * self._watches_loss(unit),
        )

    def _periodic_messages(self, unit: StepUnit, size: int) -> tuple[int, ...]:
        if self._switched or not size:
            return ()
        if self._reduction is None:
            return (size,)
        # They carry the vectors of all units.
        return self._reduction.message_bytes if unit is next(iter(self._units.values()), unit) else ()

    @property
    def further_traffic(self) -> list[Traffic]:
        """See the base class: the statistics."""
        return [] if self._reduction is None else [self._reduction.traffic]

    # --- the step -----------------------------------------------------------------------------------------------

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        self._maybe_switch(unit)
        if unit.exchange is not None and not self._switched:
            self._precondition(unit, buckets)
        self._first_order.apply(unit, buckets)

    def _precondition(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        """Replace the gradients of preconditioned matrices, in the buckets, by their preconditioned forms."""
        assert unit.exchange is not None
        step = unit.common_step(self.state)
        due = (step - 1) % self.options.update_interval == 0
        vectors = self._reduced_statistics(unit) if due else {}
        self._drop_statistics(unit)
        places: dict[int, tuple[Bucket, int]] = {}
        sources: list[Tensor | None] = [None] * len(unit.entries)
        for bucket in buckets:
            for position, entry in enumerate(bucket.entries):
                places[entry.index] = (bucket, position)
                sources[entry.index] = bucket.grads[position]

        def compute(batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
            self.health.add("matrices_updated", len(tasks))
            fresh = partial(self._factors.fresh, batch.signature, unit.device)
            states = [self.matrix_states.obtain(task.key, fresh) for task in tasks]
            if due:
                self._move_factors(tasks, states, vectors)
            return self._factors.apply(batch.signature, states, stack)

        def deliver(task: MatrixTask, index: int, piece: Tensor) -> None:
            bucket, position = places[index]
            bucket.grads[position] = piece.clone()

        unit.exchange.run(sources, compute, deliver)
        self._prepare_capture(step)

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

    def _move_factors(
        self, tasks: Sequence[MatrixTask], states: Sequence[MatrixState], vectors: Mapping[str, LayerVectors]
    ) -> None:
        updated, skipped = self._factors.move(tasks, states, vectors)
        self.health.add("factors_updated", updated)
        self.health.add("factors_skipped", skipped)

    # --- MKOR-H -------------------------------------------------------------------------------------------------

    def _maybe_switch(self, unit: StepUnit) -> None:
        """Feed the detector this step's loss, once per step, the same on every rank."""
        if not self._watches_loss(unit):
            return
        mean = self._losses.take_mean(unit.layout, unit.device, unit.traffic)
        if mean is not None and self._detector.update(mean):
            self._switched = True
            self._drop_factors()
            logger.info("MKOR-H: the loss has passed its knee; continuing with %s alone.", self.options.backend)

    def _watches_loss(self, unit: StepUnit) -> bool:
        first = next((other for other in self._units.values() if not other.apart), unit)
        return self.options.hybrid and not self._switched and not unit.apart and unit is first

    def _drop_factors(self) -> None:
        if self._capture is not None:
            self._capture.remove()
        self.matrix_states.forget()

    @property
    def switched(self) -> bool:
        """MKOR-H: whether the first-order optimizer has taken over."""
        return self._switched

    # --- checkpoints --------------------------------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """Class and backend: another backend has other element states."""
        return f"MKOR-{self.options.backend}"

    def state_dict(self) -> dict[str, Any]:
        """As in the base class, plus the state of the hybrid switch."""
        return {**super().state_dict(), **self.extra_state()}

    def extra_state(self) -> dict[str, Any]:
        """The hybrid switch."""
        return {"hybrid": {"switched": self._switched, **self._detector.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in the base class; statistics gathered since the last step are dropped."""
        super().load_state_dict(state_dict)
        self.load_extra_state(state_dict)

    def load_extra_state(self, state_dict: Mapping[str, Any]) -> None:
        """The hybrid switch; statistics gathered since the last step are dropped."""
        self._discard_window()
        if self._capture is not None:
            self._capture.enabled = True
        hybrid = dict(state_dict.get("hybrid", {}))
        if hybrid:
            self._switched = bool(hybrid["switched"])
            self._detector.load_state_dict(hybrid)
        if self._switched:
            self._drop_factors()
        elif self._capture is not None:
            # Back from after the switch: hooks and factors come into use again.
            self._capture.attach()
            if any("statistics" not in unit.scratch for unit in self._units.values()):
                self._forget_plans()
