"""What load_checkpoint does with a checkpoint, decided from plain facts: one row each for every way and refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deepspeed_plugin.checkpoints import CheckpointError
from deepspeed_plugin.checkpoints.load_plan import Present, Saved, Universal, Wanted, decide

BY_NAME, DEEPSPEED = True, False

SAVED = Saved(name="tag", latest="tag", author="SONew", stage=2, ranks=2, groups=1)
HERE = Present(identity="SONew", optimizer="SONew", stage=2, ranks=2, groups=1)
THREE: dict[str, Any] = {"stage": 3, "partitioned": True}
ADAMW: dict[str, Any] = {"author": None, "moments": True}
SHARED_OUT: dict[str, Any] = {"config": {"expert_parallel": {"enabled": True, "autoep_size": 2}}}
ORDER = (("a", "b"), (2,))
OTHERS: dict[str, Any] = {"identity": None, "optimizer": "AdamW"}
ALL = Wanted()
WEIGHTS = Wanted(load_optimizer_states=False)
UNIVERSAL = Universal(name="universal", author="SONew", source="/runs/tag", groups=1)


def _case(
    by_name: bool, saved: Any = None, here: Any = None, wanted: Wanted = ALL, **plan: Any
) -> tuple[Saved, Present, Wanted, bool, dict[str, Any]]:
    return replace(SAVED, **(saved or {})), replace(HERE, **(here or {})), wanted, by_name, plan


CASES = {
    "the same layout": _case(DEEPSPEED, judge=True),
    "a pipeline's stage judges its own files itself": _case(DEEPSPEED, here={"alone": False}),
    "whole, in a file that any ranks can read": _case(
        DEEPSPEED, {"stage": 0, "ranks": None}, {"stage": 0, "ranks": None}
    ),
    "more ranks": _case(BY_NAME, here={"ranks": 3}),
    "another stage": _case(BY_NAME, here={"stage": 1}),
    "another cut": _case(BY_NAME, here={"config": {"zero_optimization": {"round_robin_gradients": True}}}),
    "to ZeRO-3": _case(BY_NAME, here=THREE),
    "weights of the same layout": _case(DEEPSPEED, wanted=WEIGHTS),
    "weights for more ranks": _case(DEEPSPEED, here={"ranks": 3}, wanted=WEIGHTS),
    "weights at ZeRO-3": _case(BY_NAME, THREE, THREE, WEIGHTS),
    "weights alone, with frozen ones, at ZeRO-3": _case(DEEPSPEED, THREE, {**THREE, "frozen": "a"}, WEIGHTS),
    "frozen ones where nothing is cut": _case(BY_NAME, here={"frozen": "a", "ranks": 3}),
    "another of our optimizers": _case(BY_NAME, {"author": "MKOR"}, fresh=True),
    "another of ours, in a pipeline": _case(DEEPSPEED, {"author": "MKOR"}, {"pipeline": True}, fresh=True),
    "another of ours, with experts": _case(DEEPSPEED, {"author": "MKOR"}, {"experts": True}, fresh=True),
    "AdamW's": _case(DEEPSPEED, {"author": None}, fresh=True),
    "AdamW's moments, cut alike": _case(BY_NAME, ADAMW, inherit=True),
    "AdamW's moments, for more ranks": _case(BY_NAME, ADAMW, {"ranks": 3}, inherit=True),
    "AdamW's moments, for ZeRO-3": _case(BY_NAME, ADAMW, THREE, inherit=True),
    "AdamW's moments, cut otherwise": _case(
        BY_NAME, ADAMW, {"config": {"zero_optimization": {"round_robin_gradients": True}}}, inherit=True
    ),
    "AdamW's moments, in other groups": _case(BY_NAME, {**ADAMW, "groups": 2}, inherit=True),
    "AdamW's moments, of AutoEP's experts": _case(BY_NAME, {**ADAMW, **SHARED_OUT}, {"stacks": True}, inherit=True),
    "AdamW's moments, of experts that were no stacks": _case(DEEPSPEED, ADAMW, {"stacks": True}, fresh=True),
    "AdamW's moments, of stacks that are frozen": _case(
        DEEPSPEED, {**ADAMW, **SHARED_OUT}, {"stacks": True, "frozen": "a", "frozen_stack": "a"}, fresh=True
    ),
    "AdamW's moments, of experts in another order": _case(
        DEEPSPEED,
        {**ADAMW, "config": {**SHARED_OUT["config"], "use_data_before_expert_parallelism": True}},
        {"stacks": True},
        fresh=True,
    ),
    "AdamW's moments, in a pipeline": _case(DEEPSPEED, ADAMW, {"pipeline": True}, fresh=True),
    "AdamW's moments, with experts": _case(DEEPSPEED, ADAMW, {"experts": True}, fresh=True),
    "AdamW's moments, with frozen ones at ZeRO-3": _case(
        DEEPSPEED, {**ADAMW, **THREE}, {**THREE, "frozen": "a"}, fresh=True
    ),
    "AdamW's moments, by the same order": _case(BY_NAME, {**ADAMW, "order": ORDER}, {"order": ORDER}, inherit=True),
    "AdamW's moments, by another order": _case(
        DEEPSPEED, {**ADAMW, "order": ORDER}, {"order": (("b", "a"), (2,))}, fresh=True
    ),
    "AdamW's moments, in groups of other sizes": _case(
        DEEPSPEED, {**ADAMW, "order": ORDER}, {"order": (("a", "b"), (1, 1))}, fresh=True
    ),
    "AdamW's moments, by an order that ZeRO has not": _case(DEEPSPEED, {**ADAMW, "order": ORDER}, fresh=True),
    "AdamW's moments, for AdamW": _case(DEEPSPEED, ADAMW, OTHERS),
    "AdamW's weights, into fp32 copies": _case(DEEPSPEED, {"author": None}, {"copies": True}, fresh=True, refresh=True),
    "ours, for AdamW": _case(DEEPSPEED, here=OTHERS, fresh=True),
    "other groups, weights alone": _case(BY_NAME, {**THREE, "groups": 2}, THREE, WEIGHTS),
}


@pytest.mark.parametrize("case", CASES)
def test_the_way(case: str) -> None:
    saved, here, wanted, by_name, plan = CASES[case]
    found = decide(saved, here, wanted)
    assert found.by_name is by_name
    assert (found.judge, found.refresh) == (plan.get("judge", False), plan.get("refresh", False))
    assert found.inherit == plan.get("inherit", False)
    assert found.wanted.states == (wanted.states and not plan.get("fresh", False)), "states of others are not loaded"
    assert (found.note is not None) == plan.get("fresh", False)
    if found.note is not None:
        assert f"by {saved.author or 'another optimizer'};" in found.note
        assert f"the state of {here.optimizer} starts fresh" in found.note


@pytest.mark.parametrize(
    ("saved", "here", "wanted", "text"),
    [
        ({"stages": 2}, {}, ALL, "written by 2 pipeline stages"),
        ({"stages": 2}, {"stages": 2, "pipeline": True, "ranks": 3}, ALL, "continue a pipeline on the same stages"),
        ({}, {"experts": True, "ranks": 3}, ALL, "states of expert layers continue on the same stage"),
        ({}, {**THREE, "frozen": "a.weight"}, ALL, r"frozen parameters \(a.weight, …\)"),
        ({}, THREE, Wanted(custom_load_fn=print), "custom_load_fn cannot be used"),
        ({"groups": 2}, {"ranks": 3}, ALL, "has 2 param groups, the engine 1"),
        ({"author": None, **THREE}, {}, ALL, "moving to or from ZeRO-3 at once"),
        ({"author": None, **THREE, "latest": "b"}, THREE, ALL, r"in 'latest' \(b\), not of tag"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    saved: dict[str, Any], here: dict[str, Any], wanted: Wanted, text: str
) -> None:
    with pytest.raises(CheckpointError, match=text):
        decide(replace(SAVED, **saved), replace(HERE, **here), wanted)


@pytest.mark.parametrize(
    ("saved", "here", "wanted", "by_name", "note"),
    [
        ({"holds_states": True}, {}, ALL, BY_NAME, None),
        ({"has_source": True}, {}, ALL, BY_NAME, "states are read from /runs/tag"),
        ({}, {}, ALL, BY_NAME, "its original, /runs/tag, is no longer there"),
        ({"author": "MKOR"}, {}, ALL, BY_NAME, "written by MKOR; its weights are kept"),
        ({"author": None}, {}, ALL, BY_NAME, "written by another optimizer"),
        ({"groups": 0}, {}, WEIGHTS, BY_NAME, None),
        ({}, OTHERS, ALL, DEEPSPEED, "the universal checkpoint in universal was written by SONew"),
        ({"author": None}, OTHERS, ALL, DEEPSPEED, None),
    ],
)
def test_universal(
    saved: dict[str, Any], here: dict[str, Any], wanted: Wanted, by_name: bool, note: str | None
) -> None:
    found = decide(replace(UNIVERSAL, **saved), replace(HERE, **here), wanted)
    assert (found.by_name, found.wanted) == (by_name, wanted)
    assert found.note is None if note is None else note in str(found.note)


@pytest.mark.parametrize(
    ("saved", "here", "text"),
    [
        ({}, {"pipeline": True}, "universal checkpoints of pipelines"),
        ({}, {"experts": True}, "universal checkpoints of pipelines"),
        ({}, {**THREE, "frozen": "a"}, "frozen parameters"),
        ({"holds_states": True, "groups": 2}, {}, "has 2 param groups"),
    ],
)
def test_universal_refusals(saved: dict[str, Any], here: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        decide(replace(UNIVERSAL, **saved), replace(HERE, **here), ALL)


def test_nothing_is_left_to_deepspeed() -> None:
    assert decide(None, HERE, ALL).by_name is DEEPSPEED
