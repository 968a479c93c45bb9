"""Training runs of torchtitan's debug models, cut to two layers, with its own trainer, in many parallelisms."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from cpu_titan import NoTokenizer, Rows
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models import deepseek_v3, llama3
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

import rankwise.torchtitan  # noqa: F401

Weights = dict[str, Tensor]
STEPS, SAVED, ROWS = 4, 2, 8
WIDTH, WORDS = 64, 64


def llama() -> Trainer.Config:
    """Its debug model's configuration, smaller, with two heads of queries to one of keys."""
    sizes = {"n_layers": 2, "dim": WIDTH, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96}
    layers = llama3._build_llama3_layers(**sizes, rope=ComplexRoPE.Config(dim=16, max_seq_len=512), attn_backend="flex")
    return _smaller(llama3_debugmodel(), layers)


def deepseek() -> Trainer.Config:
    """The same: a layer without experts, and one with eight of them."""
    latent = {"q_lora_rank": 0, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    sizes = {"n_layers": 2, "n_dense_layers": 1, "dim": WIDTH, "n_heads": 4, "mscale": 0.7, "dense_hidden_dim": 96}
    experts = {"moe_hidden_dim": 32, "num_experts": 8, "num_shared_experts": 2, "router_top_k": 3}
    rope = ComplexRoPE.Config(dim=8, max_seq_len=512)
    layers = deepseek_v3._build_dsv3_layers(
        **latent,
        **sizes,
        **experts,
        router_score_func="softmax",
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=rope,
    )
    return _smaller(deepseek_v3_debugmodel(), layers)


def _smaller(config: Trainer.Config, layers: list[Any]) -> Trainer.Config:
    model = config.model_spec.model
    model.dim, model.vocab_size, model.layers = WIDTH, WORDS, layers
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = WORDS, WIDTH
    model.norm.normalized_shape = WIDTH
    model.lm_head.in_features, model.lm_head.out_features = WIDTH, WORDS
    config.loss.loss_fn.global_vocab_size = WORDS
    return config


MODELS = {"llama": llama, "deepseek": deepseek}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"weight_decay": 0.1}),
    "mars": ("MARS", {"weight_decay": 0.1}),
    "mars-adamw": ("mars-adamw", {}),
    "mars-lion": ("MARS-Lion", {}),
    "mars-shampoo": ("MARS-Shampoo", {"ns_dtype": "float32"}),
    "mars-m": ("MARS-M", {"ns_dtype": "float32", "weight_decay": 0.1}),
    "sonew": ("SONew", {"eps": 1e-3}),
    "ldadam": ("LDAdam", {"rank": 4}),
    "mkor": ("MKOR", {"update_interval": 2, "factor_dtype": "float32"}),
    "mkor-h": ("MKOR-H", {"update_interval": 2, "factor_dtype": "float32"}),
    # Over to AdamW in the second step.
    "switched": (
        "MKOR-H",
        {"factor_dtype": "float32", "hybrid_min_steps": 2, "hybrid_patience": 1, "hybrid_beta": 1e6},
    ),
}


@dataclass(frozen=True)
class Cell:
    """A model and how it is shared out.

    Attributes:
        world: Number of ranks.
        model: One of `MODELS`.
        parallel: Degrees and other fields of ``parallelism``.
        batch: Rows of a rank and micro-batch; those of a step are always the same.
        whole: Whether every layer is computed again in the backward pass.
        length: Tokens of a row.
        rows: Rows of a step.
    """

    world: int
    model: str = "llama"
    parallel: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 2
    whole: bool = False
    length: int = 32
    rows: int = ROWS


def _degrees(**degrees: int) -> dict[str, int]:
    words = {"shard": "data_parallel_shard", "replicate": "data_parallel_replicate", "tp": "tensor_parallel"}
    words |= {"pp": "pipeline_parallel", "cp": "context_parallel", "ep": "expert_parallel"}
    return {f"{words[name]}_degree": degree for name, degree in degrees.items()}


CELLS: dict[str, Cell] = {
    "one": Cell(1, batch=ROWS),
    "micro-one": Cell(1, batch=2),
    "fsdp-2": Cell(2, parallel=_degrees(shard=2)),
    "hsdp-4": Cell(4, parallel=_degrees(shard=2, replicate=2)),
    "ddp-2": Cell(2, parallel=_degrees(shard=1, replicate=2)),
    "tp-2": Cell(2, parallel=_degrees(tp=2)),
    "tp-fsdp-4": Cell(4, parallel=_degrees(tp=2, shard=2)),
    # Whole blocks of FlexAttention's on every rank.
    "long-one": Cell(1, length=256, rows=2),
    "cp-2": Cell(2, parallel=_degrees(cp=2), length=256, rows=2),
    "pp-2": Cell(2, parallel={**_degrees(pp=2), "pipeline_parallel_schedule": "1F1B"}, batch=ROWS),
    "pp-fsdp-4": Cell(4, parallel={**_degrees(pp=2, shard=2), "pipeline_parallel_schedule": "1F1B"}, batch=ROWS // 2),
    "recomputed-2": Cell(2, parallel=_degrees(shard=2), whole=True),
    "experts-one": Cell(1, "deepseek", batch=ROWS),
    "experts-fsdp-2": Cell(2, "deepseek", _degrees(shard=2)),
    "ep-2": Cell(2, "deepseek", _degrees(shard=2, ep=2)),
    "ep-fsdp-4": Cell(4, "deepseek", _degrees(shard=4, ep=2)),
    "experts-pp-2": Cell(2, "deepseek", {**_degrees(pp=2), "pipeline_parallel_schedule": "1F1B"}, batch=ROWS),
}


def optimizer(case: str) -> OptimizersContainer.Config:
    """One group of all parameters."""
    name, options = CASES[case]
    groups = [ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs={"lr": 2e-3, **options})]
    return OptimizersContainer.Config(param_groups=groups, implementation="foreach")


def start(cell: Cell, chosen: OptimizersContainer.Config, load: str = "", **checkpoint: Any) -> Trainer:
    """torchtitan's trainer, before its first step.

    Args:
        cell: The model and its ranks.
        chosen: The optimizer's configuration.
        load: A checkpoint to begin with.
        checkpoint: Further fields of ``checkpoint``.
    """
    config = MODELS[cell.model]()
    config.optimizer = chosen
    config.dataloader, config.tokenizer = Rows.Config(), NoTokenizer.Config()
    config.validator.enable = False
    config.dump_folder = checkpoint.pop("folder", "") or tempfile.mkdtemp()
    config.metrics.log_freq, config.debug.seed = 1, 1
    training = {"steps": STEPS, "seq_len": cell.length, "local_batch_size": cell.batch, "global_batch_size": cell.rows}
    training |= {"mixed_precision_param": "float32", "disable_cuda_graphs": True}
    given = {"enable": True, "initial_load_path": load or None, "load_only": True, "interval": SAVED, **checkpoint}
    parallel = {"spmd_backend": "partial_dtensor", **cell.parallel}
    for part, values in (("training", training), ("checkpoint", given), ("parallelism", parallel)):
        for name, value in values.items():
            setattr(getattr(config, part), name, value)
    if cell.whole:
        config.activation_checkpoint = FullAC.Config()
    return config.build()


def weights(trainer: Trainer) -> Weights:
    """The whole weights that this rank has something of; MKOR-H's average loss beside them."""
    named = [pair for part in trainer.model_parts for pair in part.named_parameters()]
    found = {canonical_fqn(name): _whole(value.detach()).clone() for name, value in named}
    for each in trainer.optimizers:
        if getattr(each, "needs_loss", False):
            found["loss"] = torch.tensor(each.switch.detector.state_dict()["loss_average"])
    return found


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def finished(trainer: Trainer) -> Weights:
    """Train to the end."""
    trainer.train()
    found = weights(trainer)
    trainer.close()
    return found


def train(rank: int, world: int, cell: Cell, cases: list[str], load: str, folder: str = "") -> dict[str, Weights]:
    """On one rank, all cases from the same weights; saved half way where there is a folder."""
    found = {}
    for case in cases:
        saving = {"load_only": False, "folder": f"{folder}/{case}"} if folder else {}
        found[case] = finished(start(cell, optimizer(case), load, **saving))
    return found


def resume(rank: int, world: int, cell: Cell, cases: list[str], folder: str) -> dict[str, Weights]:
    """On one rank, from what was saved half way."""
    states = {"initial_load_model_only": False}
    places = {case: f"{folder}/{case}/checkpoint/step-{SAVED}" for case in cases}
    return {case: finished(start(cell, optimizer(case), places[case], **states)) for case in cases}


@cache
def seed(model: str) -> str:
    """A checkpoint of the initial weights, as torchtitan makes one for comparisons."""
    folder = tempfile.mkdtemp()
    run_ranks(1, _seed, model, folder)
    return f"{folder}/checkpoint/step-0"


def _seed(rank: int, world: int, model: str, folder: str) -> None:
    options = {"folder": folder, "load_only": False, "create_seed_checkpoint": True}
    trainer = start(Cell(1, model, batch=ROWS), optimizer("adamw"), **options)
    trainer.checkpointer.save(curr_step=0, last_step=True)
    trainer.close()


def merged(outcomes: list[dict[str, Weights]]) -> dict[str, Weights]:
    """Of all ranks: each of several stages has its own; where several have one, they must have the same bits."""
    found: dict[str, Weights] = {}
    for outcome in outcomes:
        for case, theirs in outcome.items():
            for name, value in theirs.items():
                known = found.setdefault(case, {}).setdefault(name, value)
                assert torch.equal(known, value), (case, name)
    return found


def difference(found: Weights, expected: Weights) -> float:
    """The largest of all elements; of NaN, infinite."""
    assert found.keys() == expected.keys()
    each = torch.stack([(found[name] - expected[name]).abs().max() for name in expected])
    return float(each.nan_to_num(nan=torch.inf).max())
