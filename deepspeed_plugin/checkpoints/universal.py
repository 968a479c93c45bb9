"""DeepSpeed's universal checkpoints: a folder per parameter, for any number of ranks and any stage.

Ours lie beside DeepSpeed's files, by name, in a folder ``rankwise`` that
:func:`deepspeed_plugin.checkpoints.converting.convert` adds; where DeepSpeed's converter ran alone, they are read from
the checkpoint it was made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_plugin.checkpoints.errors import CheckpointError
from deepspeed_plugin.checkpoints.files import CheckpointFolder, NamedStates, SavedCheckpoint, newest_model_file, tag_in
from deepspeed_plugin.checkpoints.load_plan import Universal
from deepspeed_plugin.checkpoints.reading import read

__all__ = ["COMMON", "FOLDER", "PARAMETERS", "UniversalCheckpoint"]

FOLDER, COMMON = "rankwise", "common.pt"
"""Where our states lie in a universal checkpoint, and the file there with what does not depend on the layout."""
PARAMETERS = "parameters"
"""Key in that file of the shapes of each param group's parameters."""


@dataclass(frozen=True)
class UniversalCheckpoint(CheckpointFolder):
    """A universal checkpoint, whoever wrote it.

    Attributes:
        states: Our states in it, if they are wanted and of this optimizer.
        source: The checkpoint it was made of, if they are, and are not here but there.
    """

    states: NamedStates | None = None
    source: SavedCheckpoint | None = None

    @classmethod
    def of_anybody(cls, load_dir: str | Path, tag: str | None) -> UniversalCheckpoint | None:
        """The checkpoint of a tag, or of the latest one, for DeepSpeed to load; None if there is none."""
        tag = tag_in(load_dir, "latest_universal") if tag is None else str(tag)
        model_file = None if tag is None else newest_model_file(Path(load_dir) / tag)
        return None if model_file is None else cls(model_file.parent, model_file)

    @classmethod
    def find(cls, load_dir: str | Path, tag: str | None, states: bool, identity: str | None) -> UniversalCheckpoint:
        """The checkpoint of a tag, or of the latest one, and where the states of our optimizer are.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        found = cls.of_anybody(load_dir, tag)
        if tag is None and tag_in(load_dir, "latest_universal") is None:
            raise CheckpointError(
                f"checkpoint.load_universal is set, but {load_dir} has no 'latest_universal'; convert a checkpoint "
                "with 'rankwise universal', name a tag, or remove the setting: checkpoints of rankwise optimizers "
                "move to other ranks and stages without it."
            )
        if found is None or not (found.folder / "zero" / "optimizer_state.pt").is_file():
            folder = Path(load_dir) / str(tag_in(load_dir, "latest_universal") if tag is None else tag)
            raise CheckpointError(
                f"{folder} is not a universal checkpoint, which checkpoint.load_universal asks for; convert it with "
                "'rankwise universal', or remove the setting."
            )
        if not states or found.record.get("identity") != identity:
            return found
        own = _own_states(found.folder, found.record)
        source = _source(found.folder, found.record) if own is None else None
        return cls(found.folder, found.model_file, own, source)

    @property
    def files(self) -> list[Path]:
        """Those that a load reads; other optimizers' states are left alone."""
        return [*sorted((self.folder / "zero").rglob("fp32.pt")), self._scaler_file, self.model_file]

    def known(self, states: bool) -> Universal:
        """As :meth:`deepspeed_plugin.checkpoints.files.SavedCheckpoint.known`."""
        common = self.states.common if self.states is not None else self.source.common if self.source else {}
        return Universal(
            name=self.folder.name,
            author=self.record.get("identity"),
            holds_states=self.states is not None,
            has_source=self.source is not None,
            source=str(self.record.get("folder", "") if self.source is None else self.source.folder),
            partitioned=self.partitioned_weights,
            groups=len(common.get("param_groups", ())),
        )

    def scaler_state(self) -> Mapping[str, Any]:
        """As :meth:`deepspeed_plugin.checkpoints.files.SavedCheckpoint.scaler_state`."""
        return read(self._scaler_file)

    @property
    def _scaler_file(self) -> Path:
        return self.folder / "zero" / "optimizer_state.pt"


def _own_states(folder: Path, record: Mapping[str, Any]) -> NamedStates | None:
    """What ``convert`` added, unless it is of an earlier conversion into the same folder."""
    path = folder / FOLDER / COMMON
    common = read(path) if path.is_file() else None
    return NamedStates(path.parent, common) if common is not None and common["save"] == record["save"] else None


def _source(folder: Path, record: Mapping[str, Any]) -> SavedCheckpoint | None:
    """The checkpoint that was converted, where it was saved or beside the universal one, if it is still the same."""
    written = Path(record["folder"])
    for candidate in (folder.parent / written.name, written):
        if candidate.is_dir():
            saved = SavedCheckpoint.at(candidate)
            if saved is not None and saved.record.get("save") == record["save"] and not saved.missing:
                return saved
    return None
