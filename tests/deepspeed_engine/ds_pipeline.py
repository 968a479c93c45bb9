"""The same layers as pipeline stages of DeepSpeed and as one module of plain PyTorch."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from deepspeed_plugin.registry import build
from rankwise.routing.roles import Role, annotate, assign_role

WIDTH, LENGTH, BATCH, ACCUMULATION, STEPS = 10, 8, 8, 4, 4

# MKOR-H switches at step 3, so that both of its halves run.
TYPES = {**ds.TYPES, "MKOR-H": {**ds.TYPES["MKOR-H"], "hybrid_min_steps": 3}, ds.REFERENCE: ds.REFERENCE_PARAMS}


class Block(nn.Module):
    """Two linear layers around a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 23)
        self.norm = nn.LayerNorm(23)
        self.down = nn.Linear(23, WIDTH, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.norm(self.up(h))))


class SharedTable(nn.Embedding):
    """An embedding that is built alike on every stage that shares it."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            super().__init__(ds.VOCABULARY, WIDTH)


class SharedLinear(nn.Linear):
    """A linear layer that is built alike on every stage that shares it."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(8)
            super().__init__(WIDTH, WIDTH, bias=False)


def unembed(table: SharedTable, h: Tensor) -> Tensor:
    return nn.functional.linear(h, table.weight)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True)
class PipelineJob:
    """One training run.

    Attributes:
        name: JSON type.
        stage: ZeRO stage.
        stages: Pipeline stages.
        tied: Whether the first and the last layer share their weight.
        config: Further keys of the DeepSpeed configuration.
        dtype: Type of the model's weights.
        bare_first_stage: Whether the first stage is the embedding alone.
        tied_linear: Whether both stages share a linear layer as well.
    """

    name: str
    stage: int = 1
    stages: int = 2
    tied: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    bare_first_stage: bool = False
    tied_linear: bool = False

    def layers(self) -> list[Any]:
        torch.manual_seed(0)
        table, head = nn.Embedding(ds.VOCABULARY, WIDTH), nn.Linear(WIDTH, ds.VOCABULARY, bias=False)
        mix = Conv1D(13, WIDTH)
        nn.init.normal_(mix.weight, std=0.3)
        inner: list[Any] = [Block(), mix, nn.Linear(13, WIDTH), Block()]
        if self.tied_linear:
            inner = [TiedLayerSpec("mix", SharedLinear), *inner, TiedLayerSpec("mix", SharedLinear)]
        if self.bare_first_stage:
            return [table, nn.Sequential(*inner, head)]
        if self.tied:
            return [
                TiedLayerSpec("table", SharedTable),
                *inner,
                TiedLayerSpec("table", SharedTable, forward_fn=unembed),
            ]
        return [table, *inner, head]


class Whole(nn.Module):
    """All layers in one process, under the names the stages give their parameters."""

    def __init__(self, job: PipelineJob) -> None:
        super().__init__()
        self.order: list[Any] = []
        self.tied_modules = nn.ModuleDict()
        for index, layer in enumerate(job.layers()):
            if isinstance(layer, nn.Module):
                self.add_module(str(index), layer)
                self.order.append(layer)
                continue
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            shared = self.tied_modules[layer.key]
            self.order.append(shared if layer.forward_fn is None else functools.partial(layer.forward_fn, shared))

    def annotate(self) -> None:
        """As on the stages, where a weight that several of them share takes an element-wise rule."""
        annotate(self)
        assign_role(self.tied_modules.parameters(), Role.EMBEDDING)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x)
        return loss_of(x, y)


@functools.cache
def batches() -> tuple[Tensor, Tensor]:
    """Inputs and targets (steps, micro-batches, samples, tokens)."""
    generator = torch.Generator().manual_seed(5)
    shape = (STEPS, ACCUMULATION, BATCH, LENGTH)
    x = torch.randint(0, ds.VOCABULARY, shape, generator=generator)
    return x, torch.randint(0, ds.VOCABULARY, shape, generator=generator)


def engine_of(job: PipelineJob, world: int) -> Any:
    """Engine of a job; call it on every rank."""
    replicas = world // job.stages
    with contextlib.redirect_stdout(io.StringIO()):
        model = PipelineModule(job.layers(), num_stages=job.stages, loss_fn=loss_of, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": BATCH // replicas,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": job.stage},
        "optimizer": {"type": job.name, "params": dict(TYPES[job.name])},
        **({"bf16": {"enabled": True}} if job.dtype is torch.bfloat16 else {}),
        **job.config,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return engine


def train(engine: Any, steps: range, recorder: ds.Recorder | None = None) -> None:
    """Optimizer steps of a pipeline engine on its replica's share of the global batch."""
    x, y = batches()
    size = BATCH // engine.grid.data_parallel_size
    share = slice(engine.grid.data_parallel_id * size, (engine.grid.data_parallel_id + 1) * size)
    for step in steps:
        if recorder is not None:
            recorder.begin_step()
        engine.train_batch(iter([(x[step, micro, share], y[step, micro, share]) for micro in range(ACCUMULATION)]))


def replay(job: PipelineJob, ranks: list[ds.Record]) -> dict[str, np.ndarray]:
    """Final weights of one process that is fed the gradients and statistics the stages' optimizers were handed."""
    model = Whole(job)
    parameters = dict(model.named_parameters())
    start = ds.whole(record.initial for record in ranks)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(start[name]))
    model.annotate()
    optimizer = build(job.name, list(model.parameters()), **TYPES[job.name])
    now = {"step": 0}
    if optimizer.needs_capture:
        optimizer.capture(model)
        optimizer.factor_steps.reduced = lambda unit, due, groups: {  # type: ignore[method-assign]
            key: tuple(torch.from_numpy(value) for value in values)
            for record in ranks
            for key, values in record.statistics[now["step"]].items()
        }
    for step in range(STEPS):
        now["step"] = step
        grads = ds.whole(record.grads[step] for record in ranks)
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(grads[name])
        losses = {record.losses[step] for record in ranks} - {None}
        assert len(losses) <= 1, "the stages were told different losses"
        if losses:
            optimizer.record_loss(losses.pop())
        optimizer.step()
    return ds.weights_of(model)


def run_whole(job: PipelineJob) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Initial and final weights of a single process of plain PyTorch."""
    model = Whole(job)
    initial = ds.weights_of(model)
    model.annotate()
    params = TYPES[job.name]
    if job.name == ds.REFERENCE:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=params["lr"])
    else:
        optimizer = build(job.name, list(model.parameters()), **params)
    if getattr(optimizer, "needs_capture", False):
        optimizer.capture(model)
    x, y = batches()
    for step in range(STEPS):
        model.zero_grad()
        for micro in range(ACCUMULATION):
            loss = model(x[step, micro], y[step, micro])
            if getattr(optimizer, "needs_capture", False):
                optimizer.record_loss(loss)
            (loss / ACCUMULATION).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return initial, ds.weights_of(model)
