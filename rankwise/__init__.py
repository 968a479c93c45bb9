"""MKOR, MARS, SONew and LDAdam with matrix states partitioned over ranks, as torch.optim optimizers.

Names are imported when they are asked for, so that ``rankwise list`` and ``--help`` answer without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankwise import frameworks as frameworks  # makes the core's messages name what to call
from rankwise.layout.front_ends import read_sharded_by
from rankwise.version import __version__

if TYPE_CHECKING:
    from rankwise.ldadam.optimizer import LDAdam
    from rankwise.mars.optimizer import MARS
    from rankwise.mkor.optimizer import MKOR
    from rankwise.routing.roles import annotate
    from rankwise.sonew.optimizer import SONew

__all__ = ["MARS", "MKOR", "LDAdam", "SONew", "__version__", "annotate"]

_HOMES = {
    **{name: f"rankwise.{name.lower()}.optimizer" for name in ("MARS", "MKOR", "LDAdam", "SONew")},
    "annotate": "rankwise.routing.roles",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(_HOMES[name]), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _sharded_readers() -> tuple[Any, Any]:
    from rankwise.fsdp.replaced_parameters import refuse_replaced
    from rankwise.fsdp.sharded_parameters import ShardedParameters

    return ShardedParameters.of, refuse_replaced


read_sharded_by(_sharded_readers)
