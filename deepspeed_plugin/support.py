"""These functions refuse combinations that cannot work before the first step, with the reason and a fix."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

from deepspeed_plugin.auto_tp import is_cut, tensor_ranks
from deepspeed_plugin.experts import are_cut_alike, are_known, are_native, stacks_of
from deepspeed_plugin.pipeline import is_pipeline
from rankwise.options.validation import OptionError
from rankwise.step.optimizer import ShardedOptimizer, living_optimizers

__all__ = ["refuse_built_before", "refuse_masters", "refuse_replaced", "refuse_settings", "refuse_wrapper"]


def refuse_settings(engine: DeepSpeedEngine, name: str) -> None:
    """Refuse engine settings under which a rankwise optimizer would not do what it says, before anything is built.

    Args:
        engine: The engine, whose configuration is read.
        name: The optimizer's type.

    Raises:
        OptionError: A setting is refused; the message names the key, its value, the reason and the fix.
    """
    _refuse_cut_weights(engine, name)
    _refuse_half_narrow(engine, name)
    _refuse_offload(engine, name)
    if engine.zenflow:
        _refuse(
            name,
            "zero_optimization.zenflow",
            True,
            "ZenFlow steps selected columns and the rest apart, so no whole matrix is ever updated",
            "remove the zenflow block",
        )
    if _leaves_sequences_apart(engine):
        _refuse(
            name,
            "sequence_parallel_size",
            engine.sequence_parallel_size,
            "without an mpu DeepSpeed does not sum gradients over the ranks that share a sequence",
            "pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp, initialized, to deepspeed.initialize",
        )
    if engine.torch_autocast_enabled() and engine.torch_autocast_dtype() is torch.float16:
        _refuse(
            name,
            "torch_autocast.dtype",
            "float16",
            "a GradScaler on every rank then decides by that rank's gradients alone whether to step, so that ranks "
            "would wait for each other",
            "use bfloat16, or the fp16 block",
        )
    if engine.has_moe_layers and engine.sequence_parallel_size > 1 and stacks_of(engine.module):
        _refuse(
            name,
            "sequence_parallel_size",
            engine.sequence_parallel_size,
            "which ranks share an expert of AutoEP is known without sequence parallelism only",
            "leave out sequence parallelism, or expert_parallel",
        )
    if engine.zero_elastic_checkpoint():
        _refuse(
            name,
            "zero_optimization.elastic_checkpoint",
            True,
            "DeepSpeed then saves states without asking the optimizer, so that matrix states are lost",
            "set it to false; checkpoints continue on any number of ranks without it",
        )
    if engine.has_moe_layers and (is_pipeline(engine) or not are_known(engine.module)):
        _refuse(
            name,
            "expert layers",
            "in a pipeline" if is_pipeline(engine) else "neither AutoEP nor deepspeed.moe.layer.MoE",
            "which ranks hold which expert is known of these two without a pipeline only, of AutoEP since 0.19.8",
            "use AutoEP (expert_parallel.enabled) under ZeRO stage 1, 2 or 3, or a dense model",
        )


def _refuse_offload(engine: DeepSpeedEngine, name: str) -> None:
    """Refuse ways to keep states off the device that bypass the optimizer."""
    offload = engine.zero_offload_optimizer()
    if offload is None:
        return
    if offload.ratio != 1.0:
        _refuse(
            name,
            "zero_optimization.offload_optimizer.ratio",
            offload.ratio,
            "DeepSpeed steps the part that stays on the device with torch.optim.AdamW, and asserts that the type is "
            "its DeepSpeedCPUAdam (deepspeed/runtime/zero/stage3.py:316)",
            "set ratio to 1.0",
        )
    if offload.device == "nvme":
        _refuse(
            name,
            "zero_optimization.offload_optimizer.device",
            "nvme",
            "there are no weights in memory to plan by (deepspeed/runtime/zero/stage3.py:1117), and states come back "
            "as long as the flat weight and in its type (runtime/swap_tensor/optimizer_utils.py:113), which matrix "
            "states and those of some parameters are not",
            "use device 'cpu'",
        )
    if engine.super_offload():
        _refuse(
            name,
            "zero_optimization.offload_optimizer.super_offload",
            True,
            "SuperOffload runs Adam kernels of its own in place of the optimizer",
            "set super_offload to false",
        )


def _refuse_half_narrow(engine: DeepSpeedEngine, name: str) -> None:
    """Refuse narrow master weights where DeepSpeed asks for its own Adam; its assertion does not name the key."""
    if not engine.bf16_master_weights_and_gradients() and not engine.fp16_master_weights_and_gradients():
        return
    if (
        engine.bf16_master_weights_and_gradients()
        and engine.bf16_optimizer_states()
        and engine.zero_offload_optimizer() is None
    ):
        return
    kind = "bf16" if engine.bf16_master_weights_and_gradients() else "fp16"
    _refuse(
        name,
        f"{kind}.{kind}_master_weights_and_grads",
        True,
        "DeepSpeed then takes no optimizer but its DeepSpeedCPUAdam, unless bf16.bf16_optimizer_states is true too and "
        "nothing is offloaded (deepspeed/runtime/base_optimizer.py:505-518)",
        "leave it out, or keep bf16 masters with both keys, without offload_optimizer",
    )


def _leaves_sequences_apart(engine: DeepSpeedEngine) -> bool:
    return engine.sequence_parallel_size > 1 and not hasattr(engine.mpu, "get_sequence_data_parallel_group")


def _refuse_cut_weights(engine: DeepSpeedEngine, name: str) -> None:
    """Refuse tensor parallelism and pipelines of unknown shape."""
    if isinstance(getattr(engine, "module", None), DualPipeVModule):
        _refuse(
            name,
            "the model",
            "DualPipeVModule",
            "every rank holds two stages, and none of the checkpoints of such a run has been tested",
            "use PipelineModule",
        )
    if is_cut(engine):
        _refuse_beside_autotp(engine, name)
        _refuse_clipping_by_half_a_norm(engine, name)
        return
    cut = engine.mpu.get_slice_parallel_world_size() if is_pipeline(engine) else engine.mp_world_size
    if cut > 1:
        _refuse(
            name,
            "tensor parallelism",
            cut,
            "an mpu does not say which dimension of a weight is cut, so the whole matrix is unknown",
            "let DeepSpeed cut the model (tensor_parallel.autotp_size), or use data or pipeline parallelism",
        )


def _refuse_beside_autotp(engine: DeepSpeedEngine, name: str) -> None:
    """Refuse whatever divides ranks or weights in a second way, which no layout describes."""
    beside = {
        "expert layers": engine.has_moe_layers and are_native(engine.module),
        "a pipeline": is_pipeline(engine),
        "sequence parallelism": engine.sequence_parallel_size > 1,
        "hpZ": engine.zero_hpz_partition_size() > 1,
    }
    dividing = [what for what, present in beside.items() if present]
    if dividing:
        _refuse(
            name,
            "tensor_parallel.autotp_size",
            tensor_ranks(engine),
            f"which ranks hold what is known of AutoTP with data parallelism alone, not with {' and '.join(dividing)}",
            "leave it out, or what is beside it",
        )


def _refuse_clipping_by_half_a_norm(engine: DeepSpeedEngine, name: str) -> None:
    """Refuse to clip where DeepSpeed's norm leaves experts out, so that steps would depend on the ranks."""
    if engine.has_moe_layers and engine.gradient_clipping() and engine.zero_optimization_stage() < 3:
        _refuse(
            name,
            "gradient_clipping",
            engine.gradient_clipping(),
            "beside AutoTP the norm of all gradients lacks the experts of every tensor-parallel rank but the first "
            "(deepspeed/runtime/zero/stage_1_and_2.py:2682), so that other ranks would clip otherwise",
            "set it to 0, or use ZeRO stage 3, whose norm has all experts",
        )


def refuse_built_before(engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
    """Refuse a user's optimizer whose experts AutoEP has replaced since it was built.

    Raises:
        OptionError: The message says to name the type in the JSON.
    """
    if stacks_of(engine.module):
        _refuse(
            optimizer.spec.name,
            "optimizer",
            "an instance beside expert_parallel",
            "AutoEP replaces the experts' weights while the engine is built, so that the optimizer knows others",
            "name the type in the JSON's optimizer block",
        )


def refuse_wrapper(engine: DeepSpeedEngine, name: str) -> None:
    """Refuse a wrapper that would hand over wrong gradients.

    Args:
        engine: The engine, whose wrapper is built.
        name: The optimizer's type.

    Raises:
        OptionError: The wrapper is refused; the message names the key, its value, the reason and the fix.
    """
    wrapper = engine.optimizer
    if engine.has_moe_layers and not are_cut_alike(engine):
        _refuse(
            name,
            "expert layers under",
            type(wrapper).__name__,
            "it steps experts and other weights at once, which lie on different groups of ranks",
            "use ZeRO stage 1 or 2 (AutoEP: or 3) with data_types.grad_accum_dtype as the model's type",
        )
    if isinstance(wrapper, BF16_Optimizer) and not engine.zero_optimization():
        _refuse(
            name,
            "bf16 pipeline with zero_optimization.stage",
            0,
            "DeepSpeed cannot load the checkpoints it writes in this combination",
            "use stage 1",
        )
    if isinstance(wrapper, FP16_UnfusedOptimizer) and wrapper.loss_scale != 1:
        _refuse(
            name,
            "fp16 with zero_optimization.stage",
            0,
            f"at stage 0 DeepSpeed divides gradients by a loss scale ({wrapper.loss_scale:g}) that its backward pass "
            "does not apply",
            "use stage 1, or bf16, or fp16.loss_scale 1.0",
        )


def refuse_masters(engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
    """Refuse remainders beside master weights that are not in bf16, and so lack nothing.

    Args:
        engine: The engine, whose wrapper is built.
        optimizer: The engine's basic optimizer.

    Raises:
        OptionError: Master weights are not in bf16; the message names the key, its value, the reason and the fix.
    """
    wrapper = engine.optimizer
    masters = getattr(wrapper, "master_weights_and_grads_dtype", torch.float32)
    if optimizer.options.store_param_remainders and wrapper is not optimizer and masters is not torch.bfloat16:
        _refuse(
            optimizer.spec.name,
            "store_param_remainders",
            True,
            f"{type(wrapper).__name__} steps master weights of its own in {str(masters).removeprefix('torch.')}, "
            "which need no remainder",
            "leave it out, or let them be in bf16: bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states "
            "under ZeRO 1, 2 or 3, without offload_optimizer and data_types.grad_accum_dtype",
        )


def _refuse(name: str, key: str, value: Any, reason: str, fix: str) -> None:
    raise OptionError(f"{name} under DeepSpeed: {key}={value!r} is invalid: {reason}; {fix}")


def refuse_replaced(engine: DeepSpeedEngine) -> None:
    """Refuse an engine whose optimizer was made of one of ours.

    accelerate replaces a user's optimizer by DeepSpeedCPUAdam when the configuration offloads the optimizer: it hands
    over the param groups, and keeps only lr and weight decay.

    Args:
        engine: The engine, whose optimizer is chosen.

    Raises:
        OptionError: An optimizer of ours was replaced; the message says by which, and how to name it in the JSON.
    """
    if isinstance(engine.basic_optimizer, ShardedOptimizer) or engine.basic_optimizer is None:
        return
    # torch keeps the dictionaries that it is given, so that an optimizer that was made of ours shares them with it.
    groups = {id(group) for group in engine.basic_optimizer.param_groups}
    for optimizer in living_optimizers():
        if any(id(group) in groups for group in optimizer.param_groups):
            raise OptionError(
                f"{optimizer.spec.name} was built for this model, but the engine got "
                f"{type(engine.basic_optimizer).__name__}: a framework replaced it (accelerate does, under optimizer "
                "offload). Name the type in the JSON's optimizer block instead of passing an instance."
            )
