"""This module removes lock files of torch's just-in-time builds whose owners are gone.

torch makes an empty file a lock and holds it open while it compiles. A job that is killed meanwhile leaves the file
behind, and every later job waits for ever, without a word. If a process holds the file open, somebody builds; if the
holder may be on another machine or in another container, the age of the lock decides.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["PATIENCE", "build_locks", "is_abandoned", "settle", "unwatch_builds", "watch_builds"]

logger = logging.getLogger(__name__)

PATIENCE = 900.0
"""Seconds after which a lock whose holder could be out of sight counts as abandoned, if nothing in its folder changes;
a build takes a fraction of that."""

_SAYING = 3.0
"""Seconds that a program waits before it says so."""
_RELEASING = 2.0  # seconds that an owner may take to remove a lock that it has closed
_INTERVAL = 0.2
_SEEN_BY_ONE_KERNEL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
_FIRST_PID_NAMESPACE = "pid:[4026531836]"


def build_locks() -> Iterator[Path]:
    """Yield the locks of all just-in-time builds that exist now."""
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    # The root has a folder for each build, or first one for each version of Python and CUDA.
    yield from sorted(lock for pattern in ("*/lock", "*/*/lock") for lock in Path(root).glob(pattern))


def is_abandoned(lock: Path) -> bool:
    """Whether a lock's owner is gone, so that everybody else waits for ever.

    It changes nothing, takes two seconds if nobody holds the lock, and is False where the system cannot tell.

    Args:
        lock: The file, which need not exist.
    """
    if not Path("/proc/self/fd").is_dir():
        return False
    first = _look(lock)
    if first.file is None:
        return False
    # An owner closes its lock before it removes it.
    time.sleep(_RELEASING)
    return _look(lock).file == first.file


def settle(lock: Path) -> bool:
    """Wait until nobody holds a lock, and remove it if its owner is gone.

    It logs what it waits for, once that has taken some seconds, and what it has removed. Any number of processes may
    call it at once.

    Args:
        lock: The file, which need not exist.

    Returns:
        Whether this call has removed it.
    """
    said, first, began = False, _Seen(None, 0.0), time.monotonic()
    while lock.exists():
        if not Path("/proc/self/fd").is_dir():
            return False  # the system does not list open files
        look = _look(lock)
        if look.file is None:
            if not said and time.monotonic() - began >= _SAYING:
                logger.warning("%s", _waiting_for(lock))
                said = True
        elif look.file != first.file:
            first = look
        # An owner closes its lock before it removes it. One that is seen closed twice was left behind.
        elif look.at - first.at >= _RELEASING and _removed(lock, look):
            logger.warning("removed %s: the process that was compiling there has ended; going on", lock)
            return True
        time.sleep(_INTERVAL)
    return False


def _waiting_for(lock: Path) -> str:
    """Return what a user has to know of a lock that a program waits for."""
    try:
        age, status = time.time() - lock.stat().st_mtime, lock.stat()
    except FileNotFoundError:
        return f"{lock} has just been released"
    processes = ", ".join(sorted({pid for pid, other in _open_files_by_process() if os.path.samestat(other, status)}))
    holder = f"process {processes}" if processes else "a process out of sight, on another machine or in a container"
    return (
        f"{lock} is held since {age:.0f} s by {holder}: waiting until it has compiled there; if it has ended, another "
        f"terminal can go on with: rm {lock}"
    )


_stock: dict[str, Any] = {}


def watch_builds() -> None:
    """Let every just-in-time build of this process first wait for its lock by :func:`settle`, and log that it compiles.

    torch's own wait is silent, and never ends if the holder was killed. A second call changes nothing.
    """
    from torch.utils.file_baton import FileBaton

    if _stock:
        return
    _stock.update(try_acquire=FileBaton.try_acquire, release=FileBaton.release)
    timers: dict[str, threading.Timer] = {}

    def try_acquire(baton: FileBaton) -> Any:
        path = Path(baton.lock_file_path)
        settle(path)
        taken = _stock["try_acquire"](baton)
        if taken:
            said = "compiling in %s, once for all later runs: this may take minutes"
            timer = timers[str(path)] = threading.Timer(_SAYING, logger.warning, (said, path.parent))
            timer.daemon = True
            timer.start()
        return taken

    def release(baton: FileBaton) -> Any:
        timer = timers.pop(str(Path(baton.lock_file_path)), None)
        if timer is not None:
            timer.cancel()
        return _stock["release"](baton)

    for replacement in (try_acquire, release):
        setattr(FileBaton, replacement.__name__, replacement)


def unwatch_builds() -> None:
    """Undo :func:`watch_builds`."""
    from torch.utils.file_baton import FileBaton

    for name in list(_stock):
        setattr(FileBaton, name, _stock[name])
    _stock.clear()


class _Seen(NamedTuple):
    """A lock that nobody holds, as device, inode and time of its last change (or None), and when this was seen."""

    file: tuple[int, int, int] | None
    at: float


def _look(lock: Path) -> _Seen:
    """Look at a lock; the result has no file if it is held, might be held out of sight, or is gone."""
    now = time.monotonic()
    try:
        status = lock.stat()
        if not _sees_all_holders(lock, status) and time.time() - _last_change(lock.parent) < PATIENCE:
            return _Seen(None, now)
        held = any(os.path.samestat(other, status) for other in _open_files())
        # The search may take long, and the inode's number may belong to another file by then.
        return _Seen(_identity(status) if not held and _identity(status) == _identity(lock.stat()) else None, now)
    except FileNotFoundError:
        return _Seen(None, now)


def _removed(lock: Path, look: _Seen) -> bool:
    """Remove a lock that has not changed since it was seen; False if another process was faster."""
    import fcntl  # not on every system

    folder = os.open(lock.parent, os.O_RDONLY)
    try:
        # One process removes at a time, or a second one would remove the lock that the first has taken anew.
        fcntl.flock(folder, fcntl.LOCK_EX)
        if _look(lock).file != look.file:
            return False
        lock.unlink()
        return True
    except FileNotFoundError:
        return False
    finally:
        os.close(folder)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_ctime_ns


def _last_change(folder: Path) -> float:
    return max(entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(folder))


def _open_files() -> Iterator[os.stat_result]:
    """Return the open files of all processes that this one may look into."""
    return (status for _, status in _open_files_by_process())


def _open_files_by_process() -> Iterator[tuple[str, os.stat_result]]:
    """Yield the open files of all processes that this one may look into, with the processes' numbers."""
    for process in os.scandir("/proc"):
        if process.name.isdigit():
            try:
                for entry in os.scandir(f"{process.path}/fd"):
                    yield process.name, entry.stat()
            except OSError:
                continue  # the process is another user's, or has just ended


def _sees_all_holders(lock: Path, status: os.stat_result) -> bool:
    """Whether a holder could only be a process of this kernel that this one may look into."""
    mounted = _file_system(lock.resolve())
    readable = os.geteuid() in (0, status.st_uid)
    # A container may share file systems from outside with other containers, but not its own root.
    whole = os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE or mounted == "overlay"
    return readable and whole and mounted in _SEEN_BY_ONE_KERNEL


def _file_system(path: Path) -> str:
    """Return the kind of file system that a path lies on."""
    mounted, depth = "", -1
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        point = Path(fields.split()[4].encode().decode("unicode_escape"))
        if path.is_relative_to(point) and len(point.parts) >= depth:
            mounted, depth = kind.split()[0], len(point.parts)
    return mounted
