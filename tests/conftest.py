"""Settings shared by every test."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

# Lets tests in sub-directories import the helpers that lie beside this file (golden_io).
_TESTS_DIR = str(Path(__file__).resolve().parent)
if _TESTS_DIR not in sys.path:
    sys.path.insert(0, _TESTS_DIR)

# The tests' tensors are tiny and their machines shared: threads would only add noise, in time and in rounding.
torch.set_num_threads(1)
