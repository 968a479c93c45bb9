"""Faults of Megatron's distributed checkpoints, on two ranks with the distributed optimizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_cells import Cell
from megatron_harness import Trainer, opened
from megatron_types import maker
from seeing import Sentences, told

import megatron_patches
from megatron_patches.cpu import cpu_megatron

CELL = Cell(precision="bf16", use_distributed_optimizer=True)
FULL = "/dev/full"
STEPS = 2
REFUSED = "all ranks raise, naming whichever file it is"


def _bytes(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of what this rank's optimizer updates, and of its states."""
    inner = trainer.optimizer.chained_optimizers[0].optimizer
    weights = [weight for group in inner.param_groups for weight in group["params"]]
    found = {f"weights {index}": weight for index, weight in enumerate(weights)}
    models = (weight for chunk in trainer.chunks for weight in chunk.parameters())
    found |= {f"model {index}": weight for index, weight in enumerate(models)}
    for index, weight in enumerate(weights):
        found |= {f"{index} {name}": value for name, value in inner.state[weight].items()}
    found |= {f"{key} {name}": value for key, state in inner.matrix_states.items() for name, value in state.items()}
    return {name: value.detach().clone() for name, value in found.items() if isinstance(value, torch.Tensor)}


def _same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _of_elements(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the states of matrices, which may lie with other owners after loading."""
    return {name: value for name, value in tensors.items() if name.split()[0] == "weights" or name[0].isdigit()}


def _try(action: Any) -> str:
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
        return f"{type(error).__name__}: {error}"
    return ""


def damage(root: Path, name: str, nth: int) -> None:
    """A copy of the good checkpoint of which one file is cut off, emptied, or gone."""
    shutil.rmtree(root / name, ignore_errors=True)
    shutil.copytree(root / "good", root / name)
    file = sorted((root / name).glob("*.distcp"))[nth]
    if name == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size * 2 // 3 if name == "truncated" else 0)


def seen_by_megatron(rank: int, world: int, root: str) -> Sentences:
    """Save well, then on a full disk, then load what was damaged."""
    megatron_patches.apply()
    folder, found = Path(root), {}
    with cpu_megatron(), opened(CELL, maker("ldadam")) as trainer:
        trainer.advance(STEPS)
        for name in ("good", "full"):
            if rank == 0:
                (folder / name).mkdir()
            dist.barrier()
            if name == "good":
                trainer.save(folder / name)
        for file in (folder / "good").glob("__1_*.distcp") if rank == 0 else ():
            (folder / "full" / file.name).symlink_to(FULL)
        dist.barrier()
        before = _bytes(trainer)
        raised = _try(lambda: trainer.save(folder / "full"))
        held = _same(before, _bytes(trainer))
        found["full disk, Megatron"] = told({"all ranks raise": bool(raised), "the run still holds its states": held})
        trainer.advance(1)
        straight = _of_elements(_bytes(trainer))
        before = _bytes(trainer)
        for name in ("truncated", "emptied", "gone"):
            refused, same = True, True
            for nth in range(len(sorted((folder / "good").glob("*.distcp")))):
                if rank == 0:
                    damage(folder, name, nth)
                dist.barrier()
                message = _try(lambda name=name: trainer.load(folder / name))
                refused &= f"__{nth // 2}_{nth % 2}.distcp" in message and "load an earlier one" in message
                same &= _same(before, _bytes(trainer))
            found[f"{name}, Megatron"] = told({REFUSED: refused, "nothing has changed": same})
    with cpu_megatron(), opened(CELL, maker("ldadam")) as trainer:
        trainer.load(folder / "good")
        trainer.advance(1)
        continues = _same(straight, _of_elements(_bytes(trainer)))
        again = told({"the previous checkpoint continues bit for bit": continues})
    found["full disk, Megatron"] += f"; {again}"
    return found
