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

This page lists every option of every class, with its default and range. An option is a keyword of the constructor and a
key of `"params"` in a DeepSpeed JSON. Megatron's flag is the prefix above each table and the option's name with `-` for
`_`, except `lr` and `weight_decay`, which are Megatron's own flags. A value outside its range ends a run before the
first step, with the rule and a fix.

*Groups* means that parameter groups may have their own values. *Fixed* means that the shapes of states depend on the
option, so a group keeps the value of its first step. [Routing](routing.md) says which parameters use which rule;
[configs](../configs/README.md) has the ready files. `python -m benchmarks options` writes this page from the fields
that make constructors, JSON keys and flags.

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
