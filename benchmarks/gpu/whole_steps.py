"""Whole training steps at a real throughput: compiled, in bfloat16, under plain PyTorch, DeepSpeed and FSDP2."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contenders import OURS, Contender
from benchmarks.frameworks.cpu_deepspeed import choose_cpu
from benchmarks.gpu.whole_models import SHAPES, Shape, language_model

__all__ = ["ADAMW", "ENGINES", "MUON", "TOKENS", "json_block", "measure_whole_steps", "one_process_group"]

TOKENS = (1 << 17, 1 << 19)
"""Tokens of a step."""
_UPDATES = 10  # Among them one in which MKOR updates its factors.
_WARMUP = 3
_RATE = 1e-4
ADAMW, MUON = "AdamW (torch, fused)", "Muon and AdamW (torch)"


class _Pair:
    """torch's Muon for the weights of linear layers, its fused AdamW for the rest."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
        known = set(map(id, matrices))
        rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
        self.parts = (torch.optim.Muon(matrices, lr=_RATE), torch.optim.AdamW(rest, lr=_RATE, fused=True))

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def _built(name: str, model: nn.Module) -> Any:
    if name == ADAMW:
        return torch.optim.AdamW(model.parameters(), lr=_RATE, fused=True)
    if name == MUON:
        return _Pair(model)
    contender: Contender = next(each for each in OURS if each.name == name)
    optimizer = contender.build(model)
    for group in optimizer.param_groups:
        group["lr"] = _RATE
    return optimizer


class Engine(Protocol):
    """A way to train a model."""

    def micro(self, samples: Tensor, last: bool) -> None:
        """Forward and backward pass of a micro-batch, the last one before an update or not; gradients add up."""

    def update(self) -> None:
        """Step of the optimizer, after which gradients are gone."""

    def close(self) -> None:
        """Give back what others hold."""


class _Plain:
    """A loop of plain PyTorch: float32 weights, products in bfloat16 by autocast."""

    def __init__(self, model: nn.Module, name: str, device: torch.device) -> None:
        self.optimizer = _built(name, model)
        self.model = torch.compile(model, backend=_compiler(device))
        self.device = device

    def micro(self, samples: Tensor, last: bool) -> None:
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(samples)
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        pass


class _Fsdp:
    """``fully_shard`` on a mesh of one: bfloat16 copies of float32 shards."""

    def __init__(self, model: Any, name: str, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        one_process_group(device)
        mesh = init_device_mesh(device.type, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            block.compile(backend=_compiler(device))
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model, self.optimizer = model, _built(name, model)

    def micro(self, samples: Tensor, last: bool) -> None:
        self.model(samples).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        pass


class _DeepSpeed:
    """ZeRO-2 on one rank: bfloat16 weights, float32 copies in the optimizer."""

    def __init__(self, model: nn.Module, name: str, device: torch.device) -> None:
        one_process_group(device)
        if device.type == "cpu":
            choose_cpu()
        import deepspeed

        import deepspeed_plugin

        deepspeed_plugin.register()
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        given: dict[str, Any] = {"model_parameters": model.parameters()}
        if name == ADAMW:
            given["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=_RATE, fused=True)
        elif name == MUON:
            raise ValueError("torch's Muon needs whole matrices, which ZeRO's flat partitions are not")
        else:
            config["optimizer"] = json_block(name)
        self.engine, *_ = deepspeed.initialize(model=model, config=config, **given)
        self.engine.compile(backend=_compiler(device))

    def micro(self, samples: Tensor, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(self.engine(samples))

    def update(self) -> None:
        self.engine.step()

    def close(self) -> None:
        self.engine.destroy()


_JSON = {
    "MARS-AdamW": ("MARS-AdamW", {}),
    "MARS-M": ("MARS-M", {}),
    "SONew, tridiagonal": ("SONew", {"band": 1}),
    "LDAdam, rank 256": ("LDAdam", {"rank": 256}),
    "LDAdam, rank 16": ("LDAdam", {"rank": 16}),
    "MKOR": ("MKOR", {}),
}


def json_block(name: str) -> dict[str, Any]:
    """What a DeepSpeed JSON has for one of our contenders."""
    spelling, options = _JSON[name]
    return {"type": spelling, "params": {"lr": _RATE, **options}}


ENGINES: dict[str, Callable[[nn.Module, str, torch.device], Engine]] = {
    "plain": _Plain,
    "ZeRO-2": _DeepSpeed,
    "FSDP2": _Fsdp,
}


def _compiler(device: torch.device) -> str:
    # One process measures all engines: beyond eight forms of a function torch would stop compiling it, without a word.
    torch._dynamo.config.recompile_limit = 64  # type: ignore[attr-defined]
    return "inductor" if device.type == "cuda" else "eager"


def one_process_group(device: torch.device) -> None:
    """A group of this process alone, once."""
    if not dist.is_initialized():
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def measure_whole_steps(model: str, name: str, engine: str, device: torch.device, tiny: bool = False) -> dict[str, Any]:
    """Train a model and time its steps.

    Args:
        model: Key of :data:`.whole_models.SHAPES`.
        name: The optimizer: one of ours, :data:`ADAMW` or :data:`MUON`.
        engine: Key of :data:`ENGINES`.
        device: Where.
        tiny: Whether a toy of few tokens takes the model's place.

    Returns:
        Seconds of whole steps of :data:`TOKENS` tokens, of the optimizer's (mean of ten), operations a token, peak of
        memory in bytes.
    """
    shape: Shape = SHAPES["tiny" if tiny else model]
    network = language_model(shape, device)
    multiplying = sum(p.numel() for n, p in network.named_parameters() if p.ndim == 2 and not n.startswith("positions"))
    trainer = ENGINES[engine](network, name, device)
    generator = torch.Generator(device=device).manual_seed(0)
    samples = torch.randint(0, shape.vocabulary, (shape.samples, shape.length + 1), generator=generator, device=device)
    for _ in range(_WARMUP):
        trainer.micro(samples, last=True)
        trainer.update()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    micros = {tokens: 2 * (tokens // TOKENS[0]) if tiny else tokens // shape.tokens for tokens in TOKENS}
    updates = [_one_update(trainer, samples, device) for _ in range(_UPDATES)]
    seconds = {}
    for tokens, count in micros.items():
        times = [_step(trainer, samples, count, device) for _ in range(2 if tokens == TOKENS[0] else 1)]
        seconds[str(tokens)] = statistics.median(times)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    trainer.close()
    return {
        "name": name,
        "model": model,
        "engine": engine,
        "whole_seconds": seconds,
        "update_seconds": statistics.fmean(updates),
        "tokens_of_a_step": {str(tokens): count * shape.tokens for tokens, count in micros.items()},
        "operations": shape.operations(multiplying),
        "peak_bytes": peak,
    }


def _wait(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _one_update(trainer: Engine, samples: Tensor, device: torch.device) -> float:
    trainer.micro(samples, last=True)
    begin = _wait(device)
    trainer.update()
    return _wait(device) - begin


def _step(trainer: Engine, samples: Tensor, micros: int, device: torch.device) -> float:
    begin = _wait(device)
    for index in range(micros):
        trainer.micro(samples, last=index == micros - 1)
    trainer.update()
    return _wait(device) - begin
