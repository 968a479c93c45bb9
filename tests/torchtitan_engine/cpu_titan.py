"""torchtitan's own trainer on gloo processes: what it takes to run it without a GPU, a data set and a tokenizer.

Nothing of its models, parallelisms, losses, containers and checkpoints is replaced.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

# What torchtitan asks when it is imported; without a GPU it takes "cuda" for granted.
with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
    import torchtitan.tools.utils as tools

from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torchtitan import trainer as trainers
from torchtitan.components import metrics
from torchtitan.distributed import fsdp
from torchtitan.distributed import utils as distributed_utils
from torchtitan.models.common import attention
from torchtitan.models.common.attention import FlexAttention

from benchmarks.frameworks.titan_data import NoTokenizer, Rows

__all__ = ["NoTokenizer", "Rows"]

assert tools.device_type == "cpu"


class _NoMemory:
    """Stands for the monitor of a GPU's memory."""

    device_name = "cpu"
    device_capacity_gib = 0.0

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def _attention(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float | None, **kwargs: Any) -> Any:
    """By definition: torch's FlexAttention has no backward pass on CPUs."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], q.device)
    found = functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=kwargs["enable_gqa"])
    return found, None


metrics.build_device_memory_monitor = _NoMemory
FlexAttention._compiled_flex_attn = staticmethod(_attention)
# Compiled, masks take a C++ compiler ten seconds in every fresh cache.
attention._compiled_create_block_mask = create_block_mask


def _no_division(model: nn.Module) -> None:
    """As torchtitan's, by a sum: it would divide within the reduction, by one, which gloo cannot."""
    _divide(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def _taking_micro_batches(step: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule's ``step`` that takes micro-batches, too, as torchtitan has them: torch 2.13 takes whole batches."""

    @functools.wraps(step)
    def wrapper(schedule: Any, *args: Any, **given: Any) -> Any:
        if not any(name.endswith("_mbs") for name in given):
            return step(schedule, *args, **given)
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            stage.has_backward = True
            stage.clear_runtime_states()
        return schedule._step_microbatches(**given)

    return wrapper


_divide, fsdp.disable_fsdp_gradient_division = fsdp.disable_fsdp_gradient_division, _no_division
for _kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
    _kind.step = _taking_micro_batches(_kind.step)
# It names the device to the barrier, which gloo refuses.
distributed_utils.set_pg_timeouts = lambda **_: None
# Two seconds at the end of every run.
trainers.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
