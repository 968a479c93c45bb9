"""The versions of DeepSpeed that this package works with; importing it refuses earlier ones."""

from __future__ import annotations

import deepspeed

__all__ = ["TESTED"]

TESTED = "deepspeed>=0.19.7,<0.20"
_OLDEST = (0, 19, 7)  # the first to say which part of a weight a rank has


def _refuse_earlier(version: str) -> None:
    parts = [part for part in version.split("+")[0].split(".")[:3] if part.isdecimal()]
    if tuple(map(int, parts)) < _OLDEST:
        raise ImportError(
            f"rankwise needs {TESTED}, and DeepSpeed {version} is installed, which does not say which part of a weight "
            f"each rank has; pip install '{TESTED}'"
        )


_refuse_earlier(deepspeed.__version__)
