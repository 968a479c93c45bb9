"""The play-book's runs under Megatron, with its DistributedDataParallel and its distributed optimizer, on two ranks."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from book_entries import entry
from book_events import event
from book_kinds import Kind
from book_runs import Run
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "megatron_engine"))

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron_cells import DISTRIBUTED, LENGTH, Cell, tokens  # noqa: E402
from megatron_harness import Trainer, opened  # noqa: E402
from megatron_types import maker  # noqa: E402
from megatron_weights import bare  # noqa: E402

import megatron_patches  # noqa: E402
from megatron_patches.cpu import cpu_megatron  # noqa: E402

__all__ = ["MEGATRONS"]

_OPEN = ExitStack()
SIZES: Mapping[str, Any] = {"layers": 1, "hidden": 16, "microbatches": 1, "clip": 0.0}


class Megatron(Run):
    """A tiny GPT."""

    world = 2
    before = (0,)  # its steps take longest
    layout: Mapping[str, Any] = {}
    middle = "decoder.layers.0.self_attention.linear_proj.weight"

    def __init__(self, kind: Kind, start: Mapping[str, Tensor] | None = None) -> None:
        self.kind = kind
        name = "adam" if kind.is_adamw else kind.optimizer
        preset = ("variant", "hybrid")
        options = {key: value for key, value in kind.options.items() if key not in preset}
        with opened(Cell(**SIZES, **self.layout), maker(name, **options)) as trainer:
            self.trainer: Trainer = trainer
        self.model = self.trainer.chunks[0]
        self.module = bare(self.model)
        self.optimizer: Any = self.trainer.optimizer
        for group in self.groups:
            group["lr"] = 2.0**-8
        if start is not None:
            with torch.no_grad():
                for key, value in self.module.named_parameters():
                    value.copy_(start[key])
            self.optimizer.reload_model_params()

    @classmethod
    def start(cls) -> None:
        megatron_patches.apply()
        _OPEN.enter_context(cpu_megatron())

    @classmethod
    def stop(cls) -> None:
        _OPEN.close()

    def capture(self) -> None:
        """Done by what builds the optimizer."""

    @property
    def inner(self) -> Any:
        chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return chained[0].optimizer

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def first(self) -> Any:
        return self.module.decoder.layers[0]

    @property
    def last(self) -> Any:
        return self.module.output_layer

    def _pieces(self, index: int) -> tuple[Tensor, Tensor]:
        batch = tokens(index).tensor_split(self.world)[self.rank]
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    def loss(self, index: int) -> Tensor:
        inputs, labels = self._pieces(index)
        return self.model(inputs, torch.arange(LENGTH).expand_as(inputs), None, labels=labels).float().mean()

    def forward_alone(self, index: int) -> None:
        inputs, labels = self._pieces(index)
        self.module(inputs, torch.arange(LENGTH).expand_as(inputs), None, labels=labels)

    def backward(self, index: int, factor: float = 1.0) -> Tensor:
        """Megatron's schedule, and the reduction of its gradients."""
        found = []

        def forward(batches: Any, model: Any) -> Any:
            next(batches)

            def loss_of(per_token: Tensor) -> Any:
                loss = per_token.float().mean()
                found.append(loss.detach().clone())
                return loss * factor, {"loss": found[-1]}

            inputs, labels = self._pieces(index)
            return model(inputs, torch.arange(LENGTH).expand_as(inputs), None, labels=labels), loss_of

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([None]),
            model=self.model,
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=4,
            forward_only=False,
        )
        return found[0]

    def report(self, loss: Tensor) -> None:
        """Megatron's loop does so."""

    def step(self) -> Any:
        return self.optimizer.step()

    def clear(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def train(self, index: int) -> None:
        self.clear()
        self.backward(index)
        self.step()

    @property
    def ways_to_clear(self) -> dict[str, Callable[[], Any]]:
        return {
            "zero_grad_buffer() and optimizer.zero_grad()": self.clear,
            "zero_grad_buffer()": self.model.zero_grad_buffer,
        }

    @property
    def ways_to_edit(self) -> dict[str, Callable[[], Any]]:
        def reloaded() -> None:
            self._in_place()
            self.optimizer.reload_model_params()

        return {"in place, then reload_model_params()": reloaded}

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.module.named_parameters()}

    def _state(self, is_loading: bool) -> dict[str, Any]:
        state = self.trainer.sharded_state(is_loading)
        state.pop("opt_param_scheduler")
        return state

    def saved(self) -> Any:
        box = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(box)
        dist_checkpointing.save(self._state(False), box[0])
        return box[0]

    def load(self, saved: Any) -> None:
        state = dist_checkpointing.load(self._state(True), saved)
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(saved, ignore_errors=True)

    def _values(self) -> list[dict[str, Any]]:
        kept = ("lr", "weight_decay", "betas")
        return [{key: group[key] for key in kept if key in group} for group in self.groups]

    def fresh(self) -> Run:
        new = type(self)(self.kind, start=self.weights())
        for group, values in zip(new.groups, self._values(), strict=True):
            group.update(values)
        return new

    def rebuilt(self) -> Run:
        new = type(self)(self.kind, start=self.weights())
        new.load(self.saved())
        for group, values in zip(new.groups, self._values(), strict=True):
            group.update(values)
        return new


class MegatronDDP(Megatron):
    """Whole gradients on every rank."""

    framework = "Megatron DDP"
    offers = frozenset({"megatron", "ranks", "whole", "state"})


class MegatronDistributed(Megatron):
    """The distributed optimizer."""

    framework = "Megatron distributed optimizer"
    layout = DISTRIBUTED
    offers = frozenset({"megatron", "ranks", "whole", "state"})


MEGATRONS = {kind.framework: kind for kind in (MegatronDDP, MegatronDistributed)}


@event("evaluated by Megatron's schedule", "megatron")
def _evaluated(run: Any) -> None:
    run.model.eval()
    with torch.no_grad():
        run.loss(60)
    run.model.train()


@entry("state_dict and load_state_dict of Megatron's optimizer", "megatron")
def _plain_states(run: Any) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


@entry("sharded_state_dict, saved", "megatron")
def _sharded(run: Any) -> None:
    folder = run.saved()
    dist.barrier()
    if run.rank == 0:
        shutil.rmtree(folder)


@entry("reload_model_params()", "megatron")
def _reloaded(run: Any) -> None:
    run.optimizer.reload_model_params()
