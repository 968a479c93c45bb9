"""MKOR, MARS, SONew and LDAdam with matrix states partitioned over ranks, as torch.optim optimizers."""

from rankwise.optimizers.ldadam import LDAdam
from rankwise.optimizers.mars import MARS
from rankwise.optimizers.mkor import MKOR
from rankwise.optimizers.sonew import SONew

__all__ = ["LDAdam", "MARS", "MKOR", "SONew", "__version__"]
__version__ = "0.1.0"
