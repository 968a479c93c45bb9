"""MKOR, MARS, SONew and LDAdam with matrix states partitioned over ranks, as torch.optim optimizers."""

from rankwise.optimizers.ldadam import LDAdam
from rankwise.optimizers.mars import MARS
from rankwise.optimizers.mkor import MKOR
from rankwise.optimizers.routing import annotate
from rankwise.optimizers.sonew import SONew
from rankwise.version import __version__

__all__ = ["LDAdam", "MARS", "MKOR", "SONew", "__version__", "annotate"]
