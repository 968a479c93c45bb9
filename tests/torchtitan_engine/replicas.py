"""Replicas of two ranks each under torchft's lighthouse and managers, through torchtitan's container of optimizers.

One replica is killed, begins anew with other weights, and heals; what every step used is written down, so that ranks
without torchft can repeat the run.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import cpu_titan
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchft.coordination import LighthouseServer
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.experiments.torchft.manager import TorchFTManager
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer

import rankwise.torchtitan  # noqa: F401

WORLD, TOGETHER, TIMEOUT = 2, 3, 60.0
"""Ranks of a replica; steps that both replicas take before one is killed, and after it has healed; seconds."""
SEEDS = {"survivor": 1, "victim": 1, "joining": 2}
"""Of the weights that a replica begins with."""
WIDTHS = (12, 20, 9)
Options = Mapping[str, tuple[str, dict[str, Any]]]
"""Name and options of an optimizer, by the part of the model that it steps."""
CASES: Options = {
    "adamw": ("AdamW", {"weight_decay": 0.1}),
    "mars_adamw": ("MARS-AdamW", {"weight_decay": 0.1}),
    "mars_lion": ("MARS-Lion", {}),
    "mars_shampoo": ("MARS-Shampoo", {"ns_dtype": "float32"}),
    "mars_m": ("MARS-M", {"ns_dtype": "float32"}),
    "sonew": ("SONew", {"eps": 1e-3}),
    "ldadam": ("LDAdam", {"rank": 3}),
    "mkor_sketch": ("MKOR-Sketch", {"update_interval": 2, "factor_dtype": "float32"}),
}
NARROW: Options = {
    case: (name, options if case == "adamw" else {**options, "state_dtype": "int8"})
    for case, (name, options) in CASES.items()
}


class Parts(nn.ModuleDict):
    """A network for each optimizer, all of the same input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x).square().mean() for part in self.values()]).sum()


def sharded(options: Options, seed: int) -> Parts:
    """The model, on the ranks of a replica."""
    torch.manual_seed(seed)
    first, inner, last = WIDTHS
    parts = {case: nn.Sequential(nn.Linear(first, inner), nn.Tanh(), nn.Linear(inner, last)) for case in options}
    model = Parts(parts)
    for part in model.values():
        fully_shard(part)
    fully_shard(model)
    cpu_titan.fsdp.disable_fsdp_gradient_division(model)
    return model


def backward(model: nn.Module, step: int, replica: int) -> None:
    """The gradient of a replica's batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * replica + dist.get_rank())
    model(torch.randn(6, WIDTHS[0], generator=generator)).backward()


def groups_of(options: Options, kind: type[OptimizersContainer] = OptimizersContainer) -> Any:
    """A container's configuration."""
    groups = [
        ParamGroupConfig(pattern=rf"^{case}\.", optimizer_name=name, optimizer_kwargs={"lr": 0.01, **keywords})
        for case, (name, keywords) in options.items()
    ]
    return kind.Config(param_groups=groups, implementation="foreach")


def rates(optimizers: OptimizersContainer) -> LRSchedulersContainer:
    """A warm-up that lasts longer than the run."""
    return LRSchedulersContainer(optimizers, lambda step: (step + 1) / 50)


def resumed(model: nn.Module, optimizers: OptimizersContainer) -> None:
    """Begin as after a checkpoint of one step: its matrix states are cut evenly, and no owner has its own yet."""
    backward(model, 0, 0)
    OptimizersContainer.step(optimizers)
    optimizers.load_state_dict(copy.deepcopy(OptimizersContainer.state_dict(optimizers)))
    OptimizersContainer.zero_grad(optimizers)


def outcome(model: nn.Module, optimizers: OptimizersContainer) -> dict[str, Any]:
    """The weights and all that a checkpoint has of the optimizers; of torch's AdamW this rank's parts."""

    def value_of(name: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        # What AdamW has loaded lies on the mesh of the other replica, whose groups are not here.
        return (value.to_local() if name.startswith("state.adamw") else value.full_tensor()).clone()

    named = {**model.state_dict(), **OptimizersContainer.state_dict(optimizers)}
    return {name: value_of(name, value) for name, value in named.items()}


# --- a replica --------------------------------------------------------------------------------------------------------


class Replica:
    """What torchtitan's trainer has and does of torchft, without its models.

    Attributes:
        records: What every step that counted used, in the order of the steps.
        skipped: Number of steps that did not count.
    """

    def __init__(self, number: int, options: Options, seed: int, resumes: bool) -> None:
        self.number, self.skipped = number, 0
        self.records: list[dict[str, Any]] = []
        settings = TorchFTManager.Config(enable=True, replica_id=number, group_size=2, process_group_timeout_ms=10_000)
        self.ft = TorchFTManager(settings)
        self.manager = self.ft.manager
        self.model = sharded(options, seed)
        chosen = groups_of(options, TorchFTOptimizersContainer)
        self.optimizers = chosen.build(model_parts=[self.model], ft_manager=self.ft)
        self.schedule = rates(self.optimizers)
        if resumes:
            resumed(self.model, self.optimizers)
        self.ft.maybe_set_all_reduce_hook([self.model])
        # As TorchFTCheckpointManager does; but it asks the model again, which reshards it amid the forward pass.
        self.optimizers.init_cache_state_dict()
        weights = ModelWrapper(self.model)
        states = {"model": weights, "optimizer": self.optimizers, "lr_scheduler": self.schedule}
        asked = {"model": lambda: weights.cached_state_dict}
        asked |= {key: value.state_dict for key, value in states.items() if value is not weights}
        self.manager.set_state_dict_fns(
            lambda saved: [states[key].load_state_dict(value) for key, value in saved.items()],
            lambda: {key: ask() for key, ask in asked.items()},
        )

    def step(self, mark: Path | None = None) -> bool:
        """One step, as the trainer takes it; whether it counted. With a mark, wait amid it to be killed.

        The ranks are killed together from outside: one that found the other dead would end in an error instead.
        """
        number = self.manager.current_step()
        self.optimizers.zero_grad()
        if mark:
            self.manager.wait_quorum()
            mark.touch()
            signal.pause()
        backward(self.model, number, self.number)
        self.optimizers.step()
        used = {"step": self.manager.current_step() - 1, "of": self.manager.num_participants()}
        used |= {"gave": self.manager.is_participating(), "rate": self.schedule.schedulers[0].get_last_lr()[0]}
        self.schedule.step()
        used["next"] = self.schedule.schedulers[0].get_last_lr()[0]
        counted = self.manager.current_step() > number
        if counted:
            self.records.append(used)
        self.skipped += not counted
        return counted

    def together(self) -> int:
        """Number of last steps that both replicas have taken part in."""
        return next((at for at, record in enumerate(reversed(self.records)) if record["of"] < 2), len(self.records))


def _mark(folder: str | Path, rank: int) -> Path:
    """The file that says that a rank of the victim waits to be killed."""
    return Path(folder, f"victim-{rank}.waits")


def replica(rank: int, name: str, options: Options, folder: str) -> None:
    """Train until both replicas have taken enough steps together, once more after the loss of one; or die then."""
    made = Replica(int(name != "survivor"), options, SEEDS[name], resumes=name != "joining")
    met = lost = name == "joining"
    mark = _mark(folder, rank)
    begun = time.monotonic()
    with Path(folder, f"{name}-{rank}.jsonl").open("w") as file:
        while not (lost and made.together() == TOGETHER):
            assert time.monotonic() - begun < TIMEOUT, made.records
            met = met or made.together() == TOGETHER
            if made.step(mark if name == "victim" and met else None):
                print(json.dumps(made.records[-1]), file=file, flush=True)
                if made.records[-1]["of"] == 1:
                    lost = met
                    time.sleep(0.05)
    found = {"states": outcome(made.model, made.optimizers), "skipped": made.skipped}
    Path(folder, f"{name}-{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    made.manager.shutdown(wait=False)


def _process(rank: int, port: int, environment: Mapping[str, str], function: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    # torchtitan's trainer gives replicas' groups other names by such ranks.
    first = WORLD * int(args[0] != "survivor")
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT), _ranks=list(range(first, first + WORLD)))
    function(rank, *args)
    os._exit(0)


def _lighthouse(pipe: Any) -> None:
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=2000, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    pipe.send(server.address())
    pipe.recv()
    os._exit(0)


def _begin(function: Callable[..., None], *args: Any, **environment: str) -> list[Any]:
    """Start the ranks of a replica."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = mp.get_context("fork")
    ranks = [context.Process(target=_process, args=(rank, port, environment, function, *args)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    return ranks


def _end(ranks: list[Any]) -> None:
    for process in ranks:
        process.join(TIMEOUT)
        assert process.exitcode == 0, process.exitcode


def _kill(ranks: list[Any], folder: Path) -> None:
    """Kill a replica once all of its ranks wait for it."""
    begun = time.monotonic()
    while not all(_mark(folder, rank).exists() for rank in range(WORLD)):
        assert time.monotonic() - begun < TIMEOUT and all(process.is_alive() for process in ranks)
        time.sleep(0.01)
    for process in ranks:
        process.kill()
        process.join()


def run(options: Options, folder: Path) -> None:
    """Two replicas; the second one is killed and started again with other weights."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    lighthouse = context.Process(target=_lighthouse, args=(theirs,))
    lighthouse.start()
    address = ours.recv()
    begin = functools.partial(_begin, replica, TORCHFT_LIGHTHOUSE=address)
    started: list[Any] = []
    try:
        started += (survivor := begin("survivor", options, str(folder)))
        started += (victim := begin("victim", options, str(folder)))
        _kill(victim, folder)
        started += (joining := begin("joining", options, str(folder)))
        _end(survivor)
        _end(joining)
    finally:
        for process in [*started, lighthouse]:
            process.kill()
            process.join()


# --- the same steps without torchft -----------------------------------------------------------------------------------


def records(folder: str | Path, name: str, rank: int) -> list[dict[str, Any]]:
    """What the steps of a rank used; in the first one either replica heals the other, on one rank each."""
    return [json.loads(line) for line in Path(folder, f"{name}-{rank}.jsonl").read_text().splitlines()]


def repeated(rank: int, world: int, options: Options, folder: str) -> dict[str, Any]:
    """The run of the first replica, its gradients averaged with those that the second one gave."""
    others = [*records(folder, "victim", rank), *records(folder, "joining", rank)]
    second = {record["step"] for record in others if record["gave"]}
    model = sharded(options, SEEDS["survivor"])
    optimizers = groups_of(options).build(model_parts=[model])
    rates(optimizers)
    optimizers.state_dict()  # it counts as a step of torch's AdamW
    resumed(model, optimizers)
    for record in records(folder, "survivor", rank):
        step = record["step"]
        gradients = []
        for number, gave in enumerate((record["gave"], step in second)):
            optimizers.zero_grad()
            backward(model, step, number)
            if gave:
                gradients.append([parameter.grad.to_local().clone() for parameter in model.parameters()])
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            parameter.grad.to_local().copy_(torch.stack(parts).sum(0) / record["of"])
        _set_rate(optimizers, record["rate"])
        optimizers.step()
        _set_rate(optimizers, record["next"])
    return outcome(model, optimizers)


def _set_rate(optimizers: OptimizersContainer, rate: float) -> None:
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = rate
