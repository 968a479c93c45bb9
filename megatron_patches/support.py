"""These functions refuse settings that cannot work before the first step."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron.core.optimizer import OptimizerConfig
from megatron.core.utils import get_model_config
from torch import nn

from megatron_patches.memory import buffer_refusals, memory_refusals
from rankwise.options.fields import Options

__all__ = [
    "Setting",
    "SupportError",
    "refuse_beside",
    "refuse_beyond_engines",
    "refuse_settings",
    "refuse_without_statistics",
    "refuse_wrapping",
    "refused_flags",
]


class SupportError(ValueError):
    """A Megatron setting that cannot work with our optimizers."""


class Setting(NamedTuple):
    """Whether a setting is given that cannot work beside another one, its flag, and why."""

    is_given: bool
    flag: str
    reason: str


def refuse_beside(other: str, settings: Iterable[Setting], name: str) -> None:
    """Refuse settings that do not work beside another one.

    Args:
        other: Flag of the other setting.
        settings: The settings.
        name: The optimizer's name.

    Raises:
        SupportError: One of them is given.
    """
    for setting in settings:
        if setting.is_given:
            raise SupportError(f"{setting.flag} is invalid with {other} and --optimizer {name}: {setting.reason}")


class _Refusal(NamedTuple):
    """A field of OptimizerConfig or of Megatron's arguments, its flag, why it cannot work, and what does."""

    field: str
    flag: str
    reason: str
    fix: str


_REFUSED = (
    _Refusal(
        "optimizer_cuda_graph",
        "--optimizer-cuda-graph",
        "a captured step would repeat the exchanges between ranks and the host's decisions of one step for ever",
        "leave it out; the graphs of the model's layers are another flag",
    ),
    _Refusal(
        "use_layer_wise_distributed_optimizer",
        "use_layer_wise_distributed_optimizer=True",
        "Megatron lays that optimizer's buffers out for its own optimizers' matrices",
        "pass --rankwise-layer-wise (rankwise_layer_wise=True) instead",
    ),
    _Refusal(
        "use_custom_fsdp",
        "--use-custom-fsdp",
        "it is the old name of --use-megatron-fsdp, in versions whose cuts were not tried",
        "use --use-megatron-fsdp",
    ),
)


def refused_flags(args: argparse.Namespace, name: str) -> Iterator[tuple[str, str]]:
    """Yield flags of Megatron's command line that cannot work, with the reason and what does.

    Args:
        args: Result of the parser.
        name: The optimizer's name.
    """
    yield from memory_refusals(args, name)
    for refusal in _REFUSED:
        if getattr(args, refusal.field, False):
            yield refusal.flag, f"{refusal.reason}; {refusal.fix}"


def refuse_wrapping(chunks: Sequence[nn.Module], config: OptimizerConfig, name: str) -> None:
    """Check how the model is wrapped and cut.

    Args:
        chunks: The model chunks.
        config: Megatron's config.
        name: The optimizer's name.

    Raises:
        SupportError: Buffers that contradict the config, experts that lie in one tensor, or settings beside weights
            that are cut once more.
    """
    for setting, reason in buffer_refusals(config, chunks):
        raise SupportError(f"{setting} is invalid with --optimizer {name}: {reason}")
    for chunk in chunks:
        if any(type(module).__name__ == "GroupedMLP" for module in chunk.modules()):
            raise SupportError(
                f"--moe-grouped-gemm without Transformer Engine (experts are a GroupedMLP) is invalid with --optimizer "
                f"{name}: all experts of a rank lie in one tensor, which would be taken for one matrix; use "
                "--transformer-impl transformer_engine, or leave --moe-grouped-gemm out"
            )
        model, again = get_model_config(chunk), "--tensor-parallel-num-weight-shards"
        shards = [getattr(model, f"{kind}gtp_weight_remat_size", None) or 1 for kind in ("", "expert_")]
        buffers = getattr(chunk, "ddp_config", None)
        if max(shards) > 1:
            settings = (
                Setting(
                    bool(getattr(model, "num_moe_experts", None)) and shards[0] != shards[1],
                    "--expert-tensor-parallel-num-weight-shards",
                    f"experts are then cut over {shards[1]} further ranks and other weights over {shards[0]}, and "
                    "Megatron averages both kinds of gradients over as many ranks, so that its own Adam leaves the run "
                    "of one process, too; cut both over the same number",
                ),
                Setting(
                    getattr(config, "rankwise_layer_wise", False),
                    "--rankwise-layer-wise",
                    "it deals whole weights out, and ranks have rows of them; use --use-distributed-optimizer",
                ),
                Setting(
                    any(getattr(buffers, f"fp{bits}_param_gather", False) for bits in (4, 8)),
                    "--fp8-param-gather",
                    "rows of few bits are tensors of a class that Transformer Engine's functions do not all take, and "
                    "were never tried; leave out one of the two",
                ),
                Setting(
                    bool(getattr(model, "qk_clip", False)),
                    "--qk-clip",
                    "Megatron scales a rank's rows as if they were the whole weight; leave out one of the two",
                ),
            )
            refuse_beside(again, settings, name)


def refuse_beyond_engines(name: str, options: Options) -> None:
    """Check an optimizer's options.

    Args:
        name: The optimizer's name.
        options: Its options.

    Raises:
        SupportError: A mode needs a training loop of the user's own.
    """
    for key, reason in options.beyond_engines().items():
        raise SupportError(
            f"{key}={getattr(options, key)!r} is invalid with --optimizer {name}: Megatron's schedules run one "
            f"backward pass per step, {reason}; use the default {key}={options.table()[key].default!r}"
        )


def refuse_settings(config: OptimizerConfig, name: str) -> None:
    """Check an optimizer config.

    Args:
        config: Megatron's config.
        name: The optimizer's name.

    Raises:
        SupportError: A setting cannot work; the message has the flag, the reason and the nearest that does.
    """
    for field, flag, reason, fix in _REFUSED:
        if getattr(config, field, False):
            raise SupportError(f"{flag} is invalid with --optimizer {name}: {reason}; {fix}")
    for flag, reason in memory_refusals(config, name):
        raise SupportError(f"{flag} is invalid with --optimizer {name}: {reason}")
    if getattr(config, "rankwise_layer_wise", False):
        for field, flag in (("use_distributed_optimizer", "--use-distributed-optimizer"), ("fp16", "--fp16")):
            if getattr(config, field):
                raise SupportError(
                    f"{flag} is invalid with the layer-wise optimizer: Megatron deals whole bf16 or fp32 parameters "
                    "out to the ranks; drop one of the two (the distributed optimizer works with fp16 as well)"
                )


def refuse_without_statistics(chunk: nn.Module, blocks: bool) -> None:
    """Check a model for MKOR, which needs the inputs and output gradients of its layers.

    Args:
        chunk: A chunk of the model.
        blocks: Whether every tensor-parallel shard is a matrix of its own.

    Raises:
        SupportError: A setting cannot work; the message has the flag, the reason and the nearest that does.
    """
    model = get_model_config(chunk)
    for name, module in chunk.named_modules():
        fused = hasattr(module, "_make_fused_impl") or getattr(module, "_with_fused_impl", False)
        if fused and hasattr(module, "linear_fc1"):
            raise SupportError(
                f"--use-transformer-engine-op-fuser is invalid for MKOR: '{name}' ({type(module).__name__}) runs its "
                "layers as one operation, which shows no module hook their inputs, from which MKOR's statistics come; "
                "leave it out"
            )
    if blocks and model.sequence_parallel:
        raise SupportError(
            "tp_mode='block' is invalid for MKOR with --sequence-parallel: a shard's statistics need all tokens, of "
            "which a rank then sees its own; use tp_mode='exact', or leave --sequence-parallel out"
        )
    graphs = getattr(model, "cuda_graph_impl", "none") or "none"
    if graphs != "none" or getattr(model, "enable_cuda_graph", False) or getattr(model, "external_cuda_graph", False):
        raise SupportError(
            f"cuda_graph_impl={graphs!r} is invalid for MKOR: replayed graphs run no module hooks, from which its "
            "statistics come; leave CUDA graphs out, or use mkor-sketch, whose factors come from gradients"
        )
