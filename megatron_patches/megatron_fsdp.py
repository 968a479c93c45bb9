"""Megatron's own FSDP (``--use-megatron-fsdp``): which run of each parameter a rank's optimizer is given.

It lays the parameters of a unit one behind the other in a flat buffer, padded so that rows stay whole, and cuts that
over the data-parallel ranks. The optimizer gets ``DTensor`` parameters, whose placements do not say where the cuts are;
the buffer's index does. The modules hold these parameters while nothing computes, and their own during a step's passes.
Its two versions share this geometry and no code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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

__all__ = [
    "UNSAVED",
    "copy_of",
    "gather_anew",
    "own_weights",
    "refuse_beside_megatron_fsdp",
    "run_of",
    "under_megatron_fsdp",
    "with_empty_shards",
]

UNSAVED = (
    "Megatron saves no optimizer under --megatron-fsdp-version 2 (FullyShardedOptimizer.sharded_state_dict); use "
    "version 1, or train without --save and --load, or with --no-save-optim and --no-load-optim"
)
"""Why there are no checkpoints with version 2, and what works."""
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
    own = getattr(parameter, "orig_param", parameter)
    local = parameter._local_tensor.numel()
    if not any(placement.is_shard() for placement in parameter.placements) or local == own.numel():
        return 0, own.numel()
    if not local:
        return 0, 0
    start, end = _run_of_second(parameter) if own is parameter else _run_of_first(wrapper, parameter)
    if end - start != local:
        raise SupportError(
            f"a parameter of shape {tuple(own.shape)} has {local} elements on this rank, and [{start}, {end}) by the "
            "index of Megatron's FSDP: this version of it was misread; use a tested one"
        )
    return start, end


def _run_of_second(parameter: Any) -> tuple[int, int]:
    group = parameter._mfsdp_parameter_group()
    held = [held.sharded is parameter for held in group.fsdp_parameters]
    run = group.main_weight._get_owned_range(held.index(True))
    return run.tensor_relative_offset, run.tensor_relative_offset + run.numel


def _run_of_first(wrapper: Any, parameter: Any) -> tuple[int, int]:
    own = parameter.orig_param
    all_buffers = (_wrapped(chunk).param_and_grad_buffer for chunk in wrapper.model_chunks)
    buffers = next(buffers for buffers in all_buffers if own in buffers.param_to_param_group)
    group = buffers.parameter_groups[buffers.param_to_param_group[own]]
    buffer = group.main_weight_buffer or group.model_weight_buffer
    start, end = buffer._get_item_slice_in_shard(buffer.param_idx[own])
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
    second = [group for chunk in chunks if _is_second(chunk) for group in _second_groups(chunk)]
    for group in second:
        group._switch_to_unsharded_parameters()
    for inner in wrapped:
        inner.module.register_load_state_dict_post_hook(partial(gather_anew, [inner]))
        inner.start_param_sync(force_sync=True)
        inner._replace_param_with_raw_if_needed()
        # Modules that are asked what a checkpoint holds of them would put the optimizer's parameters back.
        inner._replace_param_with_distributed_if_needed = lambda: None
    try:
        named = [named for inner in wrapped for named in inner.param_and_grad_buffer.optimizer_named_parameters]
        optimized = {parameter.orig_param: parameter for _, parameter in named}
        optimized |= {held.unsharded: held.sharded for group in second for held in group.fsdp_parameters}

        def as_optimized(parameters: Mapping[Parameter, ModelParameter]) -> dict[Parameter, ModelParameter]:
            for own, given in optimized.items():
                attach_info(given, parameters[own].info)
            return {optimized.get(own, own): facts for own, facts in parameters.items()}

        yield as_optimized
    finally:
        for inner in wrapped:
            del inner._replace_param_with_distributed_if_needed
            inner.synchronize_param_gather()
        for group in second:
            group._switch_to_sharded_parameters()


def gather_anew(chunks: Sequence[nn.Module], *_: Any) -> None:
    """Let go of gathered weights, so that the next pass gathers those that the optimizer has. Sends nothing.

    Megatron gathers for the next pass as a step ends, and leaves that as it is when weights are loaded.

    Args:
        chunks: The model chunks.
        _: What torch hands to hooks.
    """
    for inner in filter(None, map(_wrapped, chunks)):
        inner.install_optimized_model_weights()
        inner.synchronize_param_gather()


def with_empty_shards(stock: Any, chunks: Sequence[nn.Module]) -> list[tuple[Any, str, Any]]:
    """Return functions that keep what version 2 leaves out of the param groups: shards that are empty on this rank.

    All ranks then have the same groups, by which they compare what they know of a parameter.

    Args:
        stock: The module of Megatron's factory.
        chunks: The model chunks.

    Returns:
        The module, the name and the function in its place, of each of its functions.
    """
    if not any(map(_is_second, chunks)):
        return []
    group, build = stock._get_param_groups, stock._get_megatron_optimizer_based_on_param_groups
    all_groups: list[dict[str, Any]] = []

    def grouped(*args: Any, **kwargs: Any) -> Any:
        groups = group(*args, **kwargs)
        all_groups[:] = [dict(group) for group in groups]  # Megatron gives these dictionaries other lists
        return groups

    def built(*args: Any, **kwargs: Any) -> Any:
        return build(*args, **{**kwargs, "param_groups": list(all_groups)})

    return [(stock, group.__name__, grouped), (stock, build.__name__, built)]


def _is_second(chunk: Any) -> bool:
    """Whether a chunk is wrapped by version 2."""
    return getattr(getattr(chunk, "ddp_config", None), "megatron_fsdp_version", 1) == 2 and _wrapped(chunk) is None


def _second_groups(chunk: nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters, each with its buffers, of version 2."""
    modules: Iterator[Any] = chunk.modules()
    for module in modules:
        if hasattr(module, "_unshard_parameter_groups"):
            yield from module.parameter_groups


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
    frozen = [name for name, parameter in chunk.named_parameters() if not parameter.requires_grad]
    yield Setting(
        bool(frozen) and _is_second(chunk),
        f"a frozen parameter ('{next(iter(frozen), '')}')",
        "version 2 lets go of a layer's weights when the gradients of the others are there, while the backward pass "
        "still reads frozen ones, with its own Adam, too; use version 1",
    )
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
