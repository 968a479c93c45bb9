"""Settings shared by every test."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.kernels import lists, native
from rankwise.kernels.dispatch import using

# Lets tests in sub-directories import the helpers that lie beside this file (golden_io).
_TESTS_DIR = str(Path(__file__).resolve().parent)
if _TESTS_DIR not in sys.path:
    sys.path.insert(0, _TESTS_DIR)

from triton_interpreter import interpreter, launches  # noqa: E402

__all__ = ["interpreter", "launches"]


def _keep_to_one_core() -> None:
    """Workers of pytest-xdist have a core each, for themselves and their ranks: waking up another core costs more than
    most of the ranks' messages, so that two ranks on one core are nearly as fast as on two."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker.startswith("gw") and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


_keep_to_one_core()
# Of a worker's make-believe terminal; consoles that are made on import would keep it.
os.environ.pop("COLUMNS", None)

# The tests' tensors are tiny and their machines shared: threads would only add noise, in time and in rounding.
torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """A million objects stay until the end: nobody looks for garbage among them, neither while they are made nor later,
    which would take half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where nothing can be compiled, the tests of what is compiled are left out."""
    marked = [item for item in items if item.get_closest_marker("compiled")]
    if marked and not native.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no compiler, or RANKWISE_NATIVE=0"))


@pytest.fixture(params=["chosen", "lists"])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels of the machine's choice, and the plain lists."""
    with using(lists) if request.param == "lists" else nullcontext():
        yield request.param


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
