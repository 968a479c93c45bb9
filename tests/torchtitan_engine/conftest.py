"""torchtitan on CPU processes: skipped where it is not installed."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Not by importing it, which asks for a GPU: see cpu_titan.
if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)
logging.getLogger("torchtitan").setLevel(logging.ERROR)
