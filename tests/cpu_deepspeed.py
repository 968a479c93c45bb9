"""DeepSpeed on CPU processes: without the extension that only serves inference, its log silent."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from unittest import mock

__all__ = ["NO_BUILD", "choose_cpu", "prepare_ranks"]

NO_BUILD = {"CXX": "no-such-compiler"}
"""Environment of our launchers' commands under which DeepSpeed builds no extension.

It would build shared-memory collectives, which take a compiler a minute and no part in training. Our own kernels are
compiled by another compiler then.
"""


def choose_cpu() -> None:
    """To be called before DeepSpeed is imported."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # DeepSpeed looks for ninja on the path; it is installed beside the interpreter, whose folder need not be there.
    folder = str(Path(sys.executable).parent)
    if folder not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = folder + os.pathsep + os.environ["PATH"]


def prepare_ranks() -> None:
    """Mute the library, and let forked ranks do without its collectives for inference, as without a compiler."""
    from rankwise.launch.environment import prepare_shm_build

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", UserWarning)
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        # Engines ask whether their optimizer is Muon: seconds of imports (of a compiler) that each rank would pay for.
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    with mock.patch.dict(os.environ, NO_BUILD):
        prepare_shm_build()
