"""The examples as a JSON's ``"type"``: every ZeRO stage follows one process, and runs go on on other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import deepspeed
import ds_harness as ds
import pytest
import torch
from ds_harness import run_ranks
from example_rules import Oracle

import deepspeed_plugin
from rankwise.options.validation import OptionError
from rankwise.states import optimizer_spec

STAGES, WORLDS = (0, 1, 2, 3), (2, 3)
USUAL = ((0, 2), (1, 3), (2, 3), (3, 2))
# Sides that are rotated have full rank under the first: a sharp oracle; all of them under the second.
ONE_SIDE = ("SOAP", {"lr": 5e-3, "weight_decay": 0.1, "precondition_frequency": 3, "max_precond_dim": 10})
BOTH_SIDES = ("soap", {"lr": 5e-3, "weight_decay": 0.1, "precondition_frequency": 3})
SIGNUM = ("SignSGD", {"lr": 1e-3, "weight_decay": 0.1})
PLAIN = ("embedding.weight", "head.weight")


@pytest.fixture(scope="module", autouse=True)
def _import_before_forking() -> None:
    from cpu_deepspeed import prepare_ranks

    prepare_ranks()
    import torch._inductor.compile_fx  # noqa: F401


@pytest.fixture
def small_codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parameters of any size keep states in codes, where they are asked for."""
    monkeypatch.setattr(optimizer_spec, "FEWEST_CODED", 1)
    yield


def jobs(stage: int, blocks: Sequence[tuple[str, dict[str, Any]]], **more: Any) -> list[ds.Job]:
    return [ds.at_stage(ds.Job(name, params | more), stage) for name, params in blocks]


def bound(job: ds.Job) -> float:
    return 1e-6 if job.name == "SignSGD" else 1e-5


def oracle_error(job: ds.Job, ranks: list[ds.Record]) -> float:
    """How far the engine's weights are from an independent process in float64 that is fed the same gradients."""
    start = ds.whole(record.initial for record in ranks)
    params = dict(job.params)
    options = {"frequency": params.pop("precondition_frequency", 0), "longest": params.pop("max_precond_dim", 10_000)}
    oracle = Oracle(start, "signsgd" if job.name == "SignSGD" else "soap", PLAIN, **params, **options)
    for step in range(job.steps):
        oracle.step(ds.whole(record.grads[step] for record in ranks))
    return ds.error(ds.whole(record.final for record in ranks), oracle.weights, start)


@pytest.mark.parametrize(
    ("stage", "world"),
    [
        pytest.param(stage, world, marks=() if (stage, world) in USUAL else pytest.mark.exhaustive)
        for stage in STAGES
        for world in WORLDS
    ],
)
def test_every_stage_follows_one_process(stage: int, world: int, small_codes: None) -> None:
    codes = jobs(stage, (BOTH_SIDES, SIGNUM), state_dtype="int8")
    chosen = [*jobs(stage, (ONE_SIDE, SIGNUM, BOTH_SIDES)), *codes]
    found = run_ranks(world, ds.run_all, chosen, {"stage": stage})
    for index, job in enumerate(chosen):
        ranks = [records[index] for records in found]
        assert ranks[0].matrices > 3
        assert job.name == "SignSGD" or len(set(ranks[0].owners.values())) > 1
        assert ds.replay_error(job, ranks) <= bound(job), job
    for index in (0, 1):
        # What float32 rounds.
        assert oracle_error(chosen[index], [records[index] for records in found]) <= 1e-3
    wide, narrow = (sum(sum(records[index].bytes.values()) for records in found) for index in (1, 4))
    assert narrow < 0.3 * wide


# --- on other ranks ---------------------------------------------------------------------------------------------------

HALF = ds.STEPS // 2


def _half(rank: int, world: int, chosen: list[ds.Job], folder: str, second: bool) -> list[ds.Record]:
    """The first or the second half of a run, from the checkpoint of the first."""
    deepspeed.init_distributed("gloo")
    found = []
    for index, job in enumerate(chosen):
        engine = ds.engine_of(job, world)
        if second:
            assert engine.load_checkpoint(f"{folder}/{index}")[0] is not None
        recorder = ds.Recorder(engine.basic_optimizer)
        for step in range(HALF, ds.STEPS) if second else range(HALF):
            recorder.begin_step()
            ds.train_step(engine, rank, world, step)
        if not second:
            engine.save_checkpoint(f"{folder}/{index}")
        engine.destroy()
        found.append(recorder.record)
    return found


def _joined(first: list[ds.Record], second: list[ds.Record]) -> ds.Record:
    """All ranks' records of both halves, as one process's."""
    halves = (first, second)
    return ds.Record(
        initial=list(chain.from_iterable(record.initial for record in first)),
        grads=[list(chain(*(r.grads[step] for r in half))) for half in halves for step in range(HALF)],
        final=list(chain.from_iterable(record.final for record in second)),
        lrs=[{k: v for r in half for k, v in r.lrs[step].items()} for half in halves for step in range(HALF)],
        statistics=[{}] * ds.STEPS,
        losses=[None] * ds.STEPS,
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, 2), (2, 2)),
        pytest.param((3, 3), (2, 1), marks=pytest.mark.exhaustive),
        pytest.param((2, 1), (3, 3), marks=pytest.mark.exhaustive),
        pytest.param((2, 0), (3, 2), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_goes_on_on_another_number_of_ranks(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int], small_codes: None
) -> None:
    """Ranks and stage before and after: with the same gradients, what one process does that is never interrupted."""
    blocks = (BOTH_SIDES, SIGNUM)
    chosen = {
        stage: [*jobs(stage, blocks), *jobs(stage, blocks, state_dtype="int8")] for stage in (before[1], after[1])
    }
    first = run_ranks(before[0], _half, chosen[before[1]], str(tmp_path), False)
    second = run_ranks(after[0], _half, chosen[after[1]], str(tmp_path), True)
    for index, job in enumerate(chosen[after[1]]):
        record = _joined([records[index] for records in first], [records[index] for records in second])
        assert ds.replay_error(job, [record]) <= bound(job), job


# --- the block --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "SOPA"}, "optimizer.type='SOPA' is invalid: .* did you mean 'SOAP'"),
        ({"type": "Kron"}, "rankwise adds .*SOAP.*, and what RANKWISE_RULES names"),
        ({"type": "SOAP", "params": {"preconditon_frequency": 3}}, "did you mean 'precondition_frequency'"),
        ({"type": "soap", "params": {"precondition_frequency": 0}}, "precondition_frequency=0 is invalid"),
        ({"type": "SOAP", "lr": 1e-3}, "options of type 'SOAP' are read inside \"params\""),
    ],
)
def test_a_wrong_block_is_refused_by_name(block: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        deepspeed_plugin.validate_config({"train_batch_size": 1, "optimizer": block})


def test_what_is_registered_later_is_known_and_forgotten_again() -> None:
    from rankwise.names import BY_NAME, register, unregister

    register("Late-SOAP", BY_NAME["soap"].optimizer, preset={"precondition_frequency": 2})
    assert callable(getattr(torch.optim, "Late-SOAP")) and callable(getattr(torch.optim, "late-soap"))
    deepspeed_plugin.validate_config({"train_batch_size": 1, "optimizer": {"type": "Late-SOAP"}})
    deepspeed_plugin.unregister()
    assert not hasattr(torch.optim, "Late-SOAP") and not hasattr(torch.optim, "SOAP")
    deepspeed_plugin.register()
    assert hasattr(torch.optim, "SOAP")
    unregister("Late-SOAP")
    assert not hasattr(torch.optim, "Late-SOAP")
    with pytest.raises(OptionError, match="DeepSpeed or torch.optim has an optimizer of this name"):
        register("Adagrad", BY_NAME["soap"].optimizer)
    from rankwise.configs import OPTIMIZERS

    assert "adagrad" not in BY_NAME and "adagrad" not in OPTIMIZERS and OPTIMIZERS["soap"] == "SOAP"
