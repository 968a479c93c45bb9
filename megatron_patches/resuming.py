"""After a resume: which hyper-parameters count, the checkpoint's or this run's, and why states do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_tensors_metadata

from megatron_patches.param_groups import RATES
from megatron_patches.records import nested
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["flag_of", "misfit", "options_record", "overriding_rates", "overrides", "settle_options"]

OVERRIDE = "--override-opt_param-scheduler"
# Written into the groups by Megatron's scheduler, which has rules and flags of its own for them.
_SCHEDULED = ("lr", "weight_decay")
_OURS = "optimizer.rankwise."


def flag_of(cls: type[ShardedOptimizer], option: str = "") -> str:
    """An option of a class on the command line; without an option, how all of them begin."""
    return f"--{cls.options_type.flag(option)}"


@contextmanager
def overriding_rates(optimizer: Any, scheduler: Any) -> Iterator[None]:
    """Around a load of Megatron's, after which this run's rates are to count: its loop may give all groups one rate.

    Args:
        optimizer: What the factory returned, or None.
        scheduler: Megatron's, or None.
    """
    wrappers = getattr(optimizer, "chained_optimizers", [optimizer])
    ours = [wrapper for wrapper in wrappers if isinstance(getattr(wrapper, "optimizer", None), ShardedOptimizer)]
    groups = [group for wrapper in ours if overrides(wrapper) for group in wrapper.param_groups]
    before = [{name: group[name] for name in RATES if name in group} for group in groups]
    yield
    for group, rates in zip(groups, before, strict=True):
        group.update(rates)
    if groups and scheduler is not None:
        scheduler.step(increment=0)


def overrides(wrapper: Any) -> bool:
    """Whether this run's options count where a checkpoint's differ."""
    return bool(getattr(wrapper.config, "rankwise_override_checkpoint", False))


def options_record(inner: ShardedOptimizer) -> dict[str, Any]:
    """The options an optimizer was built with, in plain data, for the next run to compare.

    Args:
        inner: The optimizer.
    """
    return {name: getattr(inner.options, name) for name in inner.options.names() if name not in _SCHEDULED}


def settle_options(
    inner: ShardedOptimizer,
    before: Sequence[Mapping[str, Any]],
    saved: Mapping[str, Any],
    override: bool,
    keep_structure: bool,
) -> None:
    """Say in one line which options differ from the checkpoint's, and which of the two count.

    A param group's values are the checkpoint's, as Megatron has it for the betas of its own optimizers, unless
    this run's are to override. What is no group's (an interval, a number of iterations) is this run's.

    Args:
        inner: The optimizer, its groups loaded.
        before: The groups as this run made them.
        saved: Result of :func:`options_record` there.
        override: Whether this run's values count.
        keep_structure: Whether options on which shapes of states depend stay this run's, to which states were read.
    """
    found: dict[str, None] = {}
    stays = 0
    for group, mine in zip(inner.param_groups, before, strict=True):
        for name in (*inner.defaults, *RATES):
            if name in _SCHEDULED or name not in mine or _plain(group.get(name)) == _plain(mine[name]):
                continue
            is_mine = keep_structure if name in inner.spec.structural_options else override
            found[_difference(inner, name, group.get(name), mine[name], is_mine)] = None
            stays += not is_mine and name not in inner.spec.structural_options
            if is_mine:
                group[name] = mine[name]
    for name, value in options_record(inner).items():
        if name in saved and name not in inner.defaults and _plain(saved[name]) != _plain(value):
            found[_difference(inner, name, saved[name], value, True)] = None
    if found:
        way_out = f". {OVERRIDE} lets this run's count" if stays else ""
        inner.reports.announce(f"rankwise {inner.spec.name}: on resuming, {'; '.join(found)}{way_out}")


def _difference(inner: ShardedOptimizer, name: str, theirs: Any, mine: Any, is_mine: bool) -> str:
    shown = flag_of(type(inner), name) if name in inner.options.names() else name
    counts = "this run's" if is_mine else "the checkpoint's"
    return f"{shown} is {theirs!r} in the checkpoint and {mine!r} in this run: {counts} counts"


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def misfit(
    requested: Any, folder: str, wanted: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]]
) -> str | None:
    """Why states of ours could not be read from a checkpoint, after Megatron has failed to.

    Args:
        requested: The sharded state that was to be filled.
        folder: The checkpoint.
        wanted: The records of our optimizers in it.
        stored: Those in the checkpoint.

    Returns:
        The first state that does not fit, and the options that differ; None if it failed for another reason.
    """
    owner = wanted[0]["identity"]
    options = "; ".join(_differing(wanted, stored))
    known = load_tensors_metadata(folder)
    for _, tensor in nested(requested):
        if not isinstance(tensor, ShardedTensor) or not tensor.key.startswith(_OURS):
            continue
        there = known.get(tensor.key)
        # Of what is padded to the number of ranks, rows may be missing.
        free = 1 if tensor.allow_shape_mismatch else 0
        if there is not None and tuple(there.global_shape[free:]) == tuple(tensor.global_shape[free:]):
            continue
        name = tensor.key.removeprefix(f"{_OURS}{owner}.")
        problem = (
            f"the checkpoint has no {name}"
            if there is None
            else f"{name} has shape {tuple(there.global_shape)} in the checkpoint and must have "
            f"{tuple(tensor.global_shape)}"
        )
        cause = f"with other options ({options})" if options else "for another model"
        return (
            f"{owner}: {problem}: it was saved {cause}; continue with what wrote it, or pass --no-load-optim to start "
            "the states afresh"
        )
    if options:
        # On this rank everything fits; another one's message is part of what Megatron raised.
        return f"{owner}: states on another rank do not fit; the checkpoint was saved with other options ({options})"
    return None


def _differing(wanted: Iterable[Mapping[str, Any]], stored: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for mine, theirs in zip(wanted, stored, strict=False):
        there = theirs.get("options", {})
        for name, value in mine["options"].items():
            if name in there and _plain(there[name]) != _plain(value):
                yield f"{name}={there[name]!r}, now {value!r}"
        return  # All parts of a model have the same.
