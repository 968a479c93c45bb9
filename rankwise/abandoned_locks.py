"""Lock files of torch's just-in-time builds whose owner is gone.

torch takes an empty file for a lock and holds it open while it compiles. A job killed meanwhile leaves the file behind,
and every later one waits for ever, without a word. Who holds it open tells whether anybody builds; where the holder may
be on another machine or in another container, time has to tell.
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
"""Seconds after which a lock is given up whose holder could be out of sight, if nothing in its folder changes: several
times what a build takes."""

_SAYING = 3.0
"""Seconds that a program waits without a word."""
_RELEASING = 2.0  # seconds
_INTERVAL = 0.2
_SEEN_BY_ONE_KERNEL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
_FIRST_PID_NAMESPACE = "pid:[4026531836]"


def build_locks() -> Iterator[Path]:
    """The locks of all just-in-time builds there are now."""
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    # Below the root: a folder for each build, or for each version of Python and CUDA first.
    yield from sorted(lock for pattern in ("*/lock", "*/*/lock") for lock in Path(root).glob(pattern))


def is_abandoned(lock: Path) -> bool:
    """Whether a lock's owner is gone, so that everybody else waits for ever; changes nothing.

    Takes two seconds where nobody holds the lock. False where it cannot be known.

    Args:
        lock: The file; need not exist.
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

    Says what it waits for, once that has taken some seconds, and what it has removed, on this module's logger. Any
    number of processes may call it at once.

    Args:
        lock: The file; need not exist.

    Returns:
        Whether it was removed here.
    """
    said, first, began = False, _Seen(None, 0.0), time.monotonic()
    while lock.exists():
        if not Path("/proc/self/fd").is_dir():
            return False  # nowhere to look for its holder
        look = _look(lock)
        if look.file is None:
            if not said and time.monotonic() - began >= _SAYING:
                logger.warning("%s", _waiting_for(lock))
                said = True
        elif look.file != first.file:
            first = look
        # An owner closes its lock before it removes it: found so twice, it was left behind.
        elif look.at - first.at >= _RELEASING and _removed(lock, look):
            logger.warning("removed %s: the process that was compiling there has ended; going on", lock)
            return True
        time.sleep(_INTERVAL)
    return False


def _waiting_for(lock: Path) -> str:
    """What a user has to know of a lock that keeps a program."""
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
    """Let every just-in-time build of this process first wait for its lock by :func:`settle`, and say that it compiles.

    torch's own wait is silent, and without an end where the holder was killed. A second call changes nothing.
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
    """A lock that nobody holds, as device, inode and time of its last change, and when that was seen."""

    file: tuple[int, int, int] | None
    at: float


def _look(lock: Path) -> _Seen:
    """What is there at a lock's name; no file where it is held, might be held out of sight, or is gone."""
    now = time.monotonic()
    try:
        status = lock.stat()
        if not _sees_all_holders(lock, status) and time.time() - _last_change(lock.parent) < PATIENCE:
            return _Seen(None, now)
        held = any(os.path.samestat(other, status) for other in _open_files())
        # An inode's number is soon another file's, and the search may take long.
        return _Seen(_identity(status) if not held and _identity(status) == _identity(lock.stat()) else None, now)
    except FileNotFoundError:
        return _Seen(None, now)


def _removed(lock: Path, look: _Seen) -> bool:
    """Remove a lock that has not changed since it was seen; False if another process was faster."""
    import fcntl  # not on every system

    folder = os.open(lock.parent, os.O_RDONLY)
    try:
        # One at a time, or the second would remove the lock that the first has taken anew.
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
    """Open files of all processes that this one may look into."""
    return (status for _, status in _open_files_by_process())


def _open_files_by_process() -> Iterator[tuple[str, os.stat_result]]:
    """The same, with the numbers of the processes."""
    for process in os.scandir("/proc"):
        if process.name.isdigit():
            try:
                for entry in os.scandir(f"{process.path}/fd"):
                    yield process.name, entry.stat()
            except OSError:
                continue  # another user's, or it has just ended


def _sees_all_holders(lock: Path, status: os.stat_result) -> bool:
    """Whether a holder could only be a process of this kernel that this one may look into."""
    mounted = _file_system(lock.resolve())
    own = os.geteuid() in (0, status.st_uid)
    # In a container, what comes from outside may be shared with others; its own root is not.
    whole = os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE or mounted == "overlay"
    return own and whole and mounted in _SEEN_BY_ONE_KERNEL


def _file_system(path: Path) -> str:
    """The kind of file system a path lies on."""
    found, depth = "", -1
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        point = Path(fields.split()[4].encode().decode("unicode_escape"))
        if path.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = kind.split()[0], len(point.parts)
    return found
