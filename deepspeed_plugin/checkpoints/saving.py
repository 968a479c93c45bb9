"""A checkpoint is named only when every rank has written its files.

Files are written beside those that they replace, so that a save that fails leaves the tag's former checkpoint intact.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import (
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_plugin.auto_tp import is_cut
from deepspeed_plugin.checkpoints.files import ASIDE, RECORD, REPLACING, zero_form
from deepspeed_plugin.checkpoints.reading import read_together
from deepspeed_plugin.layouts import DeepSpeedLayout
from rankwise.layout.chunked_vectors import CheckpointError
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["save_checkpoint"]


def save_checkpoint(
    original: Callable[..., bool],
    engine: DeepSpeedEngine,
    save_dir: str,
    tag: str | None = None,
    save_latest: bool = True,
    client_state: Mapping[str, Any] | None = None,
    **options: Any,
) -> bool:
    """Run DeepSpeed's ``save_checkpoint``, and write ``latest`` only when every rank's files are complete.

    DeepSpeed's rank 0 names the new checkpoint before the other ranks have finished theirs: a rank that dies in between
    leaves ``latest`` pointing at a checkpoint that cannot be loaded.

    Args:
        original: DeepSpeed's method, which ends in a barrier.
        engine: The engine that saves.
        save_dir: Folder of the checkpoints.
        tag: Name of the checkpoint.
        save_latest: Whether ``latest`` will name it.
        client_state: State of the user.
        options: Further arguments of DeepSpeed's method.
    """
    optimizer, client_state = engine.basic_optimizer, dict(client_state or {})
    # DeepSpeed reports what is wrong with a folder that is no path.
    if not isinstance(optimizer, ShardedOptimizer) or not (isinstance(save_dir, str | Path) and str(save_dir)):
        return original(engine, save_dir, tag=tag, client_state=client_state, save_latest=save_latest, **options)
    layout = optimizer.planner.source
    assert isinstance(layout, DeepSpeedLayout)
    # The layout is part of the checkpoint, whether or not a step was taken since the start or the last load.
    optimizer.plan_ahead(layout.units())
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    client_state.update(_note(engine, optimizer, Path(save_dir) / name, client_state))
    named_here = not engine.checkpoint_engine.is_decoupled()
    replacement = _Replacement(engine.checkpoint_engine, Path(save_dir) / name)
    with zero_form(engine), replacement.writing(engine):
        done = original(
            engine, save_dir, tag=tag, client_state=client_state, save_latest=save_latest and not named_here, **options
        )
    _put_in_place(Path(save_dir), name, replacement, named_here and save_latest and engine.global_rank == 0)
    return done


def _put_in_place(save_dir: Path, name: str, replacement: _Replacement, named: bool) -> None:
    """Give the files and the checkpoint their names; if a disk is full, all ranks raise, and nothing changes."""
    scratch = save_dir / ".latest"

    def settle() -> None:
        replacement.settle()
        if named:
            replacement.attempt(scratch, lambda: scratch.write_text(name))

    def put_name() -> None:
        replacement.finish()
        if named:
            scratch.replace(save_dir / "latest")

    try:
        # Each when the one before it is done on all ranks.
        read_together(settle)
        read_together(replacement.announce)
    except CheckpointError:
        replacement.discard()
        raise
    read_together(replacement.commit)
    read_together(put_name)


def _note(
    engine: DeepSpeedEngine, optimizer: ShardedOptimizer, folder: Path, client_state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a record of the optimizer, the save and its folder, with keys that DeepSpeed's converter needs."""
    save: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(save, src=0)
    needed = UNIVERSAL_CHECKPOINT_INFO not in client_state and not hasattr(engine.module, UNIVERSAL_CHECKPOINT_INFO)
    needed = needed and not engine.has_moe_layers  # with experts DeepSpeed writes the key itself
    version = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    record = {"identity": optimizer.identity, "save": save[0], "folder": str(folder.resolve()), "added_info": needed}
    return {RECORD: record, **({UNIVERSAL_CHECKPOINT_INFO: version} if needed else {})}


class _Replacement:
    """This rank's files of one save.

    Args:
        writer: The engine's writer of checkpoints.
        folder: Folder of the tag.
    """

    def __init__(self, writer: CheckpointEngine, folder: Path) -> None:
        self._writer, self._folder = writer, folder
        # Other writers may write later, or to another place.
        self._aside = isinstance(writer, TorchCheckpointEngine)
        self._files: list[Path] = []
        self._shared: set[Path] = set()
        self._failures: list[Exception] = []
        self._marked = False

    @contextmanager
    def writing(self, engine: DeepSpeedEngine) -> Iterator[None]:
        """Let an engine write aside, and keep errors for :meth:`settle`, because DeepSpeed's saves end in a barrier."""
        write = self._writer.save
        # Beside AutoTP, DeepSpeed 0.19.8 lets ranks with copies of an expert write one file.
        several = engine.has_moe_layers and is_cut(engine)

        def save(state_dict: Any, path: str) -> Any:
            if not self._aside:
                return write(state_dict, path)
            self._files.append(Path(path))
            if not several or "_expert_" not in Path(path).name:
                return write(state_dict, path + ASIDE)
            self._shared.add(Path(path))
            own = Path(f"{path}.{engine.global_rank}{ASIDE}")
            try:
                written = write(state_dict, str(own))
                own.replace(path + ASIDE)
            finally:
                own.unlink(missing_ok=True)
            return written

        with (
            self._held(self._writer, "save", save),
            self._held(engine, "_copy_recovery_script", engine._copy_recovery_script),
        ):
            yield

    def settle(self) -> None:
        """Raise if something could not be written.

        Raises:
            CheckpointError: A file could not be written; the message names the folder and the reason.
        """
        if self._failures:
            raise self._unwritable(self._folder, self._failures[0]) from self._failures[0]

    def attempt(self, path: Path, work: Callable[[], object]) -> None:
        """Write another file, and raise :class:`CheckpointError` if that fails."""
        try:
            work()
        except OSError as error:
            raise self._unwritable(path, error) from error

    def announce(self) -> None:
        """Mark the folder if files in it are about to be replaced; called when all ranks have written their files."""
        mark = self._folder / REPLACING
        # A mark of an earlier save stays until all files come from one save again.
        if any(path.exists() for path in self._files) and not mark.exists():
            self._marked = True
            self.attempt(mark, mark.touch)

    def commit(self) -> None:
        """Give the files their names; called when all ranks have announced it."""
        for path in self._files:
            with suppress(FileNotFoundError) if path in self._shared else nullcontext():
                _beside(path).replace(path)

    def finish(self) -> None:
        """Remove the mark; called when all ranks have given their files their names."""
        (self._folder / REPLACING).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the files of a save that failed before it was announced."""
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
        """Replace an object's method by a call whose errors are kept."""
        original = vars(owner).get(name)

        def held(*args: Any, **options: Any) -> Any:
            try:
                return call(*args, **options)
            except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError
                self._failures.append(error)
                return None

        setattr(owner, name, held)
        try:
            yield
        finally:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ASIDE)
