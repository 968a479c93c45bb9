"""``lr_scale`` and ``weight_decay_method``: every optimizer against what they are defined by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import BY_NAME, Case
from torch import Tensor, nn

from rankwise import MARS, MKOR
from rankwise.kernels import lists
from rankwise.kernels.dispatch import using
from rankwise.options.validation import OptionError

NAMES = (
    "mars-adamw",
    "mars-lion",
    "mars-shampoo",
    "mars-m",
    "sonew-tridiagonal",
    "ldadam",
    "ldadam-no-feedback",
    "mkor-adamw",
)
LR, DECAY = 1e-2, 0.5
SCALES = {"0.*": 0.25, "*.bias": 2.0}
EVERY = pytest.mark.parametrize("case", [BY_NAME[name] for name in NAMES], ids=lambda case: case.name)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 9)).double()
    model.register_parameter("row", nn.Parameter(torch.randn(5, dtype=torch.float64)))
    return model


def _scale(name: str) -> float:
    return 2.0 if name.endswith(".bias") else 0.25 if name.startswith("0.") else 1.0


def _backward(model: nn.Module, step: int) -> None:
    x = torch.randn(16, 9, generator=torch.Generator().manual_seed(step)).double()
    (model(x).square().mean() + (model.row * torch.linspace(-1, 1, 5)).sum()).backward()


def _options(case: Case, **more: Any) -> dict[str, Any]:
    own = {key: value for key, value in case.options.items() if key not in ("lr_1d", "weight_decay")}
    fallback = {"weight_decay_1d": more.get("weight_decay", DECAY), "lr_1d": None} if case.cls is MARS else {}
    return {**own, "lr": LR, "weight_decay": DECAY, **fallback, **more}


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _one_step(case: Case, factor: float = 1.0, **options: Any) -> dict[str, Tensor]:
    """Weights after a step with the rate at a share of its peak."""
    model = _model()
    optimizer = case.cls(list(model.named_parameters()), **_options(case, **options))
    optimizer.capture(model)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    _backward(model, 1)
    optimizer.step()
    return _named(model)


def _rate(case: Case, name: str) -> float:
    """What multiplies lr of vectors, which take the fallback."""
    return 0.5 if case.cls is MARS and case.name != "mars-m" and len(_model().get_parameter(name).shape) < 2 else 1.0


@EVERY
@pytest.mark.parametrize("form", [lists, None], ids=["lists", "chosen"])
def test_cautious_decay_is_the_formula(case: Case, form: Any) -> None:
    with using(form) if form is not None else using(None):  # type: ignore[arg-type]
        bare = _one_step(case, weight_decay=0.0)
        found = _one_step(case, weight_decay_method="cautious")
        plain = _one_step(case)
    for name, start in _named(_model()).items():
        update = start - bare[name]
        aligned = (update * start >= 0).double()
        decay = LR * _rate(case, name) * DECAY
        torch.testing.assert_close(found[name], bare[name] - decay * aligned * start, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(plain[name], bare[name] - decay * start, rtol=1e-12, atol=1e-14)
        assert 0 < aligned.mean() < 1 or start.numel() < 10


@EVERY
def test_independent_decay_is_a_share_of_the_schedule(case: Case) -> None:
    """By the rate's share of its peak, whatever the peak, the fallback's ratio and the multipliers of names are."""
    share, options = 0.25, {"lr_scale": SCALES}
    bare = _one_step(case, share, weight_decay=0.0, **options)
    found = _one_step(case, share, weight_decay=0.02, weight_decay_method="independent", **options)
    for name, start in _named(_model()).items():
        torch.testing.assert_close(found[name], bare[name] - 0.02 * share * start, rtol=1e-12, atol=1e-14)


def _trained(case: Case, split: bool, steps: range, resumed: Any = None) -> tuple[dict[str, Tensor], Any]:
    """A run under a schedule; with a group of its own for each multiplier, or with the option."""
    model = _model()
    named = dict(model.named_parameters())
    groups: list[Any] = list(named.items())
    options = _options(case)
    if split:
        scales = sorted(set(map(_scale, named)))
        groups = [
            {"params": [(n, p) for n, p in named.items() if _scale(n) == scale], "lr": LR * scale} for scale in scales
        ]
    else:
        options["lr_scale"] = SCALES
    optimizer = case.cls(groups, **options)
    optimizer.capture(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    if resumed is not None:
        for target, saved in zip((model, optimizer, schedule), resumed, strict=True):
            target.load_state_dict(saved)
    for step in steps:
        optimizer.zero_grad()
        _backward(model, step)
        optimizer.step()
        schedule.step()
        if not split:
            # What loggers read is the schedule's.
            assert [group["lr"] for group in optimizer.param_groups] == schedule.get_last_lr()
            assert schedule.get_last_lr() == pytest.approx([LR / (2 + step)])
    return _named(model), [part.state_dict() for part in (model, optimizer, schedule)]


# MKOR takes a bias along with its weight only within one param group.
@pytest.mark.parametrize("case", [BY_NAME[name] for name in NAMES if name != "mkor-adamw"], ids=lambda case: case.name)
def test_multipliers_are_param_groups_of_their_own(case: Case) -> None:
    found, _ = _trained(case, False, range(5))
    expected, _ = _trained(case, True, range(5))
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-12, atol=1e-14)


@EVERY
def test_multipliers_survive_a_checkpoint(case: Case) -> None:
    whole, _ = _trained(case, False, range(5))
    _, saved = _trained(case, False, range(3))
    resumed, _ = _trained(case, False, range(3, 5), saved)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_last_pattern_counts_and_is_explained() -> None:
    model = _model()
    optimizer = MARS(model.named_parameters(), lr_scale={"*": 0.5, "0.*": 2.0, "0.bias": 1.0})
    found = {line.name: line.reason.partition(", lr times ")[2] for line in optimizer.explain()}
    assert found == {"row": "0.5", "0.weight": "2", "0.bias": "", "2.weight": "0.5", "2.bias": "0.5"}


def test_patterns_that_match_nothing_are_refused() -> None:
    with pytest.raises(OptionError, match=r"MARS: lr_scale='embed' is invalid: it must match the whole name"):
        MARS(_model().named_parameters(), lr_scale={"embed": 0.1})


def test_nameless_parameters_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    MARS(_model().parameters(), lr_scale={"*embed*": 0.1})
    assert sum("lr_scale=['*embed*'] has no effect" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("backend", ["lamb", "sgd"])
@pytest.mark.parametrize("method", ["independent", "cautious"])
def test_backends_with_another_decay_refuse(backend: str, method: str) -> None:
    message = rf"MKOR: weight_decay_method='{method}' is invalid: it must be 'decoupled' with backend='{backend}'"
    with pytest.raises(OptionError, match=message):
        MKOR(_model().named_parameters(), backend=backend, weight_decay_method=method)


def test_a_peak_of_zero_is_refused() -> None:
    with pytest.raises(OptionError, match=r"lr=0.0 is invalid with weight_decay_method='independent'"):
        MARS(_model().named_parameters(), lr=0.0, weight_decay_method="independent")


def _peaks() -> Iterator[tuple[str, dict[str, Any], float]]:
    yield "group's own rate", {"lr": 0.5}, 0.5
    yield "scheduler's peak", {"max_lr": 0.2}, 0.2
    yield "constructor's", {}, LR


@pytest.mark.parametrize(("keys", "peak"), [case[1:] for case in _peaks()], ids=[case[0] for case in _peaks()])
def test_where_the_peak_comes_from(keys: dict[str, Any], peak: float) -> None:
    model = _model()
    group = {"params": list(model.named_parameters()), **keys}
    optimizer = MARS(
        [group], lr=LR, weight_decay=0.1, weight_decay_1d=0.1, gamma=0.0, weight_decay_method="independent"
    )
    optimizer.param_groups[0]["lr"] = peak / 2
    start = _named(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, value in _named(model).items():
        torch.testing.assert_close(value, start[name] * (1 - 0.1 / 2), rtol=1e-12, atol=0.0)


def test_a_checkpoint_without_peaks_continues() -> None:
    model = _model()
    saved = MARS(model.named_parameters(), lr=LR).state_dict()
    optimizer = MARS(model.named_parameters(), lr=LR, weight_decay=0.1, weight_decay_method="independent")
    optimizer.load_state_dict(saved)
    _backward(model, 0)
    optimizer.step()
    assert optimizer.param_groups[0]["lr_max"] == LR
