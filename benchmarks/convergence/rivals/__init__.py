"""Optimizers that ours are compared with and torch does not have, from their papers, as small as they can be."""

from benchmarks.convergence.rivals.dense import KFAC, Eva
from benchmarks.convergence.rivals.elementwise import LAMB, Lion
from benchmarks.convergence.rivals.gradient_factors import GradientFactors
from benchmarks.convergence.rivals.low_rank import APOLLO, GaLore
from benchmarks.convergence.rivals.soap import SOAP

__all__ = ["APOLLO", "KFAC", "LAMB", "SOAP", "Eva", "GaLore", "GradientFactors", "Lion"]
