"""This module defines the command's exit codes, and lets it end without what would look like a crash."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from typer.core import TyperGroup

from rankwise.launch.terminal import complain

__all__ = ["EXIT_CODES", "OrderlyGroup"]

EXIT_CODES = (
    "Exit codes: 0 done; 1 a check found a fault, a limit is not met or a run failed; 2 bad usage; 130 Ctrl-C; "
    "143 SIGTERM; 141 nobody reads the output any more."
)
_FAILED, _PIPE_CLOSED, _BY_SIGNAL = 1, 128 + 13, 128
_STOPPING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class OrderlyGroup(TyperGroup):
    """The commands, each of which ends with one of :data:`EXIT_CODES`."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command, which signals, a closed stdout and a full disk end without a traceback."""
        if "RANK" in os.environ:  # a script of the user may run in this process, and must end as under python
            return super().main(*args, **extra)
        _open_closed_streams()
        with _ended_by_signals():
            try:
                code = self._code(*args, **extra)
                sys.stdout.flush()
            except BrokenPipeError:
                code = _PIPE_CLOSED
            except OSError as error:
                complain(f"Error: {error}")
                code = _FAILED
            if code in (_PIPE_CLOSED, _FAILED):
                _drop_unwritten()
        sys.exit(code)

    def _code(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except SystemExit as end:
            # Typer ends with 1 after a closed pipe.
            if isinstance(end.__context__, BrokenPipeError):
                raise end.__context__ from None
            return end.code


def _open_closed_streams() -> None:
    """Open /dev/null in place of streams that were closed (``>&-``), so that no file gets their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
                setattr(sys, name, open(number, "w" if number else "r", closefd=False))


def _drop_unwritten() -> None:
    """Drop what could not be written to stdout, so that Python does not try again as it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let the first signal end what runs, through all ``finally``; further ones are ignored, and cut nothing short."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for sig in before:
            signal.signal(sig, signal.SIG_IGN)
        raise SystemExit(_BY_SIGNAL + number)

    # Signals that are ignored, as by nohup, stay so.
    before = {sig: signal.getsignal(sig) for sig in _STOPPING if signal.getsignal(sig) is not signal.SIG_IGN}
    for sig in before:
        signal.signal(sig, stop)
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
