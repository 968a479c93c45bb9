"""The page of what the packaged configurations for models will hold, send and cost, by ``rankwise plan``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rankwise.configs import MODELS, OPTIMIZERS, model_config_path
from rankwise.launch.planning.asked import Question, answered
from rankwise.launch.planning.costs import cost
from rankwise.launch.planning.described import KNOWN
from rankwise.launch.planning.devices import Links, device_of

__all__ = ["plans_page", "section_of"]

_HEAD = """# What the configurations for models will hold and cost

Written by `python -m benchmarks plans` at {commit}: each file of [configs/models](../configs/models/README.md) given to
`rankwise plan`, on as many GPUs as that page says, eight to a node. *State* is the optimizer's on the fullest rank, in
GiB, with AdamW's beside it, and its ratio to the mean of the ranks; *sent* what the optimizer sends from a rank in a
step, in MiB; *share* of a whole training step on H100s, from data sheets, nothing overlapped. **Computed, not
measured.** A dash: the plan refuses such a run, or does not know Megatron's model.
"""
_SHAPE = {"vocab_size": 30_522, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
_BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "intermediate_size": 4096, **_SHAPE}


def plans_page(commit: str) -> str:
    """The whole page.

    Args:
        commit: Of the code that plans.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _HEAD.format(commit=commit) + "".join(section_of(model, Path(folder)) for model in MODELS)


def section_of(model: str, folder: Path) -> str:
    """The table of one model.

    Args:
        model: One of :data:`MODELS`.
        folder: An empty one, for what describes a model that the plan does not know.
    """
    bert = folder / "config.json"
    bert.write_text(json.dumps(_BERT))
    columns = ["state", "AdamW's", "over the mean", "sent", "share"]
    both = [f"{framework}: {column}" for framework in ("DeepSpeed", "Megatron") for column in columns]
    head = " | ".join(["optimizer", *both])
    lines = [f"\n## {model}: {MODELS[model].gpus} GPUs\n\n| {head} |\n|{'---|' * (1 + len(both))}\n"]
    for name in OPTIMIZERS:
        if name not in ("adamw", "mars"):
            described = model if model in KNOWN else str(bert)
            run = {"ranks": MODELS[model].gpus, "seq_len": MODELS[model].seq_len}
            ds = _cells(Question(model_config_path(model, name), model=described, **run))
            flags = Question(model_config_path(model, name, "megatron"), **run)
            megatron = _cells(flags) if model in KNOWN else ["-"] * 5
            lines.append(f"| {' | '.join([name, *ds, *megatron])} |\n")
    return "".join(lines)


def _cells(question: Question) -> list[str]:
    return list(_figures(question))


def _figures(question: Question) -> Iterator[str]:
    try:
        asked = answered(question)
        found = asked.figures()
    except ValueError:
        yield from ["-"] * 5
        return
    states = found.states()
    yield f"{max(states) / 2**30:.3f}"
    yield f"{max(found.adamw) / 2**30:.3f}"
    yield f"{found.fullest:.2f}"
    yield f"{max(rank.bytes_sent for rank in found.ranks) / 2**20:,.1f}"
    yield f"{cost(found, device_of('H100'), Links(8, 300.0, 50.0, 20e-6), asked.tokens, 0.4).share:.1%}"
