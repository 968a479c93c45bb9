"""Megatron's parallelism and wrappers around its GPT, beside the bare model in one process of plain PyTorch."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.frameworks.problem import CONTROL, KINDS, MICRO_BATCHES, STEPS, Weights, as_array, corrected, perturbed_
from benchmarks.frameworks.tasks import Task
from rankwise.names import BY_SPELLING

__all__ = ["opened", "train"]

_LAYERS, _WIDTH, _HEADS, _INNER, _LENGTH, _VOCABULARY, _SAMPLES = 4, 48, 4, 80, 24, 96, 12
_CLIPPING = 1.0
_TESTS = Path(__file__).resolve().parents[2] / "tests" / "megatron_engine"


@contextmanager
def opened(task: Task) -> Iterator[None]:
    """The process group, and our types among Megatron's names; on a host without cards Megatron is told of one."""
    with ExitStack() as stack:
        bound = {"device_id": task.place} if task.device == "cuda" else {}
        backend = "nccl" if task.device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=task.patience), **bound)
        if task.device == "cpu":
            from megatron_patches.cpu import cpu_megatron

            stack.enter_context(cpu_megatron())
        import megatron_patches

        megatron_patches.apply()
        _start_groups(task.cell.settings)
        yield
        dist.barrier()


def _start_groups(settings: Mapping[str, Any]) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    chunks = settings.get("chunks", 1)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.get("tp", 1),
        pipeline_model_parallel_size=settings.get("pp", 1),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=settings.get("cp", 1),
        expert_model_parallel_size=settings.get("ep", 1),
    )
    model_parallel_cuda_manual_seed(123)


def train(task: Task, kind: str, noise: float) -> Weights:
    """Whole weights after the task's steps, by the names that they have in checkpoints; "start": the first ones."""
    settings = task.cell.settings
    start = Path(task.store) / f"start-{'experts' if settings.get('experts') else 'dense'}"
    config = _config(settings)
    chunks = [_chunk(config, settings, index).to(task.place) for index in range(settings.get("chunks", 1))]
    if kind == "start":
        _save(chunks, start)
        return _whole(start)
    _load(chunks, start)
    end = Path(task.folder(kind, noise))
    first = changed = {}
    if noise:
        first = _whole(start)
        perturbed_([p for chunk in chunks for p in chunk.parameters()], noise)
        _save(chunks, end / "changed")
        changed = _whole(end / "changed")
    if settings.get("plain"):
        _train_alone(chunks[0], kind, task)
    else:
        chunks = _train_wrapped(config, chunks, kind, task, end / "half")
    if task.saves:
        return {}
    _save(chunks, end / "end")
    found = _whole(end / "end")
    return corrected(found, changed, first) if noise else found


# --- the model --------------------------------------------------------------------------------------------------------


def _config(settings: Mapping[str, Any]) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    unfused = ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm")
    chunks, experts = settings.get("chunks", 1), settings.get("experts")
    more: dict[str, Any] = dict.fromkeys((*unfused, "gradient_accumulation_fusion", "apply_rope_fusion"), False)
    if experts:
        more |= {"num_moe_experts": experts, "moe_ffn_hidden_size": _INNER, "moe_router_topk": 2}
        more |= {"moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none"}
    return TransformerConfig(
        num_layers=_LAYERS,
        hidden_size=_WIDTH,
        num_attention_heads=_HEADS,
        num_query_groups=_HEADS // 2,
        ffn_hidden_size=_INNER,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=settings.get("tp", 1),
        sequence_parallel=settings.get("sp", False),
        pipeline_model_parallel_size=settings.get("pp", 1),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        # Two interleaved stages are each other's neighbours on both sides: one batch would mix up their messages.
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        context_parallel_size=settings.get("cp", 1),
        expert_model_parallel_size=settings.get("ep", 1),
        transformer_impl="local",
        **more,
    )


def _chunk(config: Any, settings: Mapping[str, Any], index: int) -> nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    chunks = settings.get("chunks", 1)
    layers = get_gpt_layer_local_spec(num_experts=settings.get("experts"), normalization="RMSNorm")
    if settings.get("sp"):
        # Megatron's norms of torch refuse sequence parallelism.
        parts = layers.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = _SequenceNorm
        layers = TransformerBlockSubmodules(layer_specs=[layers] * _LAYERS, layer_norm=_SequenceNorm)
    if settings.get("cp", 1) > 1:
        # Megatron's own attention across ranks needs Transformer Engine.
        layers = _context_parallel().with_gathering_attention(layers)
    torch.manual_seed(5)
    return GPTModel(  # type: ignore[no-any-return]
        config=config,
        transformer_layer_spec=layers,
        vocab_size=_VOCABULARY,
        max_sequence_length=_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=True) and index == 0,
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=True) and index == chunks - 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=index if chunks > 1 else None,
    )


class _SequenceNorm(nn.RMSNorm):
    """torch's norm, whose gradients Megatron sums over the ranks that share a sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[union-attr]


def _context_parallel() -> Any:
    """The attention of the tests, which gathers keys and values."""
    if str(_TESTS) not in sys.path:
        sys.path.insert(0, str(_TESTS))
    return importlib.import_module("context_parallel")


# --- weights by their names in checkpoints ----------------------------------------------------------------------------


def _bare(module: Any) -> Any:
    while hasattr(module, "module"):
        module = module.module
    return module


def _save(chunks: list[Any], folder: Path) -> None:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(_states(chunks), str(folder))


def _states(chunks: list[Any]) -> dict[str, Any]:
    return {f"model{index}": _bare(chunk).sharded_state_dict() for index, chunk in enumerate(chunks)}


def _load(chunks: list[Any], folder: Path) -> None:
    from megatron.core import dist_checkpointing

    states = dist_checkpointing.load(_states(chunks), str(folder))
    for index, chunk in enumerate(chunks):
        _bare(chunk).load_state_dict(states[f"model{index}"])


def _whole(folder: Path) -> Weights:
    """Every tensor of a checkpoint, put together by Megatron."""
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load_plain_tensors(str(folder))
    return {name: as_array(value) for name, value in found.items() if isinstance(value, Tensor)}


# --- training ---------------------------------------------------------------------------------------------------------


def _tokens(step: int) -> Tensor:
    """Samples of a step, one token longer than the sequences: a token says which one follows."""
    generator = torch.Generator().manual_seed(1000 + step)
    follows = torch.randperm(_VOCABULARY, generator=torch.Generator().manual_seed(7))
    tokens = [torch.randint(0, _VOCABULARY, (_SAMPLES, 1), generator=generator)]
    for _ in range(_LENGTH):
        tokens.append(follows[tokens[-1]])
    return torch.cat(tokens, 1)


def _inputs(samples: Tensor, device: torch.device) -> dict[str, Tensor]:
    """What the model is called with, of this rank's part of each sequence."""
    samples = samples.to(device)
    positions = torch.arange(_LENGTH, device=device).unsqueeze(0).expand(len(samples), -1)
    parts = {"inputs": samples[:, :-1].contiguous(), "labels": samples[:, 1:].contiguous(), "positions": positions}
    from megatron.core import parallel_state

    cut = parallel_state.get_context_parallel_world_size() > 1
    return _context_parallel().batch_of_this_rank(**parts) if cut else parts


def _losses(model: nn.Module, samples: Tensor, device: torch.device) -> Tensor:
    given = _inputs(samples, device)
    mask = torch.triu(torch.ones(1, 1, _LENGTH, _LENGTH, dtype=torch.bool, device=device), 1)
    with device:  # The attention of the tests makes its positions on the default device.
        return model(given["inputs"], given["positions"], mask, labels=given["labels"])  # type: ignore[no-any-return]


def _train_alone(model: nn.Module, kind: str, task: Task) -> None:
    """As a loop of plain PyTorch trains it: no wrapper, no optimizer of Megatron's."""
    optimizer = _built_alone(model, kind)
    for step in range(STEPS):
        for samples in _tokens(step).chunk(MICRO_BATCHES):
            loss = _losses(model, samples, task.place).float().mean()
            (loss / MICRO_BATCHES).backward()
        if getattr(optimizer, "needs_loss", False):
            optimizer.record_loss(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), _CLIPPING)
        optimizer.step()
        optimizer.zero_grad()


def _built_alone(model: nn.Module, kind: str) -> Any:
    from megatron_patches.capture import linear_views
    from megatron_patches.groups import ParallelGroups
    from megatron_patches.parameters import describe_chunks

    spelling, options = KINDS[kind]
    if kind == CONTROL:
        return torch.optim.AdamW(model.parameters(), **options)
    # Names, roles and the matrices of fused weights, as they are under Megatron.
    described = describe_chunks([model], ParallelGroups())
    named = BY_SPELLING[spelling]
    optimizer = named.optimizer(list(model.parameters()), **{**named.preset, **options})
    if optimizer.needs_capture:
        optimizer.capture(model, describe=linear_views(described))
    return optimizer


def _built(kind: str, chunks: list[Any], settings: Mapping[str, Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_patches import RankwiseConfig

    spelling, options = KINDS[kind]
    own = dict(options)
    given: dict[str, Any] = {"lr": own.pop("lr"), "weight_decay": own.pop("weight_decay", 0.0)}
    given |= {"min_lr": given["lr"], "clip_grad": _CLIPPING, "params_dtype": torch.float32}
    given |= {"use_distributed_optimizer": settings.get("distributed", False)}
    given |= {"overlap_param_gather": settings.get("overlap", False)}
    if kind == CONTROL:
        return get_megatron_optimizer(OptimizerConfig(optimizer="adam", adam_eps=own["eps"], **given), chunks)
    layer_wise = settings.get("layer_wise", False)
    name = "mkor-sketch" if own.get("rule") == "sketch" else spelling.lower()
    config = RankwiseConfig(optimizer=name, rankwise=own, rankwise_layer_wise=layer_wise, **given)
    return get_megatron_optimizer(config, chunks)


def _train_wrapped(config: Any, chunks: list[Any], kind: str, task: Task, half: Path) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    settings = task.cell.settings
    overlap = settings.get("overlap", False)
    wrapping = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        use_distributed_optimizer=settings.get("distributed", False),
        bucket_size=settings.get("bucket"),
    )
    chunks = [
        DistributedDataParallel(config, wrapping, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    optimizer = _built(kind, chunks, settings)
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    if overlap:
        config.no_sync_func = chunks[0].no_sync
    if task.loads:
        _restore(chunks, optimizer, half)
    ways, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    forward = functools.partial(_forward, task.place)
    for step in task.steps:
        task.end_here(step)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batches = _tokens(step).chunk(MICRO_BATCHES * ways)[rank::ways]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=_LENGTH,
            micro_batch_size=len(batches[0]),
            forward_only=False,
        )
        optimizer.step()
    if overlap:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
    if task.saves:
        _keep(chunks, optimizer, half)
    return chunks


def _forward(device: torch.device, batches: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    from megatron.core import parallel_state

    def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses.float().mean()
        # Megatron multiplies by the number of context-parallel ranks.
        return loss / parallel_state.get_context_parallel_world_size(), {"loss": loss.detach().clone()}

    return _losses(model, next(batches), device), mean


# --- resuming ---------------------------------------------------------------------------------------------------------


def _whole_state(chunks: list[Any], optimizer: Any, loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
    model = _bare(chunks[0]).sharded_state_dict(metadata=metadata)
    states: dict[str, Any] = {"model": model}
    states["optimizer"] = optimizer.sharded_state_dict(states, is_loading=loading, metadata=metadata)
    return states


def _keep(chunks: list[Any], optimizer: Any, half: Path) -> None:
    from megatron.core import dist_checkpointing

    half.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(_whole_state(chunks, optimizer, False), str(half))


def _restore(chunks: list[Any], optimizer: Any, half: Path) -> None:
    from megatron.core import dist_checkpointing

    states = dist_checkpointing.load(_whole_state(chunks, optimizer, True), str(half))
    _bare(chunks[0]).load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
