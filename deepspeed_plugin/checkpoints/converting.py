"""This module makes DeepSpeed's universal checkpoints, which have a folder per parameter, for any ranks and stage.

DeepSpeed's converter takes Adam's states only. Ours are added beside its files, by name.
"""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import AUTOEP_LAYERS_KEY, PARAM
from torch import Tensor

from deepspeed_plugin.checkpoints.by_name import vectors_of
from deepspeed_plugin.checkpoints.files import SavedCheckpoint
from deepspeed_plugin.checkpoints.reading import read, require_intact
from deepspeed_plugin.checkpoints.universal import COMMON, FOLDER, PARAMETERS
from rankwise.checkpoint.named_vectors import Vectors
from rankwise.layout.chunked_vectors import CheckpointError, save_vectors

__all__ = ["convert"]

_LAYOUT_KEYS = ("state", "layout", "matrix_states")


def convert(source: str | Path, target: str | Path, workers: int = 2) -> None:
    """Make a universal checkpoint with DeepSpeed's converter, and add our optimizer's states to it.

    Args:
        source: Folder of a tag, written by ``save_checkpoint`` at ZeRO stage 1, 2 or 3.
        target: Folder to write; ``latest_universal`` beside it will name it.
        workers: Number of the converter's processes.

    Raises:
        CheckpointError: There is no checkpoint in ``source``, files of it are missing or damaged, or stage 0 wrote it.
    """
    source, target = Path(source).resolve(), Path(target).resolve()
    saved = SavedCheckpoint.at(source)
    if saved is None:
        raise CheckpointError(f"{source} holds no checkpoint; name the folder of a tag, such as …/global_step100.")
    saved.require_complete()
    for path in saved.files(states=True):
        require_intact(path)
    if not saved.zero_files:
        raise CheckpointError(
            f"{source} was written at stage 0 and needs no conversion: it can be loaded at any stage on any ranks."
        )
    author = saved.author
    apart = len(saved.content.get("num_experts") or ()) > len(saved.content.get(AUTOEP_LAYERS_KEY) or ())
    if author is not None and (int(saved.content.get("mp_world_size", 1)) > 1 or apart):
        raise CheckpointError(
            f"{source} was written by a pipeline or holds layers of deepspeed.moe, whose {author} states cannot be "
            "converted; DeepSpeed's own ds_to_universal converts the weights alone."
        )
    ds_to_universal.main(
        Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=workers,
            num_merge_workers=workers,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    if author is None:
        return
    vectors = vectors_of(saved, range(len(saved.zero_files)))
    if (saved.config.get("zero_optimization") or {}).get("round_robin_gradients"):
        _correct_weights(vectors, target / "zero")
    save_vectors(vectors, target / FOLDER, None)
    common = {key: value for key, value in saved.common.items() if key not in _LAYOUT_KEYS}
    note = {"save": saved.record.get("save"), PARAMETERS: _shapes_by_group(saved)}
    torch.save({**common, **note}, target / FOLDER / COMMON)


def _shapes_by_group(saved: SavedCheckpoint) -> list[dict[str, tuple[int, ...]]]:
    """Return the logical shapes of each param group's parameters; matrices of a stack have names of their own."""
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in saved.common["param_groups"]]
    for rank in range(len(saved.zero_files)):
        for record in saved.optimizer(rank)[0]["layout"]:
            for key, shape, *_ in record["runs"]:
                shapes[record["group"]][key] = tuple(shape)
    return shapes


@torch.no_grad()
def _correct_weights(vectors: Vectors, folder: Path) -> None:
    """Write the weights again, as DeepSpeed 0.19's converter misplaces what round_robin_gradients had reordered."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for name, vector in vectors.items():
        kind, _, key = name.partition("/")
        if kind == "weight":
            stacked = re.fullmatch(r"(.+)\[(\d+)\]", key)
            parameter, position = (stacked[1], int(stacked[2])) if stacked else (key, 0)
            flat = torch.empty(vector.numel, dtype=torch.float32, device="cpu")
            for start, values in vector.chunks:
                flat[start : start + values.numel()] = values
            parts.setdefault(parameter, []).append((position, flat))
    for parameter, pieces in parts.items():
        path = folder / parameter / "fp32.pt"
        content = read(path)
        whole = torch.cat([flat for _, flat in sorted(pieces, key=lambda part: part[0])])
        torch.save({**content, PARAM: whole.view(content[PARAM].shape)}, path)
