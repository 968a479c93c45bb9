"""Ranks whose options differ stop together at the first step, with the name of the option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from simulated import CASES, Framework, world_group

from rankwise.kernels import dispatch as forms
from rankwise.kernels import lists, native
from rankwise.kernels.dispatch import using

# What rank 1 has in its second param group.
DIFFERENT: dict[str, tuple[str, Any]] = {
    "rank": ("ldadam-ef", 2),
    "error_feedback": ("ldadam-ef", False),
    "betas": ("ldadam-ef", (0.9, 0.95)),
    "clip": ("mars-muon", None),
    "lr_1d_ratio": ("mars-adamw", 0.1),
    "gamma": ("sonew-1-row-adam", 0.2),
    "momentum": ("mkor-official-sgd", 0.5),
    "lr": ("mkor-official-sgd", 0.5),
}


def _differ(rank: int, world: int) -> dict[str, str]:
    found = {}
    for name, (case, value) in DIFFERENT.items():
        framework = Framework("cut", CASES[case], torch.float32, rank, world, world_group())
        if rank == 1:
            framework.optimizer.param_groups[1][name] = value
        with pytest.raises(RuntimeError) as error:
            framework.step()
        found[name] = str(error.value)
    return found


def test_options_of_groups_are_compared() -> None:
    ranks = run_ranks(3, _differ, timeout=60)
    for name, (_, value) in DIFFERENT.items():
        assert len({messages[name] for messages in ranks}) == 1
        message = ranks[0][name]
        assert "(ranks [1] differ from the others)" in message
        assert f" param group 1: {name} is " in message and f"{value!r} on ranks [1]." in message
        assert message.count(" is ") == 1, message


def _tensor_lr(rank: int, world: int) -> int:
    framework = Framework("narrowed", CASES["ldadam-ef"], torch.float32, rank, world, world_group())
    for group in framework.optimizer.param_groups:
        group["lr"] = torch.tensor(0.01 * (rank + 1))  # would have to be read from the device
    with patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gather:
        framework.step()
    return gather.call_count


def test_comparing_takes_one_collective_for_each_plan() -> None:
    assert run_ranks(2, _tensor_lr, timeout=60) == [4, 4]  # shards and settings, for both groups


def _with_other_kernels(rank: int, world: int) -> list[str]:
    found = [_with_other_products(rank, case) for case in ("mars-muon", "mkor-official-sgd")]
    framework = Framework("cut", CASES["mars-adamw"], torch.float32, rank, world, world_group())
    with using(lists if rank == 1 else native), pytest.raises(RuntimeError) as error:
        framework.step()
    return [str(error.value), *found]


def _with_other_products(rank: int, name: str) -> str:
    """Rank 1's machine multiplies bfloat16 fast, rank 0's does not."""
    case = CASES[name]
    options = {key: value for key, value in case.options.items() if value != "DTYPE"}
    framework = Framework("cut", replace(case, options=options), torch.float32, rank, 2, world_group())
    torchs = patch.object(forms, "multiplies_bfloat16", lambda device: rank == 1)
    with torchs, pytest.raises(RuntimeError) as error:
        framework.step()
    return str(error.value)


def test_a_rank_without_a_compiler_does_not_go_unnoticed() -> None:
    """It would round otherwise than the others, and copies of a weight would drift apart."""
    first, second = run_ranks(2, _with_other_kernels, timeout=60)
    assert first == second
    message, *products = first
    assert "RANKWISE_NATIVE=0 makes them alike" in message and "rankwise.kernels.lists on ranks [1]" in message
    # Nor does one whose machine has another fastest type of products, of which a rule makes its own.
    for option, message in zip(("ns_dtype", "product_dtype"), products, strict=True):
        assert f"the type of the products (set {option} to 'float32' or 'bfloat16' on all ranks)" in message
        assert "is float32 on ranks [0], bfloat16 on ranks [1]." in message and message.count(" is ") == 1
