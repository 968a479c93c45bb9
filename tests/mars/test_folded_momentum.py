"""Without the clip, MARS-Lion, -Shampoo and -M keep one average of the gradients: the same steps as with a reference.

The oracle is the recursion itself, which keeps the previous gradient: ``m = b m + (1 - b) (g + k (g - h))``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise import MARS
from rankwise.kernels import lists, native
from rankwise.kernels.dispatch import using
from rankwise.mars import optimizer as module
from rankwise.mars.rule import corrected_gradient, orthogonal_direction
from rankwise.mars.rule import momentum as momentum_of
from rankwise.options.validation import OptionError
from rankwise.plan import step_unit as unit
from rankwise.states import optimizer_spec as spec
from rankwise.updates.remainders import join

F64 = torch.float64
SHAPES = {"a.weight": (6, 9), "b.weight": (9, 5), "experts": (3, 4, 6), "c.bias": (5,)}
STEPS = 12
# At these steps, these have no gradient.
ABSENT = {2: ("a.weight",), 3: ("a.weight", "experts"), 7: ("b.weight", "c.bias")}
GAMMA, BETA, LR = 0.3, 0.9, 0.02
VARIANTS = pytest.mark.parametrize("variant", ["lion", "shampoo", "muon"])


def _made(dtype: torch.dtype = F64, **options: Any) -> tuple[dict[str, nn.Parameter], MARS]:
    generator = torch.Generator().manual_seed(0)
    weights = {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}
    if options.get("variant") != "lion":
        options.setdefault("ns_dtype", str(dtype).removeprefix("torch."))
    given = {"lr": LR, "gamma": GAMMA, "betas": (BETA, 0.99), "clip": None, "exclude": ["*.bias"], **options}
    return weights, MARS(list(weights.items()), **given)


def _gradient(step: int, name: str, dtype: torch.dtype = F64) -> Tensor | None:
    if name in ABSENT.get(step, ()):
        return None
    generator = torch.Generator().manual_seed(1000 * step + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=F64).to(dtype)


def _train(weights: Mapping[str, nn.Parameter], optimizer: MARS, steps: Sequence[int]) -> None:
    for step in steps:
        for name, weight in weights.items():
            weight.grad = _gradient(step, name, weight.dtype)
        optimizer.step()


def _direction(variant: str, momentum: Tensor) -> Tensor:
    if variant == "lion":
        return momentum.sign()
    return orthogonal_direction(momentum, variant, BETA)  # type: ignore[arg-type]


def _oracle(
    variant: str, start: Mapping[str, Tensor], names: Sequence[str], decay: float, cautious: bool, gammas: Any = None
) -> dict[str, Tensor]:
    """Weights after all steps, by the recursion that keeps the previous gradient."""
    found = {}
    for name in names:
        x, m, h = start[name].double(), torch.zeros(SHAPES[name], dtype=F64), torch.zeros(SHAPES[name], dtype=F64)
        for step in range(STEPS):
            grad = _gradient(step, name)
            if grad is None:
                continue
            gamma = GAMMA if gammas is None else gammas[step]
            m = BETA * m + (1 - BETA) * (grad + gamma * BETA / (1 - BETA) * (grad - h))
            h = grad
            direction = _direction(variant, m)
            keep = (direction * x >= 0).double() if cautious else 1.0
            x = x - LR * decay * keep * x - LR * direction
        found[name] = x
    return found


MATRICES = ("a.weight", "b.weight", "experts")


@VARIANTS
@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("form", [lists, pytest.param(native, marks=pytest.mark.compiled)], ids=str)
def test_the_steps_of_the_form_with_a_reference(variant: str, cautious: bool, form: Any) -> None:
    how = "cautious" if cautious else "decoupled"
    with using(form):
        weights, optimizer = _made(variant=variant, weight_decay=0.1, weight_decay_method=how)
        start = copy.deepcopy({name: weight.detach() for name, weight in weights.items()})
        _train(weights, optimizer, range(STEPS))
    for name, expected in _oracle(variant, start, MATRICES, 0.1, cautious).items():
        assert float((weights[name] - expected).abs().max()) <= 1e-12, name
        assert set(optimizer.state[weights[name]]) == {"step", "grad_avg"}


@VARIANTS
def test_vectors_take_the_rule_as_far_as_it_is_theirs(variant: str) -> None:
    """Lion's fold, too; those of the matrix rules take MARS-AdamW, whose second moment is of corrected gradients."""
    weights, optimizer = _made(variant=variant, optimize_1d=True, exclude=())
    start = {"c.bias": weights["c.bias"].detach().clone()}
    _train(weights, optimizer, range(STEPS))
    kept = set(optimizer.state[weights["c.bias"]])
    if variant != "lion":
        assert kept == {"step", "exp_avg", "exp_avg_sq", "reference"}
        return
    assert kept == {"step", "grad_avg"}
    expected = _oracle("lion", start, ["c.bias"], 0.0, False)["c.bias"]
    assert float((weights["c.bias"] - expected).abs().max()) <= 1e-12


@VARIANTS
def test_it_is_decided_group_by_group(variant: str) -> None:
    """A group with a clip beside one without: each as if it were alone."""
    made = []
    for clips in ((None, 0.5), (None, None), (0.5, 0.5)):
        weights, _ = _made(variant=variant)
        groups = [
            {"params": [("a.weight", weights["a.weight"])], "clip": clips[0]},
            {"params": [(name, weights[name]) for name in ("b.weight", "experts")], "clip": clips[1]},
        ]
        options = {} if variant == "lion" else {"ns_dtype": "float64"}
        optimizer = MARS(groups, lr=LR, gamma=GAMMA, betas=(BETA, 0.99), variant=variant, **options)
        _train({name: weights[name] for name in MATRICES}, optimizer, range(STEPS))
        made.append((weights, optimizer))
    (mixed, optimizer), (without, _), (clipped, _) = made
    assert set(optimizer.state[mixed["a.weight"]]) == {"step", "grad_avg"}
    assert set(optimizer.state[mixed["b.weight"]]) == {"step", "exp_avg", "reference"}
    torch.testing.assert_close(mixed["a.weight"], without["a.weight"], rtol=0, atol=1e-13)
    assert (mixed["a.weight"] - clipped["a.weight"]).abs().max() > 1e-3
    for name in ("b.weight", "experts"):
        assert torch.equal(mixed[name], clipped[name])
        assert (mixed[name] - without[name]).abs().max() > 1e-3


def test_what_needs_the_reference_keeps_it() -> None:
    for options in ({"variant": "adamw"}, {"variant": "muon", "clip": 1e6}, {"variant": "lion", "clip": 1.0}):
        weights, optimizer = _made(**options)
        _train(weights, optimizer, range(2))
        assert {"exp_avg", "reference"} <= set(optimizer.state[weights["a.weight"]])
    weights, optimizer = _made(variant="lion", exact=True)
    for step in range(2):
        for name, weight in weights.items():
            weight.grad = _gradient(step, name)
        optimizer.record_reference()
        optimizer.step()
    assert {"exp_avg", "reference", "next_reference"} <= set(optimizer.state[weights["b.weight"]])


@VARIANTS
@pytest.mark.parametrize(("kept", "most"), [(None, 4.0), ("bfloat16", 2.0), ("int8", 1.02)])
def test_bytes_of_state(variant: str, kept: str | None, most: float) -> None:
    weight = nn.Parameter(torch.randn(128, 96, generator=torch.Generator().manual_seed(0)))
    optimizer = MARS([("w", weight)], variant=variant, clip=None, state_dtype=kept)
    for step in range(3):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    (state,) = (value for name, value in optimizer.state[weight].items() if name != "step")
    assert state.nbytes <= most * weight.numel()
    (row,) = optimizer.explain()
    assert row.state_bytes <= most * weight.numel()


@VARIANTS
def test_codes_are_those_of_a_float32_average(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The momentum of a step is made before the average is rounded: the first step is the same to the bit."""
    monkeypatch.setattr(spec, "FEWEST_CODED", 1)
    (wide, plain), (narrow, coded) = (_made(torch.float32, variant=variant, state_dtype=d) for d in (None, "int8"))
    _train(wide, plain, range(1))
    _train(narrow, coded, range(1))
    assert coded.state[narrow["a.weight"]]["grad_avg"].dtype == torch.int8
    for name in MATRICES:
        assert torch.equal(wide[name], narrow[name])
    _train(wide, plain, range(1, STEPS))
    _train(narrow, coded, range(1, STEPS))
    for name in MATRICES:
        moved = (wide[name] - _made(torch.float32)[0][name]).norm()
        assert 0 < (wide[name] - narrow[name]).norm() < (0.15 if variant == "lion" else 0.02) * moved


@VARIANTS
def test_bf16_weights_with_remainders_take_the_steps_of_fp32_ones(variant: str) -> None:
    more = {} if variant == "lion" else {"ns_dtype": "float32"}
    narrow, keeping = _made(torch.bfloat16, variant=variant, store_param_remainders=True, weight_decay=0.1, **more)
    wide, plain = _made(torch.float32, variant=variant, weight_decay=0.1, **more)
    for name, weight in wide.items():
        weight.data.copy_(narrow[name].data)
    for step in range(STEPS):
        for name in SHAPES:
            given = _gradient(step, name, torch.bfloat16)
            narrow[name].grad, wide[name].grad = given, None if given is None else given.float()
        keeping.step()
        plain.step()
    for name, weight in wide.items():
        whole = join(narrow[name].detach().reshape(-1), keeping.state[narrow[name]]["remainder"].reshape(-1))
        assert torch.equal(whole, weight.detach().reshape(-1))


def _momenta(dtype: torch.dtype, gamma: float, beta: float, folded: bool) -> list[Tensor]:
    """Momentum after each of many steps, by the passes, in either form."""
    weight = nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    optimizer = MARS([("w", weight)], variant="lion", gamma=gamma, betas=(beta, 0.99), clip=None if folded else 1e6)
    generator, drift, found = torch.Generator().manual_seed(3), torch.zeros(64, 64, dtype=F64), []
    for _ in range(200):
        drift += 0.1 * torch.randn(64, 64, generator=generator, dtype=F64)
        weight.grad = (drift + torch.randn(64, 64, generator=generator, dtype=F64)).float().to(dtype)
        optimizer.step()
        state = optimizer.state[weight]
        momentum = torch.lerp(state["grad_avg"], weight.grad, gamma) if folded else state["exp_avg"].clone()
        found.append(momentum.double())
    return found


@pytest.mark.parametrize(("gamma", "beta"), [(0.025, 0.95), (0.05, 0.95), (0.3, 0.9), (0.9, 0.99)])
def test_it_rounds_no_more_than_the_form_with_a_reference(gamma: float, beta: float) -> None:
    exact = _momenta(F64, gamma, beta, folded=False)
    errors = {}
    for folded in (False, True):
        pairs = zip(_momenta(torch.float32, gamma, beta, folded), exact, strict=True)
        errors[folded] = max(float((mine - wanted).norm() / wanted.norm()) for mine, wanted in pairs)
    assert errors[True] <= 2 * errors[False] and errors[True] < 1e-6, errors


@pytest.mark.parametrize("variant", ["shampoo", "muon"])
def test_momenta_take_the_gradients_place_where_nobody_reads_these(variant: str) -> None:
    kept, plain = _made(variant=variant)
    spent, spending = _made(variant=variant)
    spending.planner.source.spends_gradients = True
    for step in range(STEPS):
        _train(kept, plain, [step])
        _train(spent, spending, [step])
        for name in MATRICES:
            given = _gradient(step, name)
            if given is not None:
                assert torch.equal(kept[name].grad, given) and not torch.equal(spent[name].grad, given)
    for name in SHAPES:
        assert torch.equal(kept[name], spent[name])


@pytest.mark.parametrize("variant", ["shampoo", "muon"])
def test_momenta_with_memory_of_their_own_are_there_a_part_at_a_time(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, optimizer = _made(variant=variant, weight_decay=0.1)
    _train(whole, optimizer, range(STEPS))
    parts: list[int] = []
    form = module._form_momenta
    monkeypatch.setattr(unit, "AT_ONCE", 60)
    monkeypatch.setattr(
        module,
        "_form_momenta",
        lambda unit, some: (
            parts.append(sum(grad.numel() for bucket in some for grad in bucket.grads)),
            form(unit, some),
        )[1],
    )
    weights, optimizer = _made(variant=variant, weight_decay=0.1)
    _train(weights, optimizer, range(STEPS))
    assert max(parts) <= 60 and len(parts) > STEPS
    for name in SHAPES:
        assert torch.equal(weights[name], whole[name])


@VARIANTS
def test_a_change_of_gamma_counts_at_once(variant: str) -> None:
    """The momentum is made with today's gamma; with a reference, what the last one had added would stay for a while."""
    weights, optimizer = _made(variant=variant)
    gammas = [0.3] * 5 + [0.1] * (STEPS - 5)
    averages = {name: torch.zeros(SHAPES[name], dtype=F64) for name in MATRICES}
    expected = {name: weights[name].detach().clone() for name in MATRICES}
    for step, gamma in enumerate(gammas):
        optimizer.param_groups[0]["gamma"] = gamma
        _train(weights, optimizer, [step])
        for name in MATRICES:
            grad = _gradient(step, name)
            if grad is not None:
                averages[name] = BETA * averages[name] + (1 - BETA) * grad
                momentum = (1 - gamma) * averages[name] + gamma * grad
                expected[name] = expected[name] - LR * _direction(variant, momentum)
    for name in MATRICES:
        assert float((weights[name] - expected[name]).abs().max()) <= 1e-12


@VARIANTS
def test_a_change_of_beta_changes_nothing(variant: str) -> None:
    made = []
    for clip in (None, 1e6):
        weights, optimizer = _made(variant=variant, clip=clip)
        for step in range(STEPS):
            optimizer.param_groups[0]["betas"] = (0.5 + 0.04 * step, 0.99)
            _train(weights, optimizer, [step])
        made.append(weights)
    for name in MATRICES:
        assert float((made[0][name] - made[1][name]).abs().max()) <= 1e-12


def test_what_a_change_of_gamma_is_to_the_form_with_a_reference() -> None:
    """A difference of ``(old - new) b^j (n - g)`` of the step before, ``j`` steps later: it decays as averages do."""
    grads = [torch.randn(8, dtype=F64, generator=torch.Generator().manual_seed(step)) for step in range(20)]
    gammas = [0.3] * 8 + [0.1] * 12
    m = n = h = torch.zeros(8, dtype=F64)
    for step, (grad, gamma) in enumerate(zip(grads, gammas, strict=True)):
        before = n, h
        m = momentum_of(m, corrected_gradient(grad, h, gamma, BETA), BETA)
        n, h = BETA * n + (1 - BETA) * grad, grad
        if step == 8:
            change = 0.2 * (before[1] - before[0])
        if step >= 8:
            gap = m - ((1 - gamma) * n + gamma * grad)
            torch.testing.assert_close(gap, BETA ** (step - 7) * change, rtol=0, atol=1e-14)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@VARIANTS
def test_a_momentum_with_a_reference_is_refused(variant: str) -> None:
    """What an unreleased version kept without a clip, too."""
    weights, optimizer = _made(variant=variant, clip=1e6)
    _train(weights, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["clip"] = None
    _, twin = _made(variant=variant)
    with pytest.raises(ValueError, match="'a.weight' are invalid: they must include 'grad_avg'"):
        twin.load_state_dict(saved)
    assert not twin.state


@VARIANTS
def test_a_checkpoint_says_which_form_it_has(variant: str) -> None:
    """Whatever the optimizer was built with; and what has no previous gradient is refused where one is needed."""
    weights, optimizer = _made(variant=variant)
    _train(weights, optimizer, range(5))
    saved = copy.deepcopy(optimizer.state_dict())
    twins, twin = _made(variant=variant, clip=1.0)
    twin.load_state_dict(saved)
    for name, weight in weights.items():
        twins[name].data.copy_(weight.data)
    _train(weights, optimizer, range(5, STEPS))
    _train(twins, twin, range(5, STEPS))
    assert twin.param_groups[0]["clip"] is None
    assert all(torch.equal(weights[name], twins[name]) for name in SHAPES)
    for group in saved["param_groups"]:
        group["clip"] = 1.0
    before = copy.deepcopy(twin.state_dict()["state"])
    with pytest.raises(ValueError, match="'a.weight' are invalid: they must include 'exp_avg', .*'grad_avg'"):
        twin.load_state_dict(saved)
    assert all(torch.equal(before[0][name], twin.state_dict()["state"][0][name]) for name in before[0])


@VARIANTS
@pytest.mark.parametrize(("before", "after"), [(None, 1.0), (1.0, None)])
def test_whether_there_is_a_clip_stays(variant: str, before: float | None, after: float | None) -> None:
    weights, optimizer = _made(variant=variant, clip=before)
    _train(weights, optimizer, range(2))
    optimizer.param_groups[0]["clip"] = after
    at = {name: weight.detach().clone() for name, weight in weights.items()}
    with pytest.raises(OptionError, match="clip=.* for 'a.weight', which has been stepped with clip="):
        _train(weights, optimizer, range(2, 3))
    assert all(torch.equal(at[name], weights[name]) for name in SHAPES)
    optimizer.param_groups[0]["clip"] = before if before is None else 0.5
    _train(weights, optimizer, range(2, 4))


def test_a_clip_may_come_and_go_where_the_reference_stays() -> None:
    weights, optimizer = _made(variant="adamw")
    for step, clip in enumerate((None, 1.0, None, 0.5)):
        optimizer.param_groups[0]["clip"] = clip
        _train(weights, optimizer, [step])


def test_muon_and_adamw_hand_over_their_average_as_it_is() -> None:
    weights, _ = _made(torch.float32)
    matrices = {name: weights[name] for name in ("a.weight", "b.weight")}
    adamw = torch.optim.AdamW(list(matrices.values()), lr=1e-3, betas=(BETA, 0.99))
    for step in range(4, 7):
        for name, weight in matrices.items():
            weight.grad = _gradient(step, name, torch.float32)
        adamw.step()
    mars = MARS(list(matrices.items()), variant="muon", clip=None, betas=(BETA, 0.99))
    mars.continue_from(adamw.state_dict())
    for weight in matrices.values():
        assert torch.equal(mars.state[weight]["grad_avg"], adamw.state[weight]["exp_avg"])
