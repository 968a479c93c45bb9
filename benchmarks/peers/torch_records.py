"""Our types as records of torch's own optimizer tests, and torch.optim.AdamW's record beside them.

A record (``OptimizerInfo``) names a class, the options that its tests run with, and the wrong ones with the error that
each must raise. torch installs the records without the tests; ``torch_checks`` has what they drive.
"""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from rankwise import MARS, MKOR, LDAdam, SONew

if importlib.util.find_spec("expecttest") is None:
    # What torch's tests compare printed text with, which the records import and never call.
    sys.modules["expecttest"] = ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]

_frozen = torch.backends.flags_frozen()
from torch.testing._internal.common_optimizers import (  # noqa: E402 - see above
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
    optim_db,
)

# The import forbids the process to set flags of torch.backends, which its other code goes on setting.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = not _frozen

__all__ = ["RECORDS", "OptimizerErrorEnum", "OptimizerInfo", "record_of"]

# MARS decays vectors by an option of their own; the tests set "weight_decay" and expect no other.
_MARS = {"weight_decay_1d": 0.0}
# Of models of width 12 and 16, which the tests have.
_LDADAM = {"rank": 2}
_MKOR = {"update_interval": 2}

_OWN: Mapping[str, tuple[type, Mapping[str, Any], tuple[Mapping[str, Any], ...], tuple[tuple[str, Any], ...]]] = {
    "MARS-AdamW": (
        MARS,
        {**_MARS, "variant": "adamw"},
        ({"gamma": 0.1, "clip": None}, {"optimize_1d": True}, {"reference_dtype": "bfloat16"}),
        (("gamma", -1.0), ("clip", -1.0), ("variant", "adam")),
    ),
    "MARS-Lion": (MARS, {**_MARS, "variant": "lion"}, ({"gamma": 0.1},), (("gamma", -1.0),)),
    "MARS-Shampoo": (MARS, {**_MARS, "variant": "shampoo"}, ({"gamma": 0.1},), (("gamma", -1.0),)),
    "MARS-M": (
        MARS,
        {**_MARS, "variant": "muon"},
        ({"ns_steps": 6}, {"lr_1d": 3e-3}, {"ns_dtype": "float32"}),
        (("ns_steps", 0), ("lr_1d", -1.0)),
    ),
    "SONew": (
        SONew,
        {},
        ({"band": 0}, {"band": 4}, {"graft": "none", "eps": 1e-2}, {"chain": "tensor"}),
        (("band", -1), ("graft", "adamw"), ("gamma", -1.0)),
    ),
    "LDAdam": (
        LDAdam,
        _LDADAM,
        ({"error_feedback": False}, {"rho": 0.5}, {"error_dtype": "bfloat16"}, {"error_dtype": "int8"}),
        (("rank", 0), ("rho", 2.0)),
    ),
    "MKOR": (
        MKOR,
        _MKOR,
        ({"backend": "lamb"}, {"backend": "sgd", "momentum": 0.9}, {"rule": "ema"}, {"factor_dtype": "float32"}),
        (("backend", "adam"), ("factor_decay", 2.0), ("update_interval", 0)),
    ),
}
"""By type: the class, options of all its cases, options of one each, and wrong values of single options."""

_COMMON = ({}, {"lr": 0.01}, {"lr": torch.tensor(0.001)}, {"weight_decay": 0.1})
_WRONG = (("lr", -1e-2), ("eps", -1.0), ("weight_decay", -1.0), ("betas", (1.0, 0.0)), ("betas", (0.9, 1.0)))


def _words(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items()) or "default"


def _inputs(name: str) -> Callable[..., list[OptimizerInput]]:
    _, base, own, _ = _OWN[name]
    # New dictionaries at every call: the tests write into them.
    return lambda device, dtype=None: [
        OptimizerInput(params=None, kwargs={**base, **options}, desc=_words(options)) for options in (*_COMMON, *own)
    ]


def _errors(name: str) -> Callable[..., list[ErrorOptimizerInput]]:
    _, base, _, wrong = _OWN[name]

    def inputs(device: Any, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
        found = get_error_inputs_for_all_optims(device, dtype)
        for error in found:
            error.optimizer_error_input.kwargs = {**base, **error.optimizer_error_input.kwargs}
        for key, value in (*_WRONG, *wrong):
            options = {**base, key: value}
            own = OptimizerInput(params=None, kwargs=options, desc=_words({key: value}))
            # Ours name the key, whatever else they say.
            found.append(ErrorOptimizerInput(own, error_type=ValueError, error_regex=key))
        return found

    return inputs


def record_of(name: str) -> OptimizerInfo:
    """The record of a type of ours, or torch's own of AdamW.

    Args:
        name: A key of :data:`RECORDS`.
    """
    if name not in _OWN:
        return next(info for info in optim_db if info.name == name)
    return OptimizerInfo(
        _OWN[name][0],
        optim_inputs_func=_inputs(name),
        optim_error_inputs_func=_errors(name),
        supported_impls=(),
        not_og_supported_flags=(),
        supports_complex=True,
        has_capturable_arg=False,
    )


RECORDS = ("AdamW", *_OWN)
"""Types whose records are tried; the first is torch's own, as a control of the checks themselves."""
