"""This module reads a YAML file of command-line flags, for programs that read no file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__all__ = ["read_flags"]


def read_flags(path: Path) -> list[str]:
    """Return the flags of a file, in its order, to be put before typed flags, which then count.

    Args:
        path: Flat YAML mapping from flags without their dashes to values: ``lr: 0.01`` is ``--lr 0.01``,
            ``mkor-betas: [0.9, 0.95]`` is ``--mkor-betas 0.9 0.95``, true is the bare flag, false is ``--no-...`` and
            null the word ``none``.

    Raises:
        ValueError: The file is no such mapping.
    """
    yaml = importlib.import_module("yaml")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"config is {str(path)!r}, which is no readable YAML file: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"config is {str(path)!r}, which holds no mapping of flags to values")
    return [word for key, value in values.items() for word in _words(path, str(key), value)]


def _words(path: Path, key: str, value: Any) -> list[str]:
    flag = f"--{key.removeprefix('--')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    parts = value if isinstance(value, list) else [value]
    if any(isinstance(part, dict | list) for part in parts):
        raise ValueError(
            f"config is {str(path)!r}: {key!r} is {value!r}, and it must be a number, a text or a flat list"
        )
    return [flag, *("none" if part is None else str(part) for part in parts)]
