"""All experiments by name."""

from __future__ import annotations

from benchmarks.convergence.autoencoders import E1, E2
from benchmarks.convergence.experiment import Claim, Contender, Experiment
from benchmarks.convergence.factor_sources import E12
from benchmarks.convergence.ladder import ladder
from benchmarks.convergence.language_models import E3, E4, E5
from benchmarks.convergence.rates import RATES
from benchmarks.convergence.results import Results
from benchmarks.convergence.sizes import CELLS
from benchmarks.convergence.variations import VARIATIONS

__all__ = ["CHECK", "EXPERIMENTS", "chosen"]

EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in (E1, E2, E3, E4, E5, E12)}
"""Experiments of the page, in its order."""

CHECK = Experiment(
    name="E0",
    title="The harness itself",
    about="Blobs instead of digits, and seconds instead of hours: for tests.",
    task={"kind": "autoencoder", "data": "blobs", "pixels": 7, "widths": (16, 4), "batch": 50},
    steps=60,
    metric="train_loss",
    counts=0.02,
    relative=True,
    contenders=(
        Contender("Adam", "adam", 1e-2),
        Contender("SONew, band 1", "sonew", 1e-2),
        Contender("MKOR on SGD", "mkor", 1e-2, ({"backend": "sgd", "update_interval": 3},)),
    ),
    claims=(Claim("nobody", "lower than Adam", "SONew, band 1", "Adam"),),
    trials=3,
    seeds=(1, 2),
)
"""Not on the page."""


def chosen(names: str, results: Results) -> list[Experiment]:
    """Experiments from names separated by commas; empty for all of the page, "E9", "E11" and "E13" for all of theirs.

    Args:
        names: The names.
        results: What has been run: E13's rates at the larger sizes follow from it.

    Raises:
        ValueError: There is none of that name.
    """
    wanted = [name.strip().upper() for name in names.split(",") if name.strip()] or list(EXPERIMENTS)
    families = {"E9": list(CELLS.values()), "E11": list(VARIATIONS), "E13": list(ladder(results).values())}
    members = [experiment for family in families.values() for experiment in family]
    single = {experiment.name.upper(): experiment for experiment in (*members, *EXPERIMENTS.values(), CHECK, RATES)}
    known = families | {name: [experiment] for name, experiment in single.items()}
    for name in wanted:
        if name not in known:
            raise ValueError(f"no experiment {name!r}; there are: {', '.join(known)}")
    return [experiment for name in wanted for experiment in known[name]]
