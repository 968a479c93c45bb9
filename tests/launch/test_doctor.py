"""``rankwise doctor``, as a user and as a CI job call it."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rankwise.launch import doctor, self_test
from rankwise.launch.cli import app
from rankwise.names import BY_NAME

WIDE = {"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"}


def examined(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = CliRunner().invoke(app, ["doctor", "--no-self-test", "--json", *arguments], env=WIDE)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    report = json.loads(result.output)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert report["healthy"] == (result.exit_code == 0)
    return result.exit_code, found


def test_a_sound_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    status, found = examined()
    assert status == 0
    assert found["torch"]["value"].startswith(importlib.metadata.version("torch"))
    assert "MKOR-H" in found["DeepSpeed"]["value"]
    assert "products of MARS-M, MARS-Shampoo and MKOR in" in found["cpu"]["value"]
    assert found["compiled extensions"]["status"] == "ok"


@pytest.fixture
def _foreign_apex(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An apex that is not NVIDIA's can be imported; what was imported beside it is forgotten."""
    (tmp_path / "site" / "apex").mkdir(parents=True)
    (tmp_path / "site" / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("apex", "megatron"):
            del sys.modules[name]


@pytest.mark.usefixtures("_foreign_apex")
def test_what_keeps_things_from_working_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A torch below the range, a lock whose owner is gone, an apex that is not NVIDIA's, megatron-core out of range."""
    versions = {"torch": "2.1.0", "megatron-core": "0.4.0"}
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real(name))
    (tmp_path / "extensions" / "fused" / "lock").parent.mkdir(parents=True)
    (tmp_path / "extensions" / "fused" / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    status, found = examined()
    assert status == 1
    assert found["torch"]["status"] == "fail" and "torch>=2.7" in found["torch"]["advice"]
    assert found["megatron-core"]["status"] == "note" and "rankwise[megatron]" in found["megatron-core"]["advice"]
    assert "not NVIDIA's" in found["apex"]["value"] and "pip uninstall apex" in found["apex"]["advice"]
    (lock,) = (finding for finding in found.values() if finding["topic"] == "locks")
    assert lock["status"] == "fail" and f"rm {tmp_path}/extensions/fused/lock" in lock["advice"]


def test_no_compiler_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = {finding.name: finding for finding in doctor.look_at_machine()}
    assert found["compiler"].value == "none" and found["compiler"].status == "note"
    assert "g++" in found["missing build tools"].value


def test_a_look_that_raises_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("no /proc here")

    monkeypatch.setattr(doctor, "look_at_locks", broken)
    monkeypatch.setattr(doctor, "look_at_frameworks", lambda: iter(()))
    status, found = examined()
    assert status == 1 and "no /proc here" in found["look"]["value"] and "torch" in found


def test_recorded_trajectories_are_those_of_one_process() -> None:
    assert set(self_test.OPTIONS) | {"mars", "mkor-h"} == set(BY_NAME), "the two are presets of recorded ones"
    far = self_test.differences(self_test.record())
    assert set(far) == set(self_test.OPTIONS) and max(far.values()) < 1e-11


def test_a_wrong_or_missing_trajectory_is_far() -> None:
    found = {name: self_test.trajectory(name) for name in ("sonew", "mkor")}
    found["mkor"][3] += 1e-6
    far = self_test.differences(found)
    assert far["sonew"] < self_test.TOLERANCE < far["mkor"] < far["ldadam"] == float("inf")


@pytest.mark.slow
def test_two_ranks_follow_and_a_rank_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.run_self_test(300)
    assert found.status == "ok" and re.match(r"8 optimizers follow, [\w-]+ least", found.value), found
    command = "rankwise.launch.spawn.torchrun_command"
    told = "print('OSError: no network', flush=True); raise type('ChildFailedError', (Exception,), {})"
    monkeypatch.setattr(command, lambda *_: ["python", "-c", told])
    assert doctor.run_self_test(60).advice == "OSError: no network"
    killed = "print('traceback : Signal 6 (SIGABRT) received by PID 7\\n====', flush=True); raise SystemExit(1)"
    monkeypatch.setattr(command, lambda *_: ["python", "-c", killed])
    assert doctor.run_self_test(60).advice == "traceback : Signal 6 (SIGABRT) received by PID 7"
    monkeypatch.setattr(command, lambda *_: ["sleep", "60"])
    assert doctor.run_self_test(0.2).value == "no end after 0 s"
