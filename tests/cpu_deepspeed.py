"""DeepSpeed on CPU processes: its compiler on the path, its extension built once, its log silent."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

__all__ = ["choose_cpu", "prepare_ranks"]


def choose_cpu() -> None:
    """To be called before DeepSpeed is imported."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # DeepSpeed looks for ninja on the path; it is installed beside the interpreter, whose folder need not be there.
    folder = str(Path(sys.executable).parent)
    if folder not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = folder + os.pathsep + os.environ["PATH"]


def prepare_ranks() -> None:
    """Build the collectives' extension in this process, for forked ranks to inherit, and mute the library.

    Without a compiler they do without it, as under our launcher.
    """
    from deepspeed.accelerator import get_accelerator

    from rankwise.launch.environment import prepare_shm_build

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", UserWarning)
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        # Engines ask whether their optimizer is Muon: seconds of imports (of a compiler) that each rank would pay for.
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if not prepare_shm_build() and builder is not None:
        builder.load(verbose=False)
