"""Ready DeepSpeed JSON files, one per optimizer and ZeRO stage, and Megatron flags, one YAML file per optimizer.

Installed as ``rankwise.configs``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .for_models import MODELS
from .making import OPTIMIZERS, STAGES, deepspeed_text

__all__ = [
    "MODELS",
    "OPTIMIZERS",
    "STAGES",
    "deepspeed_config",
    "deepspeed_config_path",
    "megatron_config_path",
    "model_config_path",
    "trainer_config_path",
]


def deepspeed_config_path(optimizer: str, stage: int = 2) -> Path:
    """Path of the packaged DeepSpeed JSON of an optimizer at a ZeRO stage.

    Args:
        optimizer: name as in :data:`OPTIMIZERS`, in any case (``"mkor"``, ``"MARS-M"``).
        stage: ZeRO stage, 0 to 3.

    Returns:
        The file's path; the package is always installed as plain files.

    Raises:
        ValueError: if there is no such optimizer or stage.
    """
    name = _known(optimizer)
    if stage not in STAGES:
        raise ValueError(f"stage is {stage!r}: ZeRO has the stages 0, 1, 2 and 3; pass one of these")
    return Path(__file__).resolve().parent / "deepspeed" / f"zero{stage}" / f"{name}.json"


def deepspeed_config(optimizer: str, stage: int = 2) -> dict[str, Any]:
    """The packaged DeepSpeed configuration of an optimizer at a ZeRO stage, as a dict; of a registered one, too.

    Args:
        optimizer: name as in :data:`OPTIMIZERS`, in any case.
        stage: ZeRO stage, 0 to 3.

    Raises:
        ValueError: if there is no such optimizer or stage.
    """
    name = deepspeed_config_path(optimizer, stage).stem
    config: dict[str, Any] = json.loads(deepspeed_text(name, stage))
    return config


def megatron_config_path(optimizer: str) -> Path:
    """Path of the packaged flags of an optimizer, for ``rankwise megatron --config``.

    Args:
        optimizer: name as in :data:`OPTIMIZERS`, in any case; ``adamw`` is Megatron's own ``--optimizer adam``.

    Raises:
        ValueError: if there is no such optimizer.
    """
    return Path(__file__).resolve().parent / "megatron" / f"{_known(optimizer)}.yaml"


def trainer_config_path(optimizer: str) -> Path:
    """Path of the packaged DeepSpeed JSON in which the Trainer, or accelerate, fills in what is ``"auto"``.

    Args:
        optimizer: name as in :data:`OPTIMIZERS`, in any case.

    Raises:
        ValueError: if there is no such optimizer.
    """
    return Path(__file__).resolve().parent / "huggingface" / f"{_known(optimizer)}.json"


def model_config_path(model: str, optimizer: str, framework: str = "deepspeed") -> Path:
    """Path of the packaged configuration of an optimizer for a model of a usual size.

    Args:
        model: ``"gpt2-small"``, ``"llama-8b"`` ...: a folder below ``models``.
        optimizer: name as in :data:`OPTIMIZERS`, in any case; ``"mars"`` by the name of a variant.
        framework: ``"deepspeed"``, for a JSON, or ``"megatron"``, for a YAML of flags.

    Raises:
        ValueError: if there is no such file.
    """
    endings = {"deepspeed": "json", "megatron": "yaml"}
    for what, given, known in (("model", model, MODELS), ("framework", framework, endings)):
        if given not in known:
            raise ValueError(f"{what} is {given!r}: it must be one of {', '.join(known)}")
    name = _known(optimizer)
    if name == "mars":
        raise ValueError("optimizer is 'mars': it must be one of mars-adamw, mars-lion, mars-shampoo, mars-m")
    return Path(__file__).resolve().parent / "models" / model / f"{name}.{endings[framework]}"


def _known(optimizer: str) -> str:
    name = optimizer.lower()
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer is {optimizer!r}: it must be one of {', '.join(OPTIMIZERS)}")
    return name
