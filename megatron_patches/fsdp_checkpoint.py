"""States in ``fsdp_dtensor``, the one format of Megatron's FSDP, which torch.distributed.checkpoint itself plans.

Megatron moves and renames what is listed under ``state``, because SwiGLU's and latent attention's weights have other
names on the disk: it finds nothing of ours there. Our states have places of their own, in terms of the whole weights,
as in ``torch_dist``, and so go on on any number of ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron_patches.records import RECORD

__all__ = ["FORMAT", "filled_state", "torchs_state"]

FORMAT = "fsdp_dtensor"
_OURS = "rankwise"
_TENSORS = ("elements", "matrices")


def torchs_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert what :func:`megatron_patches.checkpoint.sharded_state` returned into what torch's planner can write."""
    by_key: dict[str, list[ShardedTensor]] = {}
    for tensor in _tensors(state):
        by_key.setdefault(tensor.key, []).append(tensor)
    tensors = {key: _whole(pieces) for key, pieces in by_key.items()}
    # Megatron copies the outer dictionary before torch fills it. The record is one value: its shape may have changed.
    ours = {"record": pickle.dumps(state.get(RECORD)), "tensors": tensors}
    return {"state": {}, _OURS: ours, **{key: state[key] for key in ("grad_scaler",) if key in state}}


def filled_state(requested: Mapping[str, Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was requested, with the values that torch has filled in.

    Args:
        requested: Result of :func:`megatron_patches.checkpoint.sharded_state`, whose tensors were filled in place.
        loaded: Result of :func:`torchs_state`, filled.
    """
    record = pickle.loads(loaded[_OURS]["record"])
    filled = {part: {name: tensor.data for name, tensor in requested[part].items()} for part in _TENSORS}
    return {**loaded, **filled, **({} if record is None else {RECORD: record})}


def _tensors(state: Mapping[str, Any]) -> Iterator[ShardedTensor]:
    for part in _TENSORS:
        yield from state.get(part, {}).values()


def _whole(pieces: list[ShardedTensor]) -> Any:
    """Return a tensor of the whole's shape and no memory, which tells torch of this rank's pieces of it."""
    size, runs = torch.Size(pieces[0].global_shape), {tuple(piece.global_offset): piece.data for piece in pieces}
    written = [tuple(piece.global_offset) for piece in pieces if not any(_copies(piece))]
    whole: Any = pieces[0].data.new_empty(()).expand(size)

    def chunk(offset: tuple[int, ...]) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(offset), runs[offset].size())

    def write_items(name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk(offset), TensorProperties.create_from_tensor(runs[offset]), size),
            )
            for offset in written
        ]

    def shard(index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return runs[tuple(index.offset)]

    whole.__create_chunk_list__ = lambda: [chunk(offset) for offset in runs]
    whole.__create_write_items__, whole.__get_tensor_shard__ = write_items, shard
    return whole


def _copies(piece: ShardedTensor) -> tuple[int, ...]:
    return piece.replica_id if isinstance(piece.replica_id, tuple) else (piece.replica_id,)
