"""DeepSpeed's engines: every stage of ZeRO, precisions, offload, messages in few bits, AutoTP, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.frameworks.cpu_deepspeed import choose_cpu
from benchmarks.frameworks.problem import (
    CONTROL,
    GLOBAL_BATCH,
    KINDS,
    MICRO_BATCHES,
    Weights,
    as_array,
    batch,
    corrected,
    network,
    weights_of,
)
from benchmarks.frameworks.tasks import Task

__all__ = ["opened", "train"]

_BUCKET = 20000  # Elements: several buckets of a model as small as this.
_SENDS_MATRICES = ("MARS-Shampoo", "MARS-M", "LDAdam", "MKOR", "MKOR-H")
_TENSOR_PARALLEL = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
    ],
}


@contextmanager
def opened(task: Task) -> Iterator[None]:
    """DeepSpeed's process group, and our types in its JSON."""
    if task.device == "cpu":
        choose_cpu()
    import deepspeed

    import deepspeed_plugin

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(
        "nccl" if task.device == "cuda" else "gloo", timeout=timedelta(seconds=task.patience), verbose=False
    )
    deepspeed_plugin.register()
    yield
    dist.barrier()


def train(task: Task, kind: str, noise: float) -> Weights:
    """Whole float32 weights after the task's steps."""
    import deepspeed

    model = network(noise)
    groups = task.ranks // task.cell.settings.get("autotp", 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=_config(task, kind))
    # Where the model is narrow, the engine's float32 weights are made of rounded ones.
    changed = _whole(engine, task.cell.settings["stage"]) if noise else {}
    if task.loads:
        path, _ = engine.load_checkpoint(task.folder(kind, noise))
        if path is None:
            raise RuntimeError("DeepSpeed found no checkpoint")
    part = task.rank // (task.ranks // groups)
    for number in task.steps:
        task.end_here(number)
        for micro in range(MICRO_BATCHES):
            engine.backward(engine(batch(number, micro, part, groups).to(task.place)))
            engine.step()
    if task.saves:
        engine.save_checkpoint(task.folder(kind, noise))
    found = _whole(engine, task.cell.settings["stage"])
    engine.destroy()
    return corrected(found, changed, weights_of(_rounded(network(), task))) if noise else found


def _rounded(model: nn.Module, task: Task) -> nn.Module:
    """A model with weights of the cell's type, in float32."""
    return model.to(getattr(torch, task.cell.settings.get("dtype", "float32"))).float()


def _config(task: Task, kind: str) -> dict[str, Any]:
    settings = task.cell.settings
    spelling, options = KINDS[kind]
    params = dict(options)
    if kind == CONTROL:
        params["torch_adam"] = True
    if settings.get("comm") and spelling in _SENDS_MATRICES:
        params["comm_dtype"] = settings["comm"]
    zero: dict[str, Any] = {"stage": settings["stage"]}
    if settings.get("overlap"):
        zero |= {"overlap_comm": True, "reduce_bucket_size": _BUCKET, "allgather_bucket_size": _BUCKET}
    if settings.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": task.device == "cuda"}
    cut = settings.get("autotp", 1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // MICRO_BATCHES * cut // task.ranks,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "optimizer": {"type": spelling, "params": params},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if cut > 1:
        config["tensor_parallel"] = {"autotp_size": cut, "partition_config": _TENSOR_PARALLEL}
    if settings.get("dtype") == "bfloat16":
        config["bf16"] = {"enabled": True}
    if settings.get("dtype") == "float16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    return config


def _whole(engine: Any, stage: int) -> Weights:
    """Weights as one process has them: the full-precision ones where the engine keeps some."""
    from deepspeed.module_inject.layers import TensorParallel_Layer

    cut = {id(p) for m in engine.module.modules() if isinstance(m, TensorParallel_Layer) for p in m.parameters(False)}
    found = {}
    for name, parameter in engine.module.named_parameters():
        if id(parameter) not in cut:
            found[name] = as_array(_full(parameter, stage))
    for path, module in engine.module.named_modules():
        if isinstance(module, TensorParallel_Layer):
            for name, value in _gathered(module, stage).items():
                found[f"{path}.{name}"] = as_array(value)
    return found


def _full(parameter: nn.Parameter, stage: int) -> Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    value = safe_get_full_fp32_param(parameter) if stage else None
    return parameter.detach() if value is None else value


def _gathered(module: Any, stage: int) -> dict[str, Tensor]:
    """Weights of a layer that AutoTP has cut, put together by DeepSpeed."""
    import deepspeed

    own = {name: value for name, value in module._parameters.items() if value is not None}
    with deepspeed.zero.GatheredParameters(list(own.values())) if stage == 3 else nullcontext():
        copies = {name: nn.Parameter(value.detach().clone()) for name, value in own.items()}
    module._parameters.update(copies)  # It knows its bias by identity.
    module.gather_params(list(copies.values()))
    module._parameters.update(own)
    return {name: value.detach() for name, value in copies.items()}
