"""Partitioning of optimizer work and state over data-parallel ranks; knows no optimizer and no framework."""

from .exchange import MatrixExchange
from .halo import HaloExchange
from .layout import Fragment, Layout, LayoutError
from .plan import Batch, MatrixPlan, MatrixTask, plan_matrices
from .reduce import FragmentSums
from .traffic import Traffic

__all__ = [
    "Batch",
    "Fragment",
    "FragmentSums",
    "HaloExchange",
    "Layout",
    "LayoutError",
    "MatrixExchange",
    "MatrixPlan",
    "MatrixTask",
    "Traffic",
    "plan_matrices",
]
