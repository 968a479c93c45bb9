"""Commands whose options are the fields of dataclasses: what was typed is one object for all that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

import typer

__all__ = ["bad_usage", "count", "share", "takes_dataclasses"]


def count(help: str, panel: str | None = None, *names: str, least: int = 1, most: int | None = None) -> Any:
    """The option of a whole number.

    Args:
        help: Its text.
        panel: Panel of the command's help.
        names: Names on the command line, if other than the field's.
        least: Least value that is taken.
        most: Largest value that is taken.
    """
    return typer.Option(*names, min=least, max=most, metavar="N", help=help, rich_help_panel=panel)


def share(
    help: str, panel: str | None = None, *names: str, least: float | None = None, most: float | None = None
) -> Any:
    """The option of a number with a point; see :func:`count`."""
    return typer.Option(*names, min=least, max=most, metavar="X", help=help, rich_help_panel=panel)


@contextmanager
def bad_usage(*errors: type[Exception]) -> Iterator[None]:
    """Within, an error is the user's: a line on stderr, and status 2.

    Args:
        errors: Beside ValueError.
    """
    refused: tuple[type[Exception], ...] = (ValueError, *errors)
    try:
        yield
    except refused as error:
        raise typer.BadParameter(str(error)) from error


def takes_dataclasses(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer in which each parameter that is a dataclass has become options.

    A field is one if its annotation says so, ``layers: Annotated[int, count("Blocks.")] = 4``. What is not given is
    left to its ``default_factory``, if it has one. A ValueError of ``__post_init__`` is bad usage.
    """
    parameters: list[Parameter] = []
    groups: dict[str, tuple[Any, dict[str, Any]]] = {}
    for parameter in signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if not is_dataclass(kind):
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(kind, include_extras=True)
        own = {field.name: field for field in fields(kind) if hasattr(hints[field.name], "__metadata__")}
        groups[parameter.name] = kind, own
        for name, field in own.items():
            default = None if field.default is MISSING else field.default
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name]))

    def call(**given: Any) -> None:
        for argument, (kind, own) in groups.items():
            values = {name: given.pop(name) for name in own}
            said = {name: value for name, value in values.items() if value is not None or own[name].default is None}
            with bad_usage():
                given[argument] = kind(**said)
        command(**given)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
