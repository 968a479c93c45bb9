"""The page of all options, from the fields that constructors, JSON keys and flags are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from rankwise.names import BY_SPELLING, CLASSES
from rankwise.options.fields import Option
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["options_page"]

_HEAD = """# Options

Written by `python -m benchmarks options` from the fields that constructors, JSON keys and flags are made of. An option
is a keyword of the constructor and a key of `"params"` in a DeepSpeed JSON; Megatron's flag is the prefix named with
each table and the option's name with `-` for `_`, but for `lr` and `weight_decay`, which are Megatron's own flags.

*Groups*: param groups may have values of their own. *Fixed*: the shapes of states depend on it, so that a group keeps
what it had at its first step. A value outside its range ends a run before the first step, with the rule and a fix.
Which parameters take which rule is in [routing](routing.md), what the ready files have in
[configs](../configs/README.md).

"""


def options_page() -> str:
    """The whole page."""
    return _HEAD + "\n".join(_section(known) for known in CLASSES)


def _section(known: type[ShardedOptimizer]) -> str:
    options = known.options_type
    head = ["option", "default", "values", "may vary", "what it does"]
    lines = [head, ["---"] * len(head), *map(_row, options.table().values())]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    names = "; ".join(_names(known))
    return f"## {known.__name__}\n\nTypes: {names}. Megatron's flags begin with `--{options.flag('')}`.\n\n{table}"


def _names(known: type[ShardedOptimizer]) -> Iterator[str]:
    for spelling, named in BY_SPELLING.items():
        if named.optimizer is known:
            fixed = ", ".join(f"`{key}` = {_written(value)}" for key, value in named.preset.items())
            yield f"`{spelling}`" + (f" ({fixed})" if fixed else "")


def _row(option: Option) -> list[str]:
    may = "groups, fixed" if option.structural else "groups" if option.per_group else ""
    return [f"`{option.name}`", _written(option.default), *map(_plain, (option.check.range, may, option.text))]


def _plain(text: str) -> str:
    """Without anything that Markdown would read."""
    return re.sub(r"([|*_<])", r"\\\1", text)


def _written(value: Any) -> str:
    """As a JSON has it."""
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"
