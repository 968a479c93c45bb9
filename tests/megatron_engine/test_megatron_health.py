"""Health on Megatron's writers, and optimizers that wait in the host's memory: all cells in one pair of ranks."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cells import Cell
from megatron_harness import Trainer, opened, trained
from megatron_types import maker
from ranks import once, run_ranks

from megatron_patches import offloading
from megatron_patches.cpu import cpu_megatron
from megatron_patches.patches import PATCHES

CELLS: dict[str, tuple[str, Cell]] = {
    "PP2": ("mars-m", Cell(pp=2, use_distributed_optimizer=True)),
    "EP2": ("ldadam", Cell(ep=2, moe=4, use_distributed_optimizer=True)),
    "layer-wise": ("ldadam", Cell(optimizer={"rankwise_layer_wise": True})),
}
OFFLOADED: dict[str, tuple[str, Cell]] = {
    "distributed bf16": ("ldadam", Cell(precision="bf16", use_distributed_optimizer=True)),
    "bf16": ("mkor", Cell(precision="bf16")),
    "fp32": ("mars-m", Cell()),
}
STEPS, INTERVAL = 4, 2


class Writers:
    """As Megatron's global variables: arguments everywhere, writers on the last rank."""

    def __init__(self, rank: int, watched: bool = True) -> None:
        self.written: list[tuple[str, float, int]] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        args = SimpleNamespace(tensorboard_dir="tb" if watched else None, wandb_project="", log_interval=INTERVAL)
        last = rank == dist.get_world_size() - 1
        self.module = ModuleType("megatron.training.global_vars")
        self.module.__dict__.update(
            get_args=lambda: args,
            get_tensorboard_writer=lambda: SimpleNamespace(add_scalar=self._write) if last else None,
            get_wandb_writer=lambda: SimpleNamespace(log=self._log) if last else None,
        )

    def _write(self, name: str, value: float, iteration: int) -> None:
        self.written.append((name, value, iteration))

    def _log(self, values: dict[str, float], iteration: int) -> None:
        self.logged.append((values, iteration))


def _reported(rank: int, name: str, cell: Cell, watched: bool = True) -> dict[str, Any]:
    """Train through the patched function that logs; what it wrote, and how often a step was read."""
    writers = Writers(rank, watched)
    patch = next(patch for patch in PATCHES if patch.name == "training_log")
    log = patch.replace(lambda loss_dict, total_loss_dict, learning_rate, iteration: iteration)
    with pytest.MonkeyPatch.context() as patched, opened(cell, maker(name)) as trainer:
        patched.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
        patched.setitem(sys.modules, "megatron.training.global_vars", writers.module)
        reads = []
        read = trainer.optimizer.read_health
        patched.setattr(trainer.optimizer, "read_health", lambda: reads.append(trainer.step) or read())
        for step in range(1, STEPS + 1):
            trainer.train_step()
            assert log({}, {}, 0.1, step) == step
        wrappers = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
        matrices = [sum(e.rule == "matrix" for e in w.optimizer.explain()) for w in wrappers if w.optimizer]
        return {"written": writers.written, "logged": writers.logged, "reads": reads, "matrices": matrices}


def _contents(trainer: Trainer) -> dict[str, torch.Tensor]:
    inner = trainer.optimizer.chained_optimizers[0].optimizer
    weights = [weight for group in inner.param_groups for weight in group["params"]]
    found = {f"weight {index}": weight.data for index, weight in enumerate(weights)}
    found |= {f"element {i} {k}": v for i, state in enumerate(inner.state.values()) for k, v in state.items()}
    found |= {f"matrix {key} {k}": v for key, state in inner.matrix_states.items() for k, v in state.items()}
    return found


def _moved(name: str, cell: Cell) -> dict[str, Any]:
    """Which tensors an interlude on the host has replaced, and the weights after further steps."""
    with opened(cell, maker(name)) as trainer:
        trainer.advance(2)
        before = {key: value.data_ptr() for key, value in _contents(trainer).items()}
        trainer.optimizer.offload_to_cpu()
        away = {key: value.data_ptr() for key, value in _contents(trainer).items()}
        trainer.optimizer.offload_to_cpu()
        trainer.optimizer.restore_from_cpu()
        trainer.optimizer.restore_from_cpu()
        result = trained(trainer, 2)
        return {"moved": {key for key in before if before[key] != away[key]}, "all": set(before), "result": result}


def _everything(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with cpu_megatron():
        for label, (name, cell) in CELLS.items():
            found[label] = _reported(rank, name, cell)
        found["unwatched"] = _reported(rank, *CELLS["PP2"], watched=False)
        for label, (name, cell) in OFFLOADED.items():
            with opened(cell, maker(name)) as trainer:
                trainer.advance(2)
                found[f"undisturbed {label}"] = trained(trainer, 2)
            found[f"nothing to do {label}"] = _moved(name, cell)
            with pytest.MonkeyPatch.context() as patched:
                # Counts, which lie on the host, have no dimension; all else is taken for an accelerator's.
                patched.setattr(offloading, "is_on_device", lambda tensor: tensor.dim() > 0)
                found[f"moved {label}"] = _moved(name, cell)
    return found


@once
def seen() -> list[dict[str, Any]]:
    return run_ranks(2, _everything)


@pytest.mark.parametrize("label", CELLS)
def test_health_is_written_at_the_log_interval_alone(label: str) -> None:
    name = CELLS[label][0]
    for rank, found in enumerate(seen()):
        assert found[label]["reads"] == [INTERVAL, 2 * INTERVAL]
        assert [iteration for _, iteration in found[label]["logged"]] == ([INTERVAL, 2 * INTERVAL] if rank else [])
    writer = seen()[1][label]
    assert {iteration for *_, iteration in writer["written"]} == {INTERVAL, 2 * INTERVAL}
    for values, iteration in writer["logged"]:
        assert {(key, value, iteration) for key, value in values.items()} <= set(writer["written"])
        assert all(key.startswith(f"optim/{name}/") for key in values)
        assert f"optim/{name}/bytes_sent" in values


def test_the_writers_show_all_pipeline_stages_and_experts_apart() -> None:
    ranks = seen()
    values, _ = ranks[1]["PP2"]["logged"][-1]
    per_stage = [found["PP2"]["matrices"][0] for found in ranks]
    assert min(per_stage) > 0 and values["optim/mars-m/matrices_updated"] > max(per_stage)
    values, _ = ranks[1]["EP2"]["logged"][-1]
    assert values["optim/ldadam/matrices_updated"] > 0 and values["optim/ldadam/experts/matrices_updated"] > 0


def test_without_writers_nothing_is_read() -> None:
    for found in seen():
        assert found["unwatched"]["reads"] == [] and found["unwatched"]["written"] == []


@pytest.mark.parametrize("label", OFFLOADED)
def test_an_interlude_on_the_host_changes_nothing(label: str) -> None:
    whole = seen()[0][f"undisturbed {label}"]
    for kind in ("nothing to do", "moved"):
        again = seen()[0][f"{kind} {label}"]["result"]
        assert again.losses == whole.losses
        assert all(torch.equal(again.weights[key], whole.weights[key]) for key in whole.weights)
        assert all(torch.equal(again.model_weights[key], whole.model_weights[key]) for key in whole.weights)


@pytest.mark.parametrize("label", OFFLOADED)
def test_matrix_states_and_main_weights_move_counts_and_model_weights_stay(label: str) -> None:
    for found in seen():
        assert found[f"nothing to do {label}"]["moved"] == set()
        moved, everything = found[f"moved {label}"]["moved"], found[f"moved {label}"]["all"]
        kinds = {"element", "weight"} if OFFLOADED[label][1].precision == "bf16" else {"element"}
        if any(key.startswith("matrix") for key in everything):
            kinds.add("matrix")
        assert {key.split()[0] for key in moved} == kinds
        assert not any(key.endswith(" step") for key in moved)
