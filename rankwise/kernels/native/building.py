"""This module compiles C++ sources of the rooms, once per machine, and loads them.

They need a C++ compiler with OpenMP (GCC 12, Clang 15 or later) but no headers of torch or Python. The libraries are
kept in ``$XDG_CACHE_HOME/rankwise`` (``~/.cache/rankwise``). Their names depend on sources, compiler, flags and
processor, so that machines of different kinds may share a home directory. They use every instruction of the processor
unless :data:`INSTRUCTIONS` names a smaller set.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["EXACT", "INSTRUCTIONS", "SWITCH", "library"]

logger = logging.getLogger(__name__)

SWITCH = "RANKWISE_NATIVE"
"""Environment variable: "0" never uses the native forms, "1" raises where they cannot be built."""

INSTRUCTIONS = "RANKWISE_ISA"
"""Environment variable: which instructions the native forms may use, "native" (all of the processor), "avx2", or
"default" (those of every x86-64 processor)."""

_FOLDER = Path(__file__).parent
"""Folder of the headers that all sources may include."""
_COMMON = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
_INSTRUCTIONS = {
    # By default compilers use half of the registers' width.
    "x86_64": {
        "native": ("-march=native", "-mprefer-vector-width=512"),
        "avx2": ("-march=x86-64-v3",),
        "default": ("-march=x86-64",),
    },
}
_INSTRUCTIONS_ELSEWHERE = {"native": ("-march=native",)}
EXACT = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
"""Flags of element-wise code, which must round every operation, or bits would depend on where a run is cut."""
_TIMEOUT = 300


@cache
def library(source: Path, flags: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """Compile a source, or find it compiled, and load it.

    Args:
        source: File that may include headers beside it and the shared ones.
        flags: Flags of the compiler, beside those that all sources have.

    Returns:
        The library; None where native forms are switched off, or no compiler takes the source.

    Raises:
        RuntimeError: There is no library, and :data:`SWITCH` demands one.
        ValueError: :data:`INSTRUCTIONS` has no meaning on this processor.
    """
    wish = os.environ.get(SWITCH, "")
    if wish == "0":
        return None
    try:
        return ctypes.CDLL(str(_built(source, flags)))
    except (ImportError, OSError, subprocess.SubprocessError, RuntimeError) as error:
        reason = _reason(error)
        if wish == "1":
            raise RuntimeError(f"{SWITCH}=1, but the native CPU kernels cannot be built: {reason}") from error
        logger.info("native CPU kernels (%s) are not used: %s", source.stem, reason)
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{' '.join(map(str, error.cmd))} failed:\n{error.stderr}"
    return str(error)


def _built(source: Path, flags: tuple[str, ...]) -> Path:
    import fcntl  # not on every system

    compiler = _compiler()
    command = [compiler, *_COMMON, *_instruction_flags(), *flags]
    target = _cache_folder() / f"{source.stem}-{_fingerprint(source, command)}.so"
    if not _is_sound(target):
        with open(target.with_suffix(".lock"), "w") as lock:
            # One rank of a machine compiles and the others wait. The system releases the lock if its holder dies.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_sound(target):
                _compile(command, source, target)
    return target


def _instruction_flags() -> tuple[str, ...]:
    flags_of = _INSTRUCTIONS.get(platform.machine(), _INSTRUCTIONS_ELSEWHERE)
    wish = os.environ.get(INSTRUCTIONS) or "native"
    if wish not in flags_of:
        choices = " or ".join(f"'{name}'" for name in flags_of)
        raise ValueError(f"{INSTRUCTIONS}='{wish}' is invalid: on {platform.machine()} it must be {choices}")
    return flags_of[wish]


def _compile(command: list[str], source: Path, target: Path) -> None:
    # The file is renamed when complete, so that a process that is killed leaves nothing that another would load.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        unfinished = Path(folder) / target.name
        whole = [*command, f"-I{_FOLDER}", str(source), "-o", str(unfinished)]
        subprocess.run(whole, check=True, capture_output=True, text=True, timeout=_TIMEOUT)
        checksum = Path(folder) / "checksum"
        checksum.write_bytes(_checksum(unfinished))
        os.replace(checksum, _checksum_of(target))
        os.replace(unfinished, target)


def _is_sound(target: Path) -> bool:
    """Whether a library is as it was compiled: loading one that was cut short may end the process."""
    checksum = _checksum_of(target)
    return target.exists() and checksum.exists() and checksum.read_bytes() == _checksum(target)


def _checksum_of(target: Path) -> Path:
    return target.with_suffix(".sha256")


def _checksum(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def _compiler() -> str:
    candidates = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    compiler = next((path for name in candidates if name and (path := shutil.which(name))), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler was found; set CXX to one")
    return compiler


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(root) / "rankwise"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fingerprint(source: Path, command: list[str]) -> str:
    version = subprocess.run([command[0], "--version"], check=True, capture_output=True, text=True, timeout=_TIMEOUT)
    headers = sorted({*_FOLDER.glob("*.h"), *source.parent.glob("*.h")})
    parts = [
        source.read_bytes(),
        *(path.read_bytes() for path in headers),
        repr(command).encode(),
        version.stdout.encode(),
        _processor().encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """Return the properties of the processor that ``-march=native`` depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = {line for line in lines if line.partition("\t")[0].strip() in ("flags", "Features", "model name")}
    return "\n".join([platform.machine(), *sorted(features)])
