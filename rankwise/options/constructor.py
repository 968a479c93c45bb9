"""Makes constructors whose keywords and documentation are the fields of an option class."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from rankwise.options.fields import Option, Options
from rankwise.options.hints import hint_for

__all__ = ["described", "options_as_keywords"]

_Keywords = ParamSpec("_Keywords")
_Self = TypeVar("_Self")
_Given = TypeVar("_Given", bound=Options)
_WIDTH = 116
_PARAMS = "params: Parameters, ``(name, parameter)`` pairs or param groups."


def options_as_keywords(
    options_type: Callable[_Keywords, _Given],
) -> Callable[[Callable[[_Self, Any, _Given], None]], Callable[Concatenate[_Self, _Keywords], None]]:
    """Let a constructor that takes ``params`` and an option class's object take the options as keywords.

    The class gets ``options_type`` and, in its docstring, the section ``Args``. Type checkers see the keywords, too:
    they are the parameters of the option class.

    Args:
        options_type: A dataclass of options.
    """
    known = cast(type[Options], options_type)

    def decorate(init: Callable[..., None]) -> Any:
        return _Constructor(init, known)

    return decorate


class _Constructor(Generic[_Self]):
    """Takes the constructor's place in a class body, until the class exists and can get its options."""

    def __init__(self, init: Callable[..., None], options_type: type[Options]) -> None:
        self._init, self._options_type = init, options_type

    def __set_name__(self, owner: Any, name: str) -> None:
        owner.options_type = self._options_type
        owner.__doc__ = described(owner.__doc__, self._options_type)
        setattr(owner, name, _with_keywords(self._init, self._options_type))


def _with_keywords(init: Callable[..., None], options_type: type[Options]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, params: Any, *args: Any, **keywords: Any) -> None:  # noqa: N807 - the name in tracebacks
        try:
            accepted.bind(*args, **keywords)
        except TypeError as error:
            # The message of ``bind`` lacks the name that was called.
            raise TypeError(f"{type(self).__name__}() {error}{_meant(options_type, keywords)}") from None
        init(self, params, options_type(*args, **keywords))

    accepted = inspect.signature(options_type, eval_str=True)
    parameters = list(inspect.signature(init, eval_str=True).parameters.values())[:-1]
    __init__.__signature__ = accepted.replace(parameters=[*parameters, *accepted.parameters.values()])  # type: ignore[attr-defined]
    return __init__


def _meant(options_type: type[Options], keywords: Iterable[str]) -> str:
    known = options_type.table()
    unknown = next((key for key in keywords if key not in known), None)
    return f"; {hint_for(unknown, known)}" if unknown else ""


def described(text: str | None, options_type: type[Options]) -> str | None:
    """Insert the options into a class's docstring, before the section ``Raises``."""
    if text is None:
        return None
    before, heading, after = inspect.cleandoc(text).partition("\nRaises:\n")
    entries = [_PARAMS, *map(_entry, options_type.table().values())]
    lines = [textwrap.fill(entry, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8) for entry in entries]
    return "\n".join([before, "Args:", *lines, heading + after])


def _entry(known: Option) -> str:
    facts = [known.check.range, f"default {_written(known.default)}"]
    facts += ["per group"] if known.per_group else []
    facts += ["fixed by the first step"] if known.structural else []
    return f"{known.name} ({'; '.join(facts)}): {known.text}"


def _written(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
