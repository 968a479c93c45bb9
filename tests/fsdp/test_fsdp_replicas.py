"""What torchft sends to a replica that joins: the states of a rank, asked for beside the forward pass."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from shard_settings import SETTINGS
from sharded_models import CLASSES, Run, whole
from torch.distributed.device_mesh import init_device_mesh

from rankwise.options.validation import OptionError
from rankwise.saving.shared_matrices import cut_evenly, on_mesh

BEFORE, AFTER = 3, 2
HEARD = ("mkor", "mkor-h")
CASES = [case for case in CLASSES if case not in HEARD]
# torchft's manager is known by the name of its module.
_manager: dict[str, Any] = {"__name__": "torchft.manager"}
exec("def asked(states):\n    return states()", _manager)
asked: Callable[[Callable[[], Any]], Any] = _manager["asked"]


def sent(run: Run) -> bytes:
    """The states, as they travel; the ranks ask one after the other."""
    message = b""
    for rank in range(run.parts if dist.is_initialized() else 1):
        if rank == run.part:
            message = pickle.dumps(asked(run.optimizer.state_dict))
        if dist.is_initialized():
            dist.barrier()
    return message


def other(run: Run, case: str, setting: str | None, **options: Any) -> Run:
    """A run that has begun with other weights, and gave its matrices to other ranks; now with the weights of a run."""
    joining = Run(case, setting, seed=5, **options)
    if setting is not None:
        owners = {key: (rank + 1) % run.parts for key, rank in run.optimizer.owners().items() if "[" not in key}
        joining.optimizer.planner.owner_of.update(owners)
    joining.train(1)
    for mine, theirs in zip(joining.model.parameters(), run.model.parameters(), strict=True):
        mine.detach().copy_(theirs.detach())
    joining.count = run.count
    return joining


def heal(rank: int, world: int, setting: str | None, options: dict[str, Any]) -> None:
    """Every case goes on with the same bits, and sends its states on."""
    for case in CASES:
        run = Run(case, setting, **options).train(BEFORE)
        joining = other(run, case, setting, **options)
        joining.optimizer.load_state_dict(pickle.loads(sent(run)))
        assert joining.optimizer.owners() == {} or setting is None
        third = Run(case, setting, seed=7, **options)
        third.model.load_state_dict(joining.model.state_dict())
        third.optimizer.load_state_dict(pickle.loads(sent(joining)))
        third.count = joining.count
        expected = run.train(AFTER).weights()
        for found in (joining.train(AFTER), third.train(AFTER)):
            assert found.optimizer.owners() == run.optimizer.owners()
            assert all(torch.equal(value, expected[name]) for name, value in found.weights().items()), case


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.exhaustive), {"state_dtype": "int8"}], ids=["wide", "8-bit"]
)
def test_one_process_goes_on_with_the_bits(options: dict[str, Any]) -> None:
    heal(0, 1, None, options)


EXHAUSTIVE = [("rows-2", {"state_dtype": "int8"}), *((name, {}) for name in SETTINGS if name != "rows-2")]


@pytest.mark.parametrize(
    ("setting", "options"),
    [("rows-2", {}), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in EXHAUSTIVE)],
)
def test_ranks_go_on_with_the_bits(setting: str, options: dict[str, Any]) -> None:
    run_ranks(SETTINGS[setting].world, heal, setting, options)


# --- what is refused --------------------------------------------------------------------------------------------------


def refusals(rank: int, world: int) -> list[str]:
    """Messages; nothing has changed then."""
    messages = []
    heard = Run("mkor-h", "rows-2").train(BEFORE)
    with pytest.raises(OptionError) as refused:
        heard.optimizer.load_state_dict(pickle.loads(sent(heard)))
    messages.append(str(refused.value))
    run, fresh = Run("ldadam", "rows-2").train(BEFORE), Run("mars-m", "rows-2")
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, sent(run))
    if rank:
        with pytest.raises(ValueError) as wrong_rank:
            run.optimizer.load_state_dict(pickle.loads(everyone[0]))
        messages.append(str(wrong_rank.value))
    states = pickle.loads(sent(fresh))
    before = other(Run("mars-m", "rows-2").train(1), "mars-m", "rows-2")
    with pytest.raises(ValueError) as wrong_owner:
        before.optimizer.load_state_dict(states)
    messages.append(str(wrong_owner.value))
    run.train(AFTER)
    before.train(AFTER)
    return messages


def brought_home(rank: int, world: int) -> bool:
    """Whether parts that another process has sent come to this one's mesh, whose groups it has."""
    mesh = init_device_mesh("cpu", (world,))
    part = cut_evenly(torch.arange(10.0).view(5, 2), mesh)
    foreign = pickle.loads(pickle.dumps(part))
    found = on_mesh(foreign, mesh)
    return (
        found.device_mesh is mesh and foreign.device_mesh is not mesh and torch.equal(found.full_tensor(), whole(part))
    )


def test_parts_of_another_process_come_to_this_mesh() -> None:
    assert all(run_ranks(2, brought_home))


def test_what_would_not_go_on_is_refused() -> None:
    first, second = run_ranks(2, refusals)
    assert "is invalid under torchft" in first[0] and "rule='sketch'" in first[0]
    assert "rank 0 of 2 wrote it" in second[1] and second[1].endswith("start all replicas with as many ranks")
    assert "has given its matrices to other ranks" in first[1]
