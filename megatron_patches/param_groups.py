"""This module pairs the param groups of a checkpoint with the groups of this run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer, param_group_identifier_keys

from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["GROUP_KEYS", "RATES", "Group", "match_groups", "share_members"]

_KIND = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Settings by which every version of Megatron tells groups apart."""
RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Settings that users override for some parameters; before 0.19 they are not among Megatron's own keys."""
GROUP_KEYS = tuple(dict.fromkeys((*_KIND, *param_group_identifier_keys, *RATES, "default_config")))
"""Settings by which Megatron and its users tell groups apart."""
_NUMBERS = re.compile(r"(?<=local_experts\.)\d+|(?<=experts\.linear_fc[12]\.weight)\d+|@tp\d+$")


class Group(NamedTuple):
    """A param group, of this run or of a checkpoint.

    Attributes:
        settings: All entries of the group but its tensors.
        members: Names of its parameters on all pipeline stages, without the numbers of experts and shards; empty if the
            checkpoint has no names.
    """

    settings: Mapping[str, Any]
    members: frozenset[str]


def share_members(wrappers: Sequence[MegatronOptimizer], pipeline: dist.ProcessGroup) -> list[list[frozenset[str]]]:
    """Return the names of all stages' parameters by wrapper and group. A collective of the stages' ranks.

    Args:
        wrappers: The optimizer's wrappers, as many on every stage.
        pipeline: One rank of every stage.
    """
    mine = [_members(wrapper.optimizer) for wrapper in wrappers]
    stages: list[list[list[set[str]]]] = [[] for _ in range(dist.get_world_size(pipeline))]
    dist.all_gather_object(stages, mine, group=pipeline)
    members = []
    for stubs_and_groups in zip(*stages, strict=True):
        present = [groups for groups in stubs_and_groups if groups]
        members.append([frozenset().union(*same) for same in zip(*present, strict=True)])
    return members


def _members(inner: ShardedOptimizer | None) -> list[set[str]]:
    if inner is None:  # this stage has no such parameters
        return []
    return [{_NUMBERS.sub("", name) for name in names} for names in inner.table.names_by_group(len(inner.param_groups))]


def match_groups(current: Sequence[Group], saved: Sequence[Group]) -> list[Mapping[str, Any]]:
    """Return the checkpoint's settings for every group of this run; empty if it has no such group.

    Groups are first paired by all settings by which Megatron and its users tell them apart; groups whose rates have
    changed since, by their parameters; and the remaining groups by kind, where that leaves no choice. Another layout
    may order groups differently.

    Args:
        current: This run's groups.
        saved: The checkpoint's groups.

    Raises:
        ValueError: A group could be any of several that differ.
    """
    pairs: dict[int, int] = {}
    _pair(pairs, current, saved, range(len(saved)), GROUP_KEYS)
    unused = [
        other for other in range(len(saved)) if not any(_same(saved[other], group, GROUP_KEYS) for group in current)
    ]
    for index in _unpaired(pairs, current):
        sharing = [other for other in unused if current[index].members & saved[other].members]
        if len(sharing) == 1 and _same(current[index], saved[sharing[0]], _KIND):
            pairs[index] = sharing[0]
    unused = [other for other in unused if other not in pairs.values()]
    for index in _unpaired(pairs, current):
        rivals = [other for other in _unpaired(pairs, current) if _same(current[other], current[index], _KIND)]
        choice = [other for other in unused if _same(saved[other], current[index], _KIND)]
        if choice and len(rivals) > 1:
            raise _ambiguous(current[index], [saved[other] for other in choice])
    _pair(pairs, current, saved, unused, _KIND)
    return [saved[pairs[index]].settings if index in pairs else {} for index in range(len(current))]


def _pair(
    found: dict[int, int], current: Sequence[Group], saved: Sequence[Group], among: Sequence[int], keys: Sequence[str]
) -> None:
    """Pair groups that agree in some settings, and among several of these by their parameters."""
    for index in _unpaired(found, current):
        group = current[index]
        choice = [other for other in among if _same(saved[other], group, keys)]
        if not _interchangeable(saved, choice):
            choice = [other for other in choice if saved[other].members & group.members] or choice
        if not _interchangeable(saved, choice):
            raise _ambiguous(group, [saved[other] for other in choice])
        if choice:
            found[index] = choice[0]


def _unpaired(found: Mapping[int, int], current: Sequence[Group]) -> list[int]:
    return [index for index in range(len(current)) if index not in found]


def _same(first: Group, second: Group, keys: Sequence[str]) -> bool:
    return all(_setting(first, key) == _setting(second, key) for key in keys)


def _setting(group: Group, key: str) -> Any:
    # NeMo renames the multipliers.
    return group.settings.get(key, group.settings.get(f"pre_{key}"))


def _interchangeable(saved: Sequence[Group], choice: Sequence[int]) -> bool:
    return all(saved[other].settings == saved[choice[0]].settings for other in choice)


def _ambiguous(group: Group, choice: Sequence[Group]) -> ValueError:
    return ValueError(
        f"the param group with {_shown(group)} could be any of {len(choice)} in the checkpoint: "
        f"{'; '.join(map(_shown, choice))}. Start with the learning rates and overrides of the run that wrote it "
        "(--lr, --min-lr, --decoupled-lr, config_overrides), or pass --no-load-optim to start the states afresh"
    )


def _shown(group: Group) -> str:
    return ", ".join(_settings_shown(group))


def _settings_shown(group: Group) -> Iterator[str]:
    for key in dict.fromkeys((*_KIND, *RATES)):
        value = _setting(group, key)
        if value is not None:
            yield f"{key}={value}"
