"""Loader for the recorded reference trajectories in ``tests/golden``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

GOLDEN_DIR = Path(__file__).resolve().parent / "golden"


def load_golden(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return ``(meta, arrays)`` of ``golden/<name>.npz``: the parsed JSON header and fresh tensors by array name."""
    path = GOLDEN_DIR / f"{name.removesuffix('.npz')}.npz"
    if not path.is_file():
        known = sorted(p.stem for p in GOLDEN_DIR.glob("*.npz"))
        raise FileNotFoundError(f"no golden file {path.name!r} in {GOLDEN_DIR}; there are: {', '.join(known)}")
    with np.load(path, allow_pickle=False) as archive:
        meta: dict[str, Any] = json.loads(str(archive["meta"])) if "meta" in archive.files else {}
        arrays = {
            key: torch.from_numpy(np.array(archive[key])) for key in archive.files if archive[key].dtype.kind in "biuf"
        }
    return meta, arrays
