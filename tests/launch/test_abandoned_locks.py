"""Locks of just-in-time builds: those of the dead go, those of the living stay."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.file_baton import FileBaton

from rankwise import abandoned_locks
from rankwise.abandoned_locks import settle

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")

HOLDER = """
import os, sys, time
held = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
os.close(held)
os.remove(sys.argv[1])
"""


pytestmark = pytest.mark.usefixtures("brief_waits")


def holder(lock: Path, seconds: float) -> subprocess.Popen[str]:
    """Another process that builds for so long; it does with the file what torch does."""
    command = [sys.executable, "-c", HOLDER, str(lock), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_no_lock_no_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not settle(tmp_path / "lock") and not settle(tmp_path / "nowhere" / "lock")
    assert not caplog.records


def test_a_live_lock_is_respected_and_a_killed_owner_s_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The owner is killed while another process waits for it, which is what would hang for ever."""
    lock = tmp_path / "lock"
    owner = holder(lock, 600)
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(settle(lock)))
    with caplog.at_level(logging.WARNING, logger="rankwise"):
        waiting.start()
        waiting.join(3 * abandoned_locks._RELEASING)
        assert waiting.is_alive() and lock.exists() and caplog.text.count(f"{lock} is held since") == 1
        assert f"by process {owner.pid}: waiting" in caplog.text and f"rm {lock}" in caplog.text
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert lock.exists()
        waiting.join(60)
    assert found == [True] and not lock.exists()
    assert caplog.text.count(f"removed {lock}") == 1


def test_a_build_that_ends_is_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    owner = holder(lock, 2)
    assert not settle(lock)
    assert owner.wait(30) == 0, "its lock was taken away"


def _starts(lock: Path, results: Any) -> None:
    removed = settle(lock)
    baton = FileBaton(str(lock))
    if baton.try_acquire():
        time.sleep(2 * abandoned_locks._RELEASING)
        baton.release()
    else:
        baton.wait()
    results.put(removed)


@pytest.mark.exhaustive
def test_ranks_that_meet_an_abandoned_lock_remove_it_once(tmp_path: Path) -> None:
    """Each takes the lock anew as soon as it may: none must lose that one to another rank's cleaning."""
    lock = tmp_path / "lock"
    lock.touch()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=_starts, args=(lock, results)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    assert sorted(results.get() for _ in ranks) == [False, False, True]


def test_where_the_owner_may_be_out_of_sight_time_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine's or container's: a file in the folder that changes is a build that goes on."""
    lock, result = tmp_path / "lock", tmp_path / "build.ninja"
    monkeypatch.setattr(abandoned_locks, "_sees_all_holders", lambda lock, status: False)
    for path in (lock, result):
        path.touch()
    long_ago = time.time() - 1.1 * abandoned_locks.PATIENCE
    os.utime(lock, (long_ago, long_ago))
    assert abandoned_locks._look(lock).file is None
    os.utime(result, (long_ago, long_ago))
    assert settle(lock) and not lock.exists()


def test_a_lock_taken_anew_is_not_the_one_that_was_seen(tmp_path: Path) -> None:
    """Its inode may have the same number: what another process removed and took must stay."""
    lock = tmp_path / "lock"
    lock.touch()
    seen = abandoned_locks._look(lock)
    assert seen.file is not None
    lock.unlink()
    lock.touch()
    assert not abandoned_locks._removed(lock, seen) and lock.exists()
    again = abandoned_locks._look(lock)
    with lock.open():
        assert abandoned_locks._look(lock).file is None
        assert not abandoned_locks._removed(lock, again) and lock.exists()


def test_the_file_systems_of_this_machine_are_known() -> None:
    assert abandoned_locks._file_system(Path("/proc/self/fd")) == "proc"
    assert abandoned_locks._file_system(Path("/").resolve())
