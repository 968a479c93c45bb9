"""Commands talk to people on a terminal, to programs as JSON, and say on stderr what went wrong."""

from __future__ import annotations

import json
import math
from typing import Any

import typer
from rich.console import Console

__all__ = ["complain", "console", "say", "tell_programs"]

console = Console()


def say(text: str) -> None:
    """Print a line for people, in which paths and names are neither styled nor broken at the terminal's edge."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def complain(text: str) -> None:
    """Print a line on stderr."""
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True, style="red")


def tell_programs(content: Any) -> None:
    """Print JSON on stdout, with null for numbers that are not finite, which JSON does not have."""
    typer.echo(json.dumps(_finite(content), indent=1, allow_nan=False))


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
