"""This module compares the packages of this environment with the versions that rankwise asks for."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rankwise.launch.findings import Finding
from rankwise.version import __version__

__all__ = ["asked_for", "look_at_packages"]

_SHOWN = ("torch", "deepspeed", "megatron-core", "torchtitan", "transformers", "accelerate", "triton", "ninja", "numpy")
_EXTRAS = ("deepspeed", "megatron", "torchtitan", "triton", "dev")


def asked_for() -> dict[str, tuple[SpecifierSet, str]]:
    """Return versions and extra ("" for none) by package, from the metadata of the installed rankwise, if any."""
    try:
        lines = importlib.metadata.requires("rankwise") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    wanted: dict[str, tuple[SpecifierSet, str]] = {}
    for requirement in map(Requirement, lines):
        extra = next((name for name in _EXTRAS if _needs(requirement, name)), "")
        if extra != "dev" and (extra or _needs(requirement, "")):
            wanted.setdefault(requirement.name.lower(), (requirement.specifier, extra))
    return wanted


def _needs(requirement: Requirement, extra: str) -> bool:
    """Whether an extra, and nothing without one, asks for a requirement here."""
    if requirement.marker is None:
        return not extra
    without = requirement.marker.evaluate({"extra": ""})
    return without if not extra else not without and requirement.marker.evaluate({"extra": extra})


def look_at_packages() -> Iterator[Finding]:
    """Yield findings about Python, rankwise, and the packages that it needs."""
    yield _python()
    ranges = asked_for()
    installed = "" if ranges else "not installed: run from a checkout, so no ranges are known"
    yield Finding("packages", "rankwise", f"{__version__} {installed}".strip(), "ok" if ranges else "note")
    for name in dict.fromkeys((*_SHOWN, *ranges)):
        if name in _SHOWN or not _version_of(name):
            yield _package(name, *ranges.get(name, (SpecifierSet(), "")))
    yield _apex()


def _python() -> Finding:
    try:
        wanted = SpecifierSet(importlib.metadata.metadata("rankwise")["Requires-Python"] or "")
    except importlib.metadata.PackageNotFoundError:
        wanted = SpecifierSet()
    version = platform.python_version()
    if wanted.contains(version, prereleases=True):
        return Finding("packages", "python", version)
    return Finding("packages", "python", version, "fail", f"rankwise needs Python {wanted}")


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _package(name: str, wanted: SpecifierSet, extra: str) -> Finding:
    version = _version_of(name)
    install = f"pip install 'rankwise[{extra}]'" if extra else f"pip install '{name}{wanted}'"
    if not version:
        advice = f"{install}, if you want it" if extra else install if str(wanted) else ""
        return Finding("packages", name, "not installed", "note" if extra or not str(wanted) else "fail", advice)
    tested = f"{version}, asked for: {wanted}" if str(wanted) else version
    if wanted.contains(version, prereleases=True):
        return Finding("packages", name, tested)
    # megatron_patches and deepspeed_plugin refuse themselves what they cannot serve.
    return Finding("packages", name, tested, "note" if extra else "fail", f"outside the range: {install}")


def _apex() -> Finding:
    apex = importlib.import_module("megatron_patches.apex").detect_apex()
    what, _, advice = apex.message.partition(": ") if apex.kind not in ("absent", "nvidia") else (apex.message, "", "")
    status = {"other": "fail" if importlib.util.find_spec("megatron") else "note", "nvidia-python-only": "note"}
    return Finding("packages", "apex", what, status.get(apex.kind, "ok"), advice)  # type: ignore[arg-type]
