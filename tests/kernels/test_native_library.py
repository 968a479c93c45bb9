"""How the C++ forms are built and found, and what happens where they cannot be."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rankwise
from rankwise.kernels import dispatch as forms
from rankwise.kernels import lists, native
from rankwise.kernels.native import building

ROOT = Path(__file__).parents[2]
ELEMENTWISE, PRODUCTS = (Path(building.__file__).with_name(f"{name}.cpp") for name in ("elementwise", "products"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache; nothing is remembered of it afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(building.SWITCH, raising=False)
    building.library.cache_clear()
    yield tmp_path / "rankwise"
    building.library.cache_clear()


def _compiler(folder: Path, body: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.compiled
def test_a_library_is_built_once(cache: Path) -> None:
    assert isinstance(building.library(ELEMENTWISE, building.EXACT), ctypes.CDLL)
    (built,) = cache.glob("*.so")
    changed = built.stat().st_mtime_ns
    building.library.cache_clear()
    assert building.library(ELEMENTWISE, building.EXACT) is not None
    assert [path.stat().st_mtime_ns for path in cache.glob("*.so")] == [changed]
    assert [path for path in cache.iterdir() if path.suffix not in (".so", ".lock", ".sha256")] == []


@pytest.mark.compiled
@pytest.mark.parametrize(
    "damage",
    [
        *("other bytes", "no checksum"),
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("emptied", "cut short", "not a library")),
    ],
)
def test_a_damaged_library_is_built_again(cache: Path, damage: str) -> None:
    assert building.library(PRODUCTS) is not None
    (built,) = cache.glob("*.so")
    whole = built.read_bytes()
    middle = len(whole) // 2
    broken = {
        "emptied": b"",
        "cut short": whole[:middle],
        "other bytes": whole[:64] + bytes(255 - byte for byte in whole[64:128]) + whole[128:],
        "not a library": b"not a library",
        "no checksum": whole,
    }[damage]
    # Another file: the one that this process has loaded stays as it is.
    built.unlink()
    built.write_bytes(broken)
    if damage == "no checksum":
        built.with_suffix(".sha256").unlink()
    os.utime(built, ns=(0, 0))
    building.library.cache_clear()
    assert building.library(PRODUCTS) is not None
    assert built.read_bytes() == whole and built.stat().st_mtime_ns > 0


@pytest.mark.compiled
def test_every_source_compiles(cache: Path) -> None:
    sources = list(Path(rankwise.__file__).parent.rglob("*.cpp"))
    assert {source.stem for source in sources} == {"elementwise", "products", "quantization", "sonew"}
    for source in sources:
        # SONew's is compiled for one band.
        for flags in [("-DBAND=0",), ("-DBAND=1",), ("-DBAND=4",)] if source.stem == "sonew" else [()]:
            assert building.library(source, flags) is not None, (source.name, flags)


@pytest.mark.compiled
@pytest.mark.parametrize("change", ["flags", "processor", "source", "header", "header of the room"])
def test_another_machine_or_source_is_another_library(
    cache: Path, change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = ELEMENTWISE
    before = building._fingerprint(source, ["c++"])
    command = ["c++", "-O1"] if change == "flags" else ["c++"]
    if change == "processor":
        monkeypatch.setattr(building, "_processor", lambda: "another")
    if change == "source":
        source = tmp_path / "elementwise.cpp"
        source.write_text("// another")
    if change == "header":
        (tmp_path / "tiles.h").write_text("// another")
        monkeypatch.setattr(building, "_FOLDER", tmp_path)
    if change == "header of the room":
        shutil.copy(source, tmp_path)
        source = tmp_path / source.name
        (tmp_path / "own.h").write_text("// another")
    assert building._fingerprint(source, command) != before


@pytest.mark.compiled
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names sets of instructions of x86-64")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="nothing to list instructions with")
def test_instructions_can_be_limited(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set makes a library of its own, without instructions beyond it; a misspelt one is no silent fallback."""
    wide = {"avx2": re.compile(r"%zmm"), "default": re.compile(r"%[yz]mm")}
    for wish in ("avx2", "default"):
        monkeypatch.setenv(building.INSTRUCTIONS, wish)
        building.library.cache_clear()
        before = set(cache.glob("*.so")) if cache.exists() else set()
        assert building.library(ELEMENTWISE, building.EXACT) is not None
        (built,) = set(cache.glob("*.so")) - before
        listing = subprocess.run(["objdump", "-d", str(built)], check=True, capture_output=True, text=True).stdout
        assert "%xmm" in listing and not wide[wish].search(listing)
    monkeypatch.setenv(building.INSTRUCTIONS, "avx3")
    building.library.cache_clear()
    with pytest.raises(ValueError, match="RANKWISE_ISA='avx3' is invalid: .*'native' or 'avx2' or 'default'"):
        building.library(ELEMENTWISE, building.EXACT)


def test_switched_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(building.SWITCH, "0")
    assert not native.is_available()
    assert forms.kernels_for(torch.device("cpu"), torch.float32) is lists
    assert not cache.exists()


def test_without_a_compiler_the_plain_forms_serve(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.INFO, logger="rankwise"):
        assert forms.kernels_for(torch.device("cpu"), torch.float32) is lists
    assert "no C++ compiler was found; set CXX to one" in caplog.text


def test_a_compiler_that_fails_is_quoted(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body = 'case "$*" in *--version*) echo 1;; *) echo unknown option >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", _compiler(tmp_path, body))
    assert building.library(ELEMENTWISE, building.EXACT) is None
    building.library.cache_clear()
    monkeypatch.setenv(building.SWITCH, "1")
    with pytest.raises(RuntimeError, match=f"{building.SWITCH}=1, but .*(?s:.)*unknown option"):
        building.library(ELEMENTWISE, building.EXACT)
    assert list(cache.glob("*.so")) == []


def test_a_killed_compiler_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half a library must never be loaded."""
    body = (
        'case "$*" in *--version*) echo 1;; *) '
        'for last; do :; done; echo half > "$last"; kill -9 $$;; esac'  # the last argument is the file to write
    )
    monkeypatch.setenv("CXX", _compiler(tmp_path, body))
    assert building.library(ELEMENTWISE, building.EXACT) is None
    assert list(cache.glob("*.so")) == []


@pytest.mark.compiled
def test_processes_that_start_together_build_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    body = f'case "$*" in *--version*) ;; *) echo built >> {calls};; esac\nexec c++ "$@"'
    monkeypatch.setenv("CXX", _compiler(tmp_path, body))
    program = "from rankwise.kernels import native; assert native.is_available()"
    processes = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=dict(os.environ)) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert calls.read_text().split() == ["built"]
