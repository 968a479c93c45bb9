"""Partitioning of optimizer work and state over data-parallel ranks; knows no optimizer and no framework."""

from .agreement import gather_together, together
from .batch_messages import BatchPlan
from .equal_slices import SlicedMatrix, find_slices, in_slices
from .even_cuts import EvenCuts, EvenLayout
from .exchange import Gather, MatrixExchange, Return
from .fused_blocks import Block, cut_into_blocks, in_blocks
from .halo import Halo, HaloExchange, ReadField
from .indices import DeviceIndices
from .layout import Layout, LayoutError, Shard, StridedRun
from .local_groups import host_group, local_group
from .message_format import Traffic, WireFormat
from .owner_plan import BATCH_ELEMENTS, Batch, MatrixPlan, MatrixTask, Reply, keepers_of, own_pieces, plan_matrices
from .parameter_sums import ShardSums
from .volume import (
    BatchBuffers,
    BatchVolume,
    Flow,
    RankBuffers,
    batch_buffers,
    batch_volumes,
    halo_volume,
    matrix_volume,
    sent_in,
    sums_volume,
)

__all__ = [
    "BATCH_ELEMENTS",
    "Batch",
    "BatchBuffers",
    "BatchPlan",
    "BatchVolume",
    "Block",
    "DeviceIndices",
    "EvenCuts",
    "EvenLayout",
    "Flow",
    "Gather",
    "Halo",
    "HaloExchange",
    "Layout",
    "LayoutError",
    "MatrixExchange",
    "MatrixPlan",
    "MatrixTask",
    "RankBuffers",
    "ReadField",
    "Reply",
    "Return",
    "Shard",
    "ShardSums",
    "SlicedMatrix",
    "StridedRun",
    "Traffic",
    "WireFormat",
    "batch_buffers",
    "batch_volumes",
    "cut_into_blocks",
    "find_slices",
    "gather_together",
    "halo_volume",
    "host_group",
    "in_blocks",
    "in_slices",
    "keepers_of",
    "local_group",
    "matrix_volume",
    "own_pieces",
    "plan_matrices",
    "sent_in",
    "sums_volume",
    "together",
]
