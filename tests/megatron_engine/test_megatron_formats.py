"""Megatron's ``torch`` format, a dictionary of one rank's: it suffices, or is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_cells import Cell
from megatron_harness import Result, Trainer, opened, trained
from megatron_types import maker
from megatron_weights import bare
from ranks import run_ranks

from megatron_patches.cpu import cpu_megatron
from megatron_patches.formats import refuse_format
from megatron_patches.registry import NAMES
from megatron_patches.support import SupportError

LAYER_WISE: dict[str, Any] = {"rankwise_layer_wise": True}
# Optimizer, cell, and whether the ranks load the first one's dictionary, as Megatron has it in this format.
RUNS: dict[str, tuple[str, Cell, bool]] = {
    "sonew, first rank's": ("sonew", Cell(), True),
    "mars-m bf16, first rank's": ("mars-m", Cell(precision="bf16"), True),
    "ldadam, its own": ("ldadam", Cell(precision="bf16"), False),
    "ldadam, first rank's": ("ldadam", Cell(), True),
    "layer-wise, its own": ("ldadam", Cell(optimizer=LAYER_WISE), False),
    "layer-wise, first rank's": ("sonew", Cell(precision="bf16", optimizer=LAYER_WISE), True),
}
REFUSED = ("ldadam, first rank's", "layer-wise, first rank's")


def _save(trainer: Trainer, file: Path) -> None:
    if hasattr(trainer.optimizer, "save_state_dict_to_file"):
        trainer.optimizer.save_state_dict_to_file(str(file))
    else:
        torch.save(trainer.optimizer.state_dict(), file)
    model = [bare(chunk).state_dict() for chunk in trainer.chunks]
    torch.save((model, trainer.scheduler.state_dict(), trainer.step), file.with_suffix(".model"))
    torch.distributed.barrier()


def _load(trainer: Trainer, file: Path) -> None:
    model, schedule, trainer.step = torch.load(file.with_suffix(".model"), weights_only=False)
    for chunk, state in zip(trainer.chunks, model, strict=True):
        bare(chunk).load_state_dict(state)
    if hasattr(trainer.optimizer, "load_state_dict_from_file"):
        trainer.optimizer.load_state_dict_from_file(str(file))
    else:
        trainer.optimizer.load_state_dict(torch.load(file))
    trainer.scheduler.num_steps = 0  # Megatron's adds the saved ones.
    trainer.scheduler.load_state_dict(schedule)


def _runs(rank: int, world: int, folder: Path) -> dict[str, tuple[Result | None, Result | str | None]]:
    found: dict[str, Any] = {}
    with cpu_megatron():
        for label, (name, cell, first) in RUNS.items():
            with opened(cell, maker(name)) as trainer:
                trainer.advance(2)
                _save(trainer, folder / f"{label} {rank}")
                whole = trained(trainer, 2)
            with opened(cell, maker(name)) as trainer:
                trainer.advance(1)
                before = _tensors(trainer)
                try:
                    _load(trainer, folder / f"{label} {0 if first else rank}")
                    found[label] = whole, trained(trainer, 2)
                except ValueError as error:
                    found[label] = whole, str(error)
                    assert all(map(torch.equal, before, _tensors(trainer))), label
    return found


def _tensors(trainer: Trainer) -> list[torch.Tensor]:
    inner = [wrapper.optimizer for wrapper in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])]
    kept = [state for optimizer in inner for state in optimizer.state.values()]
    kept += [state for optimizer in inner for state in optimizer.matrix_states.everything().values()]
    return [value.clone() for state in kept for value in state.values() if isinstance(value, torch.Tensor)]


def test_one_ranks_dictionary_suffices_or_is_refused(tmp_path: Path) -> None:
    first, second = run_ranks(2, _runs, tmp_path)
    for label in RUNS:
        whole, again = first[label]
        if label in REFUSED:
            assert "was given the states of rank 0 of 2" in again and "--ckpt-format torch_dist" in again
            assert second[label][1] == again
        else:
            assert not isinstance(again, str), (label, again)
            assert again.losses == whole.losses, label
            assert all(torch.equal(again.weights[key], whole.weights[key]) for key in whole.weights), label


# --- at the start -----------------------------------------------------------------------------------------------------


def _arguments(**changed: Any) -> SimpleNamespace:
    sizes = {"world_size": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    return SimpleNamespace(**{**sizes, "save": "folder", "ckpt_format": "torch", **changed})


START: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "distributed": ("sonew", {"use_distributed_optimizer": True}, "--use-distributed-optimizer"),
    "layer-wise": ("sonew", {"rankwise_layer_wise": True}, "layer-wise"),
    "owners": ("ldadam", {}, "2 ranks share"),
    "owners of factors": ("mkor-h", {}, "2 ranks share"),
    "states on every rank": ("mars-m", {}, None),
    "one copy": ("ldadam", {"tensor_model_parallel_size": 4}, None),
    "torch_dist": ("ldadam", {"ckpt_format": "torch_dist", "use_distributed_optimizer": True}, None),
    "nothing saved": ("ldadam", {"save": None}, None),
    "no states saved": ("ldadam", {"no_save_optim": True}, None),
}


@pytest.mark.parametrize("label", START)
def test_the_format_is_judged_before_training(label: str) -> None:
    name, changed, reason = START[label]
    if reason is None:
        refuse_format(_arguments(**changed), name, NAMES[name][0])
        return
    with pytest.raises(SupportError, match=reason) as error:
        refuse_format(_arguments(**changed), name, NAMES[name][0])
    assert "--ckpt-format torch is invalid" in str(error.value) and "use --ckpt-format torch_dist" in str(error.value)
