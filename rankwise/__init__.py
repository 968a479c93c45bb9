"""MKOR, MARS, SONew and LDAdam with matrix states partitioned over ranks, as torch.optim optimizers."""

from rankwise import frameworks as frameworks  # makes the core's messages name what to call
from rankwise.fsdp.replaced_parameters import refuse_replaced
from rankwise.fsdp.sharded_parameters import ShardedParameters
from rankwise.layout.layout_source import read_sharded_by
from rankwise.ldadam.optimizer import LDAdam
from rankwise.mars.optimizer import MARS
from rankwise.mkor.optimizer import MKOR
from rankwise.routing.roles import annotate
from rankwise.sonew.optimizer import SONew
from rankwise.version import __version__

read_sharded_by(ShardedParameters.of, refuse_replaced)

__all__ = ["MARS", "MKOR", "LDAdam", "SONew", "__version__", "annotate"]
