"""Layouts say where each engine wrapper keeps each parameter; only this module reads flat buffers and groups.

ZeRO hands the inner optimizer flat fp32 partitions, which stay as they are. At the first step on each flat tensor the
position of every parameter is read off the wrapper once, and its values are compared with the model's weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property, partial

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer
from torch import Tensor

from deepspeed_plugin import auto_tp
from deepspeed_plugin._versions import TESTED
from deepspeed_plugin.affine_maps import is_stack, logical_shape
from deepspeed_plugin.experts import expert_shards
from rankwise.comm.local_groups import host_group
from rankwise.layout.agreement import together
from rankwise.layout.layout import LayoutError
from rankwise.layout.layout_source import LayoutSource, Slice, TensorContents, TensorParallel, WorkPlace
from rankwise.layout.tensor_parallel_shards import TensorParallelShard
from rankwise.statistics.hooks import Describe
from rankwise.statistics.linear_views import describe_linear
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["DeepSpeedLayout", "GroupedShapes", "layout_of"]

GroupedShapes = list[list[tuple[str, tuple[int, ...]]]]
"""Names and shapes of parameters, by param group."""


def layout_of(engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> DeepSpeedLayout:
    """Return the layout of the wrapper that the engine chose.

    Raises:
        LayoutError: The wrapper, or an attribute of it, is unknown.
    """
    wrapper = engine.optimizer
    if wrapper is optimizer:
        return _Unwrapped(engine, optimizer)
    for kind, layout in _LAYOUTS.items():
        if isinstance(wrapper, kind):
            known = layout(engine, optimizer)
            known.refuse_other_attributes()
            return known
    raise LayoutError(
        f"DeepSpeed wrapped {optimizer.spec.name} in {type(wrapper).__name__}, whose memory layout is unknown; "
        "use ZeRO stage 0, 1, 2 or 3 without compression, ZenFlow or other optimizer wrappers."
    )


def _exchange_group(engine: DeepSpeedEngine, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group, or its twin for CPU tensors where offload keeps the partitions on the host."""
    return host_group(group) if engine.zero_cpu_offload() else group


class DeepSpeedLayout(LayoutSource):
    """Names the contents of the tensors in the param groups of an engine's basic optimizer.

    Args:
        engine: The engine.
        optimizer: The engine's basic optimizer, whose constructor saw the model's own parameters.
    """

    def __init__(self, engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
        self._engine = engine
        self._names = {id(parameter): name for name, parameter in optimizer.table.parameters.items()}
        self._set: set[str] = set()
        self._data: dist.ProcessGroup = engine.seq_data_parallel_group
        self._cut, holders = auto_tp.is_cut(engine), self._data
        self._shards: dict[int, TensorParallelShard] = {}
        if engine.has_moe_layers and not self._cut:
            self._shards = together(partial(expert_shards, engine.module), holders)
        if self._cut:
            assert dist.group.WORLD is not None
            holders = dist.group.WORLD
            # Others would wait for a tensor-parallel group that alone has raised.
            self._shards = together(partial(auto_tp.shards, engine.module), holders)
            self.tensor_parallel = auto_tp.tensor_parallel(holders)
        twin = _exchange_group(engine, holders)
        self.group: dist.ProcessGroup | None = twin
        self._twins = {holders: twin}
        # Wrappers drop or clear the gradients of partitions after the step, except in the buffers of offload, where a
        # parameter without a gradient goes on showing its last one.
        self.spends_gradients = not engine.zero_cpu_offload()

    @abstractmethod
    def contents(self, tensor: Tensor) -> TensorContents:
        """Return what a tensor of the param groups stores."""

    @abstractmethod
    def units(self) -> list[list[tuple[Tensor, int]]]:
        """Return, for each ``step()`` call, the tensors in the param groups, and the positions of their groups."""

    def work_place(self, group: dist.ProcessGroup | None) -> WorkPlace | None:
        """The engine's device, where ZeRO-Offload keeps the partitions on the host."""
        if not self._engine.zero_cpu_offload():
            return None
        partners = None if self.tensor_parallel is None else self.tensor_parallel.group
        return WorkPlace(torch.device(self._engine.device), self._given(group), self._given(partners))

    def _given(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """Return the engine's group of which a group is the twin."""
        return next((given for given, twin in self._twins.items() if twin is group), group)

    def refuse_other_attributes(self) -> None:
        """Refuse a wrapper without the attributes that say which tensors it steps.

        Raises:
            LayoutError: Names the attribute, the version and the tested ones.
        """
        try:
            self.units()
            self._grouped()
        except AttributeError as error:
            raise LayoutError(
                f"{error}, from which the layout of its parameters is read; this DeepSpeed ({_version()}) names it "
                f"differently from the tested ones: install {TESTED}, or report the version."
            ) from error

    def order(self) -> GroupedShapes | None:
        """Return names and shapes by group if each tensor of the param groups is a whole parameter, else None."""
        return None

    def _order_of(self, groups: Iterable[Iterable[Tensor]]) -> GroupedShapes:
        return [[(self._name(parameter), tuple(parameter.shape)) for parameter in group] for group in groups]

    def tensor_of(self, parameter: Tensor) -> Tensor | None:
        """Return the tensor of the param groups that stores a parameter of the model, or would if this rank held it."""
        raise NotImplementedError(f"{type(self).__name__} keeps no partitions")

    def publish_weights(self) -> None:
        """Copy the optimizer's weights, changed from outside, to the model."""
        self._engine.optimizer.update_lp_params()

    def forget_gradients(self) -> None:
        """Forget the gradients of micro-batches that no step has followed, and count micro-batches anew."""
        self._engine.optimizer.zero_grad()
        self._engine.micro_steps -= self._engine.micro_steps % self._engine.gradient_accumulation_steps()

    def note_set(self, parameter: Tensor) -> None:
        """Note that a user has set the optimizer's copy of a weight, which the model follows at the next step only."""
        self._set.add(self._name(parameter))

    def slices(self, parameter: Tensor, start: int, end: int, offset: int, copy: int = 0) -> list[Slice]:
        """Return a run of what this rank's data-parallel ranks hold of a parameter, in terms of the whole one.

        Args:
            parameter: Parameter of the model.
            start: First element of the run.
            end: Element behind the run's last one.
            offset: Where the first element is stored.
            copy: Number of the data-parallel copy that the run belongs to.
        """
        name, shard = self._name(parameter), self._shards.get(id(parameter))
        if shard is None:
            return [Slice(name, start, end, offset, None, copy)]
        return shard.slices(name, start, end, offset, copy)

    def local(self, parameter: Tensor, position: int) -> int:
        """Return where an element of a slice lies in what these ranks hold of the parameter, flattened."""
        shard = self._shards.get(id(parameter))
        return position if shard is None else shard.local(position)

    def averaged_over(self) -> float | None:
        """Return the number of data-parallel ranks if AutoTP divides weights: its ranks share one gradient."""
        return float(dist.get_world_size(self._data)) if self._cut else None

    @property
    def linear_views(self) -> Describe:
        """Return the function that describes modules to MKOR."""
        return auto_tp.linear_views(self._shards) if self._cut else describe_linear

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """Group of every parameter, and its position there, in the wrapper's numbers."""
        return {id(p): (i, j) for i, group in enumerate(self._grouped()) for j, p in enumerate(group)}

    def _grouped(self) -> Sequence[Sequence[Tensor]]:
        """Return the model's parameters by group of the wrapper."""
        return []

    def loss_scale(self) -> float:
        """Return what the present gradients were multiplied by in the backward pass."""
        wrapper = self._engine.optimizer
        return self._mean_share() * float(getattr(wrapper, "cur_scale", getattr(wrapper, "loss_scale", 1.0)))

    def _mean_share(self) -> float:
        """Return the factor for DeepSpeed's mean over ranks that do not share a sequence, or for its ``sum``."""
        mean = getattr(self._engine, "gradient_average", True)
        return 1.0 / float(self._engine.sequence_parallel_size if mean else dist.get_world_size(self._data))

    def _name(self, parameter: Tensor) -> str:
        try:
            return self._names[id(parameter)]
        except KeyError:
            raise LayoutError(
                f"DeepSpeed optimizes a parameter of shape {tuple(logical_shape(parameter))} that the optimizer's "
                "constructor did not see; pass the model's own parameters to deepspeed.initialize."
            ) from None

    @staticmethod
    def _position(tensor: Tensor, candidates: Iterable[Tensor]) -> int:
        for index, candidate in enumerate(candidates):
            if candidate is tensor:
                return index
        raise LayoutError(
            f"step() met a tensor of {tensor.numel()} elements that the ZeRO wrapper does not list; this DeepSpeed "
            f"version ({_version()}) stores partitions differently from the tested ones ({TESTED})."
        )

    def _verify(self, name: str, full_precision: Tensor, model_weight: Tensor) -> None:
        """Refuse a layout by which the optimizer's copy and the model's weight have different values."""
        if name in self._set:
            return
        expected = full_precision.detach().to(device=model_weight.device, dtype=model_weight.dtype)
        # A NaN differs from itself, but is no sign of a misread layout.
        if not torch.equal(expected, model_weight) and not torch.allclose(
            expected, model_weight, rtol=0.0, atol=0.0, equal_nan=True
        ):
            raise LayoutError(
                f"the optimizer's copy of '{name}' differs from the model's weight: the partition layout of DeepSpeed "
                f"{_version()} was misread, or the weights were changed behind its back. Training would corrupt the "
                "model; change weights before deepspeed.initialize, or after it with deepspeed.utils."
                "safe_set_full_fp32_param; if nobody has, report the version."
            )


class _Copies(DeepSpeedLayout):
    """Layout of stage 0, where data-parallel ranks have equal copies, and one of them saves its copy."""

    def __init__(self, engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
        super().__init__(engine, optimizer)
        several = dist.get_world_size(self.group) > 1
        self.replicated, self.saved_by_some = several and not self._cut, several

    def _copy(self) -> int:
        return dist.get_rank(self._data) if self._cut else 0


class _Unwrapped(_Copies):
    """Layout of stage 0 in fp32, where the tensors are the module's own parameters."""

    def __init__(self, engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
        super().__init__(engine, optimizer)
        self.spends_gradients = False  # gradients are the model's own
        self._group_of = {
            id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }

    def loss_scale(self) -> float:
        return self._mean_share()

    def units(self) -> list[list[tuple[Tensor, int]]]:
        groups = self._engine.optimizer.param_groups
        return [[(tensor, position) for position, group in enumerate(groups) for tensor in group["params"]]]

    def order(self) -> GroupedShapes:
        return self._order_of(group["params"] for group in self._engine.optimizer.param_groups)

    def publish_weights(self) -> None:
        pass  # the weights are the model's own

    def contents(self, tensor: Tensor) -> TensorContents:
        slices = self.slices(tensor, 0, tensor.numel(), 0, self._copy())
        return TensorContents(self._group_of[id(tensor)], tuple(slices))


class _Unfused(_Copies):
    """Layout of stage 0 in fp16 or bf16, where the tensors are whole fp32 clones."""

    def units(self) -> list[list[tuple[Tensor, int]]]:
        clones = self._engine.optimizer.fp32_groups
        return [[(tensor, position) for position, group in enumerate(clones) for tensor in group]]

    def order(self) -> GroupedShapes:
        return self._order_of(self._engine.optimizer.fp16_groups)

    def publish_weights(self) -> None:
        wrapper = self._engine.optimizer
        for clones, parameters in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
            for clone, parameter in zip(clones, parameters, strict=True):
                parameter.data.copy_(clone.data)

    def contents(self, tensor: Tensor) -> TensorContents:
        wrapper = self._engine.optimizer
        for index, clones in enumerate(wrapper.fp32_groups):
            for clone, parameter in zip(clones, wrapper.fp16_groups[index], strict=True):
                if clone is tensor:
                    self._verify(self._name(parameter), clone, parameter.data)
                    return TensorContents(index, tuple(self.slices(parameter, 0, tensor.numel(), 0, self._copy())))
        return TensorContents(self._position(tensor, ()), ())


class _FlatPartition(DeepSpeedLayout):
    """Layout with a flat partition per param group, an equal cut of a buffer whose views are the model's weights."""

    @abstractmethod
    def _partitions(self) -> Sequence[tuple[Tensor, Sequence[Tensor]]]:
        """Return the flat tensor of each param group, and the group's parameters."""

    def _group(self, tensor: Tensor) -> tuple[int, Sequence[Tensor]]:
        index = self._position(tensor, (flat for flat, _ in self._partitions()))
        return index, self._partitions()[index][1]

    def tensor_of(self, parameter: Tensor) -> Tensor | None:
        for flat, parameters in self._partitions():
            if any(candidate is parameter for candidate in parameters):
                return flat
        return None

    def contents(self, tensor: Tensor) -> TensorContents:
        index, parameters = self._group(tensor)
        size = tensor.numel()
        first = size * dist.get_rank(self._engine.optimizer.real_dp_process_group[index])
        slices = []
        for parameter in parameters:
            # The weight is a view of the flat buffer, so that its storage offset is its position, whatever reordering
            # (round_robin_gradients) or alignment padding the wrapper applied.
            position = int(parameter.data.storage_offset())
            start, end = max(position, first), min(position + parameter.numel(), first + size)
            if start >= end:
                continue
            offset = start - first
            weight = parameter.data.reshape(-1)[start - position : end - position]
            self._verify(self._name(parameter), tensor.detach()[offset : offset + end - start], weight)
            slices += self.slices(parameter, start - position, end - position, offset)
        return TensorContents(index, tuple(slices))

    def ranks_apart(self, tensor: Tensor) -> dist.ProcessGroup | None:
        """Return the ranks over which a group of experts is cut; None for the ranks of the layout.

        Those of AutoEP have names that count all experts, so that all ranks share them as they share a matrix.
        """
        index, parameters = self._group(tensor)
        group: dist.ProcessGroup = self._engine.optimizer.real_dp_process_group[index]
        if not self._engine.has_moe_layers or group is self._engine.seq_data_parallel_group:
            return None
        if any(id(parameter) in self._shards for parameter in parameters):
            return None
        return self._host_twin(group)

    def _host_twin(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        if group not in self._twins:
            self._twins[group] = _exchange_group(self._engine, group)
        return self._twins[group]


class _ZeroOneTwo(_FlatPartition):
    def units(self) -> list[list[tuple[Tensor, int]]]:
        # The wrapper narrows param_groups to one group per call.
        return [[(tensor, 0)] for tensor in self._engine.optimizer.single_partition_of_fp32_groups]

    def _grouped(self) -> Sequence[Sequence[Tensor]]:
        groups: Sequence[Sequence[Tensor]] = self._engine.optimizer.bit16_groups
        return groups

    def _partitions(self) -> Sequence[tuple[Tensor, Sequence[Tensor]]]:
        return list(zip(self._engine.optimizer.single_partition_of_fp32_groups, self._grouped(), strict=True))

    def keeps_gradient(self, parameter: Tensor) -> bool | None:
        wrapper = self._engine.optimizer
        if parameter.grad is not None or getattr(parameter, "grad_accum", None) is not None:
            return True
        if id(parameter) not in self._places:
            return None
        index, _ = self._places[id(parameter)]
        if wrapper.cpu_offload:
            # If a step has a single backward pass, nothing is accumulated. A rank notes what it steps itself alone.
            accumulated, number = wrapper._offload_accumulated_param_ids, wrapper.get_param_id(parameter)
            if wrapper.is_param_in_current_partition[number]:
                return number in accumulated
            return bool(accumulated) if self._has_own else self._passes_follow(wrapper.micro_step_id)
        if wrapper.all_grad_tensors.get(index) is not None:
            return True
        # The next pass adds to what was gathered for the step only if that is one buffer.
        gathered = wrapper.averaged_gradients.get(index)
        return gathered is not None and wrapper._use_compact_grad_partition_buffer(index)

    def forget_gradients(self) -> None:
        super().forget_gradients()
        wrapper = self._engine.optimizer
        # As when a step begins, and as after an overflow.
        wrapper.micro_step_id = INITIAL_MICRO_STEP_ID
        wrapper._release_preflattened_grad_buffers()
        if wrapper.cpu_offload:
            wrapper._offload_accumulated_param_ids = set()
            wrapper.reset_cpu_buffers()
        wrapper.averaged_gradients.clear()
        wrapper.all_grad_tensors.clear()

    @cached_property
    def _has_own(self) -> bool:
        """Whether this rank's partition is more than padding."""
        return any(self._engine.optimizer.is_param_in_current_partition.values())

    def _passes_follow(self, last: int) -> bool:
        """Whether a step has several backward passes, by the number of its last one, from 0; -1: none has run."""
        return last > 0 or (last == 0 and self._engine.gradient_accumulation_steps() > 1)


class _Bf16(_FlatPartition):
    def units(self) -> list[list[tuple[Tensor, int]]]:
        flats = self._engine.optimizer.fp32_groups_flat_partition
        return [[(tensor, position) for position, tensor in enumerate(flats)]]

    def loss_scale(self) -> float:
        return self._mean_share()

    def _grouped(self) -> Sequence[Sequence[Tensor]]:
        groups: Sequence[Sequence[Tensor]] = self._engine.optimizer.bf16_groups
        return groups

    def _partitions(self) -> Sequence[tuple[Tensor, Sequence[Tensor]]]:
        return list(zip(self._engine.optimizer.fp32_groups_flat_partition, self._grouped(), strict=True))

    def keeps_gradient(self, parameter: Tensor) -> bool | None:
        if id(parameter) not in self._places:
            return None
        group, position = self._places[id(parameter)]
        return bool(self._engine.optimizer.fp32_groups_has_gradients[group][position])


class _ZeroThree(DeepSpeedLayout):
    """Layout of ZeRO-3: flat sub-groups of parameters that are cut into equal pieces, the last ones padded.

    Pieces that are whole rows are slices, which all ranks compute together. Experts have ranks of their own.
    """

    def __init__(self, engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
        super().__init__(engine, optimizer)
        ranks = dist.get_world_size(self.group)
        if ranks > 1 and not (self._cut or engine.has_moe_layers):
            self.tensor_parallel = TensorParallel.far((tuple(range(ranks)),), self.group)

    def _mean_share(self) -> float:
        # The wrapper's reduce-scatter divides by the number of ranks.
        return 1.0 if self._engine.optimizer.reduce_scatter else super()._mean_share()

    def keeps_gradient(self, parameter: Tensor) -> bool | None:
        # The first backward pass after a step, or after zero_grad(), overwrites the buffers.
        return bool(self._engine.optimizer.micro_step_id > 0)

    def forget_gradients(self) -> None:
        super().forget_gradients()
        wrapper = self._engine.optimizer
        wrapper.averaged_gradients.clear()
        if wrapper.offload_optimizer:
            wrapper._offload_boundary_param_ids = set()
            wrapper.reset_cpu_buffers()

    def units(self) -> list[list[tuple[Tensor, int]]]:
        wrapper = self._engine.optimizer
        flats = enumerate(wrapper.fp32_partitioned_groups_flat)
        return [[(tensor, wrapper.sub_group_to_group_id[index])] for index, tensor in flats]

    def publish_weights(self) -> None:
        wrapper = self._engine.optimizer
        for index, full_precision in enumerate(wrapper.fp32_partitioned_groups_flat):
            flat = wrapper.fp16_partitioned_groups_flat[index]
            flat.data.copy_(full_precision.data)
            pieces = wrapper.fp16_partitioned_groups[index]
            for piece, updated in zip(pieces, wrapper.unflatten(flat, pieces), strict=True):
                piece.data = updated.data

    def tensor_of(self, parameter: Tensor) -> Tensor | None:
        wrapper = self._engine.optimizer
        place = wrapper.grad_position.get(wrapper.get_param_id(parameter))
        return None if place is None else wrapper.fp32_partitioned_groups_flat[place[0]]

    def contents(self, tensor: Tensor) -> TensorContents:
        wrapper = self._engine.optimizer
        sub_group = self._position(tensor, wrapper.fp32_partitioned_groups_flat)
        slices = []
        for parameter in wrapper.fp16_groups[sub_group]:
            _, offset, numel = wrapper.grad_position[wrapper.get_param_id(parameter)]
            start = numel * dist.get_rank(parameter.ds_process_group)
            end = min(start + numel, parameter.ds_numel)
            if start >= end:
                continue
            piece = parameter.ds_tensor
            if getattr(piece, "status", None) is None or piece.status.name == ZeroParamStatus.AVAILABLE.name:
                weight = piece.data.reshape(-1)[: end - start]
                self._verify(self._name(parameter), tensor.detach()[offset : offset + end - start], weight)
            ranks = dist.get_world_size(parameter.ds_process_group)
            if is_stack(parameter) or ranks <= dist.get_world_size(self._data):
                slices += self.slices(parameter, start, end, offset)
            else:  # AutoTP leaves it whole, and zero.Init has partitioned it over tensor-parallel ranks, too
                slices.append(Slice(self._name(parameter), start, end, offset))
        return TensorContents(wrapper.sub_group_to_group_id[sub_group], tuple(slices))


_LAYOUTS: dict[type, type[DeepSpeedLayout]] = {
    DeepSpeedZeroOptimizer: _ZeroOneTwo,
    DeepSpeedZeroOptimizer_Stage3: _ZeroThree,
    BF16_Optimizer: _Bf16,
    FP16_UnfusedOptimizer: _Unfused,
}


def _version() -> str:
    import deepspeed

    return str(deepspeed.__version__)
