"""Small Hugging Face models, trained by accelerate on ranks, or by the plain loop in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate_on_cpu import accept_cpu
from sharded_models import whole
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import rankwise
from rankwise import MARS, MKOR, LDAdam, SONew

VOCABULARY, LENGTH = 32, 8
CLASSES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "mars-adamw": (MARS, {}),
    "mars-m": (MARS, {"variant": "muon", "ns_dtype": "float32"}),
    "sonew": (SONew, {"eps": 1e-3}),
    "ldadam": (LDAdam, {"rank": 2}),
    "mkor": (MKOR, {"update_interval": 1, "factor_dtype": "float32"}),
}
OURS = [case for case in CLASSES if case != "adamw"]
Weights = dict[str, Tensor]


def _decoder(config: Any, model: Any, **changed: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4}
    given = {**sizes, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, **changed}
    built: nn.Module = model(config(**given))
    return built


def _gpt2() -> nn.Module:
    """``Conv1D``, fused q, k and v, a tied head."""
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    none = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=0, eos_token_id=0))


def _bert() -> nn.Module:
    """A class for every token: the head for masked words is one that accelerate cannot shard, its bias being tied."""
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return _decoder(BertConfig, BertForTokenClassification, **none, num_labels=VOCABULARY)


class _Adapted(nn.Module):
    """A frozen linear layer with a low-rank sum that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 8, bias=False)
        self.lora_B = nn.Linear(8, base.out_features, bias=False)
        nn.init.normal_(self.lora_B.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def _adapted() -> nn.Module:
    """All frozen but adapters."""
    model = _decoder(LlamaConfig, LlamaForCausalLM).requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, _Adapted(getattr(layer.self_attn, name)))
    return model


def _frozen_embeddings() -> nn.Module:
    model = _decoder(LlamaConfig, LlamaForCausalLM)
    model.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": lambda: _decoder(LlamaConfig, LlamaForCausalLM),
    "llama-tied": lambda: _decoder(LlamaConfig, LlamaForCausalLM, tie_word_embeddings=True),
    "qwen": lambda: _decoder(Qwen2Config, Qwen2ForCausalLM),
    "bert": _bert,
    "adapted": _adapted,
    "frozen-embeddings": _frozen_embeddings,
}


def built(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights wherever it is called."""
    torch.manual_seed(0)
    return MODELS[kind]().to(dtype).train()


def optimizer_of(case: str, model: nn.Module, **options: Any) -> Any:
    """With the weight decay of matrices alone, as the Trainer has it."""
    kind, own = CLASSES[case]
    if case != "adamw":
        rankwise.annotate(model)
    if next(model.parameters()).dtype == torch.float64:
        own = {**own, **{name: "float64" for name in ("ns_dtype", "factor_dtype") if name in own}}
    decayed = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    others = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = kind([group for group in groups if group["params"]], lr=1e-2, **{**own, **options})
    if case == "mkor":
        optimizer.capture(model)
    return optimizer


def batch(step: int, rank: int, world: int, rows: int = 5) -> Tensor:
    """Tokens of one rank's micro-batch; some ranks have a row less where they do not divide the rows."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)[rank::world].contiguous()


def alone(case: str, kind: str, steps: int, dtype: torch.dtype, micro: int = 1, clip: float = 0.0) -> Weights:
    """The loop of two ranks in one process: the mean of their mean losses."""
    model = built(kind, dtype)
    optimizer = optimizer_of(case, model)
    for step in range(steps):
        for number in range(micro * step, micro * (step + 1)):
            for rank in range(2):
                tokens = batch(number, rank, 2)
                (model(input_ids=tokens, labels=tokens).loss / (2 * micro)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def weights_of(model: nn.Module) -> Weights:
    """Whole, by the names that the model had before it was wrapped."""
    named = ((name.replace("_checkpoint_wrapped_module.", ""), value) for name, value in model.named_parameters())
    return {name: whole(value) for name, value in named}


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], kind: str) -> float:
    """The largest of any weight, of the largest change since the beginning."""
    begin = {name: value.detach().to(torch.float64) for name, value in built(kind).named_parameters()}
    assert found.keys() == expected.keys()
    largest = max(float((value - begin[name]).abs().max()) for name, value in expected.items())
    gaps = torch.stack([(found[name].double() - value.double()).abs().max() for name, value in expected.items()])
    return float(gaps.nan_to_num(nan=torch.inf).max()) / largest


class Accelerated:
    """One rank's training by accelerate.

    Args:
        case: One of `CLASSES`.
        kind: One of `MODELS`.
        dtype: Type of the weights.
        micro: Micro-batches of a step.
        clip: Clip of the gradients' norm; 0: none.
        mixed: Type of the computation, as accelerate names it.
        plugin: Of the plugin.
    """

    def __init__(
        self,
        case: str,
        kind: str,
        dtype: torch.dtype = torch.float32,
        micro: int = 1,
        clip: float = 0.0,
        mixed: str = "no",
        **plugin: Any,
    ) -> None:
        from accelerate import Accelerator
        from accelerate.utils import FullyShardedDataParallelPlugin

        accept_cpu()
        given: dict[str, Any] = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", **plugin}
        if kind == "bert":
            # By itself accelerate takes the embeddings for a layer, and then shards what is in them once more.
            given["transformer_cls_names_to_wrap"] = ["BertLayer"]
        self.accelerator = Accelerator(
            mixed_precision=mixed,
            gradient_accumulation_steps=micro,
            fsdp_plugin=FullyShardedDataParallelPlugin(**given),
        )
        model = built(kind, dtype)
        optimizer = optimizer_of(case, model)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.micro, self.clip, self.count = micro, clip, 0

    def train(self, steps: int, rows: int = 5) -> Accelerated:
        """So many steps."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        for number in self._micro_batches(steps):
            tokens = batch(number, rank, world, rows)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(input_ids=tokens, labels=tokens).loss)
                if self.clip and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def _micro_batches(self, steps: int) -> Iterator[int]:
        first = self.micro * self.count
        self.count += steps
        yield from range(first, self.micro * self.count)

    def weights(self) -> Weights:
        """See :func:`weights_of`."""
        return weights_of(self.model)
