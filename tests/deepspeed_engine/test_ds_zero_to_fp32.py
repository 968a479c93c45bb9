"""DeepSpeed's own zero_to_fp32 on checkpoints of ours: the fp32 weights, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ds_harness as ds
import numpy as np
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ds_harness import run_ranks


def _save(rank: int, world: int, jobs: list[ds.Job], folder: str) -> list[dict[str, np.ndarray]]:
    masters = []
    for index, job in enumerate(jobs):
        engine = ds.engine_of(job, world)
        for step in range(2):
            ds.train_step(engine, rank, world, step)
        engine.save_checkpoint(f"{folder}/{index}")
        masters.append(ds.master_weights(engine))
        engine.destroy()
    return masters


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)], ids=str)
def test_gives_the_full_precision_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    by_name = {job.name: replace(job, dtype=dtype) for job in ds.ours()}
    chosen = [("MARS-M", 1), ("SONew", 2), ("LDAdam", 3), ("MKOR", 3)]
    jobs = [replace(by_name[name], config={"zero_optimization": {"stage": stage}}) for name, stage in chosen]
    masters = run_ranks(2, _save, jobs, str(tmp_path))[0]
    for index, expected in enumerate(masters):
        found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / str(index)))
        assert expected.keys() <= found.keys()
        for name, value in expected.items():
            assert found[name].dtype == torch.float32
            np.testing.assert_array_equal(found[name].detach().numpy(), value, err_msg=f"{chosen[index]} {name}")
