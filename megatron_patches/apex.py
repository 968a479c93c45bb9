"""This module tells NVIDIA's apex, which Megatron can use, from an unrelated PyPI package. Neither is needed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Literal, NamedTuple

__all__ = ["Apex", "detect_apex"]


class Apex(NamedTuple):
    """The package that is installed under the name ``apex``.

    Attributes:
        kind: ``"absent"``; ``"nvidia"`` with compiled kernels; ``"nvidia-python-only"`` without them; ``"other"`` for a
            package that is not NVIDIA's.
        message: The kind in words for a user, with what to do about it.
    """

    kind: Literal["absent", "nvidia", "nvidia-python-only", "other"]
    message: str

    @property
    def is_usable(self) -> bool:
        """Whether Megatron's fused kernels can come from it."""
        return self.kind == "nvidia"


_ABSENT = Apex("absent", "apex is not installed; it is not needed")
_NVIDIA = Apex("nvidia", "NVIDIA's apex with its compiled kernels")
_PYTHON_ONLY = Apex(
    "nvidia-python-only",
    "NVIDIA's apex was built without its compiled kernels (there is no amp_C): its fused optimizers fail when called; "
    "rebuild it with --cpp_ext and --cuda_ext, or uninstall it",
)
_OTHER = Apex(
    "other",
    "the installed package 'apex' is not NVIDIA's (there is no apex.optimizers.FusedAdam): Megatron takes it for "
    "NVIDIA's and fails while it builds layers; run 'pip uninstall apex'",
)


def detect_apex() -> Apex:
    """Look for NVIDIA's apex; imports it only if something of that name is installed."""
    if importlib.util.find_spec("apex") is None:
        return _ABSENT
    try:
        optimizers = importlib.import_module("apex.optimizers")
    except Exception:  # An unrelated package may raise any error while it is imported.
        return _OTHER
    if not hasattr(optimizers, "FusedAdam"):
        return _OTHER
    return _NVIDIA if importlib.util.find_spec("amp_C") is not None else _PYTHON_ONLY
