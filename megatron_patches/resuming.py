"""After a resume this module says which options count, the checkpoint's or this run's, and which states do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_tensors_metadata

from megatron_patches.param_groups import RATES
from megatron_patches.records import nested
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["flag_of", "misfit", "options_record", "overriding_rates", "overrides", "settle_options", "wrappers_of_ours"]

OVERRIDE = "--override-opt_param-scheduler"
# Megatron's scheduler writes these into the groups, and has rules and flags of its own for them.
_SCHEDULED = ("lr", "weight_decay")
_OURS = "optimizer.rankwise."


def flag_of(cls: type[ShardedOptimizer], option: str = "") -> str:
    """Return an option's flag on the command line; without an option, how all flags of a class begin."""
    return f"--{cls.options_type.flag(option)}"


@contextmanager
def overriding_rates(optimizer: Any, scheduler: Any) -> Iterator[None]:
    """Let this run's rates count after a load of Megatron's inside, whose loop may give all groups one rate.

    Args:
        optimizer: Result of the factory, or None.
        scheduler: Megatron's scheduler, or None.
    """
    groups = [group for wrapper in wrappers_of_ours(optimizer) if overrides(wrapper) for group in wrapper.param_groups]
    before = [{name: group[name] for name in RATES if name in group} for group in groups]
    yield
    for group, rates in zip(groups, before, strict=True):
        group.update(rates)
    if groups and scheduler is not None:
        scheduler.step(increment=0)


def wrappers_of_ours(optimizer: Any) -> list[Any]:
    """Return Megatron's wrappers around optimizers of ours.

    Args:
        optimizer: Result of the factory, or None.
    """
    wrappers = getattr(optimizer, "chained_optimizers", [optimizer])
    return [wrapper for wrapper in wrappers if isinstance(getattr(wrapper, "optimizer", None), ShardedOptimizer)]


def overrides(wrapper: Any) -> bool:
    """Whether this run's options count if a checkpoint's differ."""
    return bool(getattr(wrapper.config, "rankwise_override_checkpoint", False))


def options_record(inner: ShardedOptimizer) -> dict[str, Any]:
    """Return the options that an optimizer was built with, in plain data, for the next run to compare.

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

    A param group gets the checkpoint's values, as the betas of Megatron's own optimizers do, unless this run's override
    them. Options that groups do not have (an interval, a number of iterations) are this run's.

    Args:
        inner: The optimizer, whose groups are loaded.
        before: The groups that this run made.
        saved: Result of :func:`options_record` in the checkpoint.
        override: Whether this run's values count.
        keep_structure: Whether options that decide shapes of states stay this run's, because states were read so.
    """
    differences: dict[str, None] = {}
    stays = 0
    for group, mine in zip(inner.param_groups, before, strict=True):
        for name in (*inner.defaults, *RATES):
            if name in _SCHEDULED or name not in mine or _plain(group.get(name)) == _plain(mine[name]):
                continue
            is_mine = keep_structure if name in inner.spec.structural_options else override
            differences[_difference(inner, name, group.get(name), mine[name], is_mine)] = None
            stays += not is_mine and name not in inner.spec.structural_options
            if is_mine:
                group[name] = mine[name]
    for name, value in options_record(inner).items():
        if name in saved and name not in inner.defaults and _plain(saved[name]) != _plain(value):
            differences[_difference(inner, name, saved[name], value, True)] = None
    if differences:
        way_out = f". {OVERRIDE} lets this run's count" if stays else ""
        inner.reports.announce(f"rankwise {inner.spec.name}: on resuming, {'; '.join(differences)}{way_out}")


def _difference(inner: ShardedOptimizer, name: str, theirs: Any, mine: Any, is_mine: bool) -> str:
    shown = flag_of(type(inner), name) if name in inner.options.names() else name
    counts = "this run's" if is_mine else "the checkpoint's"
    return f"{shown} is {theirs!r} in the checkpoint and {mine!r} in this run: {counts} counts"


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def misfit(
    requested: Any, folder: str, wanted: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return why states of ours could not be read from a checkpoint, after Megatron has failed to.

    Args:
        requested: Sharded state that was asked for.
        folder: Folder of the checkpoint.
        wanted: Records of our optimizers in the sharded state.
        stored: Records of our optimizers in the checkpoint.

    Returns:
        The first state that does not fit, and the options that differ; None if it failed for another reason.
    """
    owner = wanted[0]["identity"]
    options = "; ".join(_differing(wanted, stored))
    metadata = load_tensors_metadata(folder)
    for _, tensor in nested(requested):
        if not isinstance(tensor, ShardedTensor) or not tensor.key.startswith(_OURS):
            continue
        stored_tensor = metadata.get(tensor.key)
        # A state that is padded to the number of ranks may have other numbers of rows.
        free = 1 if tensor.allow_shape_mismatch else 0
        if stored_tensor is not None and tuple(stored_tensor.global_shape[free:]) == tuple(tensor.global_shape[free:]):
            continue
        name = tensor.key.removeprefix(f"{_OURS}{owner}.")
        problem = (
            f"the checkpoint has no {name}"
            if stored_tensor is None
            else f"{name} has shape {tuple(stored_tensor.global_shape)} in the checkpoint and must have "
            f"{tuple(tensor.global_shape)}"
        )
        cause = f"with other options ({options})" if options else "for another model"
        return (
            f"{owner}: {problem}: it was saved {cause}; continue with what wrote it, or pass --no-load-optim to start "
            "the states afresh"
        )
    if options:
        # On this rank everything fits; the error that Megatron raised has another rank's message.
        return f"{owner}: states on another rank do not fit; the checkpoint was saved with other options ({options})"
    return None


def _differing(wanted: Iterable[Mapping[str, Any]], stored: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for mine, theirs in zip(wanted, stored, strict=False):
        options = theirs.get("options", {})
        for name, value in mine["options"].items():
            if name in options and _plain(options[name]) != _plain(value):
                yield f"{name}={options[name]!r}, now {value!r}"
        return  # all parts of a model have equal options
