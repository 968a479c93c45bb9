"""Modules with users' optimizers are imported where names of optimizers are read, so that every process has them.

The variable ``RANKWISE_RULES``, which launched ranks inherit, names them, or installed packages with an entry point in
the group ``rankwise.rules``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from rankwise.options.validation import OptionError

__all__ = ["GROUP", "VARIABLE", "add_rule_modules", "import_rule_modules", "names_rule_modules"]

VARIABLE = "RANKWISE_RULES"
"""Environment variable with the names of modules or files, separated as in ``PATH``."""

GROUP = "rankwise.rules"
"""Group of the entry points of installed packages."""


def names_rule_modules() -> bool:
    """Whether the variable or an installed package names any module."""
    return bool(os.environ.get(VARIABLE) or entry_points(group=GROUP))


def import_rule_modules() -> None:
    """Import what the variable and installed packages name, and what is not imported already.

    Raises:
        OptionError: A module cannot be imported; the message has its name and the reason.
    """
    for word in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        _imported(word)
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            raise OptionError(
                f"the entry point {point.name!r} of {GROUP} is invalid: {point.value} cannot be imported "
                f"({type(error).__name__}: {error}); repair or uninstall "
                f"{point.dist.name if point.dist else 'its package'}"
            ) from error


def add_rule_modules(words: list[str]) -> None:
    """Import modules now, and in every process that this one starts.

    Args:
        words: Names of modules, or paths of files.

    Raises:
        OptionError: A module cannot be imported.
    """
    # Ranks may be started in another folder.
    named = [str(Path(word).resolve()) if word.endswith(".py") else word for word in words]
    for word in named:
        _imported(word)
    if not named:
        return
    inherited = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*inherited, *named]))


def _imported(word: str) -> ModuleType:
    try:
        return _from_file(Path(word)) if word.endswith(".py") else importlib.import_module(word)
    except OptionError as error:
        raise OptionError(f"{VARIABLE}: {word!r} is invalid: {error}") from error
    except Exception as error:
        # Python wraps what a descriptor of a class body has raised in another error.
        cause = error.__cause__ if isinstance(error.__cause__, OptionError) else error
        raise OptionError(
            f"{VARIABLE}: {word!r} is invalid: it must be a module that can be imported or the path of a .py file "
            f"({type(cause).__name__}: {cause}); correct it, or take it out of {VARIABLE}"
        ) from error


def _from_file(path: Path) -> ModuleType:
    """Import a file under its own name, under which others may import it, too."""
    path = path.resolve()
    before = sys.modules.get(path.stem)
    if before is not None:
        if _file_of(before) == path:
            return before
        raise ImportError(f"a module {path.stem!r} is imported already, from {_file_of(before)}; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).resolve()
