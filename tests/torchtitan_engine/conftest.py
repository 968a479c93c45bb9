"""torchtitan on CPU processes: skipped where it is not installed."""

from __future__ import annotations

import logging
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("torchtitan.trainer")
logging.getLogger("torchtitan").setLevel(logging.ERROR)
