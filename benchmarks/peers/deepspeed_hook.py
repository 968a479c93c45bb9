"""DeepSpeed with another optimizer in Adam's place: in whatever configuration its tests write, none of them edited."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["CONTROL", "MARKS", "OPTIONS", "TYPE", "install", "placed"]

TYPE = "RANKWISE_PEER_TYPE"
"""Environment variable with the type that takes Adam's place."""
MARKS = "RANKWISE_PEER_MARKS"
"""Environment variable with the file that is written where a configuration was changed."""
CONTROL = "AdamW"
"""torch.optim.AdamW, put in the same places."""

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    CONTROL: {"torch_adam": True},
    # DeepSpeed's tests have models of width 3 to 10, which the default of 16 refuses.
    "LDAdam": {"rank": 2},
    "MARS-M": {},
    "SONew": {},
    "MKOR": {},
}
"""Types that are tried, and what each is told beside the learning rate and the weight decay of the test."""

_KEPT = ("lr", "weight_decay")
# What tests of 0.19.6 read of an engine to compare it with another, and 0.19.8 has no more.
_GONE = ("sparse_tensor_module_names",)


def placed(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A configuration with another optimizer where it says Adam or AdamW; itself where it says neither.

    Args:
        config: DeepSpeed's, as a dictionary; it is not changed.
        name: A key of :data:`OPTIONS`.
    """
    block = config.get("optimizer")
    if not isinstance(block, Mapping) or str(block.get("type")).lower() not in ("adam", "adamw"):
        return config
    params = {key: value for key, value in (block.get("params") or {}).items() if key in _KEPT}
    # DeepSpeed lets no optimizer but its own be offloaded until it is told that this is meant.
    meant = {"zero_force_ds_cpu_optimizer": False}
    return {**config, **meant, "optimizer": {"type": name, "params": {**params, **OPTIONS[name]}}}


def install() -> None:
    """Change what DeepSpeed reads of a configuration, in this process and those forked from it; once."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    name = os.environ[TYPE]
    if name != CONTROL:
        import deepspeed_plugin  # noqa: F401 - registers the types
    if hasattr(DeepSpeedConfig, "_before_peers"):
        return
    for gone in _GONE:
        if not hasattr(DeepSpeedEngine, gone):
            setattr(DeepSpeedEngine, gone, frozenset())
    original = DeepSpeedConfig._initialize_params
    DeepSpeedConfig._before_peers = original

    @functools.wraps(original)
    def initialize_params(config: Any, param_dict: Mapping[str, Any]) -> None:
        found = placed(param_dict, name)
        if found is not param_dict:
            Path(os.environ[MARKS]).touch()
        original(config, found)

    DeepSpeedConfig._initialize_params = initialize_params


if TYPE in os.environ:
    install()
