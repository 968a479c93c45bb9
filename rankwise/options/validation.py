"""Validated hyper-parameters. Every message has the key, the value, the rule and the fix."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankwise.options.hints import OPTION_WORDS, VALUE_WORDS, nearest, shown, with_both_spellings

__all__ = [
    "LDAdamOptions",
    "MARSOptions",
    "MKOROptions",
    "OptionError",
    "Options",
    "SONewOptions",
    "check_given",
    "check_keys",
    "check_preset",
    "patterns",
]


_DTYPES = ("float32", "bfloat16", "float16", "float64")
_LARGEST = 1e6
"""Of rates and factors: beyond it, products with them leave the range of float32."""
_COUNT = 10**9
"""Of steps and sizes: more than any run or model has, and far from overflowing an index."""
_WIDEST_BAND = 32
_MOST_ITERATIONS = 100


class OptionError(ValueError):
    """A hyper-parameter outside its range, or a key nobody knows."""


def check_keys(given: Collection[str], valid: Collection[str], owner: str) -> None:
    """Refuse unknown keys, naming the nearest valid one.

    Raises:
        OptionError: ``given`` holds a key that is not in ``valid``.
    """
    for key in given:
        if key not in valid:
            near = nearest(key, valid, OPTION_WORDS)
            hint = f"did you mean '{near}'?" if near else f"valid keys are {', '.join(sorted(valid))}."
            raise OptionError(f"{owner} has no option {shown(key)}: {hint}")


def check_preset(given: Mapping[str, Any], preset: Mapping[str, Any], owner: str, instead: str) -> None:
    """Refuse other values for what an optimizer's name already says.

    Args:
        given: The user's options.
        preset: Those the name stands for.
        owner: The name, for the message.
        instead: The name that leaves the choice to the user.

    Raises:
        OptionError: Names the key and the name to use.
    """
    for key in preset:
        if key in given:
            raise OptionError(
                f"{owner} has no option '{key}', which the name fixes ({key}={preset[key]!r}): leave it out, or choose "
                f"{key}={shown(given[key])} under the name '{instead}'"
            )


def check_given(given: Mapping[str, Any], options: Options, owner: str) -> None:
    """Refuse options that were written down although the choice of others leaves them unread.

    Raises:
        OptionError: Names the key, why nothing reads it, and the way out.
    """
    for key, (reason, fix) in options.unread().items():
        if key in given:
            raise OptionError(f"{owner}: {key}={shown(given[key])} is invalid: {reason}; {fix}")


def patterns(given: Any) -> Any:
    """A list of name patterns as a tuple; anything else as it is, for the check to refuse (a lone string too)."""
    return tuple(given) if isinstance(given, list | tuple | set) else given


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer above every float
        return False


@dataclass(frozen=True)
class Options:
    """Base of the option sets: range checks by name."""

    owner: ClassVar[str] = "optimizer"
    lr: float | Tensor = 1e-3
    skip_nonfinite: bool = False

    @classmethod
    def names(cls) -> list[str]:
        """All keys."""
        return [field.name for field in fields(cls)]

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Options:
        """Validate the values of a param group.

        Raises:
            OptionError: A value is outside its range.
        """
        return cls(**{name: group[name] for name in cls.names() if name in group})

    def _fail(self, key: str, rule: str, fix: str) -> None:
        raise OptionError(f"{self.owner}: {key}={shown(getattr(self, key))} is invalid: {rule}; {fix}")

    def unread(self) -> Mapping[str, tuple[str, str]]:
        """Options that nothing reads under these values of the others, why, and the fix."""
        return {}

    def _refuse_unread(self) -> None:
        for key, (reason, fix) in self.unread().items():
            value = getattr(self, key)
            if (tuple(value) if isinstance(value, list) else value) != self._default(key):
                self._fail(key, reason, fix)

    def _number(self, key: str) -> float:
        value = getattr(self, key)
        if isinstance(value, Tensor):
            if value.numel() != 1:
                self._fail(key, "a tensor value must have one element", "pass a float or a 0-d tensor")
            # A tensor on an accelerator is trusted: reading it here would stall the device.
            if value.device.type != "cpu":
                return math.nan
            value = value.item()
        if not _is_number(value):
            self._fail(key, "it must be a finite number", f"write e.g. {self._default(key)!r}")
        return float(value)

    def _default(self, key: str) -> Any:
        return next(field.default for field in fields(self) if field.name == key)

    def _at_least(self, key: str, low: float, strict: bool = False, high: float = _LARGEST) -> None:
        value = self._number(key)
        if value < low or (strict and value == low):
            self._fail(key, f"it must be {'>' if strict else '>='} {low:g}", f"the default is {self._default(key)!r}")
        if value > high:
            self._fail(key, f"it must be <= {high:g}", f"the default is {self._default(key)!r}")

    def _fraction(self, key: str, include_one: bool = False) -> None:
        value = self._number(key)
        if value < 0 or value > 1 or (value == 1 and not include_one):
            self._fail(
                key, f"it must lie in [0, 1{']' if include_one else ')'}", f"the default is {self._default(key)!r}"
            )

    def _integer(self, key: str, low: int, high: int, why: str = "") -> None:
        value = getattr(self, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            self._fail(key, f"it must be an integer >= {low}", f"the default is {self._default(key)!r}")
        if value > high:
            self._fail(key, f"it must be <= {high}{why and ', ' + why}", f"the default is {self._default(key)!r}")

    def _flag(self, key: str) -> None:
        if not isinstance(getattr(self, key), bool):
            self._fail(key, "it must be true or false", f"the default is {self._default(key)!r}")

    def _choice(self, key: str, choices: Collection[Any]) -> None:
        value = getattr(self, key)
        # Compared by type first: 0 is no name, and a tensor has no truth.
        if not isinstance(value, str | None) or value not in choices:
            near = nearest(value, [str(choice) for choice in choices], VALUE_WORDS)
            meant = next((choice for choice in choices if str(choice) == near), "")
            fix = f"the default is {self._default(key)!r}"
            if near is not None:
                fix = f"did you mean {with_both_spellings(meant)}?"
            self._fail(key, f"it must be one of {', '.join(map(with_both_spellings, choices))}", fix)

    def _betas(self, key: str) -> None:
        value = getattr(self, key)
        well_formed = isinstance(value, tuple | list) and len(value) == 2
        if not well_formed or not all(_is_number(beta) and 0 <= beta < 1 for beta in value):
            self._fail(key, "it must be two numbers in [0, 1)", f"the default is {list(self._default(key))}")

    def _dtype(self, key: str, optional: bool = False, auto: bool = False, narrow: bool = True) -> None:
        value = getattr(self, key)
        if (value is None and optional) or (auto and isinstance(value, str) and value == "auto"):
            return
        name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        known = _DTYPES if narrow else tuple(known for known in _DTYPES if known != "float16")
        if not isinstance(name, str) or name not in known:
            named, unless = f"{', '.join(known[:-1])} or {known[-1]}", ", or be 'auto'" if auto else ""
            self._fail(
                key,
                f"it must name a floating-point type: {named}{unless}",
                f"write {nearest(name, [*known, *(['auto'] if auto else [])], VALUE_WORDS) or 'float32'!r}",
            )
        object.__setattr__(self, key, name)  # as a JSON file gives it

    def _patterns(self, key: str) -> None:
        value = getattr(self, key)
        if not isinstance(value, tuple | list) or not all(isinstance(pattern, str) for pattern in value):
            self._fail(key, "it must be a list of name patterns", 'write e.g. ["*gate*"]')

    def _common(self) -> None:
        self._at_least("lr", 0.0)
        self._at_least("eps", 0.0)
        self._at_least("weight_decay", 0.0)
        self._patterns("exclude")
        self._flag("skip_nonfinite")

    def _graphs(self, capturable: bool) -> None:
        self._flag("capturable")
        if capturable and self.skip_nonfinite:
            self._fail(
                "capturable",
                "it must be false with skip_nonfinite=True, of which the host has to learn after each step",
                "set one of the two to false",
            )


@dataclass(frozen=True)
class MARSOptions(Options):
    """Options of :class:`rankwise.MARS`."""

    owner: ClassVar[str] = "MARS"
    lr: float | Tensor = 3e-3
    variant: str = "adamw"
    betas: tuple[float, float] = (0.95, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    gamma: float = 0.025
    exact: bool = False
    clip: float | None = 1.0
    optimize_1d: bool = False
    lr_1d: float | None = None
    betas_1d: tuple[float, float] = (0.9, 0.95)
    weight_decay_1d: float = 0.1
    ns_steps: int = 5
    ns_dtype: str = "auto"
    comm_dtype: str | None = None
    exclude: tuple[str, ...] = ()
    capturable: bool = False

    def __post_init__(self) -> None:
        self._common()
        self._graphs(self.capturable)
        self._choice("variant", ("adamw", "lion", "shampoo", "muon"))
        self._betas("betas")
        self._betas("betas_1d")
        self._at_least("gamma", 0.0)
        self._flag("exact")
        self._flag("optimize_1d")
        if self.clip is not None:
            self._at_least("clip", 0.0, strict=True)
        if self.lr_1d is not None:
            self._at_least("lr_1d", 0.0)
        self._at_least("weight_decay_1d", 0.0)
        self._integer("ns_steps", 1, _MOST_ITERATIONS, "a handful already reaches an orthogonal matrix")
        self._dtype("ns_dtype", auto=True)
        self._dtype("comm_dtype", optional=True)


@dataclass(frozen=True)
class SONewOptions(Options):
    """Options of :class:`rankwise.SONew`."""

    owner: ClassVar[str] = "SONew"
    lr: float | Tensor = 1e-3
    band: int = 1
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    graft: str = "adam"
    graft_eps: float = 1e-8
    gamma: float = 1e-2
    chain: str = "row"
    exclude: tuple[str, ...] = ()
    capturable: bool = False

    def __post_init__(self) -> None:
        self._common()
        self._graphs(self.capturable)
        self._integer("band", 0, _WIDEST_BAND, "as every neighbour costs one more tensor, and the solve their cube")
        self._betas("betas")
        self._choice("graft", ("adam", "adam_official", "rmsprop", "sgd", "momentum", "none"))
        self._at_least("graft_eps", 0.0)
        self._fraction("gamma")
        self._choice("chain", ("row", "tensor"))


@dataclass(frozen=True)
class LDAdamOptions(Options):
    """Options of :class:`rankwise.LDAdam`."""

    owner: ClassVar[str] = "LDAdam"
    lr: float | Tensor = 1e-3
    rank: int = 16
    rho: float = 0.908
    betas: tuple[float, float] = (0.908, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    error_feedback: bool = True
    error_dtype: str | None = None
    comm_dtype: str | None = None
    exclude: tuple[str, ...] = ()
    capturable: bool = False

    def __post_init__(self) -> None:
        self._common()
        self._graphs(self.capturable)
        self._integer("rank", 1, _COUNT, "lower the rank")
        self._fraction("rho", include_one=True)
        self._betas("betas")
        self._flag("error_feedback")
        self._dtype("error_dtype", optional=True)
        self._dtype("comm_dtype", optional=True)


@dataclass(frozen=True)
class MKOROptions(Options):
    """Options of :class:`rankwise.MKOR`, its first-order backend included."""

    owner: ClassVar[str] = "MKOR"
    lr: float | Tensor = 1e-3
    backend: str = "adamw"
    factor_decay: float = 0.95
    update_interval: int = 10
    rule: str = "official"
    stabilizer: tuple[float, float] | None = (2.0, 0.9)
    stabilizer_norm: str = "row_sum"
    rescale: str | None = "joint"
    max_factor_dim: int = 16384
    factor_dtype: str = "bfloat16"
    product_dtype: str = "auto"
    comm_dtype: str | None = None
    tp_mode: str = "exact"
    hybrid: bool = False
    hybrid_beta: float = 0.1
    hybrid_patience: int = 20
    hybrid_min_steps: int = 100
    hybrid_ema: float = 0.95
    output_gain: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._common()
        self._choice("backend", ("adamw", "lamb", "sgd"))
        self._fraction("factor_decay")
        if self.factor_decay == 0:
            self._fail("factor_decay", "it must lie in (0, 1)", "the default is 0.95")
        self._integer("update_interval", 1, _COUNT)
        self._choice("rule", ("official", "ema", "paper_literal"))
        self._check_stabilizer()
        self._choice("stabilizer_norm", ("row_sum", "max_entry"))
        self._choice("rescale", ("joint", None))
        self._integer("max_factor_dim", 1, _COUNT)
        self._dtype("factor_dtype")
        # Gradients would vanish in float16.
        self._dtype("product_dtype", auto=True, narrow=False)
        self._dtype("comm_dtype", optional=True)
        self._choice("tp_mode", ("exact", "block"))
        self._flag("hybrid")
        self._at_least("hybrid_beta", 0.0, strict=True)
        self._integer("hybrid_patience", 1, _COUNT)
        self._integer("hybrid_min_steps", 2, _COUNT)
        self._fraction("hybrid_ema")
        self._at_least("output_gain", 0.0, strict=True)
        self._betas("betas")
        self._fraction("momentum")
        self._flag("nesterov")
        self._refuse_unread()
        if self.nesterov and self.momentum == 0:
            self._fail(
                "nesterov", "it must go with a momentum above 0", "set momentum to e.g. 0.9, or nesterov to false"
            )

    def unread(self) -> Mapping[str, tuple[str, str]]:
        """What belongs to the other backends, and to MKOR-H."""
        theirs = ("betas",) if self.backend == "sgd" else ("momentum", "nesterov")
        other = "'adamw' or 'lamb'" if self.backend == "sgd" else "'sgd'"
        found = {
            key: (f"backend={self.backend!r} does not read it", f"leave it out, or set backend to {other}")
            for key in theirs
        }
        if not self.hybrid:
            knee = ("hybrid_beta", "hybrid_patience", "hybrid_min_steps", "hybrid_ema")
            found |= {key: ("nothing reads it without hybrid", "leave it out, or set hybrid to true") for key in knee}
        return found

    def _check_stabilizer(self) -> None:
        value = self.stabilizer
        if value is None:
            return
        pair = isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_number, value))
        if not pair or not (0 < value[0] <= _LARGEST and 0 <= value[1] <= 1):
            self._fail(
                "stabilizer", "it must be [threshold > 0, retention in [0, 1]] or null", "the default is [2.0, 0.9]"
            )
