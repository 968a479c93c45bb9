"""DeepSpeed's bf16 master weights with ``store_param_remainders`` take the steps of its fp32 ones, at ZeRO 1 to 3."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ds_harness as ds
import numpy as np
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from ds_harness import run_ranks

from deepspeed_plugin.checkpoints.converting import convert
from rankwise.options.validation import OptionError

pytestmark = pytest.mark.slow

NARROW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
STEPS = 5


@dataclass(frozen=True)
class _Job(ds.Job):
    """With bf16 masters and their remainders, or fp32 ones."""

    narrow: bool = True

    def ds_config(self, world: int) -> dict[str, Any]:
        config = super().ds_config(world)
        if self.narrow:
            config["bf16"] = dict(NARROW)
            config["optimizer"]["params"]["store_param_remainders"] = True
        return config


def _job(name: str, stage: int, narrow: bool = True, **zero: Any) -> _Job:
    # Without clipping, which DeepSpeed does in the type of the gradients.
    config = {"gradient_clipping": 0.0, "zero_optimization": {"stage": stage, **zero}}
    return _Job(name, ds.TYPES[name], config, dtype=torch.bfloat16, steps=STEPS, narrow=narrow)


class _Fed:
    """Feeds an engine's optimizer the gradients, and the statistics, that another one has recorded."""

    def __init__(self, optimizer: Any, record: ds.Record) -> None:
        self._update, self._record, self.step = optimizer._update, record, 0
        self.alike: list[bool] = []
        optimizer._update = self.update
        if optimizer.needs_capture:
            optimizer.factor_steps.reduced = self.statistics

    def update(self, unit: Any, buckets: Any) -> None:
        given = {(key, start): values for key, _, start, values in self._record.grads[self.step]}
        for bucket in buckets:
            for entry, grad in zip(bucket.entries, bucket.grads, strict=True):
                wanted = torch.from_numpy(given[entry.key, entry.shard.start])
                self.alike.append(torch.equal(grad, wanted))
                grad.copy_(wanted)
        self._update(unit, buckets)

    def statistics(self, *_: Any) -> Any:
        found = self._record.statistics[self.step]
        return {key: tuple(map(torch.from_numpy, values)) for key, values in found.items()}


def _masters(engine: Any) -> dict[str, np.ndarray]:
    return {
        name: safe_get_full_fp32_param(parameter).numpy().copy() for name, parameter in engine.module.named_parameters()
    }


def _rounded(weight: np.ndarray) -> np.ndarray:
    """Half away from zero."""
    return ((weight.view(np.uint32) + 0x8000) & np.uint32(0xFFFF0000)).view(np.float32)


def _same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name].view(np.uint32), values.view(np.uint32), name)


def _follows(rank: int, world: int, cells: tuple[tuple[str, int], ...]) -> None:
    for name, stage in cells:
        engine = ds.engine_of(_job(name, stage), world)
        recorder, found = ds.Recorder(engine.basic_optimizer), []
        for step in range(STEPS):
            recorder.begin_step()
            ds.train_step(engine, rank, world, step)
            found.append(_masters(engine))
            _same(ds.model_weights(engine), {key: _rounded(value) for key, value in found[-1].items()})
        kept = [tensor.dtype for unit in engine.basic_optimizer.planned_units for tensor in unit.tensors]
        assert set(kept) == {torch.bfloat16}
        engine.destroy()
        engine = ds.engine_of(_job(name, stage, narrow=False), world)
        fed = _Fed(engine.basic_optimizer, recorder.record)
        for step in range(STEPS):
            fed.step = step
            ds.train_step(engine, rank, world, step)
            _same(found[step], _masters(engine))
        assert all(fed.alike[: len(fed.alike) // STEPS])  # from the same weights, DeepSpeed's gradients are the same
        lacking = sum(int((values.view(np.uint32) & 0xFFFF != 0).sum()) for values in found[-1].values())
        assert lacking > 0.9 * sum(values.size for values in found[-1].values())
        engine.destroy()


def test_bf16_masters_with_remainders_take_the_steps_of_fp32_masters() -> None:
    run_ranks(2, _follows, (("SONew", 1), ("MKOR", 2), ("LDAdam", 3)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_type_takes_them_at_every_stage(stage: int) -> None:
    run_ranks(2, _follows, tuple((name, stage) for name in ds.TYPES))


# --- checkpoints -----------------------------------------------------------------------------------------------------


@contextmanager
def _engine(job: _Job, world: int) -> Iterator[Any]:
    engine = ds.engine_of(job, world)
    yield engine
    engine.destroy()


def _saved(rank: int, world: int, folder: str) -> Any:
    """Of every kind of masters: at the save, and two steps later."""
    found = {}
    adamw = replace(_job("LDAdam", 2, narrow=False), name=ds.REFERENCE, params=ds.REFERENCE_PARAMS)
    for name, job in ((True, _job("LDAdam", 2)), (False, _job("LDAdam", 2, narrow=False)), ("AdamW", adamw)):
        with _engine(job, world) as engine:
            for step in range(3):
                ds.train_step(engine, rank, world, step)
            engine.save_checkpoint(f"{folder}/{name}", tag="a")
            at = _masters(engine)
            for step in range(3, STEPS):
                ds.train_step(engine, rank, world, step)
            found[name] = at, _masters(engine)
    return found


def _resumed(rank: int, world: int, folder: str, moves: list[tuple[bool, int, bool]]) -> Any:
    found = []
    for source, stage, narrow in moves:
        with _engine(_job("LDAdam", stage, narrow), world) as engine:
            ds.train_step(engine, rank, world, 7)  # what is there before must leave no trace
            engine.load_checkpoint(f"{folder}/{source}", tag="a")
            at = _masters(engine)
            for step in range(3, STEPS):
                ds.train_step(engine, rank, world, step)
            found.append((at, _masters(engine)))
    return found


MOVES: list[Any] = [(True, 2, True), (True, 2, False), (False, 3, True), ("AdamW", 2, True)]
"""Whether the masters that were saved, at stage 2, are narrow (AdamW's are not); the stage that loads, and whether its
masters are."""


@pytest.mark.parametrize(
    "moves",
    [
        pytest.param(MOVES, id="some"),
        pytest.param(
            [(True, 3, True), (True, 1, False), (True, 3, False), (False, 2, True), (False, 1, True)],
            id="others",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_checkpoints_move_between_kinds_of_masters_bit_for_bit(tmp_path: Path, moves: list[Any]) -> None:
    written = run_ranks(2, _saved, str(tmp_path))[0]
    for move, (at, later) in zip(moves, run_ranks(2, _resumed, str(tmp_path), moves)[0], strict=True):
        start, end = written[move[0]]
        _same(at, start)
        if move == (True, 2, True):
            _same(later, end)
    if moves is not MOVES:
        for move, (at, _) in zip(moves, run_ranks(1, _resumed, str(tmp_path), moves)[0], strict=True):
            _same(at, written[move[0]][0])


def _from_universal(rank: int, world: int, folder: str) -> Any:
    job = _job("LDAdam", 3)
    with _engine(replace(job, config={**job.config, "checkpoint": {"load_universal": True}}), world) as engine:
        engine.load_checkpoint(folder, tag="universal")
        return _masters(engine)


@pytest.mark.exhaustive
def test_a_universal_checkpoint_has_whole_masters(tmp_path: Path) -> None:
    written = run_ranks(2, _saved, str(tmp_path))[0]
    convert(tmp_path / "True" / "a", tmp_path / "True" / "universal", workers=1)
    _same(run_ranks(2, _from_universal, str(tmp_path / "True"))[0], written[True][0])


def _accessed(rank: int, world: int) -> None:
    for stage in (2, 3):
        with _engine(_job("MARS-AdamW", stage), world) as engine:
            ds.train_step(engine, rank, world, 0)
            parameter = engine.module.up.weight
            value = torch.randn(23, 10, generator=torch.Generator().manual_seed(0))
            safe_set_full_fp32_param(parameter, value)
            assert torch.equal(safe_get_full_fp32_param(parameter), value)


def test_deepspeeds_accessors_give_and_take_whole_masters() -> None:
    run_ranks(2, _accessed)


# --- refused ---------------------------------------------------------------------------------------------------------


def _refused(rank: int, world: int) -> list[str]:
    plain, found = {"enabled": True}, []
    half = {"enabled": True, "bf16_master_weights_and_grads": True}
    cases: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (0, plain, {}),
        (2, plain, {}),
        (1, plain, {"data_types": {"grad_accum_dtype": "fp32"}}),
        (2, half, {}),
        (2, dict(NARROW), {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    ]
    for stage, block, further in cases:
        job = _job("MARS-AdamW", stage, narrow=False)
        params = {**job.params, "store_param_remainders": True}

        class Given(_Job):
            def ds_config(self, world: int, block: dict[str, Any] = block) -> dict[str, Any]:
                return {**super().ds_config(world), "bf16": block}

        given = Given(job.name, params, {**job.config, **further}, dtype=torch.bfloat16, narrow=False)
        with pytest.raises(OptionError) as refusal:
            ds.engine_of(given, world)
        found.append(str(refusal.value))
    return found


def test_masters_that_lack_nothing_are_refused_on_all_ranks() -> None:
    ours, theirs = run_ranks(2, _refused)
    assert ours == theirs
    own = "store_param_remainders=True is invalid: .* in float32, which need no remainder; leave it out, or let"
    half = "bf16.bf16_master_weights_and_grads=True is invalid: .* DeepSpeedCPUAdam, .* with both keys"
    for message, words in zip(ours, [own, own, own, half, half], strict=True):
        assert re.search(words, message), message
