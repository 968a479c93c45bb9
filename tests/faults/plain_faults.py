"""Faults in gradients, factors and settings, on two ranks that hold parameters cut as ZeRO cuts them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import simulated
import torch
import torch.distributed as dist
from factor_windows import inverse
from seeing import Sentences, told
from simulated import CASES, Framework, world_group
from torch import Tensor, nn

from rankwise import MARS, MKOR, LDAdam, SONew

FAMILIES = ("mars-adamw", "mars-muon", "sonew-1-row-adam", "ldadam-ef", "mkor-official-adamw")
BEFORE, AFTER = 2, 2
SECONDS_LATE = 2.0
OTHER_VERSION = "0.0.9"


def _framework(case: str, rank: int, world: int, options: Mapping[str, Any] | None = None) -> Framework:
    changed = replace(CASES[case], options={**CASES[case].options, **(options or {})})
    return Framework("cut", changed, torch.float32, rank, world, world_group())


def _bytes(framework: Framework) -> dict[str, Tensor]:
    """Copies of this rank's weights and states."""
    saved = framework.optimizer.state_dict()
    found = {f"weights {index}": tensor for index, (tensor, _) in enumerate(framework.shards)}
    found |= {f"{index} {name}": value for index, state in saved["state"].items() for name, value in state.items()}
    found |= {f"{key} {name}": value for key, state in saved["matrix_states"].items() for name, value in state.items()}
    return {name: value.detach().clone() for name, value in found.items()}


def _same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _finite(framework: Framework) -> bool:
    return all(bool(value.isfinite().all()) for value in _bytes(framework).values())


@contextmanager
def _poisoned(framework: Framework, value: float) -> Iterator[None]:
    """Every step taken in here meets a number in the first gradient of this rank, in a matrix."""

    def poison(*_: Any) -> None:
        gradient = framework.shards[0][0].grad
        assert gradient is not None
        gradient.view(-1)[0] = value

    handle = framework.optimizer.register_step_pre_hook(poison)
    try:
        yield
    finally:
        handle.remove()


def _gradient(value: float, breaks: Callable[[int], bool], rank: int, world: int) -> str:
    """With ``skip_nonfinite``: the broken step leaves no trace, at once and later."""
    unmoved, later, counted = True, True, True
    for case in FAMILIES:
        broken = _framework(case, rank, world, {"skip_nonfinite": True})
        straight = _framework(case, rank, world)
        for step in range(BEFORE + AFTER):
            if step == BEFORE:
                before = _bytes(broken)
                with _poisoned(broken, value) if breaks(rank) else nullcontext():
                    broken.step()
                broken.count -= 1
                unmoved &= _same(_bytes(broken), before)
            broken.step()
            straight.step()
        later &= _same(_bytes(broken), _bytes(straight))
        counted &= broken.optimizer.read_health()["skipped_steps"] == 1.0
    return told(
        {
            "every weight and state keeps its bits on all ranks": unmoved,
            "later steps are those of a run that never met it": later,
            "`skipped_steps` counts it": counted,
        }
    )


def _gradient_let_through(value: float, rank: int, world: int) -> str:
    """Without ``skip_nonfinite``."""
    spoilt, silent = [], True
    for case in FAMILIES:
        framework = _framework(case, rank, world)
        for step in range(BEFORE + 1):
            with _poisoned(framework, value) if step == BEFORE and rank == 1 else nullcontext():
                framework.step()
        everyone: list[Any] = [None] * world
        torch.distributed.all_gather_object(everyone, _finite(framework))
        spoilt.append(not all(everyone))
        silent &= framework.optimizer.read_health()["skipped_steps"] == 0.0
    return told(
        {
            "the step is taken, as by torch.optim": all(spoilt) and silent,
            "no rank raises or waits": len(spoilt) == len(FAMILIES),
        }
    )


def _factor(steps: int, rank: int, world: int) -> str:
    """A NaN in a factor of one matrix after some steps; factors move in steps 1, 4, 7."""
    broken, straight = (_framework("mkor-official-adamw", rank, world) for _ in range(2))
    for _ in range(steps):
        broken.step()
        straight.step()
    found, expected = broken.optimizer.matrix_states, straight.optimizer.matrix_states
    spoilt = min(found)
    if rank == 0:
        found[spoilt]["left_vectors"][0, 0] = torch.nan
    finite = True
    for step in range(steps, 6):
        if step == 3 and rank == 0:
            # What a failed factor is to become, before the vector of this step moves it.
            expected[spoilt]["left_weights"].zero_()
        broken.step()
        straight.step()
        finite &= all(bool(tensor.isfinite().all()) for tensor, _ in broken.shards)
    # The identity may be scaled and moved in another order of roundings.
    fresh = torch.allclose(inverse(found[spoilt], "left"), inverse(expected[spoilt], "left"), rtol=0.0, atol=1e-6)
    others = all(
        torch.equal(value, expected[key][name])
        for key in found
        for name, value in found[key].items()
        if rank or key != spoilt
    )
    return told(
        {
            "weights stay finite in every step": finite,
            "the factor starts again from the identity at the next factor step": fresh,
            "other factors keep the bits of a run without it": others,
        }
    )


def _late(rank: int, world: int) -> str:
    same = True
    for case in FAMILIES:
        late, straight = _framework(case, rank, world), _framework(case, rank, world)
        for step in range(BEFORE):
            if case == FAMILIES[-1] and step and rank == 1:
                time.sleep(SECONDS_LATE)
            late.step()
            straight.step()
        same &= _same(_bytes(late), _bytes(straight))
    return told({"the others wait": True, "every bit is that of a run without it": same})


# --- ranks that disagree --------------------------------------------------------------------------------------------


class _Wider(simulated.Model):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.d = nn.Linear(9, 11, dtype=dtype)


def _refused(framework: Framework, *words: str) -> str:
    """A step on zero gradients, which ends before it begins."""
    before = _bytes(framework)
    for tensor, _ in framework.shards:
        tensor.grad = torch.zeros_like(tensor)
    try:
        framework.optimizer.step()
    except (RuntimeError, ValueError) as error:
        message = str(error)
    else:
        message = "nothing was raised"
    missing = [word for word in words if word not in message]
    assert not missing, (missing, message)
    weights = {name: value for name, value in before.items() if name.startswith("weights")}
    return told(
        {
            f"all ranks raise, naming {_listed(words)}": not missing,
            "nothing has changed": all(torch.equal(_bytes(framework)[name], value) for name, value in weights.items()),
        }
    )


def _listed(words: tuple[str, ...]) -> str:
    return ", ".join(f"“{word.strip()}”" for word in words)


def _options(rank: int, world: int) -> str:
    return _refused(_framework("ldadam-ef", rank, world, {"rank": 3 + rank}), "rank is 3 on ranks [0], 4 on ranks [1]")


def _model(rank: int, world: int) -> str:
    with mock.patch.object(simulated, "Model", _Wider if rank == 1 else simulated.Model):
        framework = _framework("ldadam-ef", rank, world)
    return _refused(framework, "'d.bias' has shape (11,) on rank 1 and (9,)")


def _version(rank: int, world: int) -> str:
    framework = _framework("ldadam-ef", rank, world)
    with mock.patch("rankwise.plan.planner.__version__", OTHER_VERSION if rank == 1 else "0.1.0"):
        return _refused(framework, f"the version of rankwise is 0.1.0 on ranks [0], {OTHER_VERSION} on ranks [1]")


def _rates(rank: int, world: int) -> str:
    """One rank's schedule goes its own way; the check is the page's."""
    page = (Path(__file__).resolve().parents[2] / "docs/reliability.md").read_text()
    (code,) = re.findall(r"```python\n(import torch\n\n\ndef refuse_other_rates.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    makers: list[Callable[[Iterator[tuple[str, nn.Parameter]]], torch.optim.Optimizer]] = [
        lambda named: torch.optim.AdamW((parameter for _, parameter in named), lr=1e-2),
        lambda named: MARS(named, lr=1e-2),
        lambda named: SONew(named, lr=1e-2),
        lambda named: LDAdam(named, lr=1e-2, rank=2),
        lambda named: MKOR(named, lr=1e-2, update_interval=1),
    ]
    alike, apart, refused = [], [], []
    for make in makers:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = make(model.named_parameters())
        if isinstance(optimizer, MKOR):
            optimizer.capture(model)
        replica = nn.parallel.DistributedDataParallel(model)
        for step in range(4):
            if step == 2:
                alike.append(_spread(model) == 0)
                names["refuse_other_rates"](optimizer)
                optimizer.param_groups[0]["lr"] *= 1 + rank
            optimizer.zero_grad()
            replica(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        apart.append(_spread(model) > 1e-3)
        try:
            names["refuse_other_rates"](optimizer)
        except RuntimeError as error:
            refused.append("[[0.01], [0.02]]" in str(error))
    return told(
        {
            "nothing is said, as with torch.optim: weights part from there on": all([*alike, *apart]),
            "`refuse_other_rates` (below) raises on all ranks": refused == [True] * len(makers),
        }
    )


def _spread(model: nn.Module) -> float:
    """The largest difference between two ranks' values of one weight."""
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float((most - least).max())


SCENARIOS: dict[str, Callable[[int, int], str]] = {
    "NaN skipped": lambda rank, world: _gradient(torch.nan, lambda _: True, rank, world),
    "Inf skipped": lambda rank, world: _gradient(torch.inf, lambda _: True, rank, world),
    "one rank skipped": lambda rank, world: _gradient(torch.nan, lambda one: one == 1, rank, world),
    "NaN let through": lambda rank, world: _gradient_let_through(torch.nan, rank, world),
    "factor before it moves": lambda rank, world: _factor(3, rank, world),
    "factor between": lambda rank, world: _factor(2, rank, world),
    "late": _late,
    "options": _options,
    "model": _model,
    "version": _version,
    "rates": _rates,
}


def seen_on_a_rank(rank: int, world: int) -> Sentences:
    """What each scenario ends in."""
    return {name: scenario(rank, world) for name, scenario in SCENARIOS.items()}
