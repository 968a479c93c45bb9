"""Layouts say where each of Megatron's optimizer wrappers keeps each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch import Tensor
from torch.nn import Parameter

from megatron_patches.groups import ParallelGroups
from megatron_patches.megatron_fsdp import copy_of, run_of, under_megatron_fsdp
from megatron_patches.memory import steps_on_host
from megatron_patches.parameters import ModelParameter
from megatron_patches.scaling import GradientScale
from rankwise.comm.local_groups import host_group
from rankwise.fsdp.placements import held_runs
from rankwise.layout.dtensors import is_sharded, local_view
from rankwise.layout.layout import LayoutError
from rankwise.layout.layout_source import LayoutSource, TensorContents, TensorParallel, WorkPlace

__all__ = ["MegatronLayout"]


class MegatronLayout(LayoutSource):
    """Names the contents of the tensors in the param groups of a wrapper's inner optimizer.

    Args:
        wrapper: Built optimizer of Megatron.
        parameters: The model's parameters.
        groups: This rank's process groups.
        scale: Scale of the gradients.
        expert: Whether the wrapper holds experts.
        layer_wise: Whether every data-parallel rank was given whole parameters of its own.
    """

    def __init__(
        self,
        wrapper: MegatronOptimizer,
        parameters: Mapping[Parameter, ModelParameter],
        groups: ParallelGroups,
        scale: GradientScale,
        expert: bool,
        layer_wise: bool = False,
    ) -> None:
        self._wrapper = wrapper
        self._parameters = parameters
        stage = groups.stage(expert)
        self.on_host = steps_on_host(wrapper)
        """Whether the optimizer's tensors are on the host in a step."""
        self.group: dist.ProcessGroup | None = host_group(stage) if self.on_host else stage
        self.tensor_parallel: TensorParallel | None = groups.tensor_parallel(expert, stage)
        self._groups_there = stage, None if self.tensor_parallel is None else self.tensor_parallel.group
        if self.on_host and self.tensor_parallel is not None:
            group = self.tensor_parallel.group
            self.tensor_parallel = replace(self.tensor_parallel, group=group and host_group(group))
        self.layer_wise = layer_wise
        self.sharded = any(map(is_sharded, parameters))
        """Whether ``fully_shard`` has cut the parameters."""
        self._copy = 0 if layer_wise else copy_of(wrapper, groups.data(expert)[0])
        # Of weights that are cut once more, the ranks that do so hold no copies.
        self._copy_again, self._again = groups.alike(expert), groups.again(expert)
        self._scale = scale
        self._contents: dict[int, TensorContents] = {}
        self.held: dict[int, tuple[Parameter, slice]] = {}
        """The model's parameter, and the run of it that the tensor holds, by the id of an optimizer's tensor."""
        self.stage_copies = {facts.info.name: facts.stage_copy for facts in parameters.values() if facts.stage_copy}
        """Number of earlier pipeline stages that have a weight, too, by its name."""
        self.plain_names = {
            id(parameter): facts.info.name for parameter, facts in parameters.items() if not facts.expert
        }
        """Name of each parameter that is no expert's, by its id."""
        # Gradients of a model in fp32 are its own; others are copies, or the buffer that the next step clears.
        self.spends_gradients = isinstance(wrapper, DistributedOptimizer | Float16OptimizerWithFloat16Params)
        if under_megatron_fsdp(wrapper):
            for index, group in enumerate(wrapper.param_groups):
                for parameter in group["params"]:
                    self._register(index, parameter, parameter, *run_of(wrapper, parameter), self._copy)
        elif isinstance(wrapper, DistributedOptimizer):
            self._register_shards(wrapper)
        elif isinstance(wrapper, Float16OptimizerWithFloat16Params):
            self._register_main_copies(wrapper)
        else:
            for index, group in enumerate(wrapper.param_groups):
                for parameter in group["params"]:
                    self._register_whole(index, parameter, parameter)

    def work_place(self, group: dist.ProcessGroup | None) -> WorkPlace | None:
        """The model's device, where main weights and states are on the host in a step."""
        if not self.on_host:
            return None
        stage, partners = self._groups_there
        return WorkPlace(next(iter(self._parameters)).device, stage if group is self.group else group, partners)

    def contents(self, tensor: Tensor) -> TensorContents:
        """Return what a tensor of the param groups stores."""
        try:
            return self._contents[id(tensor)]
        except KeyError:
            raise LayoutError(
                f"step() met a tensor of shape {tuple(tensor.shape)} that Megatron's optimizer did not list when "
                "it was built; param groups must not be changed afterwards."
            ) from None

    def parameter_name(self, parameter: Parameter) -> str:
        """Return the name of a parameter in the whole model."""
        return self._parameters[parameter].info.name

    def knows(self, parameter: Parameter) -> bool:
        """Whether a parameter is one of the model's, held on this rank or not."""
        return parameter in self._parameters

    def main_weights(self) -> Iterator[tuple[Tensor, Parameter, slice]]:
        """Yield the optimizer's tensors, and the runs of the model's flattened parameters that they hold."""
        for tensors in self.units():
            for tensor, _ in tensors:
                yield (tensor, *self.held[id(tensor)])

    def units(self) -> list[list[tuple[Tensor, int]]]:
        """Return the tensors of the one ``step()`` call, and the positions of their groups."""
        groups = self._wrapper.param_groups
        return [[(tensor, position) for position, group in enumerate(groups) for tensor in group["params"]]]

    def gradient_divisor(self) -> Tensor:
        """Return what output gradients, summed over the stage's ranks and micro-batches, must be divided by."""
        scale: Tensor | None = getattr(self._wrapper, "backward_scale", None)
        divisor = (self._wrapper.get_loss_scale() if scale is None else scale) / self._scale.factor
        return divisor.cpu() if self.on_host else divisor

    # --- registration -------------------------------------------------------------------------------------------

    def _register_shards(self, wrapper: DistributedOptimizer) -> None:
        instance = wrapper.distributed_optimizer_instance_id
        model_groups = (wrapper.model_fp32_groups, wrapper.model_float16_groups)
        shard_groups = (wrapper.shard_fp32_groups, wrapper.shard_fp32_from_float16_groups)
        for models, shards in zip(model_groups, shard_groups, strict=True):
            for index, (parameters, tensors) in enumerate(zip(models, shards, strict=True)):
                for parameter, tensor in zip(parameters, tensors, strict=True):
                    held = wrapper._get_model_param_range_map(parameter)["param"]
                    copy = instance if self._parameters[parameter].run else instance * self._again[1] + self._again[0]
                    self._register(index, parameter, tensor, held.start, held.end, copy)

    def _register_main_copies(self, wrapper: Float16OptimizerWithFloat16Params) -> None:
        for index, parameters in enumerate(wrapper.float16_groups):
            for parameter, copy in zip(parameters, wrapper.fp32_from_float16_groups[index], strict=True):
                self._register_whole(index, parameter, copy)
        for index, parameters in enumerate(wrapper.fp32_from_fp32_groups):
            for parameter in parameters:
                self._register_whole(index, parameter, parameter)

    def _register_whole(self, index: int, parameter: Parameter, tensor: Tensor) -> None:
        if is_sharded(parameter):
            start, end = self._rows_held(parameter)
            self._register(index, parameter, tensor, start, end, 0)
        else:
            copy = self._copy_again if self._parameters[parameter].run else self._copy
            self._register(index, parameter, tensor, 0, tensor.numel(), copy)

    def _rows_held(self, parameter: Any) -> tuple[int, int]:
        """Return this rank's run of a flattened parameter, whose rows ``fully_shard`` has cut."""
        mesh, shape = parameter.device_mesh, parameter.shape
        runs = held_runs(shape, tuple(mesh.mesh.shape), mesh.get_coordinate(), parameter.placements)
        start, end = runs[0][0] if runs[0] else (0, 0)
        width = prod(shape[1:])
        if len(runs[0]) > 1 or any(run != [(0, size)] for run, size in zip(runs[1:], shape[1:], strict=True)):
            raise LayoutError(
                f"'{self.parameter_name(parameter)}' has the placements {tuple(parameter.placements)}: Megatron's "
                "TorchFullyShardedDataParallel cuts rows alone; use a tested version"
            )
        return start * width, end * width

    def _register(self, index: int, parameter: Parameter, tensor: Tensor, start: int, end: int, copy: int) -> None:
        facts = self._parameters[parameter]
        if tensor is not parameter and not _is_copy(tensor, parameter, start, end):
            raise LayoutError(
                f"the optimizer's copy of '{facts.info.name}' differs from the model's weight: the layout of this "
                "megatron-core was misread. Training would corrupt the model; use a tested version."
            )
        self.held[id(tensor)] = (parameter, slice(start, end))
        self._contents[id(tensor)] = TensorContents(index, facts.slices(start, end, copy) if end > start else ())


def _is_copy(tensor: Tensor, parameter: Parameter, start: int, end: int) -> bool:
    """Whether an optimizer's tensor has the values of a run of a parameter, flattened."""
    quantized = is_float8tensor(parameter)
    whole = dequantize_fp8_tensor(parameter) if quantized else local_view(parameter)
    weight, mine = whole.detach().reshape(-1), local_view(tensor).detach().reshape(-1)
    weight = weight if is_sharded(parameter) else weight[start:end]
    if mine.numel() != end - start:
        return False
    if not quantized:
        return torch.equal(mine.to(weight), weight)
    # An 8-bit weight has only a few bits of the main weight, which was quantized to it.
    weight = weight.float()
    nearby = weight.abs() / 8 + whole.detach().abs().max().float() / 64
    return bool(((mine - weight).abs() <= nearby).all())
