"""Fields of dataclasses become options of commands, so that what was typed is one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

import typer

__all__ = ["bad_usage", "count", "share", "takes_dataclasses"]


def count(help: str, panel: str | None = None, *names: str, least: int = 1, most: int | None = None) -> Any:
    """Return the option of a whole number.

    Args:
        help: Text of the option.
        panel: Panel of the command's help.
        names: Names on the command line, if they differ from the field's.
        least: Least valid value.
        most: Largest valid value.
    """
    return typer.Option(*names, min=least, max=most, metavar="N", help=help, rich_help_panel=panel)


def share(
    help: str, panel: str | None = None, *names: str, least: float | None = None, most: float | None = None
) -> Any:
    """Return the option of a number with a point, with the arguments of :func:`count`."""
    return typer.Option(*names, min=least, max=most, metavar="X", help=help, rich_help_panel=panel)


@contextmanager
def bad_usage(*errors: type[Exception]) -> Iterator[None]:
    """Treat an error inside the context as the user's: print a line on stderr, and end with status 2.

    Args:
        errors: Types of such errors beside ValueError.
    """
    refused: tuple[type[Exception], ...] = (ValueError, *errors)
    try:
        yield
    except refused as error:
        raise typer.BadParameter(str(error)) from error


def takes_dataclasses(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer in which the fields of each dataclass parameter are options.

    A field is an option if its annotation says so, ``layers: Annotated[int, count("Blocks.")] = 4``. If it is not
    given, its ``default_factory``, if there is one, makes the value. A ValueError of ``__post_init__`` is bad usage.
    """
    parameters: list[Parameter] = []
    groups: dict[str, tuple[Any, dict[str, Any]]] = {}
    for parameter in signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if not is_dataclass(kind):
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(kind, include_extras=True)
        options = {field.name: field for field in fields(kind) if hasattr(hints[field.name], "__metadata__")}
        groups[parameter.name] = kind, options
        for name, field in options.items():
            default = None if field.default is MISSING else field.default
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name]))

    def call(**given: Any) -> None:
        for argument, (kind, options) in groups.items():
            values = {name: given.pop(name) for name in options}
            said = {name: value for name, value in values.items() if value is not None or options[name].default is None}
            with bad_usage():
                given[argument] = kind(**said)
        command(**given)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
