"""The tiny GPT of the Megatron tests: one model and one stream of batches, in many parallel layouts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch import Tensor

GLOBAL_BATCH, LENGTH, VOCABULARY, HIDDEN, HEADS = 8, 16, 64, 64, 4
MAX_LR, MIN_LR, DECAY_STEPS = 5e-3, 1e-3, 20
DISTRIBUTED: dict[str, Any] = {"use_distributed_optimizer": True}
OVERLAPPED: dict[str, Any] = {
    **DISTRIBUTED,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 5000,
}
BIASED: dict[str, Any] = {"swiglu": False, "gqa": False}
MOE: dict[str, Any] = {"moe": 4}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
# Sizes of latent attention, no two alike.
LATENT: dict[str, Any] = {
    **{"multi_latent_attention": True, "q_lora_rank": None, "kv_lora_rank": 40, "rope_type": "rope"},
    **{"qk_head_dim": 14, "qk_pos_emb_head_dim": 8, "v_head_dim": 18},
}


@dataclass(frozen=True)
class Cell:
    """One layout of one model.

    Attributes:
        tp, pp, ep: Sizes of tensor, pipeline and expert parallelism; the rest of the world is data parallel.
        etp: Size of experts' tensor parallelism; that of the others' if None.
        vpp: Model chunks per pipeline stage; above 1 the interleaved schedule runs.
        cp: Size of context parallelism, with an attention of the tests' own.
        again, expert_again: Number of ranks over which a tensor-parallel rank's rows of a weight are cut once more.
        filled_up: Number of rows of which each of these ranks stores a multiple, filled up with zeros.
        sp: Whether sequence parallelism goes with tensor parallelism.
        precision: ``fp32``, ``bf16`` or ``fp16`` (dynamic loss scale); ``fp64`` where Megatron is told that it is fp32.
        bucket_size: Elements per bucket of the gradient buffer; Megatron's default if None. Only with overlap.
        moe: Number of experts, two of which are chosen per token; 0 for a dense model.
        dense_layers: Dense layers of a model with experts, first layers that have none.
        aux_loss: Coefficient of the load-balancing loss, which depends on how the batch is split.
        swiglu: SwiGLU, RMSNorm and no bias; otherwise GELU, LayerNorm and biases.
        gqa: Whether two heads share a key and value.
        latent: Whether keys and values are made of a few latent ones.
        tied: Whether the output layer is the word embedding.
        recompute: Whether all activations are recomputed.
        microbatches: Micro-batches per step and rank; the global batch is the same in every cell.
        layers: Transformer layers of the whole model.
        hidden: Width of the model; feed-forward layers are twice as wide.
        clip: Largest gradient norm; 0 for none.
        uneven: Whether micro-batches may differ in size, where gradients are prescribed.
        transformer_engine: Whether the layers are Transformer Engine's, as its spec has them; it, or the stand-in, must
            be there.
        fp8: Whether they are told to work in 8 bits, with delayed scaling.
        fsdp: Whether the model is wrapped by TorchFullyShardedDataParallel.
        megatron_fsdp: Sharding strategy of Megatron's own FSDP, if the model is wrapped by it.
        version: Which of its two versions.
        instances: Number of its outer ranks (HSDP).
        outer: What it shards over these.
        bf16_gradients: Whether gradient buffers have the parameters' type.
        optimizer: Further fields of the optimizer's config.
        transformer: Further fields of the transformer's.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    again: int = 1
    expert_again: int = 1
    filled_up: int = 16
    sp: bool = False
    precision: str = "fp32"
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    moe: int = 0
    dense_layers: int = 0
    aux_loss: float = 0.0
    swiglu: bool = True
    gqa: bool = True
    latent: bool = False
    tied: bool = False
    recompute: bool = False
    microbatches: int = 2
    layers: int = 2
    hidden: int = HIDDEN
    clip: float = 1.0
    uneven: bool = False
    transformer_engine: bool = False
    fp8: bool = False
    fsdp: bool = False
    megatron_fsdp: str = ""
    version: int = 1
    instances: int = 1
    outer: str = "no_shard"
    bf16_gradients: bool = False
    optimizer: dict[str, Any] = field(default_factory=dict, hash=False)
    transformer: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return ",".join(f"{k}={v}" for k, v in changed.items() if v != {}) or "default"

    def transformer_config(self) -> TransformerConfig:
        dtype = DTYPES[self.precision]
        model: dict[str, Any] = {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "ffn_hidden_size": 2 * self.hidden,
            "num_attention_heads": HEADS,
            "num_query_groups": HEADS // 2 if self.gqa else HEADS,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "gated_linear_unit": self.swiglu,
            "activation_func": F.silu if self.swiglu else F.gelu,
            "normalization": "RMSNorm" if self.swiglu else "LayerNorm",
            "add_bias_linear": not self.swiglu,
        }
        layout = {
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": self.sp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "context_parallel_size": self.cp,
            "pipeline_dtype": dtype,
            # As Megatron's arguments demand for two interleaved stages, each of which is the other's neighbour on both
            # sides: in one batch of messages, those for one side would be taken for those of the other.
            "overlap_p2p_comm": self.vpp > 1,
            "batch_p2p_comm": self.vpp == 1,
            "params_dtype": dtype,
            "bf16": self.precision == "bf16",
            "fp16": self.precision == "fp16",
            "transformer_impl": "local",
        }
        fused = ("bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion", "persist_layer_norm")
        off = dict.fromkeys((*fused, "gradient_accumulation_fusion", "apply_rope_fusion"), False)
        if self.again > 1:  # older versions do not have it
            layout["tensor_parallel_num_weight_shards"] = self.tp * self.again
        if self.expert_again > 1:
            layout["expert_tensor_parallel_num_weight_shards"] = (self.etp or self.tp) * self.expert_again
        if self.recompute:
            layout |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if self.moe:
            model |= {
                "num_moe_experts": self.moe,
                "moe_ffn_hidden_size": HIDDEN,
                "moe_layer_freq": [int(layer >= self.dense_layers) for layer in range(self.layers)],
                "moe_router_topk": 2,
                "moe_token_dispatcher_type": "alltoall",
                "moe_router_load_balancing_type": "aux_loss" if self.aux_loss else "none",
                "moe_aux_loss_coeff": self.aux_loss,
            }
        if self.transformer_engine:
            layout |= {"moe_grouped_gemm": bool(self.moe), "fp8": "hybrid" if self.fp8 else None}
            layout |= {"fp8_recipe": "delayed", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
        if self.latent:
            return MLATransformerConfig(**{**model, "num_query_groups": HEADS, **LATENT}, **layout, **off)
        return TransformerConfig(**{**model, **layout, **off, **self.transformer})

    def optimizer_config(self) -> dict[str, Any]:
        """Fields of an OptimizerConfig."""
        return {
            "optimizer": "adam",
            "lr": MAX_LR,
            "min_lr": MIN_LR,
            # Adam turns the rounding of a gradient that vanishes into a whole step; this damps it.
            "adam_eps": 1e-5,
            "weight_decay": 0.1,
            "clip_grad": self.clip,
            "bf16": self.precision == "bf16",
            "fp16": self.precision == "fp16",
            "params_dtype": DTYPES[self.precision],
            "initial_loss_scale": 2.0**10,
            "loss_scale_window": 1000,
            "use_distributed_optimizer": self.use_distributed_optimizer
            or (bool(self.megatron_fsdp) and self.version == 1),
            "overlap_param_gather": self.overlap_param_gather,
            **self.optimizer,
        }

    def ddp_config(self) -> DistributedDataParallelConfig:
        names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "bucket_size")
        if self.megatron_fsdp:
            overlap = self.overlap_grad_reduce or self.megatron_fsdp in ("optim_grads", "optim_grads_params")
            return DistributedDataParallelConfig(
                use_megatron_fsdp=True,
                use_distributed_optimizer=self.version == 1,
                data_parallel_sharding_strategy=self.megatron_fsdp,
                outer_dp_sharding_strategy=self.outer,
                num_distributed_optimizer_instances=self.instances,
                overlap_grad_reduce=overlap,
                overlap_param_gather=self.megatron_fsdp == "optim_grads_params",
                gradient_reduce_div_fusion=False,  # gloo cannot multiply in a sum
                **({"megatron_fsdp_version": 2} if self.version == 2 else {}),  # older versions do not have it
            )
        in_fp32 = self.precision != "fp64" and not self.bf16_gradients
        return DistributedDataParallelConfig(
            grad_reduce_in_fp32=in_fp32, **{name: getattr(self, name) for name in names}
        )


def tokens(step: int) -> Tensor:
    """The global batch of a step, one token longer than the sequences: the same in every cell."""
    generator = torch.Generator().manual_seed(1000 + step)
    # Not uniform, so that there is something to learn.
    draws = torch.rand(GLOBAL_BATCH, LENGTH + 1, generator=generator)
    return (VOCABULARY * draws**3).long()
