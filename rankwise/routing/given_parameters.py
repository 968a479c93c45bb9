"""Refuses parameters that are given twice, before anything is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rankwise.options.validation import OptionError

__all__ = ["refuse_given_twice"]


def refuse_given_twice(owner: str, group: dict[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a tensor that a param group has twice, or that another one has already.

    torch warns of the first, names no parameter of the second, and would step the tensor twice.

    Args:
        owner: Name of the optimizer, for the message.
        group: A group that is to be added; its parameters become a list.
        others: The groups before it.

    Raises:
        OptionError: A tensor is given twice; the message names both places.
    """
    given = group.get("params")
    if isinstance(given, Tensor) or not isinstance(given, Iterable) or isinstance(given, set | str):
        return  # one tensor, or what torch refuses
    group["params"] = list(given)
    seen: dict[int, str] = {}
    for position, other in enumerate([*others, group]):
        for place, name in _named(other, position):
            before = seen.setdefault(place, name)
            if before is not name:
                raise OptionError(
                    f"{owner}: params is invalid: {before} and {name} are one tensor, which must be given once, "
                    "because a step would update it twice; leave one of them out, as model.named_parameters() does "
                    "with tied weights"
                )


def _named(group: Mapping[str, Any], position: int) -> Iterator[tuple[int, str]]:
    """Identities of a group's parameters, and what messages call them."""
    names = group.get("param_names") or ()
    for place, given in enumerate(group["params"]):
        name, tensor = given if isinstance(given, tuple) and len(given) == 2 else (None, given)
        name = names[place] if name is None and place < len(names) else name
        yield id(tensor), f"'{name}'" if name is not None else f"parameter {place} of param group {position}"
