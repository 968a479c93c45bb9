"""What the option ``blocks`` takes: how the logical matrices of fused weights lie, by patterns of their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankwise.options.by_pattern import ByPattern
from rankwise.options.checks import InvalidError
from rankwise.options.hints import nearest, shown

__all__ = ["BlockLayouts"]

WORDS = ("qkv", "heads", "none")
_EXAMPLE = 'write e.g. {"*qkv*": {"q": 4096, "k": 1024, "v": 1024}}'
_NUMBERS = ("groups", "heads")


class BlockLayouts(ByPattern):
    """A dictionary from name patterns to layouts, or None."""

    values = "layouts"
    example = _EXAMPLE

    def one(self, pattern: str, value: Any) -> Any:
        """See the base class."""
        return _layout(pattern, value)

    @property
    def range(self) -> str:
        """See the base class."""
        return 'dictionary from name patterns to "qkv", "heads", "none", or sizes'


def _layout(pattern: str, layout: Any) -> Any:
    if isinstance(layout, str):
        if layout in WORDS:
            return layout
        near = nearest(layout, list(WORDS))
        fix = f"did you mean '{near}'?" if near else _EXAMPLE
        raise InvalidError(f"the layout of '{pattern}' must be one of {', '.join(WORDS)}, or sizes", fix)
    if isinstance(layout, tuple | list):
        if len(layout) > 1 and all(map(_is_count, layout)):
            return list(layout)
        raise InvalidError(f"the sizes of '{pattern}' must be two or more integers >= 1", _EXAMPLE)
    if not isinstance(layout, Mapping) or not all(isinstance(name, str) for name in layout):
        raise InvalidError(f"the layout of '{pattern}' must be one of {', '.join(WORDS)}, or sizes", _EXAMPLE)
    return _sizes(pattern, dict(layout))


def _sizes(pattern: str, layout: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: size for name, size in layout.items() if name not in _NUMBERS}
    wrong = next((name for name, size in sizes.items() if not _is_count(size)), None)
    if wrong is not None or not sizes:
        what = f"'{wrong}'={shown(sizes[wrong])}" if wrong is not None else "no part"
        raise InvalidError(f"the sizes of '{pattern}' must be integers >= 1, and have {what}", _EXAMPLE)
    wrong = next((name for name in sizes if not name.isidentifier()), None)
    if wrong is not None:
        raise InvalidError(f"the part {wrong!r} of '{pattern}' must be named by a word", _EXAMPLE)
    if not _is_count(layout.get("groups", 1)):
        raise InvalidError(f"'groups' of '{pattern}' must be an integer >= 1", 'write e.g. {"q": 512, "groups": 8}')
    heads = layout.get("heads", 1)
    each = list(heads) if isinstance(heads, tuple | list) else [heads] * len(sizes)
    if len(each) != len(sizes) or not all(_is_count(number) or number == 0 for number in each):
        rule = f"'heads' of '{pattern}' must be an integer >= 1, or one for each of its {len(sizes)} parts"
        raise InvalidError(rule, 'write e.g. {"q": 4096, "k": 1024, "v": 1024, "heads": [32, 8, 8]}')
    return layout


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
