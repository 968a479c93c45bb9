"""Faults of checkpoint files, and the files of other optimizers, models and versions."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import ds_harness as ds
import numpy as np
import torch
from killed_ranks import Kill, job_of, resumption_of
from seeing import Sentences, told
from torch import nn

from deepspeed_plugin.checkpoints import CheckpointError
from deepspeed_plugin.checkpoints.files import ASIDE, RECORD, REPLACING

FULL = Path("/dev/full")
"""What is written to it fails as on a full disk."""
TAG, FILE = "good", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
STEPS = 2
MODEL = "mp_rank_00_model_states.pt"
# Which file of a save lies on the full disk, by the tag's name first; files are written aside.
DISKS = {
    "full disk, optimizer file of rank 1": f"full/{FILE}{ASIDE}",
    "full disk, model file of rank 0": f"full/{MODEL}{ASIDE}",
    "full disk, latest": ".latest",
    "full disk, recovery script": "zero_to_fp32.py",
    "full disk, optimizer file, same tag": f"{TAG}/{FILE}{ASIDE}",
    "full disk, model file, same tag": f"{TAG}/{MODEL}{ASIDE}",
}
DAMAGED = ("truncated", "emptied", "corrupted")


def seen_while_saving(rank: int, world: int, root: str) -> Sentences:
    """Save well, then on disks that are full, then train on."""
    deepspeed.init_distributed("gloo")
    folder, found = Path(root), {}
    engine = ds.engine_of(job_of("LDAdam", 2), world)
    for step in range(STEPS):
        ds.train_step(engine, rank, world, step)
    engine.save_checkpoint(root, tag=TAG)
    before = ds.digest(engine.basic_optimizer)
    files = _bytes_of(folder / TAG)
    for name, path in DISKS.items():
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(folder / "full", ignore_errors=True)
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).unlink(missing_ok=True)
            (folder / path).symlink_to(FULL)
        torch.distributed.barrier()
        message = "saved"
        try:
            engine.save_checkpoint(root, tag=TAG if path.startswith(TAG) else "full")
        except CheckpointError as error:
            message = str(error)
        torch.distributed.barrier()
        if rank == 0:
            (folder / path).unlink(missing_ok=True)
        torch.distributed.barrier()
        found[name] = told(
            {
                "all ranks raise": "cannot be written" in message and "make room" in message,
                "`latest` names the previous checkpoint": (folder / "latest").read_text() == TAG
                and _bytes_of(folder / TAG) == files,
                "the run still holds its states": ds.digest(engine.basic_optimizer) == before,
            }
        )
    ds.train_step(engine, rank, world, STEPS)
    (folder / f"digest{rank}").write_text(ds.digest(engine.basic_optimizer))
    engine.destroy()
    return found


def _bytes_of(folder: Path) -> dict[str, bytes]:
    # Nothing of a full disk is left, which would be read for ever.
    assert not any(path.is_symlink() for path in folder.iterdir())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damage(root: Path) -> None:
    """Copies of the good checkpoint, each with another fault."""
    for name in (*DAMAGED, "half replaced", "older version", "newer version"):
        shutil.copytree(root / TAG, root / name / TAG)
        (root / name / "latest").write_text(TAG)
        file = root / name / TAG / FILE
        if name == "truncated":
            os.truncate(file, file.stat().st_size * 2 // 3)
        elif name == "emptied":
            os.truncate(file, 0)
        elif name == "corrupted":
            _corrupt(file)
        elif name == "half replaced":
            (root / name / TAG / REPLACING).write_text("")
        elif name == "newer version":
            _as_newer(file)
        else:
            _as_older(root / name / TAG)


def _corrupt(file: Path) -> None:
    """64 bytes in the midst of the numbers become zero."""
    content = torch.load(file, weights_only=False)
    values = content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    needle = values.detach().numpy().tobytes()[256:512]
    data = bytearray(file.read_bytes())
    at = data.index(needle)
    data[at : at + 64] = bytes(64)
    file.write_bytes(data)


def _as_older(folder: Path) -> None:
    """The first versions left no note in the model file; torch's first format has no checksums."""
    for path in folder.glob("*.pt"):
        content = torch.load(path, weights_only=False)
        content.pop(RECORD, None)
        torch.save(content, path, _use_new_zipfile_serialization=False)


def _as_newer(file: Path) -> None:
    """Another state beside those we know, in the file of one rank."""
    content = torch.load(file, weights_only=False)
    for matrix in content["optimizer_state_dict"]["base_optimizer_state"]["matrix_states"].values():
        matrix["curvature"] = torch.zeros(2)
    torch.save(content, file)


class _Wider(ds.Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(6, 9)


def _attempt(rank: int, world: int, job: ds.Job, folder: Path, model: type[nn.Module] | None = None) -> dict[str, Any]:
    """What loading says and changes."""
    patch = mock.patch.object(ds, "model_of", lambda job: model()) if model is not None else mock.MagicMock()
    with patch:
        engine = ds.engine_of(job, world)
    optimizer = engine.basic_optimizer
    optimizer.plan_ahead(optimizer.planner.source.units())  # a digest goes by the plans
    first, weights = ds.digest(optimizer), ds.model_weights(engine)
    message = "loaded"
    try:
        engine.load_checkpoint(str(folder))
    except (CheckpointError, RuntimeError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
    after = ds.model_weights(engine)
    found = {
        "message": message,
        "weights": after,
        "unchanged": ds.digest(optimizer) == first
        and all(np.array_equal(after[name], value) for name, value in weights.items()),
        "counts": {int(state["step"]) for state in optimizer.state.values() if "step" in state},
    }
    engine.destroy()
    return found


def _continues(rank: int, world: int, root: Path, folder: Path) -> bool:
    """Whether a step after loading ends at the bits of the run that saved, and went on."""
    engine = ds.engine_of(job_of("LDAdam", 2), world)
    engine.load_checkpoint(str(folder))
    ds.train_step(engine, rank, world, STEPS)
    found = ds.digest(engine.basic_optimizer)
    engine.destroy()
    return found == (root / f"digest{rank}").read_text()


def _refused(found: dict[str, Any], *words: str) -> str:
    assert all(word in found["message"] for word in words), (words, found["message"])
    listed = ", ".join(f"“{word}”" for word in words)
    return told({f"all ranks raise, naming {listed}": True, "nothing has changed": found["unchanged"]})


def seen_while_loading(rank: int, world: int, root: str, kills: Sequence[tuple[Kill, str]]) -> Sentences:
    """Load what was damaged, what others wrote, and what killed runs left."""
    deepspeed.init_distributed("gloo")
    folder, here = Path(root), job_of("LDAdam", 2)
    previous = told({"the previous checkpoint continues bit for bit": _continues(rank, world, folder, folder)})
    found = dict.fromkeys(DISKS, previous)
    for name in DAMAGED:
        found[name] = _refused(_attempt(rank, world, here, folder / name), FILE)
    found["half replaced"] = _refused(_attempt(rank, world, here, folder / "half replaced"), "was being replaced")
    older = _continues(rank, world, folder, folder / "older version")
    found["older version"] = told({"it continues bit for bit": older})
    newer = _attempt(rank, world, here, folder / "newer version")
    found["newer version"] = _refused(newer, "'curvature'", "load it with the version that wrote it")
    other = _attempt(rank, world, job_of("MKOR", 2), folder)
    straight = _attempt(rank, world, here, folder)
    kept = all(np.array_equal(other["weights"][name], value) for name, value in straight["weights"].items())
    fresh = other["message"] == "loaded" and other["counts"] <= {0}
    found["another optimizer"] = told({"the weights are kept": kept, "the states start afresh": fresh})
    wider = replace(here, config={**here.config, "zero_optimization": {"stage": 1}})
    found["another model"] = _refused(_attempt(rank, world, wider, folder, _Wider), "'unused.weight' has 42 elements")
    resumptions = resumption_of(rank, world, kills)
    return found | {kill.event: seen for (kill, _), seen in zip(kills, resumptions, strict=True)}
