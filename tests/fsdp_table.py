"""Figures of FSDP2's parity tests in a file, where one is asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["write_down"]


def write_down(rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows, as lines of JSON, to the file that ``RANKWISE_FSDP_TABLE`` names, if it names one.

    Args:
        rows: ``type``, ``layout``, ``precision`` (``frameworks`` where those are compared) and figures.
    """
    path = os.environ.get("RANKWISE_FSDP_TABLE")
    if path:
        with Path(path).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
