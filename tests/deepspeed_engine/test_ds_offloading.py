"""``engine.offload_states()``: every state of ours leaves the device, and comes back to where it was, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ds_harness as ds
import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import offload_optimizer_states, reload_optimizer_states
from ds_harness import run_ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_plugin.offloaded_states import offload_states, reload_states
from rankwise import MARS, MKOR, LDAdam, SONew

STEPS, HALF = 6, 4
OPTIM_STATES = OffloadStateTypeEnum.optim_states
BUILD = {
    "MARS-M": lambda params: MARS(params, variant="muon"),
    "MARS-Shampoo": lambda params: MARS(params, variant="shampoo"),
    "SONew": lambda params: SONew(params, band=2),
    "LDAdam": lambda params: LDAdam(params, rank=2, error_dtype="bfloat16"),
    "MKOR": lambda params: MKOR(params, update_interval=1),
}


class _Wrapper:
    """What DeepSpeed's wrapper of stages 1 and 2 does with the optimizer's states, on a device that is not the host."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.offloaded_states = optimizer, set[Any]()

    def offload_states(self, engine: Any, include: Any = None, **options: Any) -> None:
        if include is None or OPTIM_STATES in include:
            offload_optimizer_states(self.optimizer, "cpu")
            self.offloaded_states.add(OPTIM_STATES)

    def reload_states(self, engine: Any, non_blocking: bool = False) -> None:
        if OPTIM_STATES in self.offloaded_states:
            reload_optimizer_states(self.optimizer, "cuda:0")
            self.offloaded_states.remove(OPTIM_STATES)


def _stepped(name: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 8))
    optimizer: Any = BUILD[name](model.named_parameters())
    if optimizer.needs_capture:
        optimizer.capture(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    return optimizer


def _holders(optimizer: Any) -> list[dict[str, Tensor]]:
    return [*optimizer.state.values(), *optimizer.matrix_states.everything().values()]


def _places(optimizer: Any) -> list[dict[str, str]]:
    return [{name: value.device.type for name, value in holder.items()} for holder in _holders(optimizer)]


@pytest.mark.parametrize("name", BUILD)
def test_all_states_leave_a_device_and_return_to_their_places(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is a fake one, whose tensors know where they are and hold nothing."""
    optimizer = _stepped(name)
    device = SimpleNamespace(current_device_name=lambda: "cuda:0", synchronize=lambda: None, empty_cache=lambda: None)
    monkeypatch.setattr("deepspeed_plugin.offloaded_states.get_accelerator", lambda: device)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for holder in _holders(optimizer):
            for key, value in holder.items():
                # Step counts are on the host, where the optimizer counts there.
                place = "cpu" if key == "step" else "cuda:0"
                holder[key] = torch.empty(value.shape, dtype=value.dtype, device=place)
        before = _places(optimizer)
        assert optimizer.matrix_states.everything() or name not in ("LDAdam", "MKOR")
        wrapper = _Wrapper(optimizer)
        engine: Any = SimpleNamespace(basic_optimizer=optimizer, optimizer=wrapper)
        options = {"pin_memory": False}
        offload_states(wrapper.offload_states, engine, include=[OffloadStateTypeEnum.hp_params], **options)
        assert _places(optimizer) == before, "only the weights were to go"
        for _ in range(2):
            for _ in range(2):  # the second call finds nothing left to do
                offload_states(wrapper.offload_states, engine, **options)
                assert {place for places in _places(optimizer) for place in places.values()} == {"cpu"}
            reload_states(wrapper.reload_states, engine)
            assert _places(optimizer) == before
        reload_states(wrapper.reload_states, engine)
        assert _places(optimizer) == before


def _trained(rank: int, world: int, jobs: list[ds.Job], folder: str, away: bool) -> list[dict[str, np.ndarray]]:
    """Weights and a hash of the states of runs whose states are away for a while, or not."""
    found = []
    for index, job in enumerate(jobs):
        engine = ds.engine_of(job, world)
        for step in range(STEPS):
            if away and step in (2, HALF):
                engine.offload_states(pin_memory=False, non_blocking=step == HALF)
                engine.reload_states(non_blocking=step == HALF)
            ds.train_step(engine, rank, world, step)
        engine.save_checkpoint(f"{folder}/{away}-{index}")
        engine.load_checkpoint(f"{folder}/{away}-{index}")
        found.append({**ds.model_weights(engine), "digest": np.array(ds.digest(engine.basic_optimizer))})
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_a_run_whose_states_were_away_is_the_same(stage: int, tmp_path: Any) -> None:
    jobs = [ds.at_stage(job, stage) for job in ds.ours(("MARS-AdamW", "MARS-M", "LDAdam", "MKOR"))]
    stayed = run_ranks(2, _trained, jobs, str(tmp_path), False)
    went = run_ranks(2, _trained, jobs, str(tmp_path), True)
    for expected_rank, found_rank in zip(stayed, went, strict=True):
        for expected, found in zip(expected_rank, found_rank, strict=True):
            assert expected.keys() == found.keys()
            assert all(np.array_equal(expected[name], found[name]) for name in expected)


def _refused(rank: int, world: int, job: ds.Job) -> str:
    engine = ds.engine_of(job, world)
    ds.train_step(engine, rank, world, 0)
    before = ds.digest(engine.basic_optimizer)
    with pytest.raises(AssertionError) as error:
        engine.offload_states(pin_memory=False)
    engine.reload_states()
    ds.train_step(engine, rank, world, 1)
    assert ds.digest(engine.basic_optimizer) != before
    engine.destroy()
    return str(error.value)


def test_stage_three_is_refused_by_deepspeed_and_goes_on() -> None:
    """As it refuses torch.optim.AdamW."""
    (job,) = ds.ours(["LDAdam"])
    for said in run_ranks(2, _refused, ds.at_stage(job, 3)):
        assert "FusedAdam" in said
