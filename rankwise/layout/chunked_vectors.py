"""Named one-dimensional tensors cut over ranks, saved and loaded by torch.distributed.checkpoint on any layout."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType

__all__ = [
    "ChunkedVector",
    "NamedVectors",
    "CheckpointError",
    "VectorFolder",
    "load_vectors",
    "own_errors",
    "save_vectors",
    "stored_tensors",
]

Stored = tuple[torch.Size, torch.dtype]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, written, or continued as asked."""


class Closed(Protocol):
    """A run that has memory of its own only while it is read or filled."""

    def opened(self) -> Tensor:
        """Return its values, 1-D."""

    def like(self) -> Tensor:
        """Return a tensor of their type and shape, on the meta device."""

    def to_fill(self) -> Tensor:
        """Return a buffer for its values, the same until it is full."""

    def filled(self, numel: int) -> None:
        """Note that ``numel`` more values were written."""


def _like(values: Tensor | Closed) -> Tensor:
    return values if isinstance(values, Tensor) else values.like()


class ChunkedVector:
    """Some runs of a flattened tensor; other ranks hold the rest.

    Implements the interface by which torch.distributed.checkpoint asks an object for its shards: when it is saved it
    gives its runs, and when it is loaded they are filled in place from whatever runs were saved.

    Args:
        numel: Elements of the whole tensor.
        chunks: (start, values) of the runs held here, 1-D, not overlapping any other rank's. Some may be
            :class:`Closed`; these are opened when they are written, or filled piece by piece.
    """

    def __init__(self, numel: int, chunks: Iterable[tuple[int, Any]]) -> None:
        self.numel = numel
        self.chunks = list(chunks)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._metadata(start, values) for start, values in self.chunks]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size([start])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self._metadata(start, values),
                    properties=TensorProperties.create_from_tensor(_like(values)),
                    size=torch.Size([self.numel]),
                ),
            )
            for start, values in self.chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        values = self.chunk_at(index)
        return values if isinstance(values, Tensor) else values.opened()

    def chunk_at(self, index: MetadataIndex) -> Tensor | Closed:
        """Return the run that begins at an index."""
        for start, values in self.chunks:
            if index.offset is not None and index.offset[0] == start:
                run: Tensor | Closed = values
                return run
        raise KeyError(f"no run at {index.offset} of '{index.fqn}' on this rank")

    @staticmethod
    def _metadata(start: int, values: Tensor | Closed) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size([start]), sizes=_like(values).size())


class _SavePlanner(DefaultSavePlanner):
    """Finds the runs of our vectors, which are no tensors; the default planner does everything else."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        stored = self.state_dict[index.fqn]
        return stored.__get_tensor_shard__(index) if isinstance(stored, ChunkedVector) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    """Fills the runs of our vectors; the default planner does everything else."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # The default planner prepares meta tensors, and drops values of types that it does not know.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator
        self.original_state_dict = state_dict

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        stored = self.state_dict[index.fqn]
        if not isinstance(stored, ChunkedVector):
            return super().lookup_tensor(index)
        values = stored.chunk_at(index)
        return values if isinstance(values, Tensor) else values.to_fill()

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        stored = self.state_dict[read_item.dest_index.fqn]
        values = stored.chunk_at(read_item.dest_index) if isinstance(stored, ChunkedVector) else tensor
        if not isinstance(values, Tensor):
            values.filled(read_item.lengths.numel())


def save_vectors(state: Mapping[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write a dictionary of :class:`ChunkedVector` and whole tensors; every rank of ``group`` contributes its own.

    Args:
        state: What this rank holds, by name.
        folder: An empty or new folder that all ranks see.
        group: Ranks that call this together; None for one process.

    Raises:
        CheckpointError: On every rank alike, if any of them could not write.
    """
    with own_errors(folder):
        dcp.save(
            dict(state),
            checkpoint_id=folder,
            planner=_SavePlanner(flatten_state_dict=False),
            process_group=group,
            no_dist=group is None,
        )


def load_vectors(state: Mapping[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill the runs and tensors of ``state`` in place.

    Args:
        state: Destinations by name; each must have been saved.
        folder: Folder written by :func:`save_vectors`.
        group: Ranks that call this together; None for one process.

    Raises:
        CheckpointError: On every rank alike, if any of them could not read.
    """
    with own_errors(folder):
        dcp.load(
            dict(state),
            checkpoint_id=folder,
            planner=_LoadPlanner(flatten_state_dict=False),
            process_group=group,
            no_dist=group is None,
        )


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Shape and type of every tensor saved in ``folder``.

    Raises:
        CheckpointError: Nothing can be read there.
    """
    with own_errors(folder):
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (stored.size, stored.properties.dtype)
        for name, stored in metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }


class NamedVectors(Mapping[str, Stored]):
    """Shapes and types of saved vectors by name, wherever they lie. Looking may raise a :class:`CheckpointError`."""

    @abstractmethod
    def load(self, wanted: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
        """Fill vectors in place, as :func:`load_vectors` does; a collective.

        Args:
            wanted: Destinations by name.
            group: Ranks that call this together; None for one process.

        Raises:
            CheckpointError: On every rank alike, if any of them could not read.
        """


class VectorFolder(NamedVectors):
    """The vectors that :func:`save_vectors` wrote into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def _stored(self) -> dict[str, Stored]:
        return stored_tensors(self.folder)

    def __getitem__(self, name: str) -> Stored:
        return self._stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def load(self, wanted: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
        """Fill vectors in place, see :func:`load_vectors`."""
        load_vectors(wanted, self.folder, group)


@contextmanager
def own_errors(folder: Path) -> Iterator[None]:
    """Raise a :class:`CheckpointError` for whatever goes wrong with a folder."""
    # torch's own failure is no Exception, and its text lists every rank's traceback.
    try:
        yield
    except CheckpointException as failure:
        rank, (cause, _) = next(iter(failure.failures.items()))
        raise CheckpointError(f"{folder}: {type(cause).__name__} on rank {rank}: {cause}") from failure
    except (EOFError, OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder}: {error}: it was not written to the end, or is damaged") from error
