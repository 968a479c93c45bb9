"""This module handles Megatron's settings for the memory of weights, gradients and states for our optimizers.

Megatron hands them to Transformer Engine's FusedAdam and to two instances of Adam, so that its own code must not see
them: the stock classes are built without them, and :mod:`.main_weights` does what they ask for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.utils import get_model_config

from megatron_patches.main_weights import HostWeights, KeptWeights, Remainders
from rankwise.names import BY_NAME

__all__ = ["buffer_refusals", "hidden", "hide", "keep", "memory_refusals", "steps_on_host", "take_settings"]

# Megatron's code must find these values instead.
_AS_WITHOUT: dict[str, Any] = {
    "use_precision_aware_optimizer": False,
    "use_precision_aware_optimizer_no_fp8_or_ds_fp8": False,
    "main_grads_dtype": torch.float32,
    "optimizer_cpu_offload": False,
}
# These options of ours say in what type a state is kept.
_STATE_TYPES = ("state_dtype", "error_dtype", "factor_dtype", "reference_dtype")
_PRECISION, _OFFLOAD = "--use-precision-aware-optimizer", "--optimizer-cpu-offload"
_KEPT = {"use_precision_aware_optimizer": _PRECISION, "optimizer_cpu_offload": _OFFLOAD}
_STAGED, _REUSE = "reuse_grad_buf_for_mxfp8_param_ag", "--reuse-grad-buf-for-mxfp8-param-ag"
_NEEDS_DISTRIBUTED = "the main weights are then pieces that no rank has whole; add --use-distributed-optimizer"


@contextmanager
def hidden(settings: Any) -> Iterator[None]:
    """Hide these settings of a config, or of arguments, from Megatron's code inside the context.

    Args:
        settings: Settings of Megatron, which change inside the context and return afterwards.
    """
    before = hide(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


def hide(settings: Any) -> dict[str, Any]:
    """Hide these settings from Megatron's code for good.

    Args:
        settings: Settings of Megatron.

    Returns:
        The former values, by name.
    """
    before = {name: getattr(settings, name) for name in _AS_WITHOUT if hasattr(settings, name)}
    for name in before:
        setattr(settings, name, _AS_WITHOUT[name])
    return before


def take_settings(config: Any, args: Any) -> None:
    """Give these settings to a config that was made from arguments while they were :func:`hidden`.

    Args:
        config: The optimizer's config.
        args: Megatron's arguments.
    """
    for name in _AS_WITHOUT:
        if hasattr(args, name):
            setattr(config, name, getattr(args, name))


def keep(wrapper: Any) -> KeptWeights | None:
    """Return what keeps the main weights of a wrapper between steps; None if they stay where Megatron has put them.

    Args:
        wrapper: Built wrapper of our optimizer, whose config has the user's settings in ``rankwise_memory``.
    """
    config = wrapper.config
    if wrapper.optimizer is None or not isinstance(wrapper, DistributedOptimizer):
        return None
    if steps_on_host(wrapper):
        return HostWeights(wrapper, config.pin_cpu_params, config.pin_cpu_grads)
    aware = getattr(config, "rankwise_memory", {}).get("use_precision_aware_optimizer", False)
    return Remainders(wrapper) if aware and config.bf16 and config.store_param_remainders else None


def steps_on_host(wrapper: Any) -> bool:
    """Whether a wrapper of ours has its main weights and states on the host.

    Args:
        wrapper: Built wrapper of our optimizer.
    """
    return bool(getattr(wrapper.config, "rankwise_memory", {}).get("optimizer_cpu_offload", False))


def memory_refusals(settings: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield settings that cannot work, with the reason and what works.

    Args:
        settings: Megatron's config or arguments.
        name: The optimizer's name.
    """
    aware = getattr(settings, "use_precision_aware_optimizer", False)
    offload = getattr(settings, "optimizer_cpu_offload", False)
    for field, flag in _KEPT.items():
        if getattr(settings, field, False) and not getattr(settings, "use_distributed_optimizer", False):
            yield flag, _NEEDS_DISTRIBUTED
    if getattr(settings, _STAGED, False):
        yield from _staging_refusals(settings)
    if not aware and _type(settings, "main_grads_dtype") != "fp32":
        yield "--main-grads-dtype", f"without {_PRECISION} Megatron's main gradients are fp32; add that flag"
    if _type(settings, "main_params_dtype") != "fp32":
        yield (
            "--main-params-dtype fp16",
            "11 bits of a main weight round most updates away, and the run no longer follows fp32; "
            f"leave it out: {_PRECISION} keeps 16 bits beside each bf16 weight, and nothing is lost",
        )
    for field in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if _type(settings, field) != "fp32":
            yield "--" + field.replace("_", "-"), _state_types(name)
    yield from _offload_refusals(settings, offload)


def _staging_refusals(settings: Any) -> Iterator[tuple[str, str]]:
    if not getattr(settings, "use_distributed_optimizer", False):
        yield _REUSE, "main weights are gathered through its buffers; add --use-distributed-optimizer"
    for field, flag in _KEPT.items():
        if getattr(settings, field, False):
            yield (
                flag,
                f"{_REUSE} gathers main weights after the step, when they are elsewhere; leave one out",
            )


def buffer_refusals(settings: Any, chunks: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield settings that the model's gradient and weight buffers contradict, with the reason and what works.

    Args:
        settings: Megatron's config.
        chunks: The model chunks.
    """
    buffers = [chunk.ddp_config for chunk in chunks if hasattr(chunk, "ddp_config")]
    if _type(settings, "main_grads_dtype") == "bf16" and any(buffer.grad_reduce_in_fp32 for buffer in buffers):
        yield "--main-grads-dtype bf16", "the gradient buffers are in fp32; make them with grad_reduce_in_fp32=False"
    kept = [flag for field, flag in _KEPT.items() if getattr(settings, field, False)]
    for field in ("fp8_param_gather", "fp4_param_gather"):
        if kept and any(getattr(buffer, field, False) for buffer in buffers):
            yield kept[0], f"a quantized weight has no 16 bits to add to; leave out --{field.replace('_', '-')}"
    staged = getattr(settings, _STAGED, False)
    clips = (kept or staged) and any(getattr(get_model_config(chunk), "qk_clip", False) for chunk in chunks)
    if kept and clips:
        yield (
            kept[0],
            "--qk-clip scales main weights after the step has stored them elsewhere; leave out one of the two",
        )
    if staged and clips:
        yield _REUSE, "--qk-clip scales weights that are then made anew from main weights; leave out one of the two"
    for field in (_STAGED, *(["overlap_param_gather"] if staged else [])):
        given = bool(getattr(settings, field, False))
        if any(given is not bool(getattr(buffer, field, False)) for buffer in buffers):
            yield (
                f"{field}={given}",
                f"the model's DistributedDataParallelConfig has {not given}, so that gradients would be gathered as "
                "weights, or weights lost before they are gathered; give both configs one value",
            )
    if staged and not settings.overlap_param_gather and not hasattr(ChainedOptimizer, "_should_defer_mxfp8_param_sync"):
        if any(getattr(chunk, "expert_parallel_buffers", None) for chunk in chunks):
            yield (
                _REUSE,
                "this version of Megatron gathers experts' buffers while they hold gradients, when the other weights "
                "have taken their step; add --overlap-param-gather, or use megatron-core 0.18 or later",
            )


def _offload_refusals(settings: Any, offload: bool) -> Iterator[tuple[str, str]]:
    if not offload:
        return
    fraction = getattr(settings, "optimizer_offload_fraction", 1.0)
    if fraction != 1.0:
        yield (
            f"--optimizer-offload-fraction {fraction}",
            "with a step on the host and another on the device, norms and matrices that ranks compute together would "
            "belong to neither; it must be 1.0, for which all main weights and states are on the host",
        )
    if getattr(settings, "use_torch_optimizer_for_cpu_offload", False):
        yield "--use-torch-optimizer-for-cpu-offload", "the host steps by the rule that --optimizer names; leave it out"


def _type(settings: Any, field: str) -> str:
    """Return a type by its name on the command line, which arguments hold until they have been validated."""
    value = getattr(settings, field, torch.float32)
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "fp8"}
    return str(names.get(value, value))


def _state_types(name: str) -> str:
    """Return the answer to Megatron's names of Adam's moments."""
    options = BY_NAME[name].optimizer.options_type
    ours = [f"--{options.flag(key)}" for key in _STATE_TYPES if key in options.names()]
    instead = f"use {' or '.join(ours)} for what can be kept in fewer bits"
    return f"it names a state of Megatron's Adam, and {name} has states of its own; {instead}; leave it out"
