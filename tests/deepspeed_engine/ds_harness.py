"""A small model trained by real DeepSpeed engines, by plain PyTorch, and by replaying what an engine recorded."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any
from unittest import mock

import deepspeed
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from ranks import run_ranks as run_torch_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import deepspeed_plugin
from deepspeed_plugin.registry import build
from rankwise import MKOR
from rankwise.routing.roles import annotate
from rankwise.step.optimizer import ShardedOptimizer

GLOBAL_BATCH, LENGTH, VOCABULARY, STEPS, ACCUMULATION = 12, 8, 17, 10, 2
FIRST_SCALE_POWER = 8

TYPES: dict[str, dict[str, Any]] = {
    "MARS": {"lr": 5e-3, "optimize_1d": True},
    "MARS-AdamW": {"lr": 5e-3},
    "MARS-Lion": {"lr": 1e-3},
    "MARS-Shampoo": {"lr": 1e-2, "ns_dtype": "float32"},
    "MARS-M": {"lr": 1e-2, "ns_dtype": "float32", "weight_decay": 0.1},
    # The default edge tolerance lets rounding grow up to a hundredfold, in one process too: see SONEW_DEFAULTS.
    "SONew": {"lr": 5e-3, "band": 2, "gamma": 0.1},
    "LDAdam": {"lr": 5e-3, "rank": 3},
    "MKOR": {"lr": 5e-3, "update_interval": 3, "factor_dtype": "float32"},
    "MKOR-H": {
        "lr": 5e-3,
        "update_interval": 3,
        "factor_dtype": "float32",
        "hybrid_min_steps": 6,
        "hybrid_patience": 1,
        "hybrid_beta": 10.0,
    },
}
"""Every JSON type. MKOR-H switches at step 6, so that both of its halves run."""

KINDS = ("MARS-AdamW", "MARS-M", "SONew", "LDAdam", "MKOR-H")
"""A type for each kind of states and messages; the others differ in formulas alone."""

SONEW_DEFAULTS = {"lr": 5e-3}
ELEMENT_WISE = ("MARS", "MARS-AdamW", "MARS-Lion", "SONew")
REFERENCE = "AdamW"
REFERENCE_PARAMS = {"lr": 5e-3, "torch_adam": True}


def replay_tolerance(name: str) -> float:
    """Largest error of a run fed the same reduced gradients, relative to the largest parameter change."""
    return 1e-6 if name in ELEMENT_WISE else 1e-5


class Net(nn.Module):
    """Embedding, linear layers with and without bias, Conv1D, LayerNorm, an unused layer, tied or untied head."""

    def __init__(self, tied: bool = False, checkpointing: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 10)
        self.up = nn.Linear(10, 23)
        self.norm = nn.LayerNorm(23)
        self.down = nn.Linear(23, 10, bias=False)
        self.mix = Conv1D(13, 10)
        nn.init.normal_(self.mix.weight, std=0.3)
        self.back = nn.Linear(13, 10)
        self.unused = nn.Linear(6, 7)
        self.head = nn.Linear(10, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointing = checkpointing

    def block(self, h: Tensor) -> Tensor:
        h = h + self.down(torch.tanh(self.norm(self.up(h))))
        return h + self.back(torch.tanh(self.mix(h)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embedding(x)
        h = checkpoint(self.block, h, use_reentrant=False) if self.checkpointing else self.block(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1).float(), y.flatten())


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        name: JSON type.
        params: Its ``params`` block.
        config: Further keys of the DeepSpeed configuration.
        tied: Whether the head shares the embedding's weight.
        split: Whether vectors get a param group of their own.
        zero_init: Whether the model is built under ``zero.Init``.
        checkpointing: Whether activations are recomputed.
        dtype: Type of the model's weights.
        steps: Optimizer steps.
        seed: Seed of the first weights and of the samples.
    """

    name: str
    params: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    split: bool = False
    zero_init: bool = False
    checkpointing: bool = False
    dtype: torch.dtype = torch.float32
    steps: int = STEPS
    seed: int = 0

    @property
    def is_reference(self) -> bool:
        return self.name == REFERENCE

    @property
    def loss_scale(self) -> float:
        """The static loss scale of the job, or the one a dynamic scale starts from."""
        if self.dtype is not torch.float16:
            return 1.0
        return float(self.config.get("fp16", {}).get("loss_scale") or 2.0**FIRST_SCALE_POWER)

    @property
    def clipping(self) -> float:
        """Largest gradient norm that passes unchanged."""
        return float(self.config.get("gradient_clipping", 1.0))

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """What micro-batches' gradients are summed in."""
        wanted = self.config.get("data_types", {}).get("grad_accum_dtype")
        return torch.float32 if wanted == "fp32" else self.dtype

    def ds_config(self, world: int) -> dict[str, Any]:
        config = {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": self.clipping,
            "steps_per_print": 10**9,
            "optimizer": {"type": self.name, "params": dict(self.params)},
            **self.config,
        }
        if self.dtype is torch.bfloat16:
            config["bf16"] = {"enabled": True}
        if self.dtype is torch.float16:
            # Hysteresis keeps the loss scale where it is through a few overflows.
            config["fp16"] = {
                "enabled": True,
                "initial_scale_power": FIRST_SCALE_POWER,
                "hysteresis": 9,
                "loss_scale_window": 1000,
                **config.get("fp16", {}),
            }
        return config


def jobs(names: Iterable[str] = TYPES, **common: Any) -> list[Job]:
    """One job per JSON type, and AdamW last."""
    return [*ours(names, **common), Job(REFERENCE, REFERENCE_PARAMS, **common)]


def ours(names: Iterable[str] = TYPES, **common: Any) -> list[Job]:
    """One job per JSON type."""
    return [Job(name, TYPES[name], **common) for name in names]


def at_stage(job: Job, stage: int) -> Job:
    """The job under a ZeRO stage."""
    return replace(job, config={**job.config, "zero_optimization": {"stage": stage}})


def model_of(job: Job) -> Net:
    torch.manual_seed(job.seed)
    return Net(job.tied, job.checkpointing)


def groups_of(model: nn.Module, job: Job, shape_of: Callable[[Tensor], Any] = lambda p: p.shape) -> Any:
    if not job.split:
        return list(model.parameters())
    matrices = [p for p in model.parameters() if len(shape_of(p)) > 1]
    vectors = [p for p in model.parameters() if len(shape_of(p)) <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-3}]


@functools.cache
def batches(steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets (steps, micro-batches, samples, tokens)."""
    generator = torch.Generator().manual_seed(5 + seed)
    shape = (max(steps, STEPS), ACCUMULATION, GLOBAL_BATCH, LENGTH)
    x = torch.randint(0, VOCABULARY, shape, generator=generator)
    y = torch.randint(0, VOCABULARY, shape, generator=generator)
    return x, y


# --- what an engine hands to the optimizer --------------------------------------------------------------------------

PackedRun = tuple[str, tuple[int, ...], int, np.ndarray]  # key, logical shape, first element, values


@dataclass
class Record:
    """One rank's view of a run; whole tensors are put together by :func:`whole`."""

    initial: list[PackedRun] = field(default_factory=list)
    grads: list[list[PackedRun]] = field(default_factory=list)
    final: list[PackedRun] = field(default_factory=list)
    model: dict[str, np.ndarray] = field(default_factory=dict)
    master: dict[str, np.ndarray] = field(default_factory=dict)
    lrs: list[dict[str, float]] = field(default_factory=list)
    statistics: list[dict[str, tuple[np.ndarray, ...]]] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    matrices: int = 0
    wrapper: str = ""
    scales: list[tuple[float, float]] = field(default_factory=list)
    owners: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    extra: Any = None


class Recorder:
    """Listens at the border between an engine and its optimizer."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.record = Record()
        self._optimizer, self._update = optimizer, optimizer._update
        optimizer._update = self.update  # type: ignore[method-assign]
        if optimizer.needs_capture:
            self._statistics = optimizer.factor_steps.reduced
            optimizer.factor_steps.reduced = self.statistics  # type: ignore[method-assign]
            self._detect = optimizer.switch.detector.update
            optimizer.switch.detector.update = self.detect  # type: ignore[method-assign]

    def begin_step(self) -> None:
        self.record.grads.append([])
        self.record.lrs.append({})
        self.record.statistics.append({})
        self.record.losses.append(None)
        self.record.calls.append(0)
        self.record.final = []

    def update(self, unit: Any, buckets: Any) -> None:
        record = self.record
        record.calls[-1] += 1
        for bucket in buckets:
            for entry, weight, grad in zip(bucket.entries, bucket.weights, bucket.grads, strict=True):
                place = (entry.key, entry.shard.shape, entry.shard.start)
                record.grads[-1].append((*place, grad.numpy().copy()))
                group = self._optimizer.param_groups[unit.parameters[entry.key].position]
                record.lrs[-1][entry.key] = float(group["lr"])
                if len(record.grads) == 1:
                    record.initial.append((*place, weight.numpy().copy()))
        self._update(unit, buckets)
        for bucket in buckets:
            for entry, weight in zip(bucket.entries, bucket.weights, strict=True):
                record.final.append((entry.key, entry.shard.shape, entry.shard.start, weight.numpy().copy()))

    def statistics(self, unit: Any, due: Any, groups: Any) -> Any:
        found = self._statistics(unit, due, groups)
        self.record.statistics[-1].update(
            {key: tuple(value.numpy().copy() for value in values) for key, values in found.items()}
        )
        return found

    def detect(self, loss: float) -> bool:
        self.record.losses[-1] = loss
        return self._detect(loss)


def whole(pieces: Iterable[Iterable[PackedRun]]) -> dict[str, np.ndarray]:
    """Full tensors from all ranks' pieces; every element must be there, and where ranks overlap they must agree."""
    found: dict[str, np.ndarray] = {}
    for rank_pieces in pieces:
        for key, shape, start, values in rank_pieces:
            flat = found.setdefault(key, np.full(prod(shape), np.nan, values.dtype).reshape(shape)).reshape(-1)
            place = flat[start : start + values.size]
            assert np.isnan(place).all() or np.array_equal(place, values), f"ranks disagree on {key}"
            place[:] = values
    for key, values in found.items():
        assert np.isfinite(values).all(), f"{key} has elements that no rank reported, or that are not finite"
    return found


# --- the runs -------------------------------------------------------------------------------------------------------


def engine_of(job: Job, world: int, **keywords: Any) -> Any:
    """Engine of a job; call it on every rank."""
    config = job.ds_config(world)
    if job.zero_init:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = model_of(job)
    else:
        model = model_of(job)
    parameters = groups_of(model, job, lambda p: getattr(p, "ds_shape", p.shape))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config, **keywords)
    return engine


def train_step(engine: Any, rank: int, world: int, step: int, factor: float = 1.0, seed: int = 0) -> float:
    """One optimizer step of an engine on its share of the global batch; returns the last micro-batch's loss."""
    loss = accumulate(engine, rank, world, step, ACCUMULATION, factor, seed)
    engine.step()
    return loss


def accumulate(engine: Any, rank: int, world: int, step: int, count: int, factor: float = 1.0, seed: int = 0) -> float:
    """The first micro-batches of a step, up to the last one's backward pass."""
    x, y = batches(STEPS, seed)
    size = GLOBAL_BATCH // world
    share = slice(rank * size, (rank + 1) * size)
    loss = torch.tensor(0.0)
    for micro in range(count):
        if micro:
            engine.step()
        loss = engine(x[step, micro, share], y[step, micro, share])
        engine.backward(loss * factor if factor != 1.0 else loss)
    return float(loss)


def model_weights(engine: Any) -> dict[str, np.ndarray]:
    """The model's own weights, whole, as the next forward pass would see them."""
    found = {}

    def read(parameter: Tensor) -> np.ndarray:
        return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32)).numpy().copy()

    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = read(parameter)
        else:
            found[name] = read(parameter)
    return found


def digest(optimizer: Any) -> str:
    """A hash of every byte of optimizer state and of the weights the optimizer updates."""
    found = hashlib.sha256()
    for unit in optimizer.planner.units.values():
        for shard in (entry.shard for entry in unit.stored_entries):
            # Not the whole tensor: ZeRO-3 pads with whatever the memory held.
            run = slice(shard.offset, shard.offset + shard.numel)
            found.update(unit.tensors[shard.tensor].detach().reshape(-1)[run].numpy().tobytes())
    for state in optimizer.state.values():
        for name in sorted(state):
            values = torch.as_tensor(state[name]).detach().reshape(-1)
            found.update(name.encode() + values.view(torch.uint8).numpy().tobytes())
    for key in sorted(optimizer.matrix_states):
        for name, value in sorted(optimizer.matrix_states[key].items()):
            found.update(f"{key}.{name}".encode() + value.detach().float().numpy().tobytes())
    if optimizer.needs_capture:
        found.update(repr(sorted(optimizer.switch.detector.state_dict().items())).encode())
    return found.hexdigest()


def master_weights(engine: Any) -> dict[str, np.ndarray]:
    """The fp32 weights, whole, through DeepSpeed's own accessor where the wrapper serves it."""
    wrapper = engine.optimizer
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        return {
            names[id(parameter)]: clone.detach().numpy().copy()
            for clones, parameters in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True)
            for clone, parameter in zip(clones, parameters, strict=True)
        }
    if wrapper is engine.basic_optimizer:
        return model_weights(engine)
    return {
        name: deepspeed.utils.safe_get_full_fp32_param(parameter).numpy().copy()
        for name, parameter in engine.module.named_parameters()
    }


@contextmanager
def in_float64() -> Iterator[None]:
    """Lets ZeRO keep, and add up, a float64 model in float64; it asks for float32 masters. Without reduce-scatter."""
    chosen = ZeROOptimizer._configure_master_weights

    def wide(*own: Any, **more: Any) -> torch.dtype:
        chosen(*own, **more)
        return torch.float64

    with (
        mock.patch.object(ZeROOptimizer, "_configure_master_weights", wide),
        mock.patch.object(deepspeed.DeepSpeedEngine, "communication_data_type", torch.float64),
        mock.patch.object(deepspeed.DeepSpeedEngine, "get_data_types", lambda _: (torch.float64, torch.float64)),
        # ZeRO-3 refuses float64 only where the processor computes in float16.
        mock.patch.object(get_accelerator(), "is_fp16_supported", lambda: False),
    ):
        yield


def loss_scale_of(engine: Any) -> float:
    """The loss scale an engine would use now."""
    return float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0


def run_engine(rank: int, world: int, job: Job, zero: Mapping[str, Any]) -> Record:
    """Train ``job`` under one ZeRO configuration."""
    job = replace(job, config={**job.config, "zero_optimization": dict(zero)})
    engine = engine_of(job, world)
    optimizer = engine.basic_optimizer
    recorder = Recorder(optimizer) if isinstance(optimizer, ShardedOptimizer) else None
    scales = []
    for step in range(job.steps):
        if recorder is not None:
            recorder.begin_step()
        before = loss_scale_of(engine)
        train_step(engine, rank, world, step, seed=job.seed)
        scales.append((before, loss_scale_of(engine)))
    record = Record() if recorder is None else recorder.record
    record.wrapper, record.scales = type(engine.optimizer).__name__, scales
    record.model = model_weights(engine)
    record.master = master_weights(engine)
    if isinstance(optimizer, ShardedOptimizer):
        record.matrices = sum(len(unit.keys("matrix")) for unit in optimizer.planner.units.values())
        record.owners = optimizer.owners()
        record.bytes = optimizer.state_bytes()
    engine.destroy()
    return record


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
    """As :func:`ranks.run_ranks`, on processes that are DeepSpeed's."""
    return run_torch_ranks(world, _of_deepspeed, fn, *args, **how)


def _of_deepspeed(rank: int, world: int, fn: Callable[..., Any], *args: Any) -> Any:
    deepspeed.init_distributed("gloo")
    return fn(rank, world, *args)


def run_all(rank: int, world: int, jobs: list[Job], zero: Mapping[str, Any]) -> list[Record]:
    """Train several jobs in one set of processes."""
    return [run_engine(rank, world, job, zero) for job in jobs]


@dataclass(frozen=True)
class Regime:
    """What an engine changes in the arithmetic of one process already, for AdamW as for any other type.

    Attributes:
        idle_step: Half precision at stage 0 steps once on zero gradients; AdamW counts that step.
        matmul_linear: ZeRO-3 replaces ``linear`` by a product and a sum, each of them rounded.
        half_reduction: BF16_Optimizer sums micro-batches in fp32, but reduces the sum over ranks in bf16.
        scales: Scales of every step, the loss scale of its backward pass and the one its gradients are divided by. They
            differ where a dynamic scale grows: DeepSpeed lets it grow before it unscales.
    """

    idle_step: bool = False
    matmul_linear: bool = False
    half_reduction: bool = False
    scales: tuple[tuple[float, float], ...] = ()

    def scales_of(self, job: Job, step: int) -> tuple[float, float]:
        """The pair of scales of one step."""
        return self.scales[step] if self.scales else (job.loss_scale, job.loss_scale)


PLAIN = Regime()


def regime_of(job: Job, stage: int, record: Record) -> Regime:
    """The regime of a recorded run."""
    half = job.dtype is not torch.float32
    scales = tuple(record.scales) if job.dtype is torch.float16 else ()
    return Regime(
        idle_step=half and stage == 0,
        matmul_linear=half and stage == 3,
        half_reduction=job.accumulation_dtype is not job.dtype,
        scales=scales,
    )


def run_plain(
    job: Job, noise: float = 0.0, seed: int = 0, shares: int = 1, regime: Regime = PLAIN
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Initial and final weights of a single process of plain PyTorch; half types keep fp32 master weights.

    Args:
        job: What to train.
        noise: Relative error added to every gradient element, to learn how the rule answers to rounding.
        seed: Seed of the noise.
        shares: Into how many equal parts each micro-batch is cut: the same samples, their gradients rounded otherwise.
        regime: What the wrapper does to the arithmetic on one rank already.
    """
    generator = torch.Generator().manual_seed(seed)
    model = model_of(job).to(job.dtype)
    master = model_of(job)
    master.load_state_dict(model.state_dict())
    initial = weights_of(master)
    half = job.dtype is not torch.float32
    now = {"step": 0}
    hooked, updated = model, (master if half else model)
    annotate(updated)
    if job.is_reference:
        optimizer: Any = torch.optim.AdamW(groups_of(updated, job), lr=job.params["lr"])
        if regime.idle_step:
            _step_on_zeros(optimizer, updated)
    else:
        optimizer = build(job.name, groups_of(updated, job), **job.params)
    if getattr(optimizer, "needs_capture", False):
        # Gradients of micro-batches are added up elsewhere.
        window = lambda: now["step"]  # noqa: E731
        optimizer.capture(updated, window, loss_scale=lambda: regime.scales_of(job, now["step"])[1])
        if half:
            _capture_from(optimizer, hooked, window)
    for step in range(job.steps):
        now["step"] = step
        _hand_over_grads(model, updated, job, step, shares, regime, optimizer)
        if noise:
            for target in updated.parameters():
                target.grad *= 1 + noise * torch.randn(target.shape, generator=generator)
        nn.utils.clip_grad_norm_(updated.parameters(), job.clipping)
        optimizer.step()
        if half:
            with torch.no_grad():
                for source, target in zip(updated.parameters(), model.parameters(), strict=True):
                    target.copy_(source)
    return initial, weights_of(updated)


def _step_on_zeros(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def _linear_of(regime: Regime) -> Any:
    if not regime.matmul_linear:
        return nullcontext()
    return mock.patch.object(nn.functional, "linear", zero3_linear_wrap)


def _hand_over_grads(
    model: nn.Module, updated: nn.Module, job: Job, step: int, shares: int, regime: Regime, optimizer: Any
) -> None:
    """Give the master weights the gradients of one step's micro-batches, as an engine would before it clips."""
    x, y = batches(job.steps, job.seed)
    sums = [torch.zeros_like(parameter, dtype=job.accumulation_dtype) for parameter in model.parameters()]
    before, after = regime.scales_of(job, step)
    size = GLOBAL_BATCH // shares
    for micro, first in product(range(ACCUMULATION), range(0, GLOBAL_BATCH, size)):
        share = slice(first, first + size)
        model.zero_grad()
        with _linear_of(regime):
            loss = model(x[step, micro, share], y[step, micro, share])
            (loss / (ACCUMULATION * shares) * before).backward()
        if getattr(optimizer, "needs_capture", False):
            optimizer.record_loss(loss)
        for total, parameter in zip(sums, model.parameters(), strict=True):
            if parameter.grad is not None:
                total += parameter.grad
    for total, target in zip(sums, updated.parameters(), strict=True):
        reduced = total.to(job.dtype) if regime.half_reduction else total
        target.grad = reduced.to(target.dtype) / after


def first_grads(job: Job, regime: Regime = PLAIN) -> dict[str, np.ndarray]:
    """The clipped gradients of the first step of one process."""
    model, master = model_of(job).to(job.dtype), model_of(job)
    _hand_over_grads(model, master, job, 0, 1, regime, None)
    nn.utils.clip_grad_norm_(master.parameters(), job.clipping)
    return {name: parameter.grad.numpy().copy() for name, parameter in master.named_parameters()}


def noise_response(job: Job, noise: float) -> float:
    """How far gradient noise of that relative size moves one process: the conditioning of the rule itself."""
    initial, expected = run_plain(job)
    return max(error(run_plain(job, noise, seed)[1], expected, initial) for seed in range(4))


def cut_response(job: Job) -> float:
    """How far one process moves where its micro-batches are cut into other parts: what rounding does to the rule."""
    initial, expected = run_plain(job)
    return max(error(run_plain(job, shares=shares)[1], expected, initial) for shares in (2, 3, 4, 6))


@functools.cache
def _response_of_type(name: str) -> float:
    return cut_response(Job(name, TYPES[name]))


def too_far(errors: Mapping[str, float], adamw: float) -> dict[str, float]:
    """Of how far each type ends from one process, or from itself on another layout, in fp32, what is not allowed.

    Ten times AdamW's distance between the same two runs, which one weight decides, or what rounding does to the type's
    own rule on this processor, if that is more.

    Args:
        errors: By type.
        adamw: AdamW's distance.
    """
    far = {name: error for name, error in errors.items() if not error <= 10.0 * adamw}
    return {name: error for name, error in far.items() if not error <= 10.0 * _response_of_type(name)}


def first_statistics(job: Job) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """Of the first step of one process: mean input, virtual-bias gradient and token count by weight."""
    model = model_of(job)
    annotate(model)
    optimizer = build(job.name, groups_of(model, job), **job.params)
    assert optimizer.needs_capture
    optimizer.capture(model)
    x, y = batches(job.steps, job.seed)
    for micro in range(ACCUMULATION):
        (model(x[0, micro], y[0, micro]) / ACCUMULATION).backward()
    return {
        name: (record.sum_input.numpy() / record.count, record.sum_output_grad.numpy(), float(record.count))
        for name, record in optimizer.statistics.records.items()
        if record.count
    }


def _capture_from(optimizer: MKOR, model: nn.Module, window: Callable[[], int]) -> None:
    """Take MKOR's statistics from the half-precision twin of the model it updates."""
    from rankwise.statistics.hooks import Capture

    captured, records = optimizer.statistics.hooks, optimizer.statistics.records
    assert captured is not None
    names = {record.name for record in records.values()}
    modules = dict(model.named_modules())
    twin = Capture(model, lambda module, _: any(modules[name] is module for name in names), window, kept=lambda _: True)
    captured.remove()
    own = {record.name: record for record in twin.records.values()}
    for record in records.values():
        own[record.name].bias = record.bias  # the one that is updated
    optimizer.statistics.records = {key: own[record.name] for key, record in records.items()}
    optimizer.statistics.hooks = twin


def weights_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.detach().float().numpy().copy() for name, parameter in model.named_parameters()}


def replay(job: Job, ranks: list[Record]) -> dict[str, np.ndarray]:
    """Final weights of one process that is fed the recorded reduced gradients and statistics."""
    model = model_of(replace(job, checkpointing=False))
    parameters = dict(model.named_parameters())
    start = whole(record.initial for record in ranks)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(start[name]))
    annotate(model)
    optimizer = build(job.name, groups_of(model, job), **job.params)
    now = {"step": 0}
    if optimizer.needs_capture:
        optimizer.capture(model)
        optimizer.factor_steps.reduced = lambda unit, due, groups: {  # type: ignore[method-assign]
            key: tuple(torch.from_numpy(value) for value in values)
            for key, values in ranks[0].statistics[now["step"]].items()
        }
    for step in range(job.steps):
        now["step"] = step
        grads = whole(record.grads[step] for record in ranks)
        lrs = {key: lr for record in ranks for key, lr in record.lrs[step].items()}
        names = {id(parameter): name for name, parameter in parameters.items()}
        for group in optimizer.param_groups:
            group["lr"] = lrs[names[id(group["params"][0])]]
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(grads[name])
        loss = ranks[0].losses[step]
        if loss is not None:
            optimizer.record_loss(loss)
        optimizer.step()
    return weights_of(model)


def largest_change(initial: Mapping[str, np.ndarray], final: Mapping[str, np.ndarray]) -> float:
    return float(max(np.abs(final[name] - initial[name]).max() for name in final))


def mean_error(
    got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], initial: Mapping[str, np.ndarray]
) -> float:
    """Mean difference of weights, relative to the mean parameter change."""
    assert got.keys() == expected.keys()
    difference = sum(np.abs(got[name] - expected[name]).sum(dtype=np.float64) for name in expected)
    change = sum(np.abs(expected[name] - initial[name]).sum(dtype=np.float64) for name in expected)
    return float(difference / change)


def error(
    got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], initial: Mapping[str, np.ndarray]
) -> float:
    """Largest difference of weights, relative to the largest parameter change."""
    assert got.keys() == expected.keys()
    worst = max(np.abs(got[name] - expected[name]).max() for name in expected)
    return float(worst) / largest_change(initial, expected)


def replay_error(job: Job, ranks: list[Record]) -> float:
    """How far the engine's master weights are from the replayed ones."""
    expected = replay(job, ranks)
    initial = whole(record.initial for record in ranks)
    return error(whole(record.final for record in ranks), expected, initial)


def mid_row_cuts(ranks: list[Record]) -> list[str]:
    """Matrices that some shard border cuts in the middle of a row."""
    return sorted(
        {key for record in ranks for key, shape, start, _ in record.grads[0] if len(shape) > 1 and start % shape[-1]}
    )


assert deepspeed_plugin.is_registered()
