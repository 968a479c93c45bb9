"""A process that measures: what a wrong kernel breaks, a context or the whole process, ends with it and not the run."""

from __future__ import annotations

import gc
import multiprocessing as mp
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu.items import Item, Place, Skipped
from benchmarks.gpu.session import Outcome

__all__ = ["InProcess", "OwnProcess"]

_START = 120.0  # Seconds for the imports and the device's context.
Sections = Callable[[Place], Mapping[str, Sequence[Item]]]


def _measured(item: Item) -> Outcome:
    try:
        found = item.run()
    except Skipped as why:
        return Outcome("skipped", [], [], str(why))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__}: {str(error)[:600]} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        return Outcome("failed", [], [], told)
    return Outcome("done", found.figures, found.rows)


class InProcess:
    """Measures here: a hanging item is waited for.

    Args:
        place: Where.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    def about(self) -> dict[str, Any]:
        """See :class:`.session.Worker`."""
        return self._place.about

    def run(self, section: str, item: Item, limit: float) -> Outcome:
        """See :class:`.session.Worker`."""
        outcome = _measured(item)
        self.is_usable()
        return outcome

    def is_usable(self) -> bool:
        """Give memory back; whether the device still answers: after a bad access it never does."""
        if not self._place.on_cuda:
            return True
        gc.collect()
        try:
            torch.cuda.synchronize(self._place.device)
            torch.cuda.empty_cache()
        except Exception:
            return False
        return True


class OwnProcess:
    """Measures in a process that is begun anew when it has died, hung, or lost its device.

    Args:
        place: Where.
        sections: Makes the items there: a function of a module, which the process imports.
        method: How processes are begun. A forked one cannot use a device that this one has looked at.

    Attributes:
        startup: Seconds that the last beginning took.
    """

    def __init__(self, place: Place, sections: Sections, method: str = "spawn") -> None:
        self._place, self._sections, self._method = place, sections, method
        self._process: Any = None
        self._pipe: Connection | None = None
        self._told: dict[str, Any] = {}
        self.startup = 0.0

    def about(self) -> dict[str, Any]:
        """See :class:`.session.Worker`; begins the process."""
        self._started(_START)
        return self._told

    def run(self, section: str, item: Item, limit: float) -> Outcome:
        """See :class:`.session.Worker`."""
        pipe = self._started(limit)
        if pipe is None:
            return Outcome("cut", [], [], "the process did not start in time")
        pipe.send((section, item.name))
        if not pipe.poll(limit):
            self.close()
            return Outcome("cut", [], [], f"not done after {limit:.0f} s")
        try:
            outcome, usable = pipe.recv()
        except EOFError:
            process = self._process
            process.join()
            self.close()
            return Outcome("failed", [], [], f"the process died with {process.exitcode}")
        if not usable:
            self.close()
        return outcome  # type: ignore[no-any-return]

    def _started(self, limit: float) -> Connection | None:
        if self._pipe is not None:
            return self._pipe
        begin = time.monotonic()
        context = mp.get_context(self._method)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._place, self._sections), daemon=False)
        self._process.start()
        theirs.close()
        try:
            if self._pipe.poll(limit):
                self._told = self._pipe.recv()
                self.startup = time.monotonic() - begin
                return self._pipe
        except EOFError:
            pass
        self.close()
        return None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection, place: Place, sections: Sections) -> None:
    found = {(section, item.name): item for section, items in sections(place).items() for item in items}
    local = InProcess(place)
    pipe.send(local.about())
    while True:
        try:
            key = pipe.recv()
        except EOFError:
            return
        outcome = local.run(key[0], found[key], 0.0)
        pipe.send((outcome, local.is_usable()))
