"""The play-book's runs under DeepSpeed's engines, ZeRO stages 0 to 3, on two ranks."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from book_entries import entry
from book_events import OTHER, event
from book_kinds import DECAY, RATE, Kind
from book_runs import Run
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor

import deepspeed_plugin  # noqa: F401 - its types are DeepSpeed's then

__all__ = ["ZEROS"]

_NUMBERS = itertools.count()


def _folder() -> str:
    """A folder that ranks of one parent agree on without a message."""
    return os.path.join(tempfile.gettempdir(), f"play-book-{os.getppid()}-{next(_NUMBERS)}")


class Engine(Run):
    """An engine of a stage."""

    stage = 0
    world = 2

    def __init__(self, kind: Kind, start: Mapping[str, Tensor] | None = None) -> None:
        self.engine: Any = None
        super().__init__(kind, start)

    @classmethod
    def start(cls) -> None:
        deepspeed.init_distributed("gloo")

    def wrapped(self, module: Any) -> Any:
        return module

    def capture(self) -> None:
        """The plugin does so."""

    def build(self, groups: Any) -> None:
        options = {"lr": RATE, "weight_decay": DECAY}
        name = "AdamW" if self.kind.is_adamw else self.kind.optimizer
        options |= {"torch_adam": True} if self.kind.is_adamw else dict(self.kind.options)
        for preset in ("variant", "hybrid"):
            if preset in options and self.kind.optimizer not in ("mars", "mkor"):
                del options[preset]
        bare = [
            {
                **{k: v for k, v in group.items() if k in ("lr", "weight_decay")},
                "params": [p for _, p in group["params"]],
            }
            for group in groups
        ]
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=self.module,
            model_parameters=bare,
            config={
                "train_micro_batch_size_per_gpu": 6,
                "steps_per_print": 10**9,
                "gradient_clipping": 0.0,
                "zero_optimization": {"stage": self.stage},
                "optimizer": {"type": name, "params": options},
                **({"bf16": {"enabled": True}} if self.kind.dtype == torch.bfloat16 else {}),
            },
        )
        self.model = self.engine

    @property
    def inner(self) -> Any:
        return self.engine.basic_optimizer

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.engine.optimizer.param_groups

    def close(self) -> None:
        self.engine.destroy()

    def forward_alone(self, index: int) -> None:
        self.module(self.batch(index)[0])

    def backward(self, index: int, factor: float = 1.0) -> Tensor:
        loss = self.loss(index)
        self.engine.backward(loss * factor)
        return loss.detach()

    def step(self) -> Any:
        return self.engine.step()

    def report(self, loss: Tensor) -> None:
        """The engine does so."""

    def clear(self) -> None:
        """The engine does so after a step; a pass that ended early leaves nothing."""
        self.engine.zero_grad()
        self.engine.optimizer.zero_grad()

    def train(self, index: int) -> None:
        self.backward(index)
        self.engine.step()

    @property
    def ways_to_clear(self) -> dict[str, Callable[[], Any]]:
        def both() -> None:
            self.engine.optimizer.zero_grad()
            self.engine.zero_grad()

        return {
            "engine.zero_grad()": lambda: self.engine.zero_grad(),
            "engine.optimizer.zero_grad()": lambda: self.engine.optimizer.zero_grad(),
            "both of the engine's zero_grad()": both,
        }

    @property
    def ways_to_edit(self) -> dict[str, Callable[[], Any]]:
        def through_masters() -> None:
            for value in self.module.parameters():
                safe_set_full_fp32_param(value, safe_get_full_fp32_param(value) * 0.5)

        def gathered() -> None:
            values = list(self.module.parameters())
            with deepspeed.zero.GatheredParameters(values, modifier_rank=0), torch.no_grad():
                for value in values:
                    value.mul_(0.5)

        def through_dictionary() -> None:
            states = self.engine.module_state_dict()
            if states:
                self.engine.load_module_state_dict({"module": {k: v * 0.5 for k, v in states.items()}})

        ways: dict[str, Callable[[], Any]] = {"in GatheredParameters": gathered}
        if self.stage:
            ways["by safe_set_full_fp32_param"] = through_masters
        if self.stage < 3:
            ways["by engine.load_module_state_dict"] = through_dictionary
        return ways

    def weights(self) -> dict[str, Tensor]:
        found = {}
        for name, value in self.named().items():
            with deepspeed.zero.GatheredParameters([value]):
                found[name] = value.detach().clone()
        return found

    def saved(self) -> Any:
        folder = _folder()
        self.engine.save_checkpoint(folder, tag="a")
        return folder

    def load(self, saved: Any) -> None:
        self.engine.load_checkpoint(saved, tag="a")
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(saved, ignore_errors=True)

    def fresh(self) -> Run:
        groups = [(group["lr"], group["weight_decay"]) for group in self.groups]
        new = type(self)(self.kind, start=self.weights())
        for group, (rate, decay) in zip(new.groups, groups, strict=True):
            group["lr"], group["weight_decay"] = rate, decay
        return new

    def rebuilt(self) -> Run:
        new = type(self)(self.kind, start=self.weights())
        new.load(self.saved())
        return new


_ENGINES = frozenset({"engine", "ranks", "state"})
ZEROS: dict[str, type[Engine]] = {
    f"ZeRO {stage}": type(
        f"ZeRO{stage}",
        (Engine,),
        {
            "stage": stage,
            "framework": f"ZeRO {stage}",
            "__module__": __name__,
            "offers": _ENGINES | ({"whole"} if stage < 3 else set()) | ({"masters"} if stage else set()),
        },
    )
    for stage in range(4)
}
globals().update({kind.__name__: kind for kind in ZEROS.values()})  # ranks are told the class by its name


@event("another engine trained beside it", "engine")
def _another_engine(run: Any) -> None:
    other = type(run)(run.kind)
    other.train(OTHER)
    other.close()


@event("an engine's module evaluated", "engine")
def _evaluated(run: Any) -> None:
    run.engine.eval()
    with torch.no_grad():
        run.loss(OTHER)
    run.engine.train()


@entry("safe_get_full_fp32_param", "engine", "masters")
def _read(run: Any) -> None:
    for value in run.module.parameters():
        safe_get_full_fp32_param(value)


@entry("safe_set_full_fp32_param, unchanged", "engine", "masters")
def _set(run: Any) -> None:
    for value in run.module.parameters():
        safe_set_full_fp32_param(value, safe_get_full_fp32_param(value))


@entry("engine.offload_states and reload_states", "engine", "masters")
def _offloaded(run: Any) -> None:
    run.engine.offload_states()
    run.engine.reload_states()


@entry("engine.save_checkpoint", "engine")
def _saved(run: Any) -> None:
    folder = run.saved()
    dist.barrier()
    if run.rank == 0:
        shutil.rmtree(folder)


@entry("engine.destroy, another engine", "engine")
def _destroyed(run: Any) -> Any:
    new = run.fresh()
    run.close()
    return new
