"""Settings shared by every test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Lets tests in sub-directories import the helpers that lie beside this file (golden_io).
_TESTS_DIR = str(Path(__file__).resolve().parent)
if _TESTS_DIR not in sys.path:
    sys.path.insert(0, _TESTS_DIR)

# The tests' tensors are tiny and their machines shared: threads would only add noise, in time and in rounding.
torch.set_num_threads(1)


@pytest.fixture
def forget_apex() -> Iterator[None]:
    """No module of apex is imported at the start, and none that the test imports, a stand-in, is at the end."""
    names = ("apex", "apex.optimizers", "amp_C")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)
    importlib.invalidate_caches()
