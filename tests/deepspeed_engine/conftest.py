"""DeepSpeed on CPU processes."""

from __future__ import annotations

import pytest
from cpu_deepspeed import choose_cpu, prepare_ranks

choose_cpu()
pytest.importorskip("deepspeed")


@pytest.fixture(scope="session", autouse=True)
def quiet_deepspeed() -> None:
    """See `prepare_ranks`."""
    prepare_ranks()
