"""FSDP2's parity figures as a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.megatron_parity import layouts_table
from benchmarks.parity import half_cell, number_text

__all__ = ["fsdp_page"]

_HEAD = """# Parity under FSDP2

Every optimizer on parameters that `fully_shard` and its companions have cut, against one process of plain PyTorch: ten
steps of a small model with gated blocks, stacked experts and a layer that is used in every third step, two
micro-batches per step, clipping that acts in every step. AdamW is torch's own. Generated from the figures of the tests
(two cores, half an hour):

```sh
export RANKWISE_FSDP_TABLE=fsdp.jsonl
python -m pytest -m exhaustive tests/fsdp/test_fsdp_grid.py tests/megatron_engine/test_same_run.py
python -m benchmarks fsdp-parity fsdp.jsonl docs/fsdp-parity.md
```

In every cell all ranks end at the same weights to the bit. In float64 each follows one process to 1e-10
(`tests/fsdp/test_fsdp_parity.py`); what is left here is rounding.
"""

_FP32 = """
Largest difference of a weight relative to the largest change of a weight, median of {seeds} seeds. Allowed: 2e-4 or 10
times AdamW's, which itself may be 1e-5; for SONew's default edge tolerance also 10 times what gradient noise of 1e-7
does to one process.
"""

_BF16 = """
`MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` against one process that computes with
bf16 copies of its fp32 weights. Mean difference relative to the mean change, median of {seeds} seeds, and in brackets
that over AdamW's in the same cell. Allowed: twice AdamW's. **†** marks what is beyond: rules that rounding moves
further in one process already. After the mark stands the error over the type's own response, which is what one process
shows when the same samples are cut into smaller micro-batches; allowed there: 3.
"""

_LARGEST = """
The same runs, largest difference of a single weight relative to the largest change of a weight. One flipped sign is a
whole step here, for AdamW as for MARS-Lion.
"""

_FRAMEWORKS = """
One small language model, the same samples, learning rates and decay in fp32: trained by DeepSpeed's ZeRO-3, by
megatron-core's distributed optimizer and by FSDP2, ten steps of two micro-batches, gradients clipped; on three ranks
the samples do not divide. Largest difference of the final weights from those of one process, relative to the largest
change. Allowed: 10 times AdamW's or what one process of the type shows when the samples are cut into other
micro-batches; for MARS-Lion of what 99 % of the weights do not exceed, for SONew of the means.
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
