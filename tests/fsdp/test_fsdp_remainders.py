"""store_param_remainders on FSDP2's shards in bf16: the steps of fp32 ones, and torch's checkpoints of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from shard_settings import MIXED
from sharded_models import Run
from test_fsdp_checkpoints import Replicated
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from rankwise.checkpoint.torch_checkpoints import read_torch
from rankwise.layout.dtensors import local_view
from rankwise.options.validation import OptionError

BF16 = torch.bfloat16
KEPT: dict[str, Any] = {"dtype": BF16, "store_param_remainders": True}
NAMES = ("mars-adamw", "mars-m", "sonew-4", "ldadam")


def _joined(run: Run) -> dict[str, Tensor]:
    """This rank's fp32 values, without torch's operations on ``DTensor``, by integers."""
    found = {}
    for name, parameter in run.model.named_parameters():
        weight, rest = local_view(parameter.detach()), local_view(run.optimizer.state[parameter]["remainder"])
        bits = (weight.contiguous().view(torch.int16).long() << 16) + rest.long()
        found[name] = bits.to(torch.int32).view(torch.float32)
    return found


def _same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name].view(torch.int32), value.view(torch.int32)), name


def _follow(rank: int, world: int, setting: str) -> None:
    for name in NAMES:
        narrow, wide = Run(name, setting, **KEPT), Run(name, setting)
        pairs = list(zip(narrow.model.parameters(), wide.model.parameters(), strict=True))
        for ours, theirs in pairs:
            local_view(theirs.detach()).copy_(local_view(ours.detach()))
        for narrow.count in range(4):
            narrow.backward()
            for ours, theirs in pairs:
                theirs.grad = None if ours.grad is None else ours.grad.float()
            narrow.optimizer.step()
            wide.optimizer.step()
            narrow.optimizer.zero_grad()
        stepped = {n: p for n, p in wide.model.named_parameters() if p in wide.optimizer.state}
        assert len(stepped) == len(pairs)
        _same(_joined(narrow), {n: local_view(parameter.detach()) for n, parameter in stepped.items()})


@pytest.mark.parametrize("setting", ["rows-2", pytest.param("columns-2", marks=pytest.mark.exhaustive)])
def test_shards_in_bf16_take_the_steps_of_fp32_ones(setting: str) -> None:
    run_ranks(2, _follow, setting)


def _mixed(rank: int, world: int) -> None:
    with pytest.raises(OptionError, match="some weights must be in bfloat16, but all are in float32, and lack nothing"):
        Run("ldadam", "rows-2", policy=MIXED, store_param_remainders=True)


def test_fp32_shards_lack_nothing() -> None:
    run_ranks(2, _mixed)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def _states(run: Run) -> dict[str, Any]:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    return {"model": model, "optimizer": optimizer}


def _saved(rank: int, world: int, folder: str) -> Any:
    run = Run("ldadam", "rows-2", **KEPT).train(3)
    at, states = _joined(run), _states(run)
    dcp.save(states, checkpoint_id=folder)
    kinds = {state["remainder"].dtype for state in states["optimizer"]["state"].values()}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_optimizer_state_dict(run.model, run.optimizer, options=options)
    return at, kinds, _joined(run.train(3)), whole


def _loaded(rank: int, world: int, folder: str, whole: Any) -> Any:
    run = Run("ldadam", "rows-2", seed=1, **KEPT)
    states = _states(run)
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(run.model, run.optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    run.count, at = 3, _joined(run)
    return at, _joined(run.train(3))


def _broadcast(rank: int, world: int, whole: Any) -> None:
    """One rank's whole dictionary: to shards, and to copies."""
    for run in (Run("ldadam", "rows-2", seed=1, **KEPT), Replicated("ldadam", **KEPT)):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(run.model, run.optimizer, whole if rank == 0 else {}, options=options)
        found = get_optimizer_state_dict(run.model, run.optimizer, options=StateDictOptions(full_state_dict=True))
        for name, state in found["state"].items() if rank == 0 else ():
            assert torch.equal(state["remainder"], whole["state"][name]["remainder"]), name


def test_checkpoints_of_torch_keep_every_bit(tmp_path: Path) -> None:
    written = run_ranks(2, _saved, str(tmp_path / "saved"))
    whole = written[0][3]
    found = run_ranks(2, _loaded, str(tmp_path / "saved"), whole)
    for (at, kinds, later, _), (at_load, after) in zip(written, found, strict=True):
        assert kinds == {torch.int32}
        _same(at_load, at)
        _same(after, later)
    run_ranks(2, _broadcast, whole)
    (tmp_path / "scratch").mkdir()
    named = read_torch(tmp_path / "saved", tmp_path / "scratch")
    _same(
        {name: own.weight for name, own in named.parameters.items()},
        {name: torch.cat([parts[0][name] for parts in written]) for name in written[0][0]},
    )
    assert all("remainder" not in own.states for own in named.parameters.values())
