"""The names of our optimizers: of both frameworks, the ready configurations and the command line."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from rankwise.ldadam.optimizer import LDAdam
from rankwise.mars.optimizer import MARS
from rankwise.mkor.optimizer import MKOR
from rankwise.options.validation import check_keys, check_preset
from rankwise.sonew.optimizer import SONew
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["BY_NAME", "BY_SPELLING", "CLASSES", "PUBLISHED_MARS", "Named"]


class Named(NamedTuple):
    """What a name stands for.

    Attributes:
        optimizer: The class.
        preset: Options that the name fixes.
    """

    optimizer: type[ShardedOptimizer]
    preset: Mapping[str, Any] = MappingProxyType({})

    def complete(
        self, given: Mapping[str, Any], owner: str, instead: str, valid: Collection[str] | None = None
    ) -> dict[str, Any]:
        """The constructor's keywords from options as a file or a command line has them.

        Args:
            given: The user's options; lists stand for tuples.
            owner: Who has them, for messages.
            instead: The name that leaves to the user what this one fixes.
            valid: The options there are; None: all of the class.

        Raises:
            OptionError: An unknown key, or one that the name fixes.
        """
        check_preset(given, self.preset, owner, instead)
        names = self.optimizer.options_type.names() if valid is None else valid
        check_keys(given, [name for name in names if name not in self.preset], owner)
        return {**self.preset, **{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}}


BY_SPELLING: Mapping[str, Named] = {
    "MARS": Named(MARS),
    "MARS-AdamW": Named(MARS, {"variant": "adamw"}),
    "MARS-Lion": Named(MARS, {"variant": "lion"}),
    "MARS-Shampoo": Named(MARS, {"variant": "shampoo"}),
    "MARS-M": Named(MARS, {"variant": "muon"}),
    "SONew": Named(SONew),
    "LDAdam": Named(LDAdam),
    "MKOR": Named(MKOR),
    "MKOR-H": Named(MKOR, {"hybrid": True}),
}
"""By the spelling of a JSON's ``"type"``."""

BY_NAME: Mapping[str, Named] = {spelling.lower(): named for spelling, named in BY_SPELLING.items()}
"""By the name on command lines and of files."""

PUBLISHED_MARS: Mapping[str, Any] = {"betas": [0.95, 0.99], "gamma": 0.025, "weight_decay": 0.01}
"""Published values of MARS-AdamW on language models, for all variants."""
# Not the published ones: what ended lowest on small models and short runs (E4 of docs/evidence.md).
_SHORT_MARS = {"betas": [0.9, 0.95], "gamma": 0.05, "weight_decay": 0.1}
_MKOR = {"lr": 0.003, "backend": "adamw", "betas": [0.9, 0.95], "weight_decay": 0.1}
READY: Mapping[str, Mapping[str, Any]] = {
    "mars": {"lr": 0.006, "variant": "adamw", **_SHORT_MARS},
    "mars-adamw": {"lr": 0.006, **_SHORT_MARS},
    "mars-lion": {"lr": 0.001, **PUBLISHED_MARS},
    "mars-shampoo": {"lr": 0.03, **PUBLISHED_MARS},
    "mars-m": {"lr": 0.012, **PUBLISHED_MARS},
    "sonew": {"lr": 0.003, "band": 1, "betas": [0.9, 0.99], "weight_decay": 0.1},
    "ldadam": {"lr": 0.006, "rank": 32, "weight_decay": 0.1},
    "mkor": _MKOR,
    "mkor-h": _MKOR,
}
"""Options of the ready configurations, for the small model of ``rankwise train``, by the same."""

CLASSES: tuple[type[ShardedOptimizer], ...] = tuple(dict.fromkeys(named.optimizer for named in BY_NAME.values()))
