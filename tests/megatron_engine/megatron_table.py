"""Figures of the parity tests in a file, where one is asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["write_down"]


def write_down(rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to the file that ``RANKWISE_MEGATRON_TABLE`` names, if it names one.

    Args:
        rows: ``type``, ``layout``, ``precision`` (``frameworks`` where two frameworks are compared) and figures.
    """
    name = os.environ.get("RANKWISE_MEGATRON_TABLE")
    if name:
        path = Path(name)
        known = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*known, *rows], indent=1))
