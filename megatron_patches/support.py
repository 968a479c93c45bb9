"""Settings that cannot work, refused before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

__all__ = ["SupportError", "refuse_settings", "refuse_without_statistics"]


class SupportError(ValueError):
    """A Megatron setting that cannot work with our optimizers."""


# Field of OptimizerConfig, its flag, why it cannot work, and the nearest setting that does.
_REFUSED = (
    (
        "use_precision_aware_optimizer",
        "--use-precision-aware-optimizer",
        "main weights and moments then live inside Transformer Engine's FusedAdam",
        "leave it out; LDAdam and MARS-Lion keep less state instead",
    ),
    (
        "optimizer_cpu_offload",
        "--optimizer-cpu-offload",
        "Megatron's hybrid optimizer splits parameters between two instances of Adam",
        "leave it out; the distributed optimizer divides the states by the data-parallel size",
    ),
    (
        "reuse_grad_buf_for_mxfp8_param_ag",
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "gradients and gathered weights then share memory in a layout of their own",
        "train with bf16 parameters",
    ),
)


def refuse_settings(config: OptimizerConfig, name: str, options: Mapping[str, Any]) -> None:
    """Check an optimizer config.

    Args:
        config: Megatron's config.
        name: The optimizer's name.
        options: Its options.

    Raises:
        SupportError: The flag, the reason and the nearest setting that works.
    """
    for field, flag, reason, fix in _REFUSED:
        if getattr(config, field, False):
            raise SupportError(f"{flag} is invalid with --optimizer {name}: {reason}; {fix}")
    if getattr(config, "rankwise_layer_wise", False):
        for field, flag in (("use_distributed_optimizer", "--use-distributed-optimizer"), ("fp16", "--fp16")):
            if getattr(config, field):
                raise SupportError(
                    f"{flag} is invalid with the layer-wise optimizer: Megatron deals whole bf16 or fp32 parameters "
                    "out to the ranks; drop one of the two (the distributed optimizer works with fp16 as well)"
                )
    if options.get("exact"):
        raise SupportError(
            f"exact=True is invalid with --optimizer {name}: Megatron's schedules run one backward pass per step, "
            "exact MARS needs the next batch's gradient too; use the default exact=False"
        )


def refuse_without_statistics(model: TransformerConfig, blocks: bool) -> None:
    """Check a model of whose layers MKOR needs the inputs and output gradients.

    Args:
        model: The model's config.
        blocks: Whether every tensor-parallel shard is a matrix of its own.

    Raises:
        SupportError: The flag, the reason and the nearest setting that works.
    """
    if blocks and model.sequence_parallel:
        raise SupportError(
            "tp_mode='block' is invalid for MKOR with --sequence-parallel: a shard's statistics need all tokens, of "
            "which a rank then sees its own; use tp_mode='exact', or leave --sequence-parallel out"
        )
    graphs = getattr(model, "cuda_graph_impl", "none") or "none"
    if graphs != "none" or getattr(model, "enable_cuda_graph", False) or getattr(model, "external_cuda_graph", False):
        raise SupportError(
            f"cuda_graph_impl={graphs!r} is invalid for MKOR: replayed graphs run no module hooks, from which its "
            "statistics come; leave CUDA graphs out"
        )
