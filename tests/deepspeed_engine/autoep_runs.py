"""Hugging Face models whose experts AutoEP shares out, trained by real DeepSpeed engines and by one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import deepspeed
import numpy as np
import torch
from autotp_runs import whole_weights
from deepspeed.checkpoint.constants import AUTOEP_PARAM_LOCAL_EXPERTS, DS_AUTOEP_UC_META
from ds_harness import REFERENCE, REFERENCE_PARAMS, TYPES
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM
from transformers.utils import output_capturing

from deepspeed_plugin.registry import build
from rankwise.routing.roles import annotate

BATCH, LENGTH, VOCABULARY, STEPS, ACCUMULATION = 4, 7, 32, 4, 2
CLIPPING = 0.5
"""Under the gradient norm of every step: clipping acts."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.0,
}
MODELS = {
    "mixtral": lambda experts: MixtralForCausalLM(
        MixtralConfig(**_SIZES, intermediate_size=12, num_local_experts=experts)
    ),
    # Beside the experts a shared one of linear layers, with a gate of its own.
    "qwen2_moe": lambda experts: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **_SIZES,
            num_experts=experts,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=20,
            intermediate_size=24,
            norm_topk_prob=True,
        )
    ),
}
SKETCH = "MKOR, sketch"
ATTENTION = {
    "use_default_specs": False,
    "layer_specs": [
        {
            "patterns": [r".*\.[qkv]_proj\.weight$", r".*shared_experts\.(gate|up)_proj\.weight$"],
            "partition_type": "column",
        },
        {"patterns": [r".*\.o_proj\.weight$", r".*shared_experts\.down_proj\.weight$"], "partition_type": "row"},
    ],
}
"""What AutoTP cuts; it knows none of the styles by which Hugging Face would cut experts."""
PARAMS: dict[str, dict[str, Any]] = {
    **TYPES,
    "LDAdam": {**TYPES["LDAdam"], "rank": 2},
    # At the tolerance of other tests an edge of an expert lies where rounding decides whether it is dropped.
    "SONew": {**TYPES["SONew"], "gamma": 0.2},
    SKETCH: {"rule": "sketch", "lr": 5e-3, "factor_dtype": "float32"},
    REFERENCE: REFERENCE_PARAMS,
}


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        name: JSON type, and behind a comma what tells a key of :data:`PARAMS` from others.
        model: A key of :data:`MODELS`.
        experts: Experts of each layer.
        stage: Stage of ZeRO.
        shared: Ranks that share the experts of a layer out.
        cut: Ranks of AutoTP, over which other weights are cut.
        config: Further keys of DeepSpeed's configuration.
        params: Params of the type, beside those of :data:`PARAMS`.
    """

    name: str
    model: str = "mixtral"
    experts: int = 4
    stage: int = 2
    shared: int = 2
    cut: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def block(self) -> dict[str, Any]:
        return {"type": self.name.partition(",")[0], "params": {**PARAMS[self.name], **self.params}}

    @property
    def clipping(self) -> float:
        """Largest norm of a step's gradients; 0, which is any, where DeepSpeed's norm lacks experts."""
        return CLIPPING if self.cut == 1 or self.stage == 3 else 0.0

    def config_on(self, world: int) -> dict[str, Any]:
        cut = {"tensor_parallel": {"autotp_size": self.cut, "partition_config": ATTENTION}} if self.cut > 1 else {}
        return {
            "train_micro_batch_size_per_gpu": BATCH * self.cut // world,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": self.clipping,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": self.stage},
            "expert_parallel": {
                "enabled": True,
                "autoep_size": self.shared,
                "preset_model": {"mixtral": "mixtral", "qwen2_moe": "qwen3_moe"}[self.model],
                "use_grouped_mm": False,
            },
            "optimizer": self.block,
            **cut,
            **self.config,
        }


def model_of(cell: Cell, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[cell.model](cell.experts)


def engine_of(cell: Cell, world: int, seed: int = 0, freeze: str | None = None) -> Any:
    """An engine; ``freeze`` names a weight of the experts, by AutoEP's name, that is not trained in the first layer."""
    model = model_of(cell, seed)
    if freeze is not None:
        source = {"w1": "gate_up_proj", "w2": "down_proj", "w3": "gate_up_proj"}[freeze]
        getattr(model.model.layers[0].mlp.experts, source).requires_grad_(False)
    return initialized(model, cell, world)


def initialized(model: nn.Module, cell: Cell, world: int, optimizer: Any = None) -> Any:
    """An engine around a model, with the optimizer of the configuration or a user's."""
    config = cell.config_on(world)
    if optimizer is not None:
        del config["optimizer"]
    # DeepSpeed 0.19.8 asks transformers 5.24 for router logits in a way that it does not know; none are asked for here.
    with mock.patch.object(output_capturing, "_CAN_RECORD_REGISTRY", None):
        return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]


def tokens() -> Tensor:
    """Tokens (steps, micro-batches, sequences, length)."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCABULARY, (STEPS, ACCUMULATION, BATCH, LENGTH), generator=generator)


def train(engine: Any, rank: int, world: int, steps: range = range(STEPS)) -> None:
    """Train on this rank's part of every batch."""
    ways = max(engine.autotp_size(), 1)  # that see the same tokens
    x, size, place = tokens(), BATCH * ways // world, rank // ways
    share = slice(place * size, (place + 1) * size)
    for step in steps:
        for micro in range(ACCUMULATION):
            mine = x[step, micro, share]
            engine.backward(engine(input_ids=mine, labels=mine).loss)
            engine.step()


class ApartExperts(nn.Module):
    """Experts with a weight for each factor, as AutoEP keeps them, computed as Hugging Face computes them."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)
        self.w1, self.w3 = nn.Parameter(gate.clone()), nn.Parameter(up.clone())
        self.w2 = nn.Parameter(experts.down_proj.detach().clone())

    def forward(self, h: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(h)
        for expert in range(len(self.w1)):
            token, place = torch.where(chosen == expert)
            inner = nn.functional.silu(h[token] @ self.w1[expert].T) * (h[token] @ self.w3[expert].T)
            result = result.index_add(0, token, inner @ self.w2[expert].T * weights[token, place, None])
        return result


def whole_model(cell: Cell) -> nn.Module:
    """The model of one process, in plain PyTorch."""
    model = model_of(cell)
    for layer in model.model.layers:
        layer.mlp.experts = ApartExperts(layer.mlp.experts)
    return model


def run_whole(cell: Cell, shares: int = 1) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Initial and final weights of one process of plain PyTorch.

    Args:
        cell: The run.
        shares: Into how many equal parts each micro-batch is cut: the same samples, their gradients rounded otherwise.
    """
    model = whole_model(cell)
    initial = named_weights(model)
    annotate(model)
    if cell.name == REFERENCE:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=PARAMS[cell.name]["lr"])
    else:
        block = cell.block
        optimizer = build(block["type"], list(model.parameters()), **block["params"])
    captured = getattr(optimizer, "needs_capture", False)
    if captured:
        optimizer.capture(model)
    x = tokens()
    for step in range(STEPS):
        model.zero_grad()
        for mine in (part for batch in x[step] for part in batch.chunk(shares)):
            loss = model(input_ids=mine, labels=mine).loss
            if captured:
                optimizer.record_loss(loss)
            (loss / (ACCUMULATION * shares)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), cell.clipping or float("inf"))
        optimizer.step()
    return initial, named_weights(model)


def named_weights(model: nn.Module) -> dict[str, np.ndarray]:
    """Whole weights by AutoEP's names, every expert apart."""
    found = {}
    for name, parameter in model.named_parameters():
        name = name.replace("mlp.gate.weight", "mlp.router.gate.weight").replace("shared_expert", "shared_experts")
        found |= _apart(name, parameter.detach().numpy().copy(), range(len(parameter)))
    return found


def weights_of(engine: Any) -> dict[str, np.ndarray]:
    """Whole weights of an engine, and the experts that this rank has of every stack."""
    meta = {name: getattr(weight, DS_AUTOEP_UC_META, {}) for name, weight in engine.module.named_parameters()}
    found = {}
    for name, values in whole_weights(engine).items():
        found |= _apart(name, values, meta[name].get(AUTOEP_PARAM_LOCAL_EXPERTS, ()))
    return found


def _apart(name: str, values: np.ndarray, experts: Iterable[int]) -> dict[str, np.ndarray]:
    if values.ndim != 3:
        return {name: values}
    return {f"{name}[{expert}]": weight for expert, weight in zip(experts, values, strict=True)}
