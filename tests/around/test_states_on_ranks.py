"""States that are removed on all ranks begin afresh on all; on one rank alone, no rank waits for another."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from rankwise import MKOR, LDAdam
from rankwise.comm import votes

TYPES: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "LDAdam": lambda p: LDAdam(p, lr=1e-2, rank=4),
    "MKOR": lambda p: MKOR(p, lr=1e-2, factor_dtype="float32"),
    "MKOR, sketches": lambda p: MKOR(p, lr=1e-2, rule="sketch", factor_dtype="float32"),
}
STEPS = 13
"""The next step is not one at which factors are due."""


def _network(weights: dict[str, Tensor] | None = None) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
    if weights is not None:
        model.load_state_dict(weights)
    return model


def _wrapped(how: str, model: nn.Module, world: int) -> nn.Module:
    if how == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


def _weights(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name.removeprefix("module.")] = whole.detach().clone()
    return found


class _Trained:
    def __init__(self, kind: str, how: str, rank: int, world: int, weights: dict[str, Tensor] | None = None) -> None:
        self.model, self.rank = _wrapped(how, _network(weights), world), rank
        self.optimizer = TYPES[kind](self.model.named_parameters())
        if isinstance(self.optimizer, MKOR):
            self.optimizer.capture(self.model)

    def steps(self, numbers: range) -> None:
        for number in numbers:
            source = torch.Generator().manual_seed(10 * number + self.rank)
            self.optimizer.zero_grad()
            self.model(torch.randn(12, 16, generator=source)).square().mean().backward()
            self.optimizer.step()


def _reset(action: str, optimizer: Any) -> None:
    if action == "clear":
        optimizer.state.clear()
    elif action == "another dictionary":
        optimizer.state = defaultdict(dict)
    elif action == "every entry":
        for state in optimizer.state.values():
            state.clear()
    else:
        getattr(optimizer, "forget_states", optimizer.state.clear)()


def _fresh_after(rank: int, world: int, kind: str, how: str, action: str) -> float:
    run = _Trained(kind, how, rank, world)
    run.steps(range(STEPS))
    fresh = _Trained(kind, how, rank, world, _weights(run.model))
    _reset(action, run.optimizer)
    for each in (run, fresh):
        each.steps(range(50, 62))
    ours, theirs = _weights(run.model), _weights(fresh.model)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def _alone(rank: int, world: int, kind: str, how: str, action: str) -> tuple[list[int], str]:
    run = _Trained(kind, how, rank, world)
    run.steps(range(STEPS))
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("rankwise")
    logger.addHandler(handler)
    if rank == 1 and action == "clear":
        run.optimizer.state.clear()
    elif rank == 1:
        run.optimizer.state.pop(next(run.model.parameters()))
    with mock.patch.object(votes, "PATIENCE", timedelta(seconds=3)):
        run.steps(range(50, 75))
    logger.removeHandler(handler)
    counts = sorted({int(state["step"]) for state in run.optimizer.state.values()})
    return counts, " ".join(record.getMessage() for record in records)


Case = tuple[str, str, str]
"""A type, how ranks hold it, and what is done to its states."""


def _all(rank: int, world: int, of: Callable[..., Any], cases: Sequence[Case]) -> list[Any]:
    return [of(rank, world, *case) for case in cases]


def test_all_ranks_begin_afresh() -> None:
    """But of MKOR without "every entry", which the step sees after the layers: factors move a step later there than a
    fresh optimizer's."""
    actions = ("clear", "another dictionary", "every entry", "forget_states")
    every = itertools.product(TYPES, ("DDP", "FSDP2"), actions)
    cases = [case for case in every if (case[0], case[2]) != ("MKOR", "every entry")]
    for found in run_ranks(2, _all, _fresh_after, cases):
        assert dict(zip(cases, found, strict=True)) == dict.fromkeys(cases, 0.0)


def _waits_for_none(cases: Sequence[Case]) -> None:
    silence, words = run_ranks(2, _all, _alone, cases)
    for case, (counts, silent), (own, told) in zip(cases, silence, words, strict=True):
        # Ranks step matrices together: the rank counts on, by the others' side, and says so.
        assert counts == own == [STEPS + 25], case
        assert silent == "" and "rank 1 alone has removed states" in told, case


USUAL = [("LDAdam", "FSDP2", "clear"), ("MKOR", "FSDP2", "pop"), ("MKOR, sketches", "DDP", "pop")]


def test_one_rank_alone_keeps_none_waiting() -> None:
    _waits_for_none(USUAL)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "how"),
    [("LDAdam", "FSDP2"), *((kind, how) for kind in ("MKOR", "MKOR, sketches") for how in ("DDP", "FSDP2"))],
)
def test_nor_does_one_of_any_type(kind: str, how: str) -> None:
    _waits_for_none([(kind, how, action) for action in ("clear", "pop")])


def test_ranks_that_step_whole_copies_begin_by_themselves() -> None:
    """Under DDP only MKOR shares work between ranks: the rank begins anew by itself, as with AdamW."""
    cases = [(kind, "DDP", action) for kind in ("AdamW", "LDAdam") for action in ("clear", "pop")]
    others, owns = run_ranks(2, _all, _alone, cases)
    for (kind, _, action), (counts, silent), (own, told) in zip(cases, others, owns, strict=True):
        assert counts == [STEPS + 25], (kind, action)
        assert own == ([25] if action == "clear" else [25, STEPS + 25]), (kind, action)
        assert silent == told == "", (kind, action)
