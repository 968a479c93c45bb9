"""DeepSpeed's universal checkpoints have a folder per parameter, for any number of ranks and any stage.

Our states lie beside DeepSpeed's files, by name, in a folder ``rankwise`` that
:func:`deepspeed_plugin.checkpoints.converting.convert` adds. If DeepSpeed's converter ran alone, they are read from the
checkpoint that was converted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import PARAM
from torch import Tensor

from deepspeed_plugin.checkpoints.files import CheckpointFolder, NamedStates, SavedCheckpoint, newest_model_file, tag_in
from deepspeed_plugin.checkpoints.load_plan import Universal
from deepspeed_plugin.checkpoints.reading import read
from rankwise.checkpoint.memory_mapped import STACKED
from rankwise.layout.agreement import together
from rankwise.layout.chunked_vectors import CheckpointError, NamedVectors, Stored, VectorFolder
from rankwise.states.param_remainders import NARROW
from rankwise.updates.remainders import split

__all__ = ["COMMON", "FOLDER", "PARAMETERS", "UniversalCheckpoint", "UniversalWeights"]

FOLDER, COMMON = "rankwise", "common.pt"
"""Folder of our states in a universal checkpoint, and the file in it with what does not depend on the layout."""
PARAMETERS = "parameters"
"""Key of the file :data:`COMMON` with the shapes of each param group's parameters."""


@dataclass(frozen=True)
class UniversalCheckpoint(CheckpointFolder):
    """A universal checkpoint, whoever wrote it.

    Attributes:
        states: Our states in it, if they are wanted and belong to this optimizer.
        source: The checkpoint that was converted, if it alone has these states.
    """

    states: NamedStates | None = None
    source: SavedCheckpoint | None = None

    @classmethod
    def of_anybody(cls, load_dir: str | Path, tag: str | None) -> UniversalCheckpoint | None:
        """Return the checkpoint of a tag, or of the latest one, for DeepSpeed to load; None if there is none."""
        tag = tag_in(load_dir, "latest_universal") if tag is None else str(tag)
        model_file = None if tag is None else newest_model_file(Path(load_dir) / tag)
        return None if model_file is None else cls(model_file.parent, model_file)

    @classmethod
    def find(cls, load_dir: str | Path, tag: str | None, states: bool, identity: str | None) -> UniversalCheckpoint:
        """Return the checkpoint of a tag, or of the latest one, with the states of our optimizer.

        Raises:
            CheckpointError: There is no checkpoint, or it is damaged.
        """
        checkpoint = cls.of_anybody(load_dir, tag)
        if tag is None and tag_in(load_dir, "latest_universal") is None:
            raise CheckpointError(
                f"checkpoint.load_universal is set, but {load_dir} has no 'latest_universal'; convert a checkpoint "
                "with 'rankwise universal', name a tag, or remove the setting: checkpoints of rankwise optimizers "
                "move to other ranks and stages without it."
            )
        if checkpoint is None or not (checkpoint.folder / "zero" / "optimizer_state.pt").is_file():
            folder = Path(load_dir) / str(tag_in(load_dir, "latest_universal") if tag is None else tag)
            raise CheckpointError(
                f"{folder} is not a universal checkpoint, which checkpoint.load_universal asks for; convert it with "
                "'rankwise universal', or remove the setting."
            )
        if not states or checkpoint.record.get("identity") != identity:
            return checkpoint
        own_states = _own_states(checkpoint.folder, checkpoint.record)
        source = _source(checkpoint.folder, checkpoint.record) if own_states is None else None
        return cls(checkpoint.folder, checkpoint.model_file, own_states, source)

    @property
    def named(self) -> NamedStates:
        """The checkpoint's weights with our states, or the weights alone where it has none."""
        return NamedStates(UniversalWeights(self)) if self.states is None else self.states

    @property
    def files(self) -> list[Path]:
        """Files that a load reads; other optimizers' states are left alone."""
        return [*sorted((self.folder / "zero").rglob("fp32.pt")), self._scaler_file, self.model_file]

    def known(self, states: bool) -> Universal:
        """Return the facts by which :func:`deepspeed_plugin.checkpoints.load_plan.decide` decides."""
        held = self.states or self.source
        common = held.common if held is not None and held.common is not None else {}
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
        """Return what ZeRO's wrapper saved of a loss scale."""
        return read(self._scaler_file)

    @property
    def _scaler_file(self) -> Path:
        return self.folder / "zero" / "optimizer_state.pt"


def _own_states(folder: Path, record: Mapping[str, Any]) -> NamedStates | None:
    """Return the states that ``convert`` added, unless an earlier conversion into this folder has left them."""
    path = folder / FOLDER / COMMON
    common = read(path) if path.is_file() else None
    return (
        NamedStates(VectorFolder(path.parent), common)
        if common is not None and common["save"] == record["save"]
        else None
    )


def _source(folder: Path, record: Mapping[str, Any]) -> SavedCheckpoint | None:
    """Return the checkpoint that was converted, from its folder or beside the universal one, if nothing replaced it."""
    written = Path(record["folder"])
    for candidate in (folder.parent / written.name, written):
        if candidate.is_dir():
            saved = SavedCheckpoint.at(candidate)
            if saved is not None and saved.record.get("save") == record["save"] and not saved.missing:
                return saved
    return None


class UniversalWeights(NamedVectors):
    """Weights in full precision, of which a universal checkpoint has a file for each parameter."""

    def __init__(self, found: UniversalCheckpoint) -> None:
        self._folder, self._module = found.folder, found.content["module"]

    def __getitem__(self, name: str) -> Stored:
        if name not in self:
            raise KeyError(name)
        weight = self._weight(name)
        return weight.shape, weight.dtype

    def __contains__(self, name: object) -> bool:
        return str(name).startswith("weight/") and self._place(str(name))[0].is_file()

    def __iter__(self) -> Iterator[str]:
        folder = self._folder / "zero"
        return (f"weight/{path.parent.relative_to(folder).as_posix()}" for path in folder.rglob("fp32.pt"))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def load(self, wanted: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
        """Load vectors as :func:`rankwise.layout.chunked_vectors.load_vectors` does.

        Raises:
            CheckpointError: On every rank: a file is damaged, or does not have the model's weight.
        """

        def read_weights() -> None:
            for name, vector in wanted.items():
                self._verify(name)
                weight = self._weight(name).reshape(-1)
                for start, values in vector.chunks:
                    values.copy_(weight[start : start + values.numel()])

        together(read_weights, group)

    def _place(self, name: str) -> tuple[Path, int | None]:
        """Return the file of a weight; for a matrix of a stack, the stack's file and the matrix's place in it."""
        key = name.removeprefix("weight/")
        path, stacked = self._folder / "zero" / key / "fp32.pt", STACKED.fullmatch(key)
        if stacked is None or path.is_file():
            return path, None
        return self._folder / "zero" / stacked[1] / "fp32.pt", int(stacked[2])

    def _weight(self, name: str) -> Tensor:
        path, position = self._place(name)
        whole = _content(path)
        return whole if position is None else whole[position]

    def _verify(self, name: str) -> None:
        """Compare a file with the model's weight."""
        path, _ = self._place(name)
        rounded = self._module.get(path.parent.relative_to(self._folder / "zero").as_posix())
        if rounded is None or not rounded.numel():
            return  # the model file has ZeRO-3's placeholder
        if not _rounds_to(_content(path), rounded):
            # DeepSpeed 0.19's converter mixes up parameters that round_robin_gradients had reordered.
            raise CheckpointError(
                f"{path} is not the weight that {self._folder.name} has in its model file: DeepSpeed's converter "
                "misplaces weights of runs with zero_optimization.round_robin_gradients; load the original checkpoint "
                "instead."
            )


def _content(path: Path) -> Tensor:
    content: Any = read(path)
    weight: Tensor = content[PARAM] if isinstance(content, Mapping) else content
    return weight.detach()


def _rounds_to(weight: Tensor, rounded: Tensor) -> bool:
    """Whether ``rounded`` has the weight's values in another type; halves may be rounded as in split weights."""
    weight, rounded = weight.reshape(-1), rounded.reshape(-1)
    if weight.shape != rounded.shape:
        return False
    matches = weight.to(rounded.dtype) == rounded
    if rounded.dtype is NARROW:
        halves = torch.empty_like(rounded)
        split(weight.float(), halves, torch.empty_like(rounded, dtype=torch.int16))
        matches |= halves == rounded
    return bool(matches.all())
