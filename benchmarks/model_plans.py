"""The page of what the packaged configurations for models will hold, send and cost, by ``rankwise plan``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap

from rankwise.configs import MODELS, OPTIMIZERS, deepspeed_config, model_config_path
from rankwise.launch.planning.costs import Cost, cost
from rankwise.launch.planning.devices import Links, device_of
from rankwise.launch.planning.model_shapes import KNOWN
from rankwise.launch.planning.plan_request import Asked, answered
from rankwise.launch.planning.question import Goal, Question
from rankwise.launch.planning.rank_figures import Figures

__all__ = ["COMM_DTYPES", "messages_of", "messages_section", "plans_page", "section_of"]

_HEAD = """# What the configurations for models will hold and cost

This page says how much memory, traffic and time `rankwise plan` computes for each file of
[configs/models](../configs/models/README.md). **All of this is computed, not measured.** The short answer:

{summary}

Each file is planned on the number of GPUs that its page gives, eight to a node, on H100s from data sheets:

- *state*: the optimizer's states on the fullest rank, in GiB, with AdamW's beside it;
- *over the mean*: the fullest rank's states over the mean of the ranks;
- *sent*: what the optimizer sends from a rank in a step, in MiB;
- *share*: the optimizer's share of a whole training step. Messages of one batch of matrices travel while others are
  computed, both at full speed.

A dash means that the plan refuses such a run, or does not know Megatron's model. Written by
`python -m benchmarks plans` at {commit}.
"""
_MESSAGES = """
## Messages: llama-8b, 64 GPUs, 262,144 tokens a step

`comm_dtype="int8"` takes a third off MARS-M's share. Of LDAdam's and MKOR's matrices ranks have
[slices](sharding.md#mkors-slices), which take less. The runs have the packaged options and ZeRO-3; the last line has
FSDP2. Times are milliseconds on H100s. *Messages* is their time if nothing else happened: sums and gathers go round a
ring, of which all network cards of a node carry a part. *Exposed* is what the device waits for them and for other
ranks of a batch. Gathers begin when gradients are there, and the next forward pass begins when all results are.

| type | comm_dtype | sent, MiB | matrix rule | element-wise | messages | hidden | exposed | step | share |
|---|---|---|---|---|---|---|---|---|---|
"""
_TYPES = {"mars-m": "MARS-M", "mkor": "MKOR", "ldadam": "LDAdam"}
_FEW = 5
"""Per cent of a training step."""
COMM_DTYPES = (None, "bfloat16", "int8")
"""Types in the table of messages."""
_SHAPE = {"vocab_size": 30_522, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
_BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "intermediate_size": 4096, **_SHAPE}


def plans_page(commit: str) -> str:
    """The whole page.

    Args:
        commit: Commit of the code that plans.
    """
    with tempfile.TemporaryDirectory() as folder:
        sections = [section_of(model, Path(folder)) for model in MODELS]
        return head_of(sections, commit) + "".join(sections) + messages_section(Path(folder))


def head_of(sections: Sequence[str], commit: str) -> str:
    """What stands above the tables.

    Args:
        sections: Of :func:`section_of`.
        commit: Commit of the code that plans.
    """
    plans: list[tuple[float, float, str]] = []
    for section in sections:
        title, *lines = section.strip().splitlines()
        for line in (line for line in lines if line.startswith("| ")):
            name, *cells = line.strip("| ").split(" | ")
            for framework, (state, adamw, _, _, share) in (("DeepSpeed", cells[:5]), ("Megatron", cells[5:])):
                if share.endswith("%"):
                    where = f"{name}, {title.removeprefix('## ').partition(':')[0]}, {framework}"
                    plans.append((float(share[:-1]), float(state) / float(adamw), where))
    most, _, whose = max(plans)
    few = sum(share <= _FEW for share, _, _ in plans)
    ratios = [ratio for _, ratio, _ in plans]
    summary = (
        f"In {few} of {len(plans)} plans the optimizer takes at most {_FEW} % of a training step, and the largest "
        f"share is {most} % ({whose}). The fullest rank holds {min(ratios):.1f} to {max(ratios):.1f} times AdamW's "
        "states."
    )
    return _HEAD.format(commit=commit, summary="\n".join(wrap(summary, 118, break_on_hyphens=False)))


def messages_section(folder: Path) -> str:
    """The table of what a step of one model waits for.

    Args:
        folder: For what is given to the plan.
    """
    lines = [_MESSAGES]
    runs = [(name, dtype, None) for name in _TYPES for dtype in COMM_DTYPES]
    for name, dtype, mesh in [*runs, ("ldadam", None, "dp=64")]:
        sent, one = messages_of(name, dtype, mesh, folder)
        times = (one.compute, one.memory, one.messages, one.hidden, one.exposed, one.total)
        shown = _TYPES[name] + (", FSDP2" if mesh else "")
        cells = [shown, dtype or "none", f"{sent / 2**20:,.1f}", *(f"{time:.2f}" for time in times), f"{one.share:.2%}"]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def messages_of(name: str, dtype: str | None, mesh: str | None, folder: Path) -> tuple[int, Cost]:
    """Bytes that the rank with most sends in a step of a type on 64 H100s, and what that costs.

    Args:
        name: Name of the type.
        dtype: In which its matrices travel.
        mesh: FSDP2's; None: ZeRO-3.
        folder: For what is given to the plan.
    """
    block = deepspeed_config(name)["optimizer"]
    block = {**block, "params": {**block["params"], "comm_dtype": dtype}}
    (folder / "run.json").write_text(json.dumps({"optimizer": block}))
    run = {"model": "llama-8b", "batch_tokens": 262_144}
    cut = {"ranks": 64, "stage": 3, "precision": "bf16"} if mesh is None else {"mesh": mesh}
    asked = answered(Question(folder / "run.json", **run, **cut))
    found = asked.figures()
    return max(rank.bytes_sent for rank in found.ranks), _cost(asked, found)


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
    yield f"{_cost(asked, found).share:.1%}"


def _cost(asked: Asked, found: Figures) -> Cost:
    return cost(found, device_of("H100"), Links(), asked.tokens, Goal.efficiency)
