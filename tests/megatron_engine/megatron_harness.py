"""A tiny GPT trained by real Megatron on CPU ranks: the same model and data in every parallel layout."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from context_parallel import batch_of_this_rank, with_gathering_attention
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    TorchFullyShardedDataParallel,
    finalize_model_grads,
)
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import fsdp_dtensor_checkpoint
from megatron.core.transformer.module import Float16Module
from megatron_cells import DECAY_STEPS, GLOBAL_BATCH, LENGTH, MAX_LR, MIN_LR, VOCABULARY, Cell, tokens
from megatron_weights import Cut, bare, cuts, gathered, initial, main_weight, model_weight
from ranks import run_ranks
from rows_apart import rows_apart
from torch import Tensor, nn

from megatron_patches.cpu import cpu_megatron

Gathered = tuple[dict[str, Tensor], float]
# Sizes of the process groups of this rank's process, the present ones last.
_open_sizes: list[tuple[int | None, ...]] = []


class Fsdp2(TorchFullyShardedDataParallel):
    """With the argument that ``finalize_model_grads`` passes, of which 0.16's knows nothing: no step gets past it."""

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        pass


MakeOptimizer = Callable[[dict[str, Any], list[nn.Module]], MegatronOptimizer]


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
        model = self._model(stage, vp_stage)
        with torch.no_grad():
            for parameter, cut in self.cuts(model):
                parameter.copy_(cut.of(initial(cut.name, cut.shape)))
        if cell.precision in ("bf16", "fp16"):
            model = Float16Module(self.config, model)
        if cell.fsdp:
            return Fsdp2(self.config, cell.ddp_config(), model)
        if cell.megatron_fsdp:
            groups = ProcessGroupCollection.use_mpu_process_groups() if cell.version == 2 else None
            return FullyShardedDataParallel(self.config, cell.ddp_config(), model, pg_collection=groups)
        wrapped = DistributedDataParallel(self.config, cell.ddp_config(), model, disable_bucketing=stage > 0)
        wrapped.vp_stage = vp_stage
        return wrapped

    def _model(self, stage: int, vp_stage: int | None) -> nn.Module:
        cell = self.cell
        return GPTModel(
            config=self.config,
            transformer_layer_spec=self._layers(vp_stage),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=True) and stage == 0,
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=True) and stage == cell.vpp - 1,
            share_embeddings_and_output_weights=cell.tied,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )

    def _layers(self, vp_stage: int | None) -> Any:
        if self.cell.transformer_engine:
            return get_gpt_layer_with_transformer_engine_spec(
                num_experts=self.cell.moe or None,
                moe_grouped_gemm=bool(self.cell.moe),
                multi_latent_attention=self.cell.latent,
            )
        layers = self._local_layers(vp_stage)
        return with_gathering_attention(layers) if self.cell.cp > 1 else layers

    def _local_layers(self, vp_stage: int | None) -> Any:
        cell = self.cell
        if cell.dense_layers:
            return get_gpt_decoder_block_spec(
                self.config, use_transformer_engine=False, normalization=self.config.normalization, vp_stage=vp_stage
            )
        return get_gpt_layer_local_spec(num_experts=cell.moe or None, normalization=self.config.normalization)

    def cuts(self, model: nn.Module) -> Iterable[tuple[nn.Parameter, Cut]]:
        """Every parameter of a model chunk, and what it is of the unsharded model."""
        found = cuts(model, self.cell.tied)
        inner: Any = getattr(model, "module", None)
        if not self.cell.megatron_fsdp or not hasattr(inner, "param_and_grad_buffer"):
            return found
        inner._replace_param_with_raw_if_needed()
        named = inner.param_and_grad_buffer.optimizer_named_parameters
        optimized = {id(parameter.orig_param): parameter for _, parameter in named}
        return [(optimized[id(parameter)], cut) for parameter, cut in found]

    def _connect(self) -> None:
        """What Megatron's training loop sets on the config before its first step."""

        def per_chunk(name: str) -> Any:
            calls = [getattr(chunk, name) for chunk in self.chunks]
            return calls[0] if len(calls) == 1 else calls

        if self.cell.again > 1 or self.cell.expert_again > 1:
            importlib.import_module("megatron.core.tensor_parallel.gtp_api").classify_gtp_remat_chains(self.chunks)
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if self.cell.megatron_fsdp:
            self.config.no_sync_func = per_chunk("no_sync")
        if self.cell.overlap_grad_reduce:
            self.config.no_sync_func = per_chunk("no_sync")
            self.config.grad_sync_func = per_chunk("start_grad_sync")
        if self.cell.overlap_param_gather:
            # As in Megatron's loop, from the second step on: the first has nothing to gather.
            self._param_sync = per_chunk("start_param_sync")
            for chunk in self.chunks:
                chunk.disable_forward_pre_hook(param_sync=False)

    def train_step(self, before_update: Callable[[Trainer], None] | None = None) -> tuple[float | None, float | None]:
        """One step on its global batch.

        Args:
            before_update: Called when the gradients are reduced and not yet clipped.

        Returns:
            The mean loss over this rank's sequences, on the last pipeline stage only; the norm, None if skipped.
        """
        self.clear_gradients()
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
        if before_update is not None:
            before_update(self)
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

    def advance(self, steps: int) -> None:
        """Train some steps more, of which nobody asks for the weights."""
        for _ in range(steps):
            self.train_step()
        self.gather_params()

    def clear_gradients(self) -> None:
        """What Megatron's loop does before the first forward pass of a step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _micro_batches(self) -> list[Tensor]:
        dp, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        pieces = tokens(self.step).tensor_split(self.cell.microbatches * dp)
        even = len({len(piece) for piece in pieces}) == 1
        assert even or self.cell.uneven, f"{self.cell}: the global batch does not divide"
        return list(pieces[rank::dp])

    def gather_params(self) -> None:
        """Wait for the parameters that an overlapped gather would bring in during the next forward pass."""
        if self.cell.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def weights(self, of: Callable[[nn.Parameter, list[MegatronOptimizer]], Tensor] = main_weight) -> Gathered:
        """Weights on rank 0 by the names and in the shapes of the unsharded model. A collective of all ranks.

        Args:
            of: :func:`main_weight`, :func:`model_weight` or, inside ``before_update``, :func:`reduced_gradient`.

        Returns:
            The weights by name (empty on the other ranks), and the largest difference between two ranks' copies.
        """
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        with ExitStack() as stack:
            for optimizer in optimizers:
                if getattr(optimizer, "kept", None) is not None:
                    stack.enter_context(optimizer.main_weights())
            return gathered(
                [(cut, of(parameter, optimizers)) for chunk in self.chunks for parameter, cut in self.cuts(chunk)]
            )

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
            name: bare(chunk).sharded_state_dict(metadata=metadata)
            for name, chunk in zip(names, self.chunks, strict=True)
        }
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        state["opt_param_scheduler"] = self.scheduler.state_dict()
        state["iteration"] = self.step
        return state

    def _fsdp_state(self, is_loading: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """What Megatron's loop saves or loads under its own FSDP, and the same as it prepares it for torch."""
        metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        names = ["model"] if len(self.chunks) == 1 else [f"model{i}" for i in range(len(self.chunks))]
        state = {n: c.state_dict_for_save_checkpoint() for n, c in zip(names, self.chunks, strict=True)}
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        raw = {**{name: dict(value) for name, value in state.items()}, "names": names}
        state |= {"opt_param_scheduler": self.scheduler.state_dict(), "iteration": self.step}
        # As preprocess_fsdp_dtensor_state_dict of megatron.training does.
        if self.config.gated_linear_unit:
            for name, chunk in zip(names, self.chunks, strict=True):
                parts = fsdp_dtensor_checkpoint.handle_swiglu_in_state_dict(chunk, state[name], state["optimizer"])
                state[name], state["optimizer"] = parts
        preprocess_state_dict_for_uneven_dtensor(state)
        return raw, state

    def save(self, folder: Path, optimizer_format: str | None = None) -> None:
        """Write a ``torch_dist`` checkpoint into an existing empty folder."""
        self.gather_params()
        if self.cell.megatron_fsdp:
            torch.distributed.checkpoint.save(self._fsdp_state(False)[1], checkpoint_id=folder)
            return
        dist_checkpointing.save(self.sharded_state(optimizer_format=optimizer_format), str(folder))

    def load(self, folder: Path, optimizer_format: str | None = None) -> None:
        """Continue from a checkpoint, of this layout or another one."""
        if self.cell.megatron_fsdp:
            raw, prepared = self._fsdp_state(True)
            planner = torch.distributed.checkpoint.DefaultLoadPlanner(allow_partial_load=True)
            torch.distributed.checkpoint.load(prepared, checkpoint_id=folder, planner=planner)
            for name, chunk in zip(raw["names"], self.chunks, strict=True):
                chunk.load_state_dict(raw[name], strict=False)
            self.optimizer.load_state_dict(raw["optimizer"])
            self.scheduler.load_state_dict(prepared["opt_param_scheduler"])
            self.step = prepared["iteration"]
            return
        # Layers of Transformer Engine's ask for extra states, which Megatron's own have not saved.
        strict = not self.cell.transformer_engine
        handling = "assume_ok_unexpected" if strict else "log_all"
        state = dist_checkpointing.load(self.sharded_state(True, optimizer_format), str(folder), strict=handling)
        # Under FSDP2 it was filled in place.
        for index, chunk in enumerate(self.chunks) if not self.cell.fsdp else ():
            bare(chunk).load_state_dict(state["model" if len(self.chunks) == 1 else f"model{index}"], strict)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["opt_param_scheduler"])
        self.step = state["iteration"]


def _forward_step(batches: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    batch = next(batches)
    inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    positions = torch.arange(LENGTH).expand_as(inputs)
    mine = batch_of_this_rank(inputs=inputs, labels=labels, positions=positions)
    return model(mine["inputs"], mine["positions"], None, labels=mine["labels"]), _loss


def _loss(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's part of the loss, which Megatron multiplies by the context-parallel size; its mean, as reported."""
    loss = per_token.float().mean()
    return loss / mpu.get_context_parallel_world_size(), {"loss": loss.detach().clone()}


@contextmanager
def opened(
    cell: Cell, make_optimizer: MakeOptimizer = stock_adam, kind: type[Trainer] | None = None
) -> Iterator[Trainer]:
    """A trainer. Its process groups, slow to build, outlive the scope for the next cell of equal sizes.

    Needs ``cpu_megatron()`` around it.

    Args:
        cell: The layout.
        make_optimizer: Builds the optimizer.
        kind: Another class of trainers, with a model of its own.
    """
    sizes = (cell.tp, cell.pp, cell.vpp, cell.ep, cell.etp, cell.cp, cell.instances, cell.again, cell.expert_again)
    if mpu.is_initialized() and _open_sizes[-1:] != [sizes]:
        mpu.destroy_model_parallel()
        _end_groups()
    if not mpu.is_initialized():
        once_more = {"gtp_remat_size": cell.again, "expert_gtp_remat_size": cell.expert_again}
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=cell.tp,
            pipeline_model_parallel_size=cell.pp,
            virtual_pipeline_model_parallel_size=cell.vpp if cell.vpp > 1 else None,
            expert_model_parallel_size=cell.ep,
            expert_tensor_parallel_size=cell.etp,
            context_parallel_size=cell.cp,
            num_distributed_optimizer_instances=cell.instances,
            **({} if cell.again == cell.expert_again == 1 else once_more),
        )
        _open_sizes.append(sizes)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    with rows_apart(cell.filled_up) if max(cell.again, cell.expert_again) > 1 else nullcontext():
        yield (kind or Trainer)(cell, make_optimizer)


def _end_groups() -> None:
    """Megatron forgets its process groups without ending them, which leaves their threads behind."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


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
    model_weights, model_gap = trainer.weights(model_weight)
    if everyone is None:
        return None
    last = [[loss for loss, _ in records] for records in everyone if records and records[0][0] is not None]
    return Result(
        losses=[sum(losses) / len(losses) for losses in zip(*last, strict=True)],
        norms=[norm for _, norm in records],
        weights=weights,
        model_weights=model_weights,
        replica_gap=max(gap, model_gap),
        buckets=sum(
            len(b.buckets)
            for c in trainer.chunks
            if not (trainer.cell.fsdp or trainer.cell.megatron_fsdp)
            for b in [*c.buffers, *c.expert_parallel_buffers]
        ),
    )


def _train_all(rank: int, world: int, cells: Sequence[Cell], make_optimizer: MakeOptimizer, steps: int) -> list[Any]:
    with cpu_megatron():
        return [_train_named(cell, make_optimizer, steps) for cell in cells]


def _train_named(cell: Cell, make_optimizer: MakeOptimizer, steps: int) -> Result | None:
    try:
        return train(cell, make_optimizer, steps)
    except Exception as error:
        error.add_note(f"cell: {cell}")
        raise


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


def mean_gap(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Mean difference between two models' weights."""
    total = sum(reference[name].numel() for name in reference)
    return float(sum((weights[name] - reference[name]).abs().sum() for name in reference)) / total


class Move(NamedTuple):
    """How far apart two runs end, relative to how far the reference went: in the largest weight, and in the mean."""

    largest: float
    mean: float


def move(weights: dict[str, Tensor], reference: dict[str, Tensor], start: dict[str, Tensor]) -> Move:
    """How far a run ends from a reference that started at ``start``."""
    return Move(
        largest_gap(weights, reference) / largest_gap(reference, start),
        mean_gap(weights, reference) / mean_gap(reference, start),
    )


def rms_move(weights: dict[str, Tensor], reference: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """Root mean square of how far a run ends from a reference, over that of the reference's way from ``start``."""

    def squared(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
        return float(sum((some[name] - others[name]).double().square().sum() for name in reference))

    return (squared(weights, reference) / squared(reference, start)) ** 0.5


def worst(moves: Iterable[Move]) -> Move:
    """The largest of each figure."""
    return Move(*map(max, zip(*moves, strict=True)))


OTHER_CUTS = (1, 4)
"""Micro-batches per step of runs that show how far rounding alone moves one process: cells have two."""
