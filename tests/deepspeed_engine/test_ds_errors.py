"""A configuration that cannot work ends on every rank before the first step, with the key, the value and the fix."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import ds_harness as ds
import pytest
import torch
from ds_harness import run_ranks
from torch import nn

import deepspeed_plugin
from deepspeed_plugin import _versions
from deepspeed_plugin.checkpoints import CheckpointError
from deepspeed_plugin.layouts import _ZeroOneTwo
from rankwise.layout.layout import LayoutError
from rankwise.options.validation import OptionError

# Type, params, and what the message must contain: key, value, rule, fix.
BAD_BLOCKS: list[tuple[str, Any, list[str]]] = [
    ("MKORR", {}, ["optimizer.type", "'MKORR'", "neither DeepSpeed, torch.optim nor rankwise", "did you mean 'MKOR'"]),
    ("Mars_lion", {}, ["optimizer.type", "'Mars_lion'", "did you mean 'MARS-Lion'"]),
    ("LDAdam", {"rnak": 4}, ["'LDAdam'", "no option 'rnak'", "did you mean 'rank'"]),
    ("LDAdam", {"rank": 0}, ["rank=0", "it must be an integer >= 1", "the default is 16"]),
    ("MARS-AdamW", {"betas": [1.2, 0.9]}, ["betas=(1.2, 0.9)", "two numbers in [0, 1)", "[0.95, 0.99]"]),
    ("MARS-M", {"variant": "lion"}, ["'MARS-M'", "no option 'variant'", "under the name 'MARS'"]),
    ("LDAdam", 3, ["optimizer.params=3", "an object of options"]),
    ("SONew", {"band": 10**400}, ["band=1000", "it must be <= 32", "the default is 1"]),
    ("SONew", {"band": -1}, ["band=-1", "it must be an integer >= 0", "the default is 1"]),
    ("MKOR", {"lr": float("nan")}, ["lr=nan", "it must be a finite number"]),
    ("MKOR", {"factor_dtype": "int8"}, ["factor_dtype='int8'", "floating-point type", "float32"]),
    ("MKOR-H", {"hybrid_patience": "auto"}, ["hybrid_patience='auto'", "only lr, betas, eps, weight_decay"]),
    ("MKOR-H", {"hybrid": False}, ["'MKOR-H'", "no option 'hybrid'", "under the name 'MKOR'"]),
    ("MKOR", {"momentum": 0.9}, ["momentum=0.9", "backend='adamw' does not read it", "set backend to 'sgd'"]),
]


class Vectors(nn.Module):
    """A model with nothing for a matrix rule."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).square().mean()


def _attempt(initialize: Callable[..., Any], model: nn.Module, name: str, params: Any, stage: int) -> str:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": name, "params": params},
    }
    try:
        initialize(model=model, model_parameters=model.parameters(), config=config)
    except OptionError as failure:
        return str(failure)
    return "accepted"


def _absent_checkpoints(folders: list[str]) -> list[str]:
    """What loading says, of names in ``latest`` and of a tag."""
    config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9, "optimizer": {"type": "SONew"}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), config=config)
    found = []
    for folder, tag in [*((folder, None) for folder in folders), (folders[0], "absent")]:
        try:
            found.append(repr(engine.load_checkpoint(folder, tag)))
        except CheckpointError as failure:
            found.append(str(failure))
    engine.destroy()
    return found


def _bad_blocks(rank: int, world: int, folders: list[str]) -> list[str]:
    found = []
    for index, (name, params, _) in enumerate(BAD_BLOCKS):
        for initialize in (deepspeed.initialize, deepspeed_plugin.initialize):
            found.append(_attempt(initialize, nn.Linear(4, 4), name, copy.copy(params), index % 4))
    for stage in range(4):
        found.append(_attempt(deepspeed.initialize, Vectors(), "LDAdam", {}, stage))
    return found + _absent_checkpoints(folders)


@pytest.mark.slow
def test_bad_blocks_end_before_the_first_step_on_every_rank(tmp_path: Path) -> None:
    """And names of checkpoints that are none."""
    folders = [tmp_path / name for name in ("dangling", "empty", "never")]
    for folder, text in zip(folders, ("global_step7", "\n", None), strict=True):
        (folder / "global_step5").mkdir(parents=True)
        (folder / "global_step5" / "mp_rank_00_model_states.pt").touch()
        if text is not None:
            (folder / "latest").write_text(text)
    for *messages, dangling, empty, never, absent in run_ranks(2, _bad_blocks, [str(f) for f in folders], timeout=60.0):
        held = "(it holds global_step5); pass the tag of one, or write it into 'latest'"
        assert "dangling/latest names 'global_step7', which is invalid" in dangling and held in dangling
        assert "empty/latest is empty, which is invalid" in empty and held in empty
        assert never == "(None, None)", "as DeepSpeed answers where nothing was saved"
        assert absent.startswith("tag='absent' is invalid") and held in absent
        for index, (name, params, parts) in enumerate(BAD_BLOCKS):
            for message in messages[2 * index : 2 * index + 2]:
                assert all(part in message for part in parts), (name, params, message)
        for message in messages[2 * len(BAD_BLOCKS) :]:
            assert "LDAdam would update none of the 2 parameters" in message and "vector" in message, message


def _told(work: Callable[..., Any], *args: Any) -> str:
    try:
        work(*args)
    except LayoutError as failure:
        return str(failure)
    return "accepted"


def _corrupted(rank: int, world: int, config: dict[str, Any], folder: str) -> list[str]:
    """Change one model weight behind the wrapper's back, on all ranks or on one, and take a step, or save."""
    found = []
    for name, culprit in (("MARS-AdamW", None), ("MKOR", None), ("MKOR", 0), ("LDAdam", 1)):
        job = ds.Job(name, ds.TYPES[name], config=config, dtype=torch.bfloat16)
        engine = ds.engine_of(job, world)
        for parameter in engine.module.parameters():
            held = getattr(parameter, "ds_tensor", parameter)
            with torch.no_grad():
                held.add_(1.0 if culprit in (None, rank) else 0.0)
        if culprit is not None:
            found.append(_told(engine.save_checkpoint, folder))
        found.append(_told(ds.train_step, engine, rank, world, 0))
        engine.destroy()
    return found


def _not_a_number(rank: int, world: int, folder: str) -> list[str]:
    """A NaN in the weights, in the model and in the optimizer's copy alike, is no sign of another layout.

    Saving plans, and so compares; a step would be skipped for its gradients.
    """
    found = []
    for stage in range(4):
        config = {"zero_optimization": {"stage": stage}}
        job = ds.Job("MARS-AdamW", ds.TYPES["MARS-AdamW"], config, dtype=torch.bfloat16)
        with mock.patch.object(ds, "model_of", _with_a_nan):
            engine = ds.engine_of(job, world)
        found.append(_told(engine.save_checkpoint, folder))
        engine.destroy()
    return found


def _with_a_nan(job: ds.Job) -> nn.Module:
    torch.manual_seed(job.seed)
    model = ds.Net()
    with torch.no_grad():
        model.up.weight[3, 3] = torch.nan
    return model


@pytest.mark.slow
def test_weights_that_are_not_numbers_are_not_taken_for_a_misread_layout(tmp_path: Path) -> None:
    assert run_ranks(2, _not_a_number, str(tmp_path)) == [["accepted"] * 4] * 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "BF16_Optimizer"])
def test_a_misread_layout_is_refused(stage: int | str, tmp_path: Path) -> None:
    """By every rank, whichever met it: none waits for one that gave up."""
    config: dict[str, Any] = {"zero_optimization": {"stage": 1 if stage == "BF16_Optimizer" else stage}}
    if stage == "BF16_Optimizer":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    for messages in run_ranks(2, _corrupted, config, str(tmp_path)):
        assert all("differs from the model's weight" in message for message in messages), messages
        assert [message[-11:] for message in messages[2:]] == ["(on rank 0)"] * 2 + ["(on rank 1)"] * 2


def _saved_alone(rank: int, world: int) -> str:
    engine = ds.engine_of(ds.at_stage(ds.ours(["MARS-AdamW"])[0], 3), world)
    ds.train_step(engine, rank, world, 0)
    with pytest.raises(RuntimeError) as caught:
        engine.basic_optimizer.state_dict()
    return str(caught.value)


def test_states_that_groups_have_in_steps_alone_are_saved_by_the_engine() -> None:
    (message,) = run_ranks(1, _saved_alone)
    assert "are in no param group" in message and "engine.save_checkpoint" in message


def test_a_renamed_attribute_is_refused_with_the_version() -> None:
    """As after an upgrade of DeepSpeed that names the groups otherwise."""
    wrapper = SimpleNamespace(single_partition_of_fp32_groups=[])
    layout = _ZeroOneTwo.__new__(_ZeroOneTwo)
    layout._engine = SimpleNamespace(optimizer=wrapper)  # type: ignore[assignment]
    with pytest.raises(LayoutError, match=rf"'bit16_groups'.*DeepSpeed \({deepspeed.__version__}\).*0\.19"):
        layout.refuse_other_attributes()
    wrapper.bit16_groups = []
    layout.refuse_other_attributes()


@pytest.mark.parametrize("version", ["0.19.6", "0.18.9+local", "0.9"])
def test_earlier_versions_are_refused_by_name(version: str) -> None:
    assert f"    {_versions.TESTED}\n" in (Path(__file__).parents[2] / "setup.cfg").read_text()
    with mock.patch.object(deepspeed, "__version__", version), pytest.raises(ImportError) as refusal:
        importlib.reload(_versions)
    assert f"needs {_versions.TESTED}, and DeepSpeed {version} is installed" in str(refusal.value)
