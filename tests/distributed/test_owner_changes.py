"""Matrices keep their owner, and with it their states, when groups are added or a checkpoint is put together."""

from __future__ import annotations

from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise import MKOR
from rankwise.comm.owner_plan import MatrixTask, plan_matrices
from rankwise.layout.layout import Layout, Shard
from rankwise.states.matrix_states import MatrixStates


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    # The last layer is the costliest: planned afresh, it would take an owner from the others.
    layers = [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 30)]
    return nn.Sequential(*layers).double()


def _train(rank: int, world: int) -> dict[str, Any]:
    model = _model()
    wrapped: nn.Module = model if world == 1 else DistributedDataParallel(model)
    named = list(model.named_parameters())
    optimizer = MKOR(named[:-2], lr=1e-2, update_interval=2, factor_dtype="float64")
    optimizer.capture(wrapped)
    generator = torch.Generator().manual_seed(1)

    def steps(count: int) -> None:
        for _ in range(count):
            x = torch.randn(10, 6, dtype=torch.float64, generator=generator)
            share = slice(None) if world == 1 else slice(5 * rank, 5 * rank + 5)
            model.zero_grad()
            (wrapped(x[share]) ** 2).mean().backward()
            optimizer.step()

    steps(3)
    owners = optimizer.owners()
    factors = {key: state["left_vectors"].clone() for key, state in optimizer.matrix_states.items()}
    optimizer.add_param_group({"params": named[-2:]})
    optimizer.capture(wrapped)
    between = sorted(optimizer.state_dict()["matrix_states"])
    steps(1)  # no factor step: they must be those of before
    kept = {key: torch.equal(optimizer.matrix_states[key]["left_vectors"], value) for key, value in factors.items()}
    steps(4)
    return {
        "weights": {name: parameter.detach().clone() for name, parameter in named},
        "owners": owners,
        "owners after": optimizer.owners(),
        "kept": kept,
        "between": between,
        "states": optimizer.state_dict()["matrix_states"],
        "held": sorted(optimizer.matrix_states),
    }


def _close(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[key], other[key], rtol=0, atol=1e-11) for key in one)


def test_a_group_added_under_ddp_moves_no_owner() -> None:
    alone = _train(0, 1)
    ranks = run_ranks(2, _train)
    for outcome in ranks:
        assert outcome["owners"].items() <= outcome["owners after"].items()
        assert outcome["kept"] and all(outcome["kept"].values())
        assert outcome["between"] == sorted(outcome["owners"])
        assert _close(outcome["weights"], alone["weights"])
        assert outcome["states"].keys() == alone["states"].keys()
        assert all(_close(state, alone["states"][key]) for key, state in outcome["states"].items())
    assert sorted(key for outcome in ranks for key in outcome["held"]) == sorted(alone["states"])


def test_given_owners_are_kept_and_carry_their_load() -> None:
    shards = tuple(Shard(key, 0, 16, 0, shape=(4, 4), tensor=index) for index, key in enumerate("abc"))
    layout = Layout((shards, shards), replicated=True)
    tasks = [MatrixTask(key, (key,), (), cost) for key, cost in (("a", 1.0), ("b", 2.0), ("c", 10.0))]
    assert plan_matrices(layout, tasks, [0.0, 0.0])[0].owners == {"c": 0, "b": 1, "a": 1}
    plan, loads = plan_matrices(layout, tasks, [0.0, 0.0], kept={"a": 0, "b": 0, "elsewhere": 5})
    assert (plan.owners, loads) == ({"a": 0, "b": 0, "c": 1}, [3.0, 10.0])


def _stale(rank: int, world: int) -> list[float]:
    """Every rank has stepped on its own before it learns of the others."""
    model = _model()
    optimizer = MKOR(model.named_parameters(), update_interval=1, factor_dtype="float64")
    optimizer.capture(model)
    x = torch.full((4, 6), rank + 1.0, dtype=torch.float64)

    def step(module: nn.Module) -> None:
        optimizer.zero_grad()
        (module(x) ** 2).mean().backward()
        optimizer.step()

    step(model)
    wrapped = DistributedDataParallel(model)
    optimizer.capture(wrapped)
    before = optimizer.state_dict()["matrix_states"]  # nobody owns anything: the first rank's
    step(wrapped)
    # A state that should not be here must not win over the owner's.
    owners = optimizer.owners()
    expected = {key: state["left_vectors"].clone() for key, state in optimizer.matrix_states.items()}
    for key in owners.keys() - expected.keys():
        optimizer.matrix_states.loaded[key] = {"left_vectors": torch.full((1,), -1.0)}
    merged = optimizer.state_dict()["matrix_states"]
    assert all(torch.equal(merged[key]["left_vectors"], value) for key, value in expected.items())
    assert all(float(state["left_vectors"].min()) > -1.0 for state in merged.values())
    assert len(expected) < len(owners) == len(before) == len(merged)
    return [float(state["left_vectors"].sum()) for _, state in sorted(before.items())]


def test_a_merged_checkpoint_has_the_owners_states() -> None:
    first, second = run_ranks(2, _stale)
    assert first == second


def test_states_of_foreign_matrices_are_dropped() -> None:
    states = MatrixStates()
    states.update({"mine": {}, "theirs": {}, "unplanned": {}})
    states.loaded = {"theirs": {}, "other": {}}
    states.drop_foreign({"mine": 0, "theirs": 1, "other": 1}, 0)
    assert sorted(states) == ["mine", "unplanned"] and states.loaded == {}
