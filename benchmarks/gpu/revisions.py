"""Which code a figure is of: the revision, and a fingerprint that words do not change."""

from __future__ import annotations

import ast
import hashlib
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

__all__ = ["fingerprint", "revision"]

_ROOT = Path(__file__).resolve().parents[2]
_READ = {".py", ".cpp", ".h"}


@cache
def revision() -> str | None:
    """The commit, with a plus if files have changed since; None where there is no repository."""
    try:
        commit = _git("rev-parse", "--short=10", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=_ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def fingerprint(places: Iterable[str]) -> str:
    """Twelve digits for what the code in some places does.

    Args:
        places: Files and folders, relative to the project.

    Returns:
        The same after a change of comments, docstrings and spaces; another one after any other change.
    """
    return _fingerprint(tuple(sorted(places)))


@cache
def _fingerprint(places: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for place in places:
        path = _ROOT / place
        files = sorted(file for file in path.rglob("*") if file.suffix in _READ) if path.is_dir() else [path]
        for file in files:
            digest.update(str(file.relative_to(_ROOT)).encode())
            digest.update(_meaning(file).encode())
    return digest.hexdigest()[:12]


@cache
def _meaning(file: Path) -> str:
    text = file.read_text()
    return meaning(text) if file.suffix == ".py" else text


def meaning(source: str) -> str:
    """A module's syntax tree without its docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:]
    return ast.dump(tree)
