"""What keeps a program at its start is said within seconds: locks of just-in-time builds, live and left behind."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from rankwise import abandoned_locks

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
ROOT = Path(__file__).resolve().parents[2]
HOLDER = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); time.sleep(600)"
SCRIPT = """
import sys
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire(), "another build"
baton.release()
print("built")
"""


@pytest.fixture
def watched(brief_waits: None) -> Iterator[None]:
    was = bool(abandoned_locks._stock)
    abandoned_locks.watch_builds()
    abandoned_locks.watch_builds()
    yield
    if not was:
        abandoned_locks.unwatch_builds()


@pytest.mark.usefixtures("watched")
def test_a_held_lock_is_named_with_its_holder_and_an_abandoned_one_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Any extension's, not only the one that DeepSpeed builds at every start."""
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline()
    taken: list[bool | None] = []
    baton = FileBaton(str(lock))
    waiting = threading.Thread(target=lambda: taken.append(baton.try_acquire()))
    with caplog.at_level(logging.WARNING, logger="rankwise"):
        waiting.start()
        deadline = time.monotonic() + 30
        while "is held since" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.1)
        assert f"{lock} is held since" in caplog.text and f"by process {owner.pid}: waiting" in caplog.text
        assert f"rm {lock}" in caplog.text and waiting.is_alive() and lock.exists()
        owner.kill()
        owner.wait()
        waiting.join(60)
    assert taken == [True] and f"removed {lock}" in caplog.text
    baton.release()
    assert not lock.exists()


@pytest.mark.usefixtures("watched")
def test_a_build_that_takes_long_is_said_and_a_short_one_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abandoned_locks, "_SAYING", 0.3)
    baton = FileBaton(str(tmp_path / "lock"))
    with caplog.at_level(logging.WARNING, logger="rankwise"):
        assert baton.try_acquire()
        baton.release()
        time.sleep(0.6)
        assert not caplog.records
        assert baton.try_acquire()
        time.sleep(0.9)
        baton.release()
    assert caplog.text.count(f"compiling in {tmp_path}, once for all later runs") == 1


def test_unwatching_gives_torch_its_own_back() -> None:
    if abandoned_locks._stock:
        pytest.skip("the plugin watches in this process")
    before = FileBaton.try_acquire, FileBaton.release
    abandoned_locks.watch_builds()
    assert FileBaton.try_acquire is not before[0]
    abandoned_locks.unwatch_builds()
    assert (FileBaton.try_acquire, FileBaton.release) == before


def test_a_script_under_our_command_passes_a_lock_that_was_left_behind(tmp_path: Path) -> None:
    """Without the package torch would wait for ever, without a word."""
    script, lock = tmp_path / "train.py", tmp_path / "some_op" / "lock"
    script.write_text(SCRIPT)
    lock.parent.mkdir()
    lock.touch()
    environment = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    found = subprocess.run(
        [sys.executable, "-m", "rankwise.launch.shim", str(script), str(lock)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    assert "built" in found.stdout and f"removed {lock}" in found.stdout + found.stderr
