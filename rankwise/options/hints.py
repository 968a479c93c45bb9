"""Parts of messages about wrong values: the value, shortened, and what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

__all__ = [
    "ADVICE",
    "LEFT_OVER",
    "OPTION_WORDS",
    "VALUE_WORDS",
    "hint_for",
    "misspelt",
    "nearest",
    "shown",
    "with_both_spellings",
]

_LONGEST = 120
OPTION_WORDS: Mapping[str, str] = {
    "learning_rate": "lr",
    "epsilon": "eps",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "beta1": "betas",
    "beta2": "betas",
    "lr_mult": "lr_scale",
    "lr_mul": "lr_scale",
    "weight_decay_mode": "weight_decay_method",
    "cautious_wd": "weight_decay_method",
    "cautious": "weight_decay_method",
    "fixed_decay": "weight_decay_method",
}
"""Our options by the names that others use."""
LEFT_OVER: Mapping[str, str] = {
    "adam_w_mode": "decay is decoupled here anyway",
    "torch_adam": "it chooses a form of the framework's AdamW",
    "fused": "which kernels run is found out here",
    "foreach": "which kernels run is found out here",
    "set_grad_none": "zero_grad(set_to_none=...) says it here",
    "maximize": "losses are minimised here",
    "differentiable": "steps have no gradient here",
    "amsgrad": "it belongs to Adam",
    "bias_correction": "it is always on here",
    "correct_bias": "it is always on here",
    "max_grad_norm": "clipping is the framework's ('gradient_clipping')",
    "ns_method": "it belongs to the framework's Muon",
    "adjust_lr_fn": "the scale of the updates is the type's own, or MARS's option 'scale'",
    "dampening": "averages here weigh a gradient by 1 minus their beta",
    "nesterov": "only MKOR's backend 'sgd' has it",
    "update_proj_gap": "the subspace follows at every step",
    "proj_type": "the side is chosen by the shape",
}
"""Options of other optimizers without a meaning in ours, and why: they are left over where a type was changed."""
_ADAM_LR = (
    ("lr_1d", "set 'lr_1d', the rate of the AdamW fallback"),
    ("lr", "remove it; the fallback has the rate 'lr', or that of a param group with 'fallback': true"),
)
_ADAM_BETAS = (("betas_1d", "set 'betas_1d', those of the AdamW fallback"), ("betas", "set 'betas'"))
_MUON_LR = (
    (
        "scale",
        "set 'lr', the matrices' rate: the same value with MARS-Shampoo, whose updates are as large as those of a Muon "
        "that scales by max(1, rows / columns) ** 0.5, and 4 to 5 times AdamW's rate with MARS-M",
    ),
    ("lr", "set 'lr', at about AdamW's rate"),
)
ADVICE: Mapping[str, Sequence[tuple[str, str]]] = {
    "muon_lr": _MUON_LR,
    "matrix_lr": _MUON_LR,
    "adam_lr": _ADAM_LR,
    "adamw_lr": _ADAM_LR,
    "scalar_lr": _ADAM_LR,
    "adam_betas": _ADAM_BETAS,
    "adamw_betas": _ADAM_BETAS,
    "momentum": (("betas", "remove it; the first of 'betas' is the momentum"), ("lr", "remove it")),
    "use_muon": (("lr", "remove it; write 'fallback': true in the param groups for which it is false"),),
    "algorithm": (("lr", "remove it; write 'fallback': true in the param groups that are AdamW's"),),
}
"""Advice on options of other optimizers, each with the option of ours that it needs; the first that fits counts."""
VALUE_WORDS: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "single": "float32",
    "fp64": "float64",
    "double": "float64",
}
"""Our values by the names that others use."""
_CLOSE = 0.6
"""Similarity below which two words are not related."""


def nearest(
    given: Any, valid: Collection[str], words: Mapping[str, str] = MappingProxyType({}), cutoff: float = _CLOSE
) -> str | None:
    """The valid word that ``given`` was probably meant to be; None if nothing is similar.

    Args:
        given: A key or a value, of any type.
        valid: The valid words.
        words: Further names of some of them, in lower case.
        cutoff: Smallest similarity, between 0 and 1.
    """
    lowered = str(given).lower() if isinstance(given, str) else shown(given)
    lowered = lowered.removeprefix("torch.")
    spelled = {candidate.lower(): candidate for candidate in valid}
    meant = words.get(lowered, "")
    if meant.lower() in spelled:
        return spelled[meant.lower()]
    near = difflib.get_close_matches(lowered, spelled, n=1, cutoff=cutoff)
    return spelled[near[0]] if near else None


def hint_for(key: str, valid: Collection[str]) -> str:
    """Advice on a key that is no option."""
    if key in LEFT_OVER:
        return f"remove it; {LEFT_OVER[key]}"
    for option, advice in ADVICE.get(key, ()):
        if option in valid:
            return advice
    near = nearest(key, valid, OPTION_WORDS)
    return f"did you mean '{near}'?" if near else f"valid keys are {', '.join(sorted(valid))}."


def misspelt(given: str, valid: Collection[str]) -> str:
    """The end of a message that lists names: the one that is spelt much like the given one, if any is."""
    near = nearest(given, valid, cutoff=0.85)
    return f"; did you mean '{near}'?" if near else ""


def shown(value: Any) -> str:
    """The ``repr`` of a value, cut to one readable line."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of thousands of digits
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 20]}... ({len(text)} characters)"


def with_both_spellings(value: Any) -> str:
    """The ``repr`` of a value; None is written as JSON and Python write it."""
    return "null (None)" if value is None else repr(value)
