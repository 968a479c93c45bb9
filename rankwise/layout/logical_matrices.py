"""The logical matrices of a fused weight: those of the model, or those that the option ``blocks`` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any, NoReturn

from rankwise.layout.fused_blocks import Block
from rankwise.options.hints import shown
from rankwise.options.validation import OptionError
from rankwise.routing.fused_shape import FusedShape
from rankwise.routing.roles import ParameterInfo

__all__ = ["block_info", "blocks_of"]

_RESERVED = ("groups", "heads")
"""Keys of a layout in the option ``blocks`` that do not name a part."""


def blocks_of(
    owner: str,
    info: ParameterInfo,
    layouts: Mapping[str, Any] | None = None,
    split_heads: bool = False,
    together: bool = False,
) -> tuple[Block, ...]:
    """The blocks of a weight, which tile it.

    Args:
        owner: Name of the optimizer, for messages.
        info: The weight, or a stack of weights that are fused alike.
        layouts: The option ``blocks``; a pattern that matches the weight overrules the model.
        split_heads: Whether each attention head is a block of its own, where heads are known.
        together: Whether the heads of a part stay one block, even if an option asks to split them.

    Returns:
        The blocks; empty where the weight is one matrix.

    Raises:
        OptionError: The option does not fit the weight.
    """
    if len(info.shape) not in (2, 3):
        return ()
    fused = info.fused
    # The last pattern counts, as it does in other options.
    pattern = next(
        (candidate for candidate in reversed(list(layouts or {})) if fnmatch(info.own_name, candidate)), None
    )
    if layouts and pattern is not None:
        layout = layouts[pattern]
        if layout == "none":
            return ()
        if layout in ("heads", "groups"):
            if fused is None or not (any(fused.heads) if layout == "heads" else fused.groups > 1):
                rule = f"the attention heads in '{info.own_name}' must be known, but are not"
                _refuse(owner, pattern, layout, rule, 'write the parts and their heads, e.g. {"q": 1024, "heads": 16}')
            if layout == "groups":
                part = "".join(name for name, _ in fused.parts)
                fused = FusedShape(((part, fused.length),), fused.dim, heads=(fused.groups,))
        else:
            fused = _from_option(owner, info, pattern, layout)
        split_heads |= layout in ("heads", "groups") or (isinstance(layout, Mapping) and "heads" in layout)
    if fused is None or fused.length != info.shape[fused.dim]:
        return ()
    return _blocks(fused, split_heads and not together)


def block_info(info: ParameterInfo, block: Block, key: str | None = None) -> ParameterInfo:
    """Describe a block, or the stack of blocks of a stack of weights; ``key`` names a matrix of a stack."""
    shape = block.shape(info.shape)
    if key is None:
        return replace(info, shape=(*info.shape[:-2], *shape), fused=None)
    return replace(info, name=key, shape=shape, fused=None, bias=None)


def _blocks(fused: FusedShape, split_heads: bool) -> tuple[Block, ...]:
    blocks, start, period = [], 0, fused.length // fused.groups
    by_columns = fused.dim == -1
    for (name, size), heads in zip(fused.parts, fused.heads or (0,) * len(fused.parts), strict=True):
        if split_heads and heads:
            width = size // heads
            for group in range(fused.groups):
                for head in range(heads):
                    first = group * period + start + head * width
                    blocks.append(Block(f"{name}.{group * heads + head}", by_columns, first, width, period))
        else:
            blocks.append(Block(name, by_columns, start, size, period, fused.groups))
        start += size
    return tuple(blocks) if len(blocks) > 1 else ()


def _from_option(owner: str, info: ParameterInfo, pattern: str, layout: Any) -> FusedShape:
    """Parts of a weight's outputs that the option names."""
    dim = -1 if info.transposed else -2
    length = info.shape[dim]
    if layout == "qkv":
        if length % 3:
            rule = f"the {length} outputs of '{info.own_name}' must be three equal parts"
            _refuse(owner, pattern, layout, rule, 'write their sizes, e.g. {"q": 4096, "k": 1024, "v": 1024}')
        return FusedShape(tuple((name, length // 3) for name in "qkv"), dim)
    if isinstance(layout, Mapping):
        groups = layout.get("groups", 1)
        sizes = {name: size for name, size in layout.items() if name not in _RESERVED}
        heads = layout.get("heads", ())
    else:
        groups, sizes, heads = 1, {f"part{place}": size for place, size in enumerate(layout)}, ()
    if groups * sum(sizes.values()) != length:
        total = f"{groups} times {sum(sizes.values())}" if groups > 1 else str(sum(sizes.values()))
        rule = f"the sizes must add up to the {length} outputs of '{info.own_name}', but add up to {total}"
        _refuse(owner, pattern, layout, rule, "count the rows of each part within one group")
    heads = (heads,) * len(sizes) if isinstance(heads, int) else tuple(heads)
    try:
        return FusedShape(tuple(sizes.items()), dim, groups, heads)
    except ValueError as error:
        _refuse(owner, pattern, layout, str(error), "count the heads of each part within one group")


def _refuse(owner: str, pattern: str, layout: Any, rule: str, fix: str) -> NoReturn:
    raise OptionError(f"{owner}: blocks={shown({pattern: layout})} is invalid: {rule}; {fix}")
