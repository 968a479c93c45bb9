"""Both frameworks, the ready configurations and the command line find optimizers by these names.

The package's own stand here; :func:`register` adds others, from modules that :mod:`rankwise.rule_modules` imports.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from rankwise.ldadam.optimizer import LDAdam
from rankwise.mars.optimizer import MARS
from rankwise.mkor.optimizer import MKOR
from rankwise.options.hints import shown
from rankwise.options.validation import OptionError, check_keys, check_preset
from rankwise.rule_modules import import_rule_modules
from rankwise.sonew.optimizer import SONew
from rankwise.step.optimizer import ShardedOptimizer

__all__ = [
    "BY_NAME",
    "BY_SPELLING",
    "CLASSES",
    "LISTENERS",
    "PUBLISHED_MARS",
    "SPELLINGS",
    "Named",
    "is_ours",
    "register",
    "unregister",
]


class Named(NamedTuple):
    """What a name stands for.

    Attributes:
        optimizer: Class of the optimizer.
        preset: Options that the name fixes.
    """

    optimizer: type[ShardedOptimizer]
    preset: Mapping[str, Any] = MappingProxyType({})

    def complete(
        self, given: Mapping[str, Any], owner: str, instead: str, valid: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Return the constructor's keywords for options of a file or a command line.

        Args:
            given: The user's options; lists stand for tuples.
            owner: What messages call the place of the options.
            instead: Name that leaves to the user what this one fixes.
            valid: Valid options; None: all options of the class.

        Raises:
            OptionError: A key is unknown, or the name fixes it.
        """
        check_preset(given, self.preset, owner, instead)
        names = self.optimizer.options_type.names() if valid is None else valid
        check_keys(given, [name for name in names if name not in self.preset], owner)
        return {**self.preset, **{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}}


BY_SPELLING: dict[str, Named] = {
    "MARS": Named(MARS),
    "MARS-AdamW": Named(MARS, {"variant": "adamw"}),
    "MARS-Lion": Named(MARS, {"variant": "lion"}),
    "MARS-Shampoo": Named(MARS, {"variant": "shampoo"}),
    "MARS-M": Named(MARS, {"variant": "muon"}),
    "SONew": Named(SONew),
    "LDAdam": Named(LDAdam),
    "MKOR": Named(MKOR),
    "MKOR-H": Named(MKOR, {"hybrid": True}),
    "MKOR-Sketch": Named(MKOR, {"rule": "sketch"}),
}
"""The optimizers by the spelling of a JSON's ``"type"``."""

BY_NAME: dict[str, Named] = {spelling.lower(): named for spelling, named in BY_SPELLING.items()}
"""The optimizers by their names on command lines and in file names."""

SPELLINGS: dict[str, str] = {spelling: name for name in BY_SPELLING for spelling in (name, name.lower())}
"""An optimizer's own spelling, by each spelling that is accepted."""

PUBLISHED_MARS: Mapping[str, Any] = {"betas": [0.95, 0.99], "gamma": 0.025, "weight_decay": 0.01}
"""Published values of MARS-AdamW on language models, for all variants."""
# These differ from the published ones: they ended lowest on small models and short runs (E4 of docs/evidence.md).
_SHORT_MARS = {"betas": [0.9, 0.95], "gamma": 0.05, "weight_decay": 0.1}
_MKOR = {"lr": 0.003, "backend": "adamw", "betas": [0.9, 0.95], "weight_decay": 0.1}
READY: dict[str, Mapping[str, Any]] = {
    "mars": {"lr": 0.006, "variant": "adamw", **_SHORT_MARS},
    "mars-adamw": {"lr": 0.006, **_SHORT_MARS},
    "mars-lion": {"lr": 0.001, **PUBLISHED_MARS},
    "mars-shampoo": {"lr": 0.03, **PUBLISHED_MARS},
    "mars-m": {"lr": 0.012, **PUBLISHED_MARS},
    "sonew": {"lr": 0.003, "band": 1, "betas": [0.9, 0.99], "weight_decay": 0.1},
    "ldadam": {"lr": 0.006, "rank": 32, "weight_decay": 0.1},
    "mkor": _MKOR,
    "mkor-h": _MKOR,
    "mkor-sketch": {**_MKOR, "lr": 0.006},
}
"""Options of the ready configurations, for the small model of ``rankwise train``, by the names of :data:`BY_NAME`."""

CLASSES: list[type[ShardedOptimizer]] = list(dict.fromkeys(named.optimizer for named in BY_NAME.values()))
"""The classes of all names, without duplicates."""

LISTENERS: list[Callable[[str, Named | None], None]] = []
"""Functions that are called with every name before it is registered, and may refuse it; later with None if it goes."""

_OURS = frozenset(BY_NAME)
_SPELLING = re.compile(r"[A-Za-z][A-Za-z0-9]*(-[A-Za-z0-9]+)*")


def is_ours(name: str) -> bool:
    """Whether a name is one of this package's own, not a registered one."""
    return name in _OURS


def register(
    spelling: str,
    optimizer: type[ShardedOptimizer],
    preset: Mapping[str, Any] = MappingProxyType({}),
    ready: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Give an optimizer a name: a JSON's ``"type"``, ``--optimizer`` in lower case, and a name for all commands.

    Registering a class of the same module and name again replaces it.

    Args:
        spelling: Name in a JSON's spelling: letters and digits, in parts joined by hyphens.
        optimizer: Class of the optimizer.
        preset: Options that the name fixes.
        ready: Options of the ready configurations.

    Raises:
        OptionError: The name is invalid or taken, the class is no optimizer's, or it has no such option.
    """
    name = str(spelling).lower()
    if not isinstance(spelling, str) or not _SPELLING.fullmatch(spelling):
        _refuse(spelling, "it must be letters and digits, in parts joined by hyphens", 'write e.g. "SOAP"')
    if not (inspect.isclass(optimizer) and issubclass(optimizer, ShardedOptimizer)) or inspect.isabstract(optimizer):
        lacking = ", ".join(sorted(getattr(optimizer, "__abstractmethods__", ())))
        rule = "it must be of a class that derives from MatrixOptimizer, ElementOptimizer or ShardedOptimizer"
        _refuse(spelling, rule, f"define {lacking} in it" if lacking else "register such a class")
    if not hasattr(optimizer, "options_type") or not hasattr(optimizer, "spec_class"):
        _refuse(
            spelling,
            "its class has no options or no spec",
            "set spec_class, and decorate __init__ with options_as_keywords",
        )
    missing = [key for key in optimizer.spec_class.required if key not in optimizer.options_type.names()]
    if missing:
        _refuse(spelling, f"its options lack {', '.join(missing)}", "declare them, see rankwise.extension.shared")
    before = BY_NAME.get(name)
    if before is not None and (name in _OURS or _origin(before.optimizer) != _origin(optimizer)):
        where = "rankwise" if name in _OURS else f"module {before.optimizer.__module__!r}"
        _refuse(spelling, f"{where} has an optimizer of this name", "register yours under another name")
    named = Named(optimizer, MappingProxyType(dict(preset)))
    check_keys([*preset, *ready], optimizer.options_type.names(), spelling)
    optimizer.options_type(**preset)
    _tell(spelling, named)
    BY_SPELLING[spelling] = BY_NAME[name] = named
    SPELLINGS.update({spelling: spelling, name: spelling})
    READY[name] = {"lr": optimizer.options_type.table()["lr"].default, **ready}
    _list_classes()


def unregister(spelling: str) -> None:
    """Forget a name that was registered; a second call changes nothing."""
    name = spelling.lower()
    if name not in _OURS and spelling in BY_SPELLING:
        del BY_SPELLING[spelling], BY_NAME[name], READY[name]
        SPELLINGS.pop(spelling, None)
        SPELLINGS.pop(name, None)
        _list_classes()
        _tell(spelling, None)


def _tell(spelling: str, named: Named | None) -> None:
    heard = []
    try:
        for hear in LISTENERS:
            hear(spelling, named)
            heard.append(hear)
    except BaseException:
        for hear in heard:
            hear(spelling, None)
        raise


def _list_classes() -> None:
    CLASSES[:] = dict.fromkeys(named.optimizer for named in BY_NAME.values())


def _origin(optimizer: type) -> tuple[str, str]:
    return optimizer.__module__, optimizer.__qualname__


def _refuse(spelling: Any, rule: str, fix: str) -> None:
    raise OptionError(f"register({shown(spelling)}) is invalid: {rule}; {fix}")


import_rule_modules()
