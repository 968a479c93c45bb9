"""The figures of the parity matrix see faults: real ones, put into the sharded optimizers, stand out tenfold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ds_harness as ds
import pytest
from ds_harness import Record, replay_tolerance
from ds_parity_grid import LABELS, Group, rows_of, runs, train

from rankwise.comm.halo import HaloExchange
from rankwise.step.matrices import _MatrixStep


def lose_halo(rank: int) -> None:
    """SONew's chains end at every shard border."""
    sound = HaloExchange.__call__

    def zero(self: HaloExchange, fields: Any) -> Any:
        found = sound(self, fields)
        for halo in (halo for row in found for halo in row):
            halo.left.zero_()
            halo.right.zero_()
        return found

    HaloExchange.__call__ = zero  # type: ignore[method-assign]


def mistake_owner(rank: int) -> None:
    """What the last owner computes is out of place by one element."""
    sound = _MatrixStep._updated

    def roll(self: _MatrixStep, *arguments: Any) -> Any:
        result = sound(self, *arguments)
        return result.roll(1, -1) if rank == 1 else result

    _MatrixStep._updated = roll  # type: ignore[method-assign]


def clip_twice(rank: int) -> None:
    """Gradients that arrive clipped are divided by their norm once more."""
    engines: list[Any] = []
    sound_engine, sound_update = ds.engine_of, ds.Recorder.update

    def remember(*arguments: Any) -> Any:
        engines.append(sound_engine(*arguments))
        return engines[-1]

    def divide(self: ds.Recorder, unit: Any, buckets: Any) -> None:
        norm = float(engines[-1].optimizer._global_grad_norm)
        for grad in (grad for bucket in buckets for grad in bucket.grads):
            grad /= max(norm, 1.0)
        sound_update(self, unit, buckets)

    ds.engine_of, ds.Recorder.update = remember, divide  # type: ignore[method-assign, assignment]


def train_with(fault: Callable[[int], None], rank: int, world: int, jobs: list[ds.Job], zero: Any) -> list[Record]:
    fault(rank)
    return train(rank, world, jobs, zero)


FAULTS: dict[Callable[[int], None], tuple[str, tuple[str, ...]]] = {
    lose_halo: ("SONew", ("same_gradients",)),
    mistake_owner: ("MKOR", ("same_gradients", "mean")),
    clip_twice: ("MARS-M", ("first_gradients",)),
}
"""A type each fault concerns, and the figures it must raise."""

GROUP = Group("bf16", "ZeRO-2", 2)
SEEDS = (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.__name__) for fault in FAULTS])
def test_faults_stand_out(fault: Callable[[int], None]) -> None:
    label, measures = FAULTS[fault]
    mains = (train, partial(train_with, fault))
    sound, faulty = (rows_of(GROUP, list(runs(GROUP, [label], main, SEEDS)))[1] for main in mains)
    floors = {"same_gradients": replay_tolerance(LABELS[label][0])}
    for measure in measures:
        assert faulty[measure] > 10 * max(sound[measure], floors.get(measure, 0.0)), (measure, sound, faulty)
