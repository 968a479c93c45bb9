"""Megatron on CPUs, with another optimizer where a test asks its factory for ``"adam"``; no test is edited."""

from __future__ import annotations

import functools
import os
import sys
import unittest.mock
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.peers.deepspeed_hook import OPTIONS
from benchmarks.peers.plugin import MARKS

__all__ = ["NAMES", "TYPE", "install"]

TYPE = "RANKWISE_PEER_TYPE"
"""Environment variable with the type that takes Adam's place."""
NAMES: Mapping[str, str] = {"AdamW": "adam", "LDAdam": "ldadam", "MARS-M": "mars-m", "SONew": "sonew", "MKOR": "mkor"}
"""Megatron's name of each type; without Transformer Engine and apex, ``adam`` is torch.optim.AdamW."""

_scope = ExitStack()
_DATA = "tests.test_utils.python_scripts.download_unit_tests_dataset"


def install() -> None:
    """Let Megatron run on this process's CPU until it ends, and give its tests another optimizer; once."""
    import torch

    from megatron_patches import apply, replace_adam
    from megatron_patches.cpu import cpu_megatron

    name = NAMES[os.environ[TYPE]]
    sys.modules[_DATA] = _without_data()
    _scope.enter_context(cpu_megatron())
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = functools.wraps(start)(
        lambda *args, **options: start(*args, **{**options, "backend": "gloo"})
    )
    if name != "adam":
        apply()
        replace_adam(name, OPTIONS[os.environ[TYPE]])
    from megatron.core import optimizer
    from megatron.training import training  # noqa: F401 - with what it looks for of Transformer Engine, before it seems to be there

    sys.modules.update(_transformer_engine())
    sys.modules.setdefault("mock", unittest.mock)
    factory = optimizer.get_megatron_optimizer

    @functools.wraps(factory)
    def marked(config: Any, *args: Any, **options: Any) -> Any:
        if config.optimizer == "adam":
            Path(os.environ[MARKS]).touch()
            # Some tests give no rate: Megatron's own Adam, which needs a GPU, takes None.
            config.lr = 1e-3 if config.lr is None else config.lr
        return factory(config, *args, **options)

    optimizer.get_megatron_optimizer = marked


def _transformer_engine() -> dict[str, ModuleType]:
    """What a test file imports for its tests of fp8, which need a GPU, beside others that need none."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.fp8")
    found = {name: ModuleType(name) for name in names}
    found[names[0]].__version__ = "0.0"  # type: ignore[attr-defined] # older than anything is asked for
    found[names[-1]].fp8_autocast = None  # type: ignore[attr-defined]
    return found


def _without_data() -> ModuleType:
    """In the place of the module that downloads tokenizers and images for other tests, to a folder of the system."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError("no test data is needed here")

    found = ModuleType(_DATA)
    found.download_and_extract_asset = refuse  # type: ignore[attr-defined]
    return found


if TYPE in os.environ:
    install()
