"""Partitioning of optimizer work and state over data-parallel ranks; knows no optimizer and no framework."""

from .agreement import gather_together, together
from .buffers import BatchBuffers, RankBuffers, batch_buffers
from .even import EvenCuts, EvenLayout
from .exchange import Gather, MatrixExchange, Return
from .halo import Halo, HaloExchange, ReadField
from .indices import DeviceIndices
from .inside import Block, cut_into_blocks, in_blocks
from .layout import Fragment, Layout, LayoutError, Place
from .lending import keepers_of
from .local_groups import host_group, local_group
from .owner_plan import BATCH_ELEMENTS, Batch, MatrixPlan, MatrixTask, Reply, own_pieces, plan_matrices
from .pieces import BatchPlan
from .reduce import FragmentSums
from .slices import SlicedMatrix, find_slices, in_slices
from .traffic import Traffic
from .volume import BatchVolume, Flow, batch_volumes, halo_volume, matrix_volume, sums_volume
from .wire import WireFormat

__all__ = [
    "host_group",
    "local_group",
    "RankBuffers",
    "batch_buffers",
    "batch_volumes",
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
    "Fragment",
    "FragmentSums",
    "Gather",
    "Halo",
    "HaloExchange",
    "ReadField",
    "Layout",
    "LayoutError",
    "MatrixExchange",
    "MatrixPlan",
    "MatrixTask",
    "Place",
    "Reply",
    "Return",
    "SlicedMatrix",
    "Traffic",
    "WireFormat",
    "cut_into_blocks",
    "find_slices",
    "gather_together",
    "halo_volume",
    "in_blocks",
    "in_slices",
    "keepers_of",
    "matrix_volume",
    "own_pieces",
    "plan_matrices",
    "sums_volume",
    "together",
]
