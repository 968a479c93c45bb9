"""FSDP2's parity figures as a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.megatron_parity import layouts_table
from benchmarks.parity import half_cell, number_text

__all__ = ["fsdp_page"]

_HEAD = """# Parity under FSDP2

This page compares every optimizer under FSDP2 with one process of plain PyTorch. The short answer: in float64 every
cell follows one process to 1e-10 (`tests/fsdp/test_fsdp_parity.py`), and the differences below are rounding. In every
cell all ranks end at the same weights to the bit.

Parameters are cut by `fully_shard` and its companions. Each run has ten steps of a small model with gated blocks,
stacked experts and a layer that is used in every third step, with two micro-batches per step and clipping that acts in
every step. AdamW is torch's own. The page is generated from the figures of the tests (two cores, half an hour):

```sh
export RANKWISE_FSDP_TABLE=fsdp.jsonl
python -m pytest -m exhaustive tests/fsdp/test_fsdp_grid.py tests/megatron_engine/test_same_run.py
python -m benchmarks fsdp-parity fsdp.jsonl docs/fsdp-parity.md
```
"""

_FP32 = """
Each figure is the largest difference of a weight relative to the largest change of a weight, the median of {seeds}
seeds. Allowed are 2e-4 or 10 times AdamW's, which itself may be 1e-5. For SONew's default edge tolerance, 10 times
the effect of gradient noise of 1e-7 on one process is allowed, too.
"""

_BF16 = """
`MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` is compared with one process that
computes with bf16 copies of its fp32 weights. Each figure is the mean difference relative to the mean change, the
median of {seeds} seeds; in brackets is its ratio to AdamW's in the same cell. Twice AdamW's is allowed. **†** marks
cells beyond that: rounding moves these rules further in one process already. The number after the mark is the error
over the type's own response, which one process shows when the same samples are cut into smaller micro-batches.
Allowed there is 3.
"""

_LARGEST = """
This is the largest difference of a single weight in these runs, relative to the largest change of a weight. One flipped
sign is a whole step here, for AdamW as for MARS-Lion.
"""

_FRAMEWORKS = """
DeepSpeed's ZeRO-3, megatron-core's distributed optimizer and FSDP2 train one small language model in fp32, with the
same samples, learning rates and decay: ten steps of two micro-batches, gradients clipped. On three ranks the samples do
not divide. Each figure is the largest difference of the final weights from those of one process, relative to the
largest change. Allowed are 10 times AdamW's, or what one process of the type shows when the samples are cut into other
micro-batches. For MARS-Lion the limit holds for 99 % of the weights, for SONew for the means.
"""

_TITLES = {
    "rows-2": "`Shard(0)` × 2",
    "rows-3": "`Shard(0)` × 3",
    "rows-4": "`Shard(0)` × 4",
    "columns-2": "`Shard(1)` × 2",
    "hybrid-4": "HSDP 2 × 2",
    "tensor-2": "TP × 2",
    "tensor-4": "TP 2 × FSDP2 2",
    "experts-2": "experts on `ep` × 2 beside FSDP2 × 2",
    "experts-4": "experts on `ep` 2 × FSDP2 2 (`Shard(1)`) beside FSDP2 × 4",
    "strided-experts-4": "experts on `ep` 2 × FSDP2 2 (`Shard(0)`) beside FSDP2 × 4",
    "offload-2": "CPU offload × 2",
    "unsharded-2": "`reshard_after_forward=False` × 2",
}

Row = Mapping[str, Any]


def fsdp_page(rows: Sequence[Row]) -> str:
    """The page.

    Args:
        rows: ``type``, ``layout``, ``precision`` (``fp32``, ``bf16``, ``frameworks``), ``largest`` and ``mean`` of
            every cell, AdamW's first; of the first two ``seeds``, and ``own_response`` where a type is held to that.
    """
    titled = [{**row, "layout": _TITLES.get(row["layout"], row["layout"])} for row in rows]
    fp32, bf16, frameworks = (
        [row for row in titled if row["precision"] == precision] for precision in ("fp32", "bf16", "frameworks")
    )
    parts = [_HEAD]
    if fp32:
        parts += ["\n## fp32\n", _FP32.format(seeds=fp32[0]["seeds"]), "\n", layouts_table(fp32, _largest)]
    if bf16:
        parts += ["\n## bf16\n", _BF16.format(seeds=bf16[0]["seeds"]), "\n", layouts_table(bf16, half_cell)]
        parts += [_LARGEST, "\n", layouts_table(bf16, _largest)]
    if frameworks:
        parts += ["\n## ZeRO-3, Megatron and FSDP2\n", _FRAMEWORKS, "\n", layouts_table(frameworks, _largest)]
        parts += ["\nMeans:\n\n", layouts_table(frameworks, _mean)]
    return "".join(parts)


def _largest(row: Row, adamw: Row) -> str:
    return number_text(row["largest"])


def _mean(row: Row, adamw: Row) -> str:
    return number_text(row["mean"])
