"""The examples, registered while their tests run; other tests see the package's own names alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_deepspeed import choose_cpu

choose_cpu()
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
ROOT = Path(__file__).resolve().parents[2]
# The harnesses lie beside the tests of their framework.
for _folder in ("deepspeed_engine", "megatron_engine", "fsdp"):
    _path = str(ROOT / "tests" / _folder)
    if _path not in sys.path:
        sys.path.append(_path)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """The names of `example_rules`; whatever else a test has registered is forgotten with them."""
    from example_rules import load

    from rankwise.names import BY_SPELLING, is_ours
    from rankwise.rule_modules import VARIABLE

    assert VARIABLE not in os.environ
    load()
    yield
    for spelling in list(BY_SPELLING):
        if not is_ours(spelling.lower()):
            from rankwise.names import unregister

            unregister(spelling)
