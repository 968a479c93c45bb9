"""A tiny GPT trained by real Megatron on CPU ranks: the same model and data in every parallel layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron_weights import bare, cuts, gathered, main_weight, set_initial
from ranks import run_ranks
from torch import Tensor, nn

from megatron_patches.cpu import cpu_megatron

GLOBAL_BATCH, LENGTH, VOCABULARY, HIDDEN, HEADS = 8, 16, 64, 64, 4
MAX_LR, MIN_LR, DECAY_STEPS = 5e-3, 1e-3, 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

MakeOptimizer = Callable[[dict[str, Any], list[nn.Module]], MegatronOptimizer]


@dataclass(frozen=True)
class Cell:
    """One layout of one model.

    Attributes:
        tp, pp, ep: Sizes of tensor, pipeline and expert parallelism; the rest of the world is data parallel.
        vpp: Model chunks per pipeline stage; above 1 the interleaved schedule runs.
        sp: Whether sequence parallelism goes with tensor parallelism.
        precision: ``fp32``, ``bf16`` or ``fp16`` (dynamic loss scale).
        bucket_size: Elements per bucket of the gradient buffer; Megatron's default if None. Only with overlap.
        moe: Number of experts, two of which are chosen per token; 0 for a dense model.
        aux_loss: Coefficient of the load-balancing loss, which depends on how the batch is split.
        swiglu: SwiGLU, RMSNorm and no bias; otherwise GELU, LayerNorm and biases.
        gqa: Whether two heads share a key and value.
        tied: Whether the output layer is the word embedding.
        recompute: Whether all activations are recomputed.
        microbatches: Micro-batches per step and rank; the global batch is the same in every cell.
        layers: Transformer layers of the whole model.
        clip: Largest gradient norm; 0 for none.
        optimizer: Further fields of the optimizer's config.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    sp: bool = False
    precision: str = "fp32"
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    moe: int = 0
    aux_loss: float = 0.0
    swiglu: bool = True
    gqa: bool = True
    tied: bool = False
    recompute: bool = False
    microbatches: int = 2
    layers: int = 2
    clip: float = 1.0
    optimizer: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return ",".join(f"{k}={v}" for k, v in changed.items() if v != {}) or "default"

    def transformer_config(self) -> TransformerConfig:
        dtype = DTYPES[self.precision]
        model: dict[str, Any] = {
            "num_layers": self.layers,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": 2 * HIDDEN,
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
            "pipeline_dtype": dtype,
            "params_dtype": dtype,
            "bf16": self.precision == "bf16",
            "fp16": self.precision == "fp16",
        }
        fused = ("bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion", "persist_layer_norm")
        off = dict.fromkeys((*fused, "gradient_accumulation_fusion", "apply_rope_fusion"), False)
        if self.recompute:
            layout |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if self.moe:
            model |= {
                "num_moe_experts": self.moe,
                "moe_ffn_hidden_size": HIDDEN,
                "moe_router_topk": 2,
                "moe_token_dispatcher_type": "alltoall",
                "moe_router_load_balancing_type": "aux_loss" if self.aux_loss else "none",
                "moe_aux_loss_coeff": self.aux_loss,
            }
        return TransformerConfig(**model, **layout, **off)

    def optimizer_config(self) -> dict[str, Any]:
        """Fields of an OptimizerConfig."""
        return {
            "optimizer": "adam",
            "lr": MAX_LR,
            "min_lr": MIN_LR,
            "weight_decay": 0.1,
            "clip_grad": self.clip,
            "bf16": self.precision == "bf16",
            "fp16": self.precision == "fp16",
            "params_dtype": DTYPES[self.precision],
            "initial_loss_scale": 2.0**10,
            "loss_scale_window": 1000,
            "use_distributed_optimizer": self.use_distributed_optimizer,
            "overlap_param_gather": self.overlap_param_gather,
            **self.optimizer,
        }

    def ddp_config(self) -> DistributedDataParallelConfig:
        names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "bucket_size")
        return DistributedDataParallelConfig(grad_reduce_in_fp32=True, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Result:
    """What rank 0 knows after training a cell.

    Attributes:
        losses: Mean loss over the global batch before each step.
        norms: Gradient norm of each step, before clipping; None if a step was skipped.
        weights: Unsharded weights by unsharded name: the fp32 main weights where the optimizer keeps some.
        model_weights: The same of the model itself, as its next forward pass would use them, in fp32.
        replica_gap: Largest difference between two ranks' copies of one element of either; 0 unless something is wrong.
        buckets: Buckets of rank 0's gradient buffers.
    """

    losses: list[float]
    norms: list[float | None]
    weights: dict[str, Tensor]
    model_weights: dict[str, Tensor]
    replica_gap: float
    buckets: int


def stock_adam(config: dict[str, Any], chunks: list[nn.Module]) -> MegatronOptimizer:
    """Megatron's own optimizer for the config."""
    return get_megatron_optimizer(OptimizerConfig(**config), chunks)


def tokens(step: int) -> Tensor:
    """The global batch of a step, one token longer than the sequences: the same in every cell."""
    generator = torch.Generator().manual_seed(1000 + step)
    # Not uniform, so that there is something to learn.
    draws = torch.rand(GLOBAL_BATCH, LENGTH + 1, generator=generator)
    return (VOCABULARY * draws**3).long()


class Trainer:
    """A cell's model, optimizer and schedule on this rank. Open it by :func:`opened`."""

    def __init__(self, cell: Cell, make_optimizer: MakeOptimizer = stock_adam) -> None:
        self.cell = cell
        self.step = 0
        self.config = cell.transformer_config()
        self.chunks: list[nn.Module] = [self._chunk(stage) for stage in range(cell.vpp)]
        self.optimizer = make_optimizer(cell.optimizer_config(), self.chunks)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=MAX_LR,
            min_lr=MIN_LR,
            lr_warmup_steps=0,
            lr_decay_steps=DECAY_STEPS * GLOBAL_BATCH,
            lr_decay_style="linear",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=DECAY_STEPS * GLOBAL_BATCH,
            wd_incr_style="constant",
        )
        self._connect()

    def _chunk(self, stage: int) -> nn.Module:
        cell = self.cell
        vp_stage = stage if cell.vpp > 1 else None
        model: nn.Module = GPTModel(
            config=self.config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                num_experts=cell.moe or None, normalization=self.config.normalization
            ),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=True) and stage == 0,
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=True) and stage == cell.vpp - 1,
            share_embeddings_and_output_weights=cell.tied,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        set_initial(model, cell.tied)
        if cell.precision != "fp32":
            model = Float16Module(self.config, model)
        wrapped = DistributedDataParallel(self.config, cell.ddp_config(), model, disable_bucketing=stage > 0)
        wrapped.vp_stage = vp_stage
        return wrapped

    def _connect(self) -> None:
        """What Megatron's training loop sets on the config before its first step."""

        def per_chunk(name: str) -> Any:
            calls = [getattr(chunk, name) for chunk in self.chunks]
            return calls[0] if len(calls) == 1 else calls

        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if self.cell.overlap_grad_reduce:
            self.config.no_sync_func = per_chunk("no_sync")
            self.config.grad_sync_func = per_chunk("start_grad_sync")
        if self.cell.overlap_param_gather:
            # As in Megatron's loop, from the second step on: the first has nothing to gather.
            self._param_sync = per_chunk("start_param_sync")
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook(param_sync=False)

    def train_step(self) -> tuple[float | None, float | None]:
        """One step on its global batch.

        Returns:
            The mean loss over this rank's sequences, on the last pipeline stage only; the gradient norm, None if skipped.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = self._micro_batches()
        reported = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(batches) for _ in self.chunks] if len(self.chunks) > 1 else iter(batches),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=LENGTH,
            micro_batch_size=len(batches[0]),
            forward_only=False,
        )
        done, norm, _ = self.optimizer.step()
        if done:
            self.scheduler.step(increment=GLOBAL_BATCH)
        if self.step == 0 and self.cell.overlap_param_gather:
            for chunk in self.chunks:
                chunk.enable_forward_pre_hook()
            self.config.param_sync_func = self._param_sync
        self.step += 1
        loss = torch.stack([entry["loss"] for entry in reported]).mean().item() if reported else None
        return loss, float(norm) if done else None

    def _micro_batches(self) -> list[Tensor]:
        dp, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        pieces = tokens(self.step).chunk(self.cell.microbatches * dp)
        assert len(pieces) == self.cell.microbatches * dp, f"{self.cell}: the global batch does not divide"
        return list(pieces[rank::dp])

    def gather_params(self) -> None:
        """Wait for the parameters that an overlapped gather would bring in during the next forward pass."""
        if self.cell.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def weights(self, main: bool = True) -> tuple[dict[str, Tensor], float]:
        """Unsharded weights on rank 0 (a collective of all ranks), and the largest difference between replicas."""
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        parts = []
        for chunk in self.chunks:
            for parameter, cut in cuts(chunk, self.cell.tied):
                value = main_weight(parameter, optimizers) if main else parameter.detach().float().clone()
                parts.append((cut, value))
        return gathered(parts)

    def sharded_state(self, is_loading: bool = False, optimizer_format: str | None = None) -> dict[str, Any]:
        """What Megatron's checkpoints hold of this rank.

        Args:
            is_loading: Whether it is to be filled by a load.
            optimizer_format: ``dp_reshardable`` or ``fully_reshardable``, for the distributed optimizer.
        """
        metadata = {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        }
        if self.cell.use_distributed_optimizer:
            metadata["distrib_optim_sharding_type"] = optimizer_format or "dp_reshardable"
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
        names = ["model"] if len(self.chunks) == 1 else [f"model{i}" for i in range(len(self.chunks))]
        state: dict[str, Any] = {
            name: chunk.sharded_state_dict(metadata=metadata)
            for name, chunk in zip(names, self.chunks, strict=True)
        }
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        state["opt_param_scheduler"] = self.scheduler.state_dict()
        state["iteration"] = self.step
        return state

    def save(self, folder: Path, optimizer_format: str | None = None) -> None:
        """Write a ``torch_dist`` checkpoint into an existing empty folder."""
        self.gather_params()
        dist_checkpointing.save(self.sharded_state(optimizer_format=optimizer_format), str(folder))

    def load(self, folder: Path, optimizer_format: str | None = None) -> None:
        """Continue from a checkpoint, of this layout or another one."""
        state = dist_checkpointing.load(self.sharded_state(True, optimizer_format), str(folder))
        for index, chunk in enumerate(self.chunks):
            bare(chunk).load_state_dict(state["model" if len(self.chunks) == 1 else f"model{index}"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["opt_param_scheduler"])
        self.step = state["iteration"]


def _forward_step(batches: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    batch = next(batches)
    inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    positions = torch.arange(LENGTH).expand_as(inputs)
    return model(inputs, positions, None, labels=labels), _loss


def _loss(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach().clone()}


@contextmanager
def opened(cell: Cell, make_optimizer: MakeOptimizer = stock_adam) -> Iterator[Trainer]:
    """A trainer with its process groups, which end with the scope. Needs ``cpu_megatron()`` around it."""
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=cell.tp,
        pipeline_model_parallel_size=cell.pp,
        virtual_pipeline_model_parallel_size=cell.vpp if cell.vpp > 1 else None,
        expert_model_parallel_size=cell.ep,
    )
    try:
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        yield Trainer(cell, make_optimizer)
    finally:
        mpu.destroy_model_parallel()


def train(cell: Cell, make_optimizer: MakeOptimizer = stock_adam, steps: int = 3) -> Result | None:
    """Train a cell on this group of ranks; the result is on rank 0."""
    with opened(cell, make_optimizer) as trainer:
        return trained(trainer, steps)


def trained(trainer: Trainer, steps: int) -> Result | None:
    """Train some steps more; the result is on rank 0."""
    records = [trainer.train_step() for _ in range(steps)]
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(records, everyone)
    weights, gap = trainer.weights()
    trainer.gather_params()
    model_weights, model_gap = trainer.weights(main=False)
    if everyone is None:
        return None
    last = [[loss for loss, _ in records] for records in everyone if records and records[0][0] is not None]
    return Result(
        losses=[sum(losses) / len(losses) for losses in zip(*last, strict=True)],
        norms=[norm for _, norm in records],
        weights=weights,
        model_weights=model_weights,
        replica_gap=max(gap, model_gap),
        buckets=sum(len(b.buckets) for c in trainer.chunks for b in [*c.buffers, *c.expert_parallel_buffers]),
    )


def _train_all(rank: int, world: int, cells: Sequence[Cell], make_optimizer: MakeOptimizer, steps: int) -> list[Any]:
    with cpu_megatron():
        return [train(cell, make_optimizer, steps) for cell in cells]


def run_cells(
    world: int, cells: Sequence[Cell], make_optimizer: MakeOptimizer = stock_adam, steps: int = 3
) -> list[Result]:
    """Train cells one after the other on one group of ``world`` forked ranks.

    Returns:
        One result per cell, as rank 0 saw it.
    """
    return run_ranks(world, _train_all, cells, make_optimizer, steps)[0]


def largest_gap(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Largest difference between two models' weights, which must have the same names and shapes."""
    assert {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in reference.items()}
    return max((weights[name] - reference[name]).abs().max().item() for name in reference)
