"""Megatron on CPU processes: skipped where it is not installed, and its start-up notices muted."""

from __future__ import annotations

import logging
import os
import warnings

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read by Megatron's tensor-parallel layers, which otherwise warn once per layer.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
warnings.simplefilter("ignore")

pytest.importorskip("megatron.core")
logging.getLogger("megatron").setLevel(logging.ERROR)
