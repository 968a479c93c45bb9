"""Files written beside those they replace: a save that fails leaves the former checkpoint of its tag as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_plugin.checkpoints.errors import CheckpointError

__all__ = ["ASIDE", "REPLACING", "Replacement", "refuse_half_replaced"]

ASIDE = ".new"
"""Ending of a file that is to become another one."""
REPLACING = "rankwise_replacing"
"""In the folder of a tag while its files become those of a later save: some may be old, some new."""


class Replacement:
    """This rank's files of one save.

    Args:
        writer: The engine's.
        folder: Folder of the tag.
    """

    def __init__(self, writer: CheckpointEngine, folder: Path) -> None:
        self._writer, self._folder = writer, folder
        # Other writers write when they like, or somewhere else.
        self._aside = isinstance(writer, TorchCheckpointEngine)
        self._files: list[Path] = []
        self._failures: list[Exception] = []
        self._marked = False

    @contextmanager
    def writing(self, engine: DeepSpeedEngine) -> Iterator[None]:
        """Let an engine write aside; what fails is kept for :meth:`settle`: DeepSpeed saves end in a barrier."""
        write = self._writer.save

        def save(state_dict: Any, path: str) -> Any:
            if not self._aside:
                return write(state_dict, path)
            self._files.append(Path(path))
            return write(state_dict, path + ASIDE)

        with (
            self._held(self._writer, "save", save),
            self._held(engine, "_copy_recovery_script", engine._copy_recovery_script),
        ):
            yield

    def settle(self) -> None:
        """Say what could not be written.

        Raises:
            CheckpointError: Names the folder and the reason.
        """
        if self._failures:
            raise self._unwritable(self._folder, self._failures[0]) from self._failures[0]

    def attempt(self, path: Path, work: Callable[[], object]) -> None:
        """Write a file beside them, with the same error."""
        try:
            work()
        except OSError as error:
            raise self._unwritable(path, error) from error

    def announce(self) -> None:
        """Mark the folder if files in it are about to be replaced, when all ranks have written theirs."""
        mark = self._folder / REPLACING
        # One of an earlier save stays until all files are of one save again.
        if any(path.exists() for path in self._files) and not mark.exists():
            self._marked = True
            self.attempt(mark, mark.touch)

    def commit(self) -> None:
        """Give the files their names, when all ranks have announced it."""
        for path in self._files:
            _beside(path).replace(path)

    def finish(self) -> None:
        """Remove the mark, when all ranks have done so."""
        (self._folder / REPLACING).unlink(missing_ok=True)

    def discard(self) -> None:
        """Leave nothing of a save that failed before it was announced."""
        for path in self._files:
            _beside(path).unlink(missing_ok=True)
        if self._marked:
            self.finish()

    def _unwritable(self, path: Path, error: Exception) -> CheckpointError:
        kept = ", and its files are as they were" if self._aside else ""
        return CheckpointError(
            f"{path} cannot be written: {error}. 'latest' names the checkpoint it named before{kept}; make room, and "
            "save again."
        )

    @contextmanager
    def _held(self, owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
        """Put a call in the place of an object's own, whose failures are kept."""
        own = vars(owner).get(name)

        def held(*args: Any, **options: Any) -> Any:
            try:
                return call(*args, **options)
            except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
                self._failures.append(error)
                return None

        setattr(owner, name, held)
        try:
            yield
        finally:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def refuse_half_replaced(folder: Path) -> None:
    """Refuse a checkpoint whose files may be of two saves.

    Args:
        folder: Folder of the tag.

    Raises:
        CheckpointError: With the ways out.
    """
    if (folder / REPLACING).exists():
        raise CheckpointError(
            f"{folder} was being replaced by a later save when that run ended: its files may be of either. Load "
            f"another tag; or, to have the later one, rename every *{ASIDE} in it to the name without that ending, and "
            f"remove {REPLACING}."
        )


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ASIDE)
