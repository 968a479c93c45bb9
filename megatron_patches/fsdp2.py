"""This module refuses settings that do not work with Megatron's ``TorchFullyShardedDataParallel``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.utils import get_model_config
from torch import nn

from megatron_patches.support import Setting, SupportError, refuse_beside

__all__ = ["refuse_beside_fsdp2"]

_ONE_MESH = "Megatron's wrapper shards over the data-parallel ranks alone, and its arguments demand 1"


def refuse_beside_fsdp2(chunks: Sequence[nn.Module], config: OptimizerConfig, name: str) -> None:
    """Check what Megatron's arguments check, too, and whether this Megatron can take a step at all.

    Args:
        chunks: The model chunks.
        config: Megatron's config.
        name: The optimizer's name.

    Raises:
        SupportError: ``fully_shard`` ignores a setting; the message says what works.
    """
    for chunk in chunks:
        if not isinstance(chunk, TorchFullyShardedDataParallel):
            continue
        refuse_beside("--use-torch-fsdp2", _settings(chunk, config), name)
        if "force_all_reduce" not in inspect.signature(chunk.finish_grad_sync).parameters:
            # Otherwise the first step raises a TypeError, with Megatron's own optimizers, too.
            raise SupportError(
                f"--use-torch-fsdp2 is invalid with --optimizer {name} on this megatron-core: {type(chunk).__name__}."
                "finish_grad_sync does not take force_all_reduce, which finalize_model_grads passes; use 0.19 or later"
            )


def _settings(chunk: TorchFullyShardedDataParallel, config: OptimizerConfig) -> Iterator[Setting]:
    model = get_model_config(chunk)
    tied = any(getattr(module, "share_embeddings_and_output_weights", False) for module in chunk.modules())
    layer_wise = getattr(config, "rankwise_layer_wise", False)
    stages, experts = model.pipeline_model_parallel_size > 1, model.expert_model_parallel_size > 1
    yield Setting(config.use_distributed_optimizer, "--use-distributed-optimizer", "it cuts another wrapper's buffers")
    yield Setting(layer_wise, "--rankwise-layer-wise", "no rank has a whole parameter; drop one of the two")
    yield Setting(config.fp16, "--fp16", "Megatron scales no loss for it; train in bf16")
    yield Setting(stages, "--pipeline-model-parallel-size", _ONE_MESH)
    yield Setting(experts, "--expert-model-parallel-size", _ONE_MESH)
    yield Setting(tied, "a tied output layer", "two modules would shard it; add --untie-embeddings-and-output-weights")
