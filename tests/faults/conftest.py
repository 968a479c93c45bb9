"""Faults of whole runs: processes of DeepSpeed, of Megatron where it is installed, and of plain PyTorch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from cpu_deepspeed import choose_cpu, prepare_ranks

choose_cpu()
pytest.importorskip("deepspeed")

# Read by Megatron's tensor-parallel layers, which otherwise warn once per layer.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
# The harnesses lie beside the tests of their framework.
for _folder in ("deepspeed_engine", "megatron_engine"):
    _path = str(Path(__file__).resolve().parents[1] / _folder)
    if _path not in sys.path:
        sys.path.append(_path)


@pytest.fixture(scope="session", autouse=True)
def quiet_deepspeed() -> None:
    """See `prepare_ranks`."""
    prepare_ranks()
