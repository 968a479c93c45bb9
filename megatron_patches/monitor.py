"""The writers of Megatron's training loop, TensorBoard and Weights & Biases, show the optimizer's health."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer

from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["health_of", "remember", "report_health"]

_latest: dict[str, Any] = {}


def remember(built: MegatronOptimizer, name: str, pipeline: dist.ProcessGroup) -> None:
    """Report the health of an optimizer from now on.

    Args:
        built: Result of the factory.
        name: The optimizer's name.
        pipeline: One rank of every pipeline stage, this one among them.
    """
    _latest.update(built=weakref.ref(built), name=name, pipeline=pipeline)


def health_of(wrappers: Sequence[Any]) -> dict[str, float]:
    """Return what happened since the last reading on this rank's pipeline stage; a collective.

    Args:
        wrappers: Wrappers of our optimizers, for the parts of one model.

    Returns:
        The counters of :meth:`rankwise.step.optimizer.ShardedOptimizer.read_health` and, if they were asked for, the
        norms of :meth:`megatron_patches.norms.Norms.read`. Names for experts begin with ``experts/``, and names for
        further parts with ``part<n>/``.
    """
    health: dict[str, float] = {}
    for index, wrapper in enumerate(wrappers):
        inner = getattr(wrapper, "optimizer", None)
        if not isinstance(inner, ShardedOptimizer):
            continue
        prefix = "experts/" if wrapper.holds_experts else f"part{index}/" if "matrices_updated" in health else ""
        norms = {} if wrapper.norms is None else wrapper.norms.read()
        health |= {prefix + name: value for name, value in {**inner.read_health(), **norms}.items()}
    return health


def report_health(iteration: int) -> None:
    """Write ``optim/<type>/<metric>`` every ``--log-interval`` iterations, where a writer is configured.

    Megatron waits for the device at these iterations, too; at all others nothing is read. A collective.

    Args:
        iteration: Number of iterations done.
    """
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

    args = get_args()
    built = _latest["built"]() if _latest else None
    # Reading is collective, though only the last rank has writers.
    is_watched = getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", None)
    if built is None or not is_watched or iteration % args.log_interval:
        return
    metrics = _over_stages(built.read_health(), _means(built), _latest["pipeline"])
    named = {f"optim/{_latest['name']}/{name}": value for name, value in metrics.items()}
    writer, board = get_tensorboard_writer(), get_wandb_writer()
    if writer:
        for name, value in named.items():
            writer.add_scalar(name, value, iteration)
    if board:
        board.log(named, iteration)


def _means(built: Any) -> frozenset[str]:
    wrappers = getattr(built, "chained_optimizers", [built])
    ours = [w.optimizer.spec for w in wrappers if isinstance(w.optimizer, ShardedOptimizer)]
    return frozenset(("skipped_steps", *(name for spec in ours for name in spec.health_means)))


def _over_stages(mine: Mapping[str, float], means: frozenset[str], pipeline: dist.ProcessGroup) -> dict[str, float]:
    """Return totals and means over the pipeline stages, as the writers' rank has the last stage's only."""
    everyone: list[Mapping[str, float]] = [{}] * dist.get_world_size(pipeline)
    dist.all_gather_object(everyone, dict(mine), group=pipeline)
    lists: dict[str, list[float]] = {}
    for stage in everyone:
        for name, value in stage.items():
            lists.setdefault(name, []).append(value)
    return {name: sum(values) / (len(values) if name.rsplit("/")[-1] in means else 1) for name, values in lists.items()}
