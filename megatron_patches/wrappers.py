"""Megatron's wrappers around our optimizers tell them their layout, and write checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import megatron.core.optimizer as stock
import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_patches.capture import linear_views
from megatron_patches.checkpoint import load_sharded, sharded_state
from megatron_patches.copies import warn_of_drift
from megatron_patches.formats import holder, refuse_holder
from megatron_patches.fsdp_checkpoint import filled_state, torchs_state
from megatron_patches.groups import ParallelGroups
from megatron_patches.layouts import MegatronLayout
from megatron_patches.losses import StepLosses
from megatron_patches.main_weights import KeptWeights
from megatron_patches.megatron_fsdp import UNSAVED, gather_anew, under_megatron_fsdp
from megatron_patches.memory import keep
from megatron_patches.monitor import health_of
from megatron_patches.norms import Norms
from megatron_patches.offloading import Offloading, let_others_move, memory_of
from megatron_patches.param_groups import share_members
from megatron_patches.parameters import ModelParameter, bare_model, is_expert
from megatron_patches.records import plain_names
from megatron_patches.resuming import options_record, overrides, settle_options
from megatron_patches.scaling import GradientScale
from megatron_patches.support import SupportError, refuse_without_statistics
from rankwise.options.validation import OptionError
from rankwise.routing.patterns import refuse_unmatched_everywhere
from rankwise.states.parameter_table import idle_allowed
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.step.reports import print_on_first_rank

__all__ = ["Adoption", "LayerWise", "wrapper_classes"]


class Adoption:
    """Facts of the model that wrappers need while they are built, and the work that remains when all are.

    Args:
        parameters: The model's parameters.
        groups: This rank's process groups.
        chunks: The model chunks.
    """

    def __init__(
        self, parameters: Mapping[Parameter, ModelParameter], groups: ParallelGroups, chunks: Sequence[nn.Module]
    ) -> None:
        self.parameters, self.groups, self.chunks = parameters, groups, chunks
        self.scale = GradientScale(chunks, groups.data(False)[1])
        self._adopted: dict[ShardedOptimizer, Any] = {}
        self._announced: set[str] = set()
        for chunk in chunks:
            self._listen(chunk)

    def _listen(self, chunk: Any) -> None:
        """Begin a new window when a chunk's gradients are zeroed, whether or not the optimizer's are."""
        zero = getattr(chunk, "zero_grad_buffer", None)
        if zero is None:
            return

        def zeroed(*args: Any, **kwargs: Any) -> Any:
            for wrapper in self._adopted.values():
                wrapper.window += 1
            return zero(*args, **kwargs)

        chunk.zero_grad_buffer = zeroed

    def adopt(self, wrapper: MegatronOptimizer, layer_wise: bool = False) -> None:
        """Give a wrapper's inner optimizer its layout.

        Args:
            wrapper: The built wrapper.
            layer_wise: Whether every data-parallel rank was given whole parameters of its own.
        """
        inner = wrapper.optimizer
        if not isinstance(inner, ShardedOptimizer):
            return
        expert = any(is_expert(parameter) for parameter in inner.table.parameters.values())
        inner.attach(MegatronLayout(wrapper, self.parameters, self.groups, self.scale, expert, layer_wise))
        inner.reports.announce = self._announce_once
        wrapper.holds_experts = expert
        self._adopted[inner] = wrapper

    def extra_states(self) -> list[dict[str, Any]]:
        """Return the extra states of this rank's optimizers."""
        return [inner.extra_state() for inner in self._adopted]

    def finish(self, built: MegatronOptimizer) -> None:
        """Hook the model for MKOR, and refuse a model without parameters for the optimizer's rule. A collective.

        Args:
            built: Result of the factory.

        Raises:
            OptionError: There is nothing to update.
        """
        self._capture(built)
        self._measure()
        wrappers = getattr(built, "chained_optimizers", [built])
        for wrapper, members in zip(wrappers, share_members(wrappers, self.groups.pipeline), strict=True):
            wrapper.members, wrapper.pipeline = members, self.groups.pipeline
        device = next((p.device for p in self.parameters), torch.device("cpu"))
        any_busy = any(not inner.table.is_idle for inner in self._adopted)
        busy = torch.tensor(float(any_busy), dtype=torch.float32, device=device)
        dist.all_reduce(busy, dist.ReduceOp.MAX)
        if not busy.item():
            for inner in self._adopted:
                inner.table.refuse_if_idle()
            raise OptionError("the optimizer would update none of the model's parameters with its own rule.")
        self._refuse_unmatched()

    def _measure(self) -> None:
        for inner, wrapper in self._adopted.items():
            by = getattr(wrapper.config, "rankwise_log_norms", None)
            if by is not None:
                wrapper.norms = Norms(by, wrapper.config.rankwise_log_interval, self.groups.whole_stage)
                wrapper.norms.watch(inner)

    def _refuse_unmatched(self) -> None:
        """Refuse patterns of options that match no parameter on any rank. A collective."""
        owner = next((inner.spec.name for inner in self._adopted), "the optimizer")
        names = [parameter.info.name for parameter in self.parameters.values()]
        names += [name for inner in self._adopted for name in inner.table.parameters]
        for key in ("exclude", "blocks"):
            # Every rank asks about every option, even if it has no optimizer of ours.
            patterns = {pattern for inner in self._adopted for pattern in inner.options.patterns.get(key, ())}
            refuse_unmatched_everywhere(owner, sorted(patterns), list(dict.fromkeys(names)), key)

    def _announce_once(self, text: str) -> None:
        # Dense and expert parameters have an optimizer each, with mostly equal messages.
        if text not in self._announced:
            self._announced.add(text)
            print_on_first_rank(text)

    def _capture(self, built: MegatronOptimizer) -> None:
        model = nn.ModuleList([bare_model(chunk) for chunk in self.chunks])
        describe = linear_views(self.parameters)
        optimizers = [inner for inner in self._adopted if inner.needs_capture]
        for chunk in self.chunks if optimizers else ():
            refuse_without_statistics(chunk, self.groups.block(False) is not None)
        with idle_allowed():
            for inner in optimizers:
                inner.capture(model, window=partial(getattr, self._adopted[inner], "window"), describe=describe)
        hearing = [inner for inner in self._adopted if inner.needs_loss]
        if hearing:
            StepLosses(built, hearing, self.chunks, self.scale, print_on_first_rank)


def wrapper_classes(adoption: Adoption) -> dict[str, type[Any]]:
    """Return our classes, bound to the model, by the names under which Megatron's modules find their own.

    Args:
        adoption: Facts of the model that the wrappers need.
    """
    ours: dict[str, tuple[type[Any], ...]] = {
        "DistributedOptimizer": (_Distributed,),
        "Float16OptimizerWithFloat16Params": (_Half,),
        "FP32Optimizer": (_Full,),
        "ChainedOptimizer": (Chained,),
    }
    if (base := getattr(stock, "FullyShardedOptimizer", None)) is not None:  # since 0.20
        ours["FullyShardedOptimizer"] = _FullySharded, base
    return {name: type(bases[0].__name__, bases, {"adoption": adoption}) for name, bases in ours.items()}


class _Healthy:
    """A chain of our wrappers."""

    chained_optimizers: list[Any]

    def read_health(self) -> dict[str, float]:
        """Return what happened since the last reading, as :func:`health_of` does; a collective."""
        return health_of(self.chained_optimizers)


class Chained(_Healthy, ChainedOptimizer):
    """Megatron's optimizer of dense and of expert parameters, whose states differ by name only."""

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrappers' states, without numbers before their names."""
        return super().sharded_state_dict(*args, **{**kwargs, "metadata": plain_names(kwargs.get("metadata"))})


class _Adopted(MegatronOptimizer):
    """The common part of the three wrappers, which checkpoint the inner optimizer's states by name, for any layout.

    Each wrapper also derives from a class of Megatron, whose methods ``super()`` calls.
    """

    adoption: Adoption
    members: Sequence[frozenset[str]] = ()
    """Names of the parameters of every param group, on all pipeline stages."""
    pipeline: dist.ProcessGroup | None = None
    """One rank of every pipeline stage, this one among them."""
    window = 0
    """Number that changes with every attempt at a step, so that statistics of a skipped one do not count."""
    holds_experts = False
    """Whether the parameters are experts', which have process groups of their own."""
    kept: KeptWeights | None = None
    """Keeps the main weights between steps, if they are not in the optimizer's tensors."""
    _offloading: Offloading | None = None
    _requested: Mapping[str, Any] = {}
    """States that Megatron's FSDP saves or fills in place."""
    backward_scale: Tensor | None = None
    """The loss scale during the last backward pass."""
    norms: Norms | None = None
    """Measures norms of updates and weights, if they are asked for."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.adoption.adopt(self)
        if self.optimizer is not None:
            let_others_move(self.optimizer, self.offload_to_cpu, self.restore_from_cpu)
        self.kept = keep(self)

    def main_weights(self) -> AbstractContextManager[None]:
        """Give the optimizer's tensors their values inside the context, as in a step."""
        return nullcontext() if self.kept is None else self.kept.here()

    def read_health(self) -> dict[str, float]:
        """Return what happened since the last reading, as :func:`health_of` does; a collective."""
        return health_of([self])

    def offload_to_cpu(self) -> None:
        """Move states, matrix states and main weights to the host; fp32 weights of the model itself stay."""
        if self.optimizer is None:
            return
        if self._offloading is None:
            self._offloading = Offloading(self.optimizer)
        self._offloading.offload({memory_of(parameter) for parameter in self.adoption.parameters})
        torch.cuda.empty_cache()

    def capture_paused(self) -> AbstractContextManager[None]:
        """Let passes inside the context leave no statistics, as :meth:`rankwise.MKOR.capture_paused` does."""
        return nullcontext() if self.optimizer is None else self.optimizer.capture_paused()

    def restore_from_cpu(self) -> None:
        """Move back what :meth:`offload_to_cpu` has moved; step counts stay on the host, where they belong."""
        if self._offloading is not None:
            self._offloading.restore()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as Megatron does, and begin a new window."""
        self.window += 1
        self.adoption.scale.begin_window()
        super().zero_grad(set_to_none)

    def prepare_grads(self) -> bool:
        """Prepare gradients as Megatron does, which changes the loss scale, and remember the scale of this pass."""
        self.window += 1
        if not self.is_stub_optimizer:
            self.backward_scale = self.get_loss_scale().clone()
        return bool(super().prepare_grads())

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return this rank's states, to be loaded into the same layout.

        They suffice for all data-parallel ranks only if each rank has all states: not if parameters are dealt out, nor
        if matrices have states, which their owners keep. Loading another rank's states is refused then.
        """
        if self.optimizer is None:
            return {}
        with self.main_weights():
            return self._whole_state(self.optimizer)

    def _whole_state(self, inner: ShardedOptimizer) -> dict[str, Any]:
        state: dict[str, Any] = {"optimizer": inner.state_dict(), "options": options_record(inner)}
        state["holder"] = holder(self)
        state["main_weights"] = [w.detach().clone() for g in self.param_groups for w in g["params"]]
        if getattr(self, "grad_scaler", None):
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` or a distributed checkpoint gave."""
        inner = self.optimizer
        if inner is None or not state_dict:
            return
        with self.main_weights():
            if "main_weights" in state_dict:
                refuse_holder(self, state_dict.get("holder"))
                self._load_full(inner, state_dict)
            else:
                fsdp = under_megatron_fsdp(self)
                load_sharded(self, filled_state(self._requested, state_dict) if fsdp else state_dict)
        if under_megatron_fsdp(self):
            gather_anew(self.model_chunks)
        if self.kept is not None:
            # Other ranks' copies follow what the main weights were rounded to here.
            for chunk in self.model_chunks:
                chunk.start_param_sync(force_sync=True)
        # The scaler changes only when nothing can be refused any more.
        if getattr(self, "grad_scaler", None) and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])

    def _load_full(self, inner: ShardedOptimizer, state_dict: Mapping[str, Any]) -> None:
        before = [dict(group) for group in inner.param_groups]
        inner.load_state_dict(state_dict["optimizer"])
        settle_options(inner, before, state_dict.get("options", {}), overrides(self), keep_structure=False)
        tensors = [weight for group in inner.param_groups for weight in group["params"]]
        for tensor, saved in zip(tensors, state_dict["main_weights"], strict=True):
            tensor.copy_(saved)

    def sharded_state_dict(
        self, model_sharded_state_dict: Any = None, is_loading: bool = False, *_: Any, **__: Any
    ) -> dict[str, Any]:
        """Return states as Megatron's ``ShardedTensor``, each rank's own pieces; a collective of a stage's ranks.

        One format serves all of Megatron's sharding types: it is written without any gather, and read back on any
        data-, tensor- and pipeline-parallel size.
        """
        if not is_loading:
            warn_of_drift(self.adoption.parameters, self.adoption.groups, self.holds_experts)
        if not under_megatron_fsdp(self):
            with self.main_weights():
                return sharded_state(self, is_loading, model_sharded_state_dict)
        self._requested = sharded_state(self, is_loading, None)
        return torchs_state(self._requested)


class _Distributed(_Adopted, DistributedOptimizer):
    """Megatron's distributed optimizer, with flat shards of every parameter."""

    def step_with_ready_grads(self) -> bool:
        """Step as Megatron does, with the main weights in the optimizer's tensors."""
        with self.main_weights():
            return bool(super().step_with_ready_grads())

    def _copy_main_params_to_model_params(self) -> None:
        if self.kept is None:
            super()._copy_main_params_to_model_params()
        else:
            self.kept.put_away()

    def _copy_model_params_to_main_params(self, *args: Any, **kwargs: Any) -> None:
        with self.main_weights():
            super()._copy_model_params_to_main_params(*args, **kwargs)

    def save_parameter_state(self, filename: str) -> None:
        """Refuse to save, because the legacy format has room for Adam's two moments only."""
        raise RuntimeError(
            f"ckpt_format='torch' cannot hold the states of {self.optimizer.spec.name} under the distributed "
            "optimizer; use --ckpt-format torch_dist."
        )

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Refuse to load what :meth:`save_parameter_state` refuses to save."""
        self.save_parameter_state(filename)


class _Half(_Adopted, Float16OptimizerWithFloat16Params):
    """Megatron's half-precision optimizer, with whole fp32 copies of bf16 or fp16 parameters."""


class _Full(_Adopted, FP32Optimizer):
    """Megatron's fp32 optimizer, which steps the parameters themselves."""


class _FullySharded(_Adopted):
    """Megatron's optimizer for version 2 of its FSDP, which cannot be saved."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in super().get_parameters():
            # Version 1 says so. Otherwise Megatron sums gradients' squares over the ranks twice.
            parameter.__fsdp_param__ = True  # type: ignore[attr-defined]

    def get_parameters(self) -> list[Parameter]:
        """Return the parameters of which this rank has elements; all, if it has none, so that no rank is left out.

        Transformer Engine's functions for many tensors, which compute norms, lose what a list that ends in an empty
        one has before that (its issue 3207).
        """
        parameters: list[Any] = super().get_parameters()
        return [parameter for parameter in parameters if parameter._local_tensor.numel()] or parameters

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Refuse to save, as Megatron does."""
        raise SupportError(f"these states cannot be saved: {UNSAVED}")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse to load, as Megatron does."""
        self.state_dict()

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Refuse to save, as Megatron does."""
        return self.state_dict()


class LayerWise(_Healthy, LayerWiseDistributedOptimizer):
    """Megatron's layer-wise optimizer, which deals whole parameters out to the data-parallel ranks.

    Args:
        adoption: Facts of the model that the wrappers need.
        optimizers: Our wrappers of fp32 parameters, from the stock factory.
        config: The user's config of Megatron.
        pg_collection: The process groups.
    """

    def __init__(
        self,
        adoption: Adoption,
        optimizers: list[MegatronOptimizer],
        config: OptimizerConfig,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        # The base class makes fp32 copies of what a rank keeps; some versions then take no wrappers.
        given = [wrapper.optimizer for wrapper in optimizers] if config.bf16 else optimizers
        super().__init__(given, config, pg_collection)
        for optimizer in self.chained_optimizers:
            adoption.adopt(optimizer, layer_wise=True)

    def allgather_params(self) -> None:
        """Gather parameters as Megatron does; with gloo, which gathers only equal parts, ranks broadcast theirs."""
        if dist.get_backend(self.pg_collection.dp_cp) == "gloo":
            self.broadcast_params()
        else:
            super().allgather_params()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrappers' states, whose replica ids are true already."""
        plain = {**kwargs, "metadata": plain_names(kwargs.get("metadata"))}
        return ChainedOptimizer.sharded_state_dict(self, *args, **plain)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the wrappers' states."""
        ChainedOptimizer.load_state_dict(self, state_dict)
