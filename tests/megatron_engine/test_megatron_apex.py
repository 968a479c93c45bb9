"""NVIDIA's apex and the other package of that name."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from megatron_patches.apex import detect_apex
from megatron_patches.patches import apply, revert

pytestmark = pytest.mark.usefixtures("forget_apex")

PYPI = {"apex/__init__.py": "", "apex/models.py": ""}
BROKEN = {"apex/__init__.py": "raise SyntaxError('written for Python 2')"}
NAMESAKE = {"apex/__init__.py": "", "apex/optimizers.py": ""}
NVIDIA = {"apex/__init__.py": "", "apex/optimizers/__init__.py": "class FusedAdam: pass"}


def install(folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


def test_absent() -> None:
    found = detect_apex()
    assert found.kind == "absent" and not found.is_usable and "not needed" in found.message


@pytest.mark.parametrize("files", [PYPI, BROKEN, NAMESAKE], ids=["imports", "does not import", "has optimizers"])
def test_the_unrelated_package_is_reported(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, files, monkeypatch)
    found = detect_apex()
    assert found.kind == "other" and not found.is_usable and "pip uninstall apex" in found.message
    try:
        with pytest.warns(UserWarning, match="not NVIDIA's"):
            apply()
    finally:
        revert()


def test_nvidias_with_and_without_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, NVIDIA, monkeypatch)
    found = detect_apex()
    assert found.kind == "nvidia-python-only" and not found.is_usable and "amp_C" in found.message
    install(tmp_path, {"amp_C.py": ""}, monkeypatch)
    found = detect_apex()
    assert found.kind == "nvidia" and found.is_usable
