"""The packaged files, made from one table: ``python -m rankwise.configs`` writes them anew."""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rankwise.names import BY_NAME, BY_SPELLING, LISTENERS, READY, Named

__all__ = ["OPTIMIZERS", "STAGES", "VALUES", "contents", "deepspeed_text", "write"]

OPTIMIZERS: dict[str, str] = {"adamw": "AdamW", **{spelling.lower(): spelling for spelling in BY_SPELLING}}
"""File stem -> DeepSpeed ``"type"``. ``adamw`` is DeepSpeed's own baseline, the rest are ours."""


def _hear_of_name(spelling: str, named: Named | None) -> None:
    """Know what is registered later, or forget it; see :func:`rankwise.names.register`."""
    OPTIMIZERS.pop(spelling.lower(), None)
    if named is not None:
        OPTIMIZERS[spelling.lower()] = spelling


LISTENERS.append(_hear_of_name)

STAGES: tuple[int, ...] = (0, 1, 2, 3)
"""The ZeRO stages there is a folder for."""

_ADAMW = {"lr": 0.003, "betas": [0.9, 0.95], "eps": 1e-08, "weight_decay": 0.1, "torch_adam": True}
VALUES: Mapping[str, Mapping[str, Any]] = ChainMap({"adamw": _ADAMW}, READY)
"""Options of each optimizer, for the small model of ``rankwise train``."""

_CLIP = 1.0
_SOURCE = (
    "Any number of GPUs. Hyperparameters: not published; for the small model of rankwise train (4 x 192, some hundred "
    "steps), to be searched anew for yours."
)
_TRAINERS = "Any number of GPUs. Hyperparameters: lr and weight_decay are the Trainer's, the others the type's own."


def deepspeed_text(name: str, stage: int) -> str:
    """The file of an optimizer at a ZeRO stage; registered ones have none, but would have this one."""
    config = {
        "_comment": _SOURCE,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": _CLIP,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": OPTIMIZERS[name], "params": VALUES[name]},
    }
    text = json.dumps(config, indent=2)
    # Pairs of numbers in one line.
    return re.sub(r"\[\s+([^\]]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _huggingface(name: str) -> str:
    """What the Trainer and accelerate both fill in is theirs; betas and eps are the type's own if nobody names them.

    So is gamma, which goes with the betas.
    """
    kept = {key: value for key, value in VALUES[name].items() if key not in ("betas", "eps", "gamma")}
    config = {
        "_comment": _TRAINERS,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": OPTIMIZERS[name], "params": {**kept, "lr": "auto", "weight_decay": "auto"}},
    }
    return json.dumps(config, indent=2) + "\n"


def _megatron(name: str) -> str:
    """Return a type's values as flags: some are Megatron's own, the others begin with the name of the class."""
    values = dict(VALUES[name])
    lines = {
        "optimizer": name if name in BY_NAME else "adam",
        "lr": values.pop("lr"),
        "weight-decay": values.pop("weight_decay"),
        "clip-grad": _CLIP,
    }
    if name in BY_NAME:
        lines |= {BY_NAME[name].optimizer.options_type.flag(key): value for key, value in values.items()}
    else:
        first, second = values["betas"]
        lines |= {"adam-beta1": first, "adam-beta2": second, "adam-eps": values["eps"]}
    flags = "".join(f"{key}: {value}\n" for key, value in lines.items())
    return f"# {_SOURCE}\n{flags}use-distributed-optimizer: true\n"


def contents() -> Iterator[tuple[str, str]]:
    """Every file: its path below the package, and its text."""
    for name in OPTIMIZERS:
        yield f"megatron/{name}.yaml", _megatron(name)
        yield f"huggingface/{name}.json", _huggingface(name)
        for stage in STAGES:
            yield f"deepspeed/zero{stage}/{name}.json", deepspeed_text(name, stage)


def write(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    """Write every file.

    Args:
        folder: The package's, or another one.
        files: Their paths below it, and their texts.
    """
    for name, text in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
