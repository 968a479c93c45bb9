"""Megatron's own FSDP (``--use-megatron-fsdp``, version 1): which run of each parameter a rank's optimizer is given.

It lays the parameters of a unit one behind the other in a flat buffer, padded so that rows stay whole, and cuts that
over the data-parallel ranks. The optimizer gets ``DTensor`` parameters, whose placements do not say where the cuts are;
the buffer's index does. The modules hold these parameters while nothing computes, and their own during a step's passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.package_info import MAJOR, MINOR
from megatron.core.utils import get_model_config
from torch import nn
from torch.nn import Parameter

from megatron_patches.parameters import ModelParameter
from megatron_patches.support import Setting, SupportError, refuse_beside
from rankwise.routing.roles import attach_info

__all__ = ["copy_of", "own_weights", "refuse_beside_megatron_fsdp", "run_of", "under_megatron_fsdp"]

_AsOptimized = Callable[[Mapping[Parameter, ModelParameter]], dict[Parameter, ModelParameter]]
# Without overlap, its hooks reduced the last micro-batch's gradients before start_grad_sync did.
_REDUCES_TWICE = (MAJOR, MINOR) < (0, 20)
_DIVIDE = "use --use-torch-fsdp2 or --use-distributed-optimizer, which divide states and main weights alike"


def under_megatron_fsdp(wrapper: Any) -> bool:
    """Whether Megatron's FSDP keeps the main weights and gradients of an optimizer's wrapper."""
    return bool(getattr(getattr(wrapper, "ddp_config", None), "use_megatron_fsdp", False))


def run_of(wrapper: Any, parameter: Any) -> tuple[int, int]:
    """Return this rank's run of a flattened parameter, as its tensor-parallel rank holds it.

    Args:
        wrapper: Wrapper of the optimizer.
        parameter: Parameter that Megatron's FSDP gives the optimizer.
    """
    own = parameter.orig_param
    local = parameter._local_tensor.numel()
    if not any(placement.is_shard() for placement in parameter.placements) or local == own.numel():
        return 0, own.numel()
    if not local:
        return 0, 0
    all_buffers = (_wrapped(chunk).param_and_grad_buffer for chunk in wrapper.model_chunks)
    buffers = next(buffers for buffers in all_buffers if own in buffers.param_to_param_group)
    group = buffers.parameter_groups[buffers.param_to_param_group[own]]
    buffer = group.main_weight_buffer or group.model_weight_buffer
    start, end = buffer._get_item_slice_in_shard(buffer.param_idx[own])
    if end - start != local:
        raise SupportError(
            f"a parameter of shape {tuple(own.shape)} has {local} elements on this rank, and [{start}, {end}) by the "
            "index of Megatron's FSDP: this version of it was misread; use a tested one"
        )
    return start, end


def copy_of(wrapper: Any, data_rank: int) -> int:
    """Return the number of this rank's copy of what its optimizer holds, among equal ones.

    Args:
        wrapper: Wrapper of the optimizer.
        data_rank: This rank's position among the data-parallel ranks.
    """
    if not under_megatron_fsdp(wrapper) or wrapper.ddp_config.data_parallel_sharding_strategy == "no_shard":
        return data_rank
    if wrapper.ddp_config.num_distributed_optimizer_instances == 1:
        return 0
    return int(parallel_state.get_inter_distributed_optimizer_instance_group().rank())


@contextmanager
def own_weights(chunks: Sequence[nn.Module]) -> Iterator[_AsOptimized]:
    """Put the model's own parameters into its modules, gathered, as passes see them. A collective of all ranks.

    Args:
        chunks: The model chunks.

    Returns:
        What translates facts of these parameters into facts of those that the optimizer is given.
    """
    wrapped = [inner for chunk in chunks if (inner := _wrapped(chunk)) is not None]
    for inner in wrapped:
        inner.start_param_sync(force_sync=True)
        inner._replace_param_with_raw_if_needed()
        # Modules that are asked what a checkpoint holds of them would put the optimizer's parameters back.
        inner._replace_param_with_distributed_if_needed = lambda: None
    try:
        named = [named for inner in wrapped for named in inner.param_and_grad_buffer.optimizer_named_parameters]
        optimized = {parameter.orig_param: parameter for _, parameter in named}

        def as_optimized(parameters: Mapping[Parameter, ModelParameter]) -> dict[Parameter, ModelParameter]:
            for own, given in optimized.items():
                attach_info(given, parameters[own].info)
            return {optimized.get(own, own): facts for own, facts in parameters.items()}

        yield as_optimized
    finally:
        for inner in wrapped:
            del inner._replace_param_with_distributed_if_needed
            inner.synchronize_param_gather()


def _wrapped(chunk: nn.Module) -> Any:
    """Return the module of Megatron's FSDP inside a chunk, if there is one."""
    return next((module for module in (chunk, getattr(chunk, "module", None)) if hasattr(module, "raw_param")), None)


def refuse_beside_megatron_fsdp(chunks: Sequence[nn.Module], config: OptimizerConfig, name: str) -> None:
    """Refuse settings that do not work beside Megatron's FSDP.

    Args:
        chunks: The model chunks.
        config: Megatron's config.
        name: The optimizer's name.

    Raises:
        SupportError: A setting cannot work; the message says what does.
    """
    for chunk in chunks:
        if not getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False):
            continue
        refuse_beside("--use-megatron-fsdp", _settings(chunk, config), name)


def _settings(chunk: Any, config: OptimizerConfig) -> Iterator[Setting]:
    given, model = chunk.ddp_config, get_model_config(chunk)
    main = getattr(given, "megatron_fsdp_main_params_dtype", torch.float32)
    half = config.bf16 or config.fp16
    narrow = half and main is not torch.float32
    yield Setting(_wrapped(chunk) is None, "--megatron-fsdp-version 2", f"its optimizer cannot be resumed; {_DIVIDE}")
    experts = model.expert_model_parallel_size > 1
    yield Setting(
        experts,
        "--expert-model-parallel-size",
        f"it steps experts and other weights by one optimizer, whose ranks differ; {_DIVIDE}",
    )
    yield Setting(
        given.data_parallel_sharding_strategy == "no_shard",
        "--data-parallel-sharding-strategy no_shard",
        "it shards nothing, and megatron-core 0.16 cannot take a step with it; leave --use-megatron-fsdp out",
    )
    several = given.num_distributed_optimizer_instances > 1
    wrongly = "twice" if _REDUCES_TWICE else "within each of several --num-distributed-optimizer-instances alone"
    yield Setting(
        given.data_parallel_sharding_strategy == "optim"
        and not given.overlap_grad_reduce
        and (several or _REDUCES_TWICE),
        "--data-parallel-sharding-strategy optim",
        f"Megatron then reduces gradients {wrongly} (start_grad_sync), so that its own Adam leaves the run of one "
        "process, too; add --overlap-grad-reduce",
    )
    yield Setting(
        given.outer_dp_sharding_strategy != "no_shard",
        "--outer-dp-sharding-strategy",
        "Megatron then sums gradients over the ranks and does not average them (_create_hfsdp_helper_buffer passes no "
        "gradient_scaling_factor on), so that its own Adam leaves the run of one process, too; use no_shard",
    )
    clips = bool(getattr(model, "qk_clip", False))
    yield Setting(clips, "--qk-clip", f"Megatron scales weights that are gathered anew before they are used; {_DIVIDE}")
    yield Setting(narrow, "--megatron-fsdp-main-params-dtype", "steps are taken on main weights in fp32; write fp32")
    decoupled = getattr(given, "megatron_fsdp_use_decoupled_grad", False)
    yield Setting(
        decoupled or config.use_precision_aware_optimizer,
        "--use-precision-aware-optimizer",
        "gradients are then where Transformer Engine's Adam alone finds them; leave it out",
    )
