"""Configurations for models of usual sizes, after published runs: ``models/<model>/<optimizer>.json`` and ``.yaml``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from rankwise.names import BY_NAME, PUBLISHED_MARS

from .making import OPTIMIZERS, VALUES

__all__ = ["MODELS", "Model", "Recipe", "contents", "recipe"]


class Model(NamedTuple):
    """A model, the run that its files describe, and AdamW's hyperparameters for it.

    Attributes:
        gpus: Gpus of the whole run.
        stage: ZeRO's.
        shape: Megatron's flags of the model; heads of keys and values are left out where all heads have their own.
        seq_len: Tokens of a sample.
        micro_batch: Samples of a GPU's pass.
        batch: Samples of a step.
        steps: Steps of the whole schedule.
        warmup: Steps of it in which the rate rises.
        lr: AdamW's.
        source: Where AdamW's hyperparameters are from.
        betas: AdamW's.
        weight_decay: AdamW's.
        parallel: Megatron's flags of parallelism.
    """

    gpus: int
    stage: int
    shape: Mapping[str, Any]
    seq_len: int
    micro_batch: int
    batch: int
    steps: int
    warmup: int
    lr: float
    source: str
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    parallel: Mapping[str, int] = MappingProxyType({})

    def accumulation(self, batch: int) -> int:
        """Micro-batches of a step under DeepSpeed, where every GPU has samples of its own."""
        return batch // (self.micro_batch * self.gpus)


_MARS, _MARS_M, _MKOR = "arXiv 2411.10438", "MARS-M's repository, README", "arXiv 2306.01685, BERT's phase 2"
_LLAMA = "arXiv 2407.21783, table 3; betas and decay: arXiv 2307.09288"


def _gpt2(layers: int, hidden: int, heads: int, gpus: int, micro_batch: int, lr: float) -> Model:
    shape = {"num-layers": layers, "hidden-size": hidden, "num-attention-heads": heads, "ffn-hidden-size": 4 * hidden}
    shape["vocab-size"] = 50_257
    return Model(gpus, 1, shape, 1024, micro_batch, 480, 100_000, 2000, lr, f"{_MARS}, its baseline")


def _llama(layers: int, hidden: int, heads: int, ffn: int, tied: bool = False, experts: int = 0) -> dict[str, Any]:
    return {
        **{"num-layers": layers, "hidden-size": hidden, "num-attention-heads": heads, "ffn-hidden-size": ffn},
        **{"group-query-attention": True, "num-query-groups": 8, "swiglu": True, "disable-bias-linear": True},
        **{"normalization": "RMSNorm", "position-embedding-type": "rope", "rotary-base": 500_000},
        "vocab-size": 32_000 if experts else 128_256,
        **({} if tied else {"untie-embeddings-and-output-weights": True}),
        **({"num-experts": experts, "moe-router-topk": 2} if experts else {}),
    }


_BERT = {
    "num-layers": 24,
    "hidden-size": 1024,
    "num-attention-heads": 16,
    "ffn-hidden-size": 4096,
    "vocab-size": 30_522,
}
_TENSORS, _STAGES, _EXPERTS = (f"{kind}-model-parallel-size" for kind in ("tensor", "pipeline", "expert"))
_TINY = "arXiv 2401.02385, of as many parameters"
_MIXTRAL = "not published; arXiv 2307.09288's of 13 B, as many as a token meets"

MODELS: Mapping[str, Model] = {
    "gpt2-small": _gpt2(12, 768, 12, 8, 15, 6e-4),
    "gpt2-medium": _gpt2(24, 1024, 16, 16, 15, 3e-4),
    "gpt2-large": _gpt2(36, 1280, 20, 32, 15, 2e-4),
    "gpt2-xl": _gpt2(48, 1600, 25, 32, 5, 2e-4),
    "llama-1b": Model(32, 2, _llama(16, 2048, 32, 8192, tied=True), 2048, 8, 1024, 100_000, 2000, 4e-4, _TINY),
    "llama-8b": Model(
        *(64, 2, _llama(32, 4096, 32, 14336), 4096, 2, 1024, 250_000, 8000, 3e-4, _LLAMA), parallel={_TENSORS: 2}
    ),
    "llama-70b": Model(
        *(1024, 3, _llama(80, 8192, 64, 28672), 4096, 1, 1024, 250_000, 8000, 1.5e-4, _LLAMA),
        parallel={_TENSORS: 8, _STAGES: 8},
    ),
    "mixtral-8x7b": Model(
        *(256, 3, _llama(32, 4096, 32, 14336, experts=8), 4096, 1, 1024, 250_000, 8000, 3e-4, _MIXTRAL),
        parallel={_STAGES: 4, _EXPERTS: 8},
    ),
    "bert-large": Model(
        *(64, 1, _BERT, 512, 4, 256, 1_000_000, 10_000, 1e-4, "arXiv 1810.04805, appendix A.2"), (0.9, 0.999), 0.01
    ),
}
"""By the name of the folder; those that ``rankwise plan`` knows have its names."""


class Recipe(NamedTuple):
    """An optimizer's hyperparameters for a model.

    Attributes:
        params: The JSON's.
        batch: Samples of a step.
        steps: Steps of the schedule.
        warmup: Warmup of it.
        source: Where they are from.
    """

    params: Mapping[str, Any]
    batch: int
    steps: int
    warmup: int
    source: str


_PUBLISHED: Mapping[tuple[str, str], tuple[Mapping[str, Any], str]] = {
    **{
        (f"gpt2-{size}", "mars-adamw"): ({"lr": lr, "weight_decay": 0.01}, _MARS)
        for size, lr in (("small", 6e-3), ("medium", 3e-3), ("large", 2e-3), ("xl", 2e-3))
    },
    **{
        (f"gpt2-{size}", "mars-m"): ({"lr": lr, "weight_decay": 0.1}, _MARS_M)
        for size, lr in (("small", 6e-3), ("medium", 5e-3), ("large", 5e-3), ("xl", 3e-3))
    },
    **{
        ("bert-large", name): ({"lr": 4e-3, "backend": "lamb", "betas": [0.9, 0.999], "weight_decay": 0.01}, _MKOR)
        for name in ("mkor", "mkor-h")
    },
}
_ADAMWS = ("sonew", "mkor", "mkor-h")
"""Types that begin with AdamW's rate: their steps have its length, or it steps behind the preconditioner."""


def recipe(model: str, name: str) -> Recipe:
    """What the files of an optimizer say for a model.

    Args:
        model: One of :data:`MODELS`.
        name: Name of the optimizer.
    """
    known = MODELS[model]
    batch, steps, warmup = known.batch, known.steps, known.warmup
    ready = dict(VALUES[name])
    if name.startswith("mars"):
        ready |= PUBLISHED_MARS  # those of small models and short runs differ
    if name == "ldadam":
        ready["rank"] = int(known.shape["hidden-size"]) // 4
    own: dict[str, Any] = {"lr": known.lr, "betas": list(known.betas), "weight_decay": known.weight_decay}
    ratio = ready["lr"] / VALUES["adamw"]["lr"]
    if name == "adamw":
        source = known.source
    elif (model, name) in _PUBLISHED:
        own, source = dict(_PUBLISHED[model, name][0]), _PUBLISHED[model, name][1]
        if source == _MKOR:  # A run of its own, from a checkpoint of another one.
            batch, steps, warmup = 32_768, 1563, 200
    elif name in _ADAMWS:
        source = "not published; AdamW's, as a place to begin"
        if name == "sonew":
            del own["betas"]
    else:
        own = {"lr": float(f"{known.lr * ratio:.2g}")}
        source = f"not published; {ratio:.2g} times AdamW's, as in the ready files"
    return Recipe({**ready, **own}, batch, steps, warmup, source)


def _source(known: Model, found: Recipe) -> str:
    return f"{known.gpus} GPUs. Hyperparameters: {found.source}."


def _deepspeed(model: str, name: str) -> str:
    known, found = MODELS[model], recipe(model, name)
    config = {
        "_comment": _source(known, found),
        "train_micro_batch_size_per_gpu": known.micro_batch,
        "gradient_accumulation_steps": known.accumulation(found.batch),
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": known.stage},
        "optimizer": {"type": OPTIMIZERS[name], "params": dict(found.params)},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                **{"total_num_steps": found.steps, "warmup_num_steps": found.warmup},
                **{"warmup_min_ratio": 0.0, "cos_min_ratio": 0.1},
            },
        },
    }
    return json.dumps(config, indent=1) + "\n"


def _megatron(model: str, name: str) -> str:
    known, found = MODELS[model], recipe(model, name)
    params = dict(found.params)
    lr, decay = params.pop("lr"), params.pop("weight_decay")
    if name in BY_NAME:
        own = {BY_NAME[name].optimizer.options_type.flag(key): value for key, value in params.items()}
    else:
        first, second = params["betas"]
        own = {"adam-beta1": first, "adam-beta2": second, "adam-eps": params["eps"]}
    flags = {
        **{"optimizer": name if name in BY_NAME else "adam", "lr": lr, "min-lr": float(f"{lr / 10:.3g}")},
        **{"weight-decay": decay, "clip-grad": 1.0, **own, "use-distributed-optimizer": True, "bf16": True},
        **{"lr-decay-style": "cosine", "train-iters": found.steps, "lr-warmup-iters": found.warmup},
        **{"micro-batch-size": known.micro_batch, "global-batch-size": found.batch, "seq-length": known.seq_len},
        **{"max-position-embeddings": known.seq_len, **known.shape, **known.parallel},
    }
    head = f"# {_source(known, found)}\n"
    # As JSON, which YAML is, but for bare words.
    return head + "".join(
        f"{key}: {value if isinstance(value, str) else json.dumps(value)}\n" for key, value in flags.items()
    )


def contents() -> Iterator[tuple[str, str]]:
    """Every file: its path below the package, and its text."""
    for model in MODELS:
        for name in OPTIMIZERS:
            if name == "mars":  # with a variant's name each
                continue
            yield f"models/{model}/{name}.json", _deepspeed(model, name)
            yield f"models/{model}/{name}.yaml", _megatron(model, name)
    yield "models/README.md", _page()


_HEAD = """# Configurations for models

This folder has configurations for models of usual sizes: `MODEL/OPTIMIZER.json` for DeepSpeed and
`MODEL/OPTIMIZER.yaml` for Megatron (`rankwise megatron --config`; add your data, tokenizer and checkpoints).
**None of these runs has been made with rankwise.** Rates are the published ones, if there are any; others are places to
begin a search. The column *source* says which. All runs clip at 1.0, rise linearly and fall along a cosine to a tenth,
whatever the published schedule was.

To see what a run holds, sends and costs, run `rankwise plan --config models/llama-8b/mkor.json --model llama-8b
--ranks 64`, or `rankwise plan --config models/llama-8b/mkor.yaml --ranks 64`, where the file names the model.
[docs/model-plans.md](../../docs/model-plans.md) has the answers for all of them. `python -m rankwise.configs` writes
the files from the table in `for_models.py`.
"""


def _page() -> str:
    lines = [_HEAD]
    for model, known in MODELS.items():
        ways = "".join(f", {key.partition('-')[0]} parallelism {size}" for key, size in known.parallel.items())
        lines.append(
            f"\n## {model}\n\n{known.gpus} GPUs, {known.seq_len} tokens a sample. DeepSpeed: ZeRO-{known.stage}. "
            f"Megatron: distributed optimizer{ways}.\n\n"
            "| optimizer | lr | weight decay | samples of a step | steps | source |\n|---|---|---|---|---|---|\n"
        )
        for name in OPTIMIZERS:
            if name != "mars":
                found = recipe(model, name)
                cells = (name, found.params["lr"], found.params["weight_decay"], f"{found.batch:,}", f"{found.steps:,}")
                lines.append(f"| {' | '.join(map(str, cells))} | {found.source} |\n")
    return "".join(lines)
