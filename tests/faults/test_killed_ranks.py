"""A rank that is killed at a random point: the others end with an error, and the last checkpoint continues bitwise."""

from __future__ import annotations

import random
from pathlib import Path

import ds_harness as ds
import pytest
from killed_ranks import EVENTS, Kill, job_of, resumption_of, survivor_of
from ranks import run_ranks

TYPES = ("MARS-AdamW", "LDAdam", "MKOR")


def _random_point(index: int) -> Kill:
    """Every event and stage occurs among twelve points."""
    generator = random.Random(index)
    event = EVENTS[index % len(EVENTS)]
    # Only these exchange matrices.
    name = TYPES[1 + index % 2] if event == "exchange" else TYPES[index % len(TYPES)]
    stage = (2, 3, 1)[index // len(EVENTS) % 3]
    # Rank 0 names a checkpoint: only another rank's death while saving can leave an incomplete one behind.
    victim = 1 if event == "save" and index != 11 else generator.randrange(2)
    return Kill(job_of(name, stage), event, victim, generator.randint(3, 7), ds.STEPS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("index", range(12))
def test_killed_rank(tmp_path: Path, index: int) -> None:
    kill, folder = _random_point(index), str(tmp_path / "checkpoints")
    assert survivor_of(kill, folder, str(tmp_path / "store")).startswith("the other rank ends")
    for seen in run_ranks(2, resumption_of, [(kill, folder)]):
        assert seen == ["the last checkpoint continues bit for bit"]
