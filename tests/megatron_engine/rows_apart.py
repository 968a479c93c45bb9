"""Stands for two collectives of Transformer Engine's, for which Megatron asks where weights are cut once more.

The cuts, buffers, hooks and prefetches are Megatron's own, of its local layers, in fp32 and bf16.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.package_info import MAJOR, MINOR
from torch import Tensor

__all__ = ["HAS_WEIGHT_SHARDS", "rows_apart"]

_PLACE = "megatron.core.tensor_parallel"
try:
    importlib.import_module(f"{_PLACE}.gtp_api")
    # Under 0.19 the gradients leave one process, and Megatron's own Adam with them.
    HAS_WEIGHT_SHARDS = (MAJOR, MINOR) >= (0, 20)
except ModuleNotFoundError:
    HAS_WEIGHT_SHARDS = False


class _Quantized:
    """No tensor is one."""


def _gather(
    rows: Tensor, group: Any, async_op: bool = False, output_tensor: Tensor | None = None, **_: Any
) -> tuple[Tensor, Any]:
    whole = rows.new_empty(rows.shape[0] * group.size(), *rows.shape[1:]) if output_tensor is None else output_tensor
    return whole, dist.all_gather_into_tensor(whole, rows.detach().clone(), group=group, async_op=async_op)


def _reduce_scatter(
    whole: Tensor, group: Any, async_op: bool = False, output: Tensor | None = None
) -> tuple[Tensor, Any]:
    rows = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:]) if output is None else output
    return rows, dist.reduce_scatter_tensor(rows, whole.contiguous(), group=group, async_op=async_op)


@contextmanager
def rows_apart(alignment: int = 16) -> Iterator[None]:
    """Let Megatron cut weights once more on CPU ranks.

    Args:
        alignment: Number of rows of which every rank stores a multiple.
    """
    module: Any = importlib.import_module(f"{_PLACE}.generalized_tensor_parallelism")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(importlib.import_module(f"{_PLACE}.gtp_api"), "HAVE_GTP", True)
        patched.setattr(module.GTP_CONFIG, "pad_for_alignment", alignment)
        names = {"gather_along_first_dim": _gather, "reduce_scatter_along_first_dim": _reduce_scatter}
        names |= {"QuantizedTensor": _Quantized, "nvtx_range_push": _nothing, "nvtx_range_pop": _nothing}
        phases = ("in_activation_recompute_phase", "in_fp8_activation_recompute_phase")
        names |= dict.fromkeys((name for name in phases if hasattr(module, name)), lambda: False)
        names["get_dummy_wgrad"] = lambda shape, dtype, zero=False: torch.zeros(shape, dtype=dtype)
        for name, value in names.items():
            patched.setattr(module, name, value)
        # 0.19 links a model's weights to those of the model before.
        module.GTPShardedParam._chain_state.clear()
        module.GTPShardedParam._recompute_chain_state.clear()
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
