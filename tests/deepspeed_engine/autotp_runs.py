"""Hugging Face models that AutoTP cuts, trained by real DeepSpeed engines and by one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.utils import groups
from ds_harness import REFERENCE, REFERENCE_PARAMS, TYPES, in_float64
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from deepspeed_plugin.registry import build
from rankwise.routing.roles import annotate

BATCH, LENGTH, VOCABULARY, STEPS, ACCUMULATION = 4, 7, 64, 6, 2
CLIPPING = 0.5
"""Under the gradient norm of every step of every model: clipping acts."""
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
_GATED = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}


def llama(**sizes: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**_GATED, **sizes}))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    # Three heads over two ranks, and nothing else that two divides.
    "llama uneven": lambda: llama(
        vocab_size=61, hidden_size=24, intermediate_size=45, num_attention_heads=3, num_key_value_heads=3
    ),
    # One head of keys: the second rank has no part of the attention.
    "llama one key": lambda: llama(num_key_value_heads=1),
    # Biases that are cut.
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_GATED)),
    # Norms of this rank's heads, whose gradients DeepSpeed sums.
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_GATED, head_dim=8)),
    # Fused weights, cut between heads.
    "gpt-neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**_SIZES, intermediate_size=64, hidden_dropout=0.0, attention_dropout=0.0)
    ),
    # Fused weights, cut in each of their parts.
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_GATED, pad_token_id=0)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=16, initializer_range=0.2)
    ),
}

PHI3 = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.down_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.gate_up_proj\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
    ],
}
"""Its attention reads the number of all heads from the model's config, and so cannot be cut."""


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        name: JSON type.
        model: A key of :data:`MODELS`.
        stage: Stage of ZeRO.
        cut: Tensor-parallel ranks.
        params: Params of the type, beside those of the other tests.
        config: Further keys of DeepSpeed's configuration.
        dtype: "fp64", "fp32", "bf16" or "fp16".
        steps: Optimizer steps.
    """

    name: str
    model: str = "llama"
    stage: int = 1
    cut: int = 2
    params: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "fp32"
    steps: int = STEPS

    @property
    def block(self) -> dict[str, Any]:
        params = REFERENCE_PARAMS if self.name == REFERENCE else TYPES[self.name]
        return {"type": self.name, "params": {**params, **self.params}}

    def config_on(self, world: int) -> dict[str, Any]:
        half = {self.dtype: {"enabled": True}} if self.dtype in ("bf16", "fp16") else {}
        cut: dict[str, Any] = {"autotp_size": self.cut}
        if self.model == "phi3":
            cut["partition_config"] = PHI3
        found = {
            "train_micro_batch_size_per_gpu": BATCH * self.cut // world,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": CLIPPING,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": self.stage},
            "optimizer": self.block,
            **half,
            **self.config,
        }
        if self.dtype == "fp64":
            found["zero_optimization"] = {"reduce_scatter": False, **found["zero_optimization"]}
        return {**found, "tensor_parallel": cut} if self.cut > 1 else found


def model_of(cell: Cell, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[cell.model]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    # Biases of zero hide that one of them was taken for another.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.02)
    return model.double() if cell.dtype == "fp64" else model


def tokens(steps: int = STEPS) -> Tensor:
    """(steps, micro-batches, samples, tokens)."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 60, (max(steps, STEPS), ACCUMULATION, BATCH, LENGTH), generator=generator)


@dataclass
class Outcome:
    """What a rank saw of a run.

    Attributes:
        whole: The model's weights at the end, put together by DeepSpeed.
        losses: Losses of every micro-batch.
        norms: Norms of the gradients of every step.
        extra: What the test asked for.
    """

    whole: dict[str, np.ndarray]
    losses: list[float]
    norms: list[float]
    extra: Any = None


def engine_of(cell: Cell, world: int, **keywords: Any) -> Any:
    """Engine of a cell; call it on every rank."""
    get_accelerator().is_fp16_supported = lambda: True
    model = keywords.pop("model", None) or model_of(cell)
    engine, *_ = deepspeed.initialize(model=model, config=cell.config_on(world), **keywords)
    return engine


def train(engine: Any, first: int, last: int) -> tuple[list[float], list[float]]:
    """Steps [first, last) of an engine on its share of the batch: losses and gradient norms."""
    rank, ways = groups._get_data_parallel_rank(), groups._get_data_parallel_world_size()
    share, losses, norms = BATCH // ways, [], []
    for micros in tokens(last)[first:last]:
        for micro in micros:
            mine = micro[rank * share : (rank + 1) * share]
            loss = engine(input_ids=mine, labels=mine).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    return losses, norms


def whole_weights(engine: Any) -> dict[str, np.ndarray]:
    """The weights as one process has them, put together by DeepSpeed from all ranks."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    found = {}
    for module in engine.module.modules():
        own = {key: value for key, value in module._parameters.items() if value is not None}
        partitioned = any(hasattr(value, "ds_id") for value in own.values())
        with deepspeed.zero.GatheredParameters(list(own.values())) if partitioned else nullcontext():
            copies = {key: nn.Parameter(value.detach().clone()) for key, value in own.items()}
        if isinstance(module, TensorParallel_Layer):
            module._parameters.update(copies)  # it knows its bias by identity
            module.gather_params(list(copies.values()))
            module._parameters.update(own)
        for key, value in copies.items():
            wide = value.detach().to(torch.promote_types(value.dtype, torch.float32))
            found[names[id(own[key])]] = wide.numpy().copy()
    return found


def run(rank: int, world: int, cells: list[Cell], ask: Callable[[Any], Any] | None = None) -> list[Outcome]:
    """Train cells one after the other in one set of processes."""
    found = []
    for cell in cells:
        with in_float64() if cell.dtype == "fp64" else nullcontext():
            engine = engine_of(cell, world)
            losses, norms = train(engine, 0, cell.steps)
            extra = None if ask is None else ask(engine)
            found.append(Outcome(whole_weights(engine), losses, norms, extra))
            engine.destroy()
    return found


def one_process(cell: Cell, factor: float = 1.0, noise: float = 0.0) -> tuple[dict[str, np.ndarray], Outcome]:
    """First weights, and what plain PyTorch makes of them.

    Args:
        cell: What is trained.
        factor: Factor of the gradients, before they are clipped.
        noise: Relative error of every element of them, to learn how the rule answers to rounding.
    """
    generator = torch.Generator().manual_seed(0)
    model = model_of(cell)
    first = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    annotate(model)
    if cell.name == REFERENCE:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=REFERENCE_PARAMS["lr"])
    else:
        optimizer = build(cell.name, list(model.parameters()), **cell.block["params"])
    captured = getattr(optimizer, "needs_capture", False)
    if captured:
        optimizer.capture(model)
    losses, norms = [], []
    for micros in tokens(cell.steps)[: cell.steps]:
        optimizer.zero_grad()
        for micro in micros:
            loss = model(input_ids=micro, labels=micro).loss
            (loss * (factor / ACCUMULATION)).backward()
            if captured:
                optimizer.record_loss(loss)
            losses.append(float(loss.detach()))
        for parameter in model.parameters() if noise else ():
            assert parameter.grad is not None
            parameter.grad *= 1 + noise * torch.randn(parameter.shape, generator=generator)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
    last = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return first, Outcome(last, losses, norms)
