"""Every type, however torch shards the model and in bf16 too, against one process: ten steps, clipped, end to end.

The figure is the largest difference of a weight relative to the largest change; in bf16 the mean difference relative to
the mean change, as in the table of DeepSpeed (`deepspeed_engine/test_ds_parity.py` says why), which allows twice
AdamW's, and ill-conditioned rules three times what one process shows when the same samples are cut into smaller
micro-batches. Medians of some seeds.

With ``RANKWISE_FSDP_TABLE=FILE`` the figures are written down, for ``python -m benchmarks fsdp-parity``.
"""

from __future__ import annotations

from typing import Any

import pytest
from fsdp_grid import BF16, FP32, REFERENCE, SEEDS, TYPES, Cell, cut_response, measured, noise_response
from fsdp_table import write_down

ALLOWED_FP32, ALLOWED_NOISE = 2e-4, 10.0
ALLOWED_HALF, ALLOWED_RESPONSE = 2.0, 3.0
# AdamW's own figure must be one of rounding, or a multiple of it would be no bound.
ALLOWED_ADAMW, ALLOWED_ADAMW_HALF = 1e-5, 4.0
ILL_CONDITIONED = ("MARS-Shampoo", "MARS-M", "SONew", "SONew, default gamma")
OURS = tuple(label for label in TYPES if label != REFERENCE)
CELLS = [*(Cell("fp32", setting) for setting in FP32), *(Cell("bf16", setting) for setting in BF16)]
USUAL = {Cell("bf16", "rows-2"): ("LDAdam", "MKOR")}


def _fp32_bound(row: dict[str, Any], adamw: dict[str, Any]) -> float:
    if row["type"] == "SONew, default gamma":
        # The default edge tolerance amplifies rounding in one process already.
        return max(ALLOWED_FP32, ALLOWED_NOISE * noise_response(row["type"], row["seeds"]).largest)
    return max(ALLOWED_FP32, ALLOWED_NOISE * adamw["largest"])


def _half_bound(row: dict[str, Any], adamw: dict[str, Any]) -> float:
    """Notes the type's own response where that is needed."""
    bound = ALLOWED_HALF * adamw["mean"]
    if row["mean"] <= bound or row["type"] not in ILL_CONDITIONED:
        return bound
    # Ranks may round more than a cut does; AdamW shows how much that adds.
    louder = max(1.0, adamw["mean"] / cut_response(REFERENCE, "bf16", row["seeds"]).mean)
    row["own_response"] = louder * cut_response(row["type"], "bf16", row["seeds"]).mean
    return ALLOWED_RESPONSE * row["own_response"]


def _check(cell: Cell, labels: tuple[str, ...], seeds: int) -> None:
    adamw, *rows = measured(cell, labels, seeds)
    half = cell.precision == "bf16"
    bounds = [(_half_bound if half else _fp32_bound)(row, adamw) for row in rows]
    write_down({**row, "layout": row["setting"]} for row in (adamw, *rows))
    if half:
        assert adamw["mean"] <= ALLOWED_ADAMW_HALF * cut_response(REFERENCE, "bf16", seeds).mean
    elif seeds == SEEDS:
        assert adamw["largest"] <= ALLOWED_ADAMW
    for row, bound in zip(rows, bounds, strict=True):
        assert row["mean" if half else "largest"] <= bound, (row, adamw)


@pytest.mark.slow
@pytest.mark.parametrize("cell", USUAL, ids=str)
def test_follows_one_process(cell: Cell) -> None:
    _check(cell, USUAL[cell], 1)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_whole_grid_follows_one_process(cell: Cell) -> None:
    _check(cell, OURS, SEEDS)
