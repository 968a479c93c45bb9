"""MKOR from end to end: scales, layers of any kind, failures, the switch; test_mkor_rule.py has the rule's options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, deviation, weights
from factor_windows import inverse
from torch import Tensor, nn

import rankwise.statistics.hooks as capture_module
from rankwise import MKOR
from rankwise.options.validation import OptionError
from rankwise.statistics.window_sums import clear

F64 = {"factor_dtype": "float64"}
STEPS = 13
ROUNDING = 1e-9


class Conv1D(nn.Module):
    """GPT-2's linear layer: its weight is (inputs, outputs)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Net(nn.Module):
    """Linear with and without bias, the transposed kind, two equal shapes for a batch, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.plain = nn.Linear(8, 6, bias=False)
        self.turned = Conv1D(8, 6)
        self.norm = nn.LayerNorm(8)
        self.twin = nn.Linear(8, 8)
        self.brother = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def layers(self) -> dict[str, nn.Module]:
        return {name: module for name, module in self.named_children() if name != "norm"}

    def forward(self, x: Tensor, see: Callable[[str, Tensor, Tensor], None] = lambda *_: None) -> Tensor:
        for name, module in self.named_children():
            output = module(x)
            see(name, x, output)
            x = torch.tanh(output)
        return output


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 3, 5, generator=generator, dtype=torch.float64) + 0.5
    return x, torch.randn(8, 3, 3, generator=generator, dtype=torch.float64) * 2


def loss(model: nn.Module, step: int, part: slice = slice(None), **more: Any) -> Tensor:
    x, y = data(step)
    return (model(x[part], **more) - y[part]).square().mean() * 4


def train(
    model: nn.Module, optimizer: Any, steps: Any = range(STEPS), backward: Callable[[int], None] | None = None
) -> dict[str, Tensor]:
    for step in steps:
        optimizer.zero_grad()
        if backward is None:
            loss(model, step).backward()
        else:
            backward(step)
        optimizer.step()
    return weights(model)


def build(model: nn.Module, params: Any = None, **options: Any) -> MKOR:
    optimizer = MKOR(model.named_parameters() if params is None else params, **{"lr": 1e-2, **F64, **options})
    optimizer.capture(model)
    return optimizer


class Dense:
    """One layer's factors, kept as the matrices whose inverses MKOR maintains."""

    def __init__(self, rule: str, gamma: float, stabilizer: tuple[float, float] | None) -> None:
        self.rule, self.gamma, self.stabilizer = rule, gamma, stabilizer
        self.inverse: dict[str, Tensor] = {}

    def move(self, side: str, vector: Tensor) -> None:
        eye = torch.eye(len(vector), dtype=vector.dtype)
        J = self.inverse.get(side, eye)
        if self.stabilizer is not None and J.abs().sum(1).max() > self.stabilizer[0]:
            J = self.stabilizer[1] * J + (1 - self.stabilizer[1]) * eye
        outer = torch.outer(vector, vector)
        if self.rule == "official":
            factor = torch.linalg.inv(self.gamma * J + (1 - self.gamma) * eye) + outer
        else:
            factor = self.gamma * torch.linalg.inv(J) + (1 - self.gamma) * outer
        self.inverse[side] = torch.linalg.inv(factor)

    def apply(self, D: Tensor, rescale: bool) -> Tensor:
        V = D
        if "left" in self.inverse:
            V = self.inverse["left"] @ V
        if "right" in self.inverse:
            V = V @ self.inverse["right"]
        return V * (D.norm() / V.norm()) if rescale else V


class Lamb(torch.optim.Optimizer):
    """LAMB as in its paper: bias-corrected, decay inside the trust ratio, which is not bounded."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.t = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.t += 1
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m, v = self.state[p].setdefault("mv", (torch.zeros_like(p), torch.zeros_like(p)))
                m.mul_(beta1).add_((1 - beta1) * p.grad)
                v.mul_(beta2).add_((1 - beta2) * p.grad**2)
                r = (m / (1 - beta1**self.t)) / ((v / (1 - beta2**self.t)).sqrt() + group["eps"])
                r = r + group["weight_decay"] * p
                ratio = p.norm() / r.norm() if p.norm() > 0 and r.norm() > 0 else 1.0
                p.sub_(group["lr"] * ratio * r)


ADAM = {"betas": (0.85, 0.97), "eps": 1e-6, "weight_decay": 0.1}
BACKENDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, ADAM),
    "lamb": (Lamb, ADAM),
    "sgd": (torch.optim.SGD, {"momentum": 0.8, "nesterov": False, "weight_decay": 0.05}),
    "sgd-nesterov": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05}),
    "sgd-plain": (torch.optim.SGD, {"momentum": 0.0, "weight_decay": 0.0}),
}


# --- scales (oracles 8 to 11) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_identity_factors_leave_the_backend_alone(backend: str) -> None:
    """Without statistics factors stay at the identity, and the gradient passes bit for bit."""
    inner_class, settings = BACKENDS[backend]
    model = make()
    optimizer = build(model, backend=backend.split("-")[0], **settings, update_interval=1)
    optimizer.statistics.hooks.remove()
    other = make()
    actual = train(model, optimizer)
    reference = inner_class(other.parameters(), lr=1e-2, **settings)
    assert deviation(actual, train(other, reference), weights(make())) < 1e-12
    assert not any(state["left_weights"].any() for state in optimizer.matrix_states.values())


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_statistics_are_free_of_loss_scale_and_accumulation(micro_batches: int, scale: float) -> None:
    """g is the gradient of the layer's bias, whatever the framework divides out afterwards."""
    model = make()
    start = weights(model)
    expected = train(model, build(model, update_interval=2))
    other = make()
    optimizer = build(other, update_interval=2)
    optimizer.planner.source.loss_scale = lambda: scale  # type: ignore[attr-defined]
    seen: list[tuple[Tensor, Tensor]] = []
    move = optimizer._factors.move

    def spy(tasks: Any, states: Any, vectors: Any, decay: float) -> Any:
        for task in tasks:
            if len(task.parts) == 2:
                seen.append((vectors[task.key][1].clone(), optimizer.table.parameters[task.parts[1]].grad.clone()))
        return move(tasks, states, vectors, decay)

    optimizer._factors.move = spy  # type: ignore[method-assign]

    def backward(step: int) -> None:
        size = 8 // micro_batches
        for first in range(0, 8, size):
            (loss(other, step, slice(first, first + size)) * scale / micro_batches).backward()
        for parameter in other.parameters():
            parameter.grad /= scale

    actual = train(other, optimizer, backward=backward)
    assert deviation(actual, expected, start) < ROUNDING
    assert len(seen) == 5 * 7
    for g, bias_gradient in seen:
        torch.testing.assert_close(g, bias_gradient, rtol=1e-11, atol=1e-16)


# --- capture (oracles 16 and 17) -------------------------------------------------------------------------------------


def test_a_tied_weight_is_preconditioned_once() -> None:
    """Two modules, one weight: one pair of factors from all uses, one product."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    torch.manual_seed(3)
    model = Tied().double()
    weight = model.a.weight.detach().clone().requires_grad_()
    optimizer = build(model, update_interval=1, backend="sgd", momentum=0.0)
    dense = Dense("official", 0.95, (2.0, 0.9))
    for step in range(5):
        x = torch.randn(7, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        first = x @ weight.T
        first.retain_grad()
        middle = torch.tanh(first)
        second = middle @ weight.T
        second.retain_grad()
        weight.grad = None
        second.square().mean().backward()
        dense.move("right", torch.cat([x, middle.detach()]).mean(0))
        dense.move("left", first.grad.sum(0) + second.grad.sum(0))
        weight.data -= 1e-2 * dense.apply(weight.grad, True)
    assert list(optimizer.matrix_states) == ["a.weight"]
    torch.testing.assert_close(model.a.weight.detach(), weight.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        inverse(optimizer.matrix_states["a.weight"], "left"), dense.inverse["left"], rtol=1e-9, atol=1e-11
    )


def test_a_head_tied_to_the_embedding_takes_the_backend() -> None:
    """Known from the model given to capture(), where names do not say it."""
    model = nn.ModuleDict({"tok": nn.Embedding(9, 6), "body": nn.Linear(6, 6), "reader": nn.Linear(6, 9, bias=False)})
    model["reader"].weight = model["tok"].weight
    optimizer = MKOR(model.parameters())
    optimizer.capture(model)
    rules = {row.name: (row.rule, row.reason) for row in optimizer.explain()}
    assert rules["group0.param0"] == ("fallback", "embedding")
    assert rules["group0.param1"] == ("matrix", "linear")
    assert not model["reader"]._forward_hooks


def test_off_factor_steps_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    original = capture_module._summed

    def counting(*args: Any) -> Tensor:
        counts[-1] += 1
        return original(*args)

    monkeypatch.setattr(capture_module, "_summed", counting)
    model = make()
    optimizer = build(model, update_interval=4)
    hooked: list[bool] = []
    for step in range(10):
        counts.append(0)
        optimizer.zero_grad()
        value = loss(model, step, see=lambda name, x, z: hooked.append(bool(z._backward_hooks)))
        value.backward()
        optimizer.step()
    # Six layers, one sum of inputs and one of output gradients each, at steps 1, 5 and 9.
    assert counts == [12 if step % 4 == 0 else 0 for step in range(10)]
    assert [any(hooked[7 * step : 7 * step + 7]) for step in range(10)] == [step % 4 == 0 for step in range(10)]


def test_a_layer_that_saw_no_token_keeps_its_factors() -> None:
    model = make()
    optimizer = build(model, update_interval=1)
    train(model, optimizer, range(3))
    before = {name: value.clone() for name, value in optimizer.matrix_states["twin.weight"].items()}
    brothers = optimizer.matrix_states["brother.weight"]["left_vectors"].clone()
    optimizer.zero_grad()
    loss(model, 3).backward()
    clear([optimizer.statistics.records["twin.weight"]])
    optimizer.step()
    state = optimizer.matrix_states["twin.weight"]
    assert all(torch.equal(state[side], before[side]) for side in before)
    assert int(state["failures"]) == 0
    assert not torch.equal(optimizer.matrix_states["brother.weight"]["left_vectors"], brothers)


def test_a_weight_without_gradient_counts_as_zero_for_its_bias() -> None:
    """The bias is preconditioned all the same, and so is the layer beside it, of the same batch."""
    model = make()
    optimizer = build(model, update_interval=1, backend="sgd", momentum=0.0)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    loss(model, 2).backward()
    model.twin.weight.grad = None
    before, gradient = weights(model), model.twin.bias.grad.clone()
    optimizer.step()
    assert torch.equal(model.twin.weight, before["twin.weight"])
    D = torch.cat([torch.zeros(8, 8, dtype=torch.float64), gradient[:, None]], dim=1)
    factors = optimizer.matrix_states["twin.weight"]
    V = inverse(factors, "left") @ D @ inverse(factors, "right")
    expected = before["twin.bias"] - 1e-2 * (V * D.norm() / V.norm())[:, -1]
    torch.testing.assert_close(model.twin.bias.detach(), expected, rtol=1e-12, atol=1e-14)
    assert not torch.equal(model.brother.weight, before["brother.weight"])


# --- failures (oracle 20) --------------------------------------------------------------------------------------------


def damage(optimizer: MKOR, name: str, which: str = "sum_input") -> None:
    getattr(optimizer.statistics.records[name], which)[0] = float("nan")


@pytest.mark.parametrize("which", ["sum_input", "sum_output_grad"])
@pytest.mark.parametrize("stabilizer", [(2.0, 0.9), None])
def test_a_nan_degrades_one_matrix(which: str, stabilizer: Any) -> None:
    """twin shares a batched update with brother; nothing but twin differs, bit for bit."""
    results = {}
    for broken in (False, True):
        model = make()
        optimizer = build(model, update_interval=1, stabilizer=stabilizer)
        train(model, optimizer, range(2))
        frozen = {side: inverse(optimizer.matrix_states["twin.weight"], side) for side in ("left", "right")}
        optimizer.zero_grad()
        loss(model, 2).backward()
        if broken:
            damage(optimizer, "twin.weight", which)
        optimizer.step()
        results[broken] = (weights(model), optimizer.matrix_states, frozen)
    (clean, clean_states, _), (dirty, dirty_states, frozen) = results[False], results[True]
    for name, value in clean.items():
        assert dirty[name].isfinite().all()
        assert torch.equal(dirty[name], value) == (not name.startswith("twin.")), name
    for name, state in clean_states.items():
        for key, value in state.items():
            if name != "twin.weight":
                assert torch.equal(dirty_states[name][key], value), (name, key)
    side = "right" if which == "sum_input" else "left"
    assert torch.equal(inverse(dirty_states["twin.weight"], side), frozen[side])
    assert {name: int(state["failures"]) for name, state in dirty_states.items() if state["failures"]} == {
        "twin.weight": 1
    }


def test_failures_in_a_row_stop_the_run() -> None:
    model = make()
    optimizer = build(model, update_interval=2)

    def step(index: int, broken: bool) -> None:
        optimizer.zero_grad()
        loss(model, index).backward()
        if broken:
            damage(optimizer, "twin.weight")
        optimizer.step()

    def failures() -> int:
        return int(optimizer.matrix_states["twin.weight"]["failures"])

    for index, broken in enumerate([True, False, True, False, False]):
        step(index, broken)
    assert failures() == 0, "a good factor step ends the series"
    step(5, False)
    for index in (6, 8, 10):
        step(index, True)
        step(index + 1, False)
    assert failures() == 3
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"factors of twin\.weight were not finite 3 factor steps in a row.*float32"):
        step(12, False)
    assert_same(weights(model), before)


def test_a_damaged_factor_is_reset() -> None:
    model = make()
    optimizer = build(model, update_interval=1)
    train(model, optimizer, range(3))
    optimizer.matrix_states["twin.weight"]["left_vectors"][0, 0] = float("nan")
    after = train(model, optimizer, range(3, 5))
    assert all(value.isfinite().all() for value in after.values())
    assert all(value.isfinite().all() for value in optimizer.matrix_states["twin.weight"].values())


def test_half_precision_factors_stay_close() -> None:
    """bf16 storage, the default, against fp64."""
    model, other = make(), make()
    expected = train(model, build(model, update_interval=1, backend="sgd"))
    optimizer = build(other, update_interval=1, backend="sgd", factor_dtype="bfloat16")
    actual = train(other, optimizer)
    assert {state["left_vectors"].dtype for state in optimizer.matrix_states.values()} == {torch.bfloat16}
    assert 1e-6 < deviation(actual, expected, weights(make())) < 0.1


# --- MKOR-H (oracle 19) ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["adamw", "lamb", "sgd"])
def test_after_the_switch_it_is_the_backend(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """Bit for bit from the states of that moment; hooks and factors are gone, which the log says once."""
    settings = BACKENDS[backend][1]
    model = make()
    optimizer = build(
        model,
        backend=backend,
        update_interval=2,
        hybrid=True,
        hybrid_min_steps=3,
        hybrid_patience=2,
        hybrid_ema=0.0,
        **settings,
    )
    losses = [4.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    switched = []
    for step, value in enumerate(losses):
        if step == 5:
            snapshot = {"model": weights(model), "state": optimizer.state_dict()}
            state = {
                name: {k: v.clone() for k, v in optimizer.state[p].items()} for name, p in model.named_parameters()
            }
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.record_loss(value)
        optimizer.step()
        switched.append(optimizer.switched)
    assert switched == [False] * 4 + [True] * 4
    assert caplog.text.count(f"continuing with {backend} alone") == 1
    assert optimizer.matrix_states == {} and snapshot["state"]["matrix_states"] == {}
    assert not any(module._forward_hooks for module in model.modules())
    assert optimizer.state_bytes()["matrix"] == 0
    # Factors that have always been the identity: a run of the backend alone, given the states of the switch.
    other = make()
    plain = build(other, backend=backend, update_interval=100, **settings)
    plain.statistics.release()
    for name, parameter in other.named_parameters():
        parameter.data.copy_(snapshot["model"][name])
        plain.state[parameter].update({key: value.clone() for key, value in state[name].items()})
    plain.followed.accept(plain.state)  # as if they had been loaded, with factors that are the identity
    train(other, plain, range(5, len(losses)))
    assert_same(weights(model), weights(other))


def test_hybrid_without_losses_never_switches() -> None:
    model, other = make(), make()
    expected = train(model, build(model, update_interval=2))
    optimizer = build(other, update_interval=2, hybrid=True, hybrid_min_steps=2, hybrid_patience=1)
    assert_same(train(other, optimizer), expected)
    assert not optimizer.switched


def test_hybrid_hears_of_losses_from_closures() -> None:
    model = make()
    optimizer = build(model, update_interval=2, hybrid=True, hybrid_min_steps=2, hybrid_patience=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss(model, 0).backward()
        return torch.ones(())

    for _ in range(4):
        optimizer.step(closure)
    assert optimizer.switched


def test_hybrid_without_losses_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    train(model, build(model, update_interval=2, hybrid=True, hybrid_min_steps=3), range(9))
    told = [record.message for record in caplog.records if "no loss was reported in 3 steps" in record.message]
    assert len(told) == 1 and "call optimizer.record_loss(loss) after each forward pass" in told[0]


def test_hybrid_takes_the_mean_over_micro_batches() -> None:
    model = make()
    optimizer = build(model, hybrid=True)
    seen: list[float] = []
    optimizer.switch.detector.update = lambda value: bool(seen.append(value))  # type: ignore[method-assign]
    for values in ((1.0, 3.0), (torch.tensor(4.0), torch.tensor([5.0]), 9)):
        optimizer.zero_grad()
        loss(model, 0).backward()
        for value in values:
            optimizer.record_loss(value)
        optimizer.step()
    assert seen == [2.0, 6.0]


def test_a_failed_plan_is_not_kept() -> None:
    """A step that ends in a plan's error must not be followed by one that trains without the matrix rule."""
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = MKOR([weight], lr=0.1)
    for _ in range(2):
        weight.grad = torch.ones(3, 2)
        with pytest.raises(OptionError, match="capture"):
            optimizer.step()
    assert torch.equal(weight, torch.ones(3, 2))


def test_losses_recorded_before_zero_grad_count() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = MKOR(model.parameters(), hybrid=True)
    optimizer.capture(model)
    for _ in range(5):
        loss = model(torch.randn(4, 3)).square().mean()
        optimizer.record_loss(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert optimizer.switch.detector.state_dict()["step"] == 5


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_unscaled_gradients_of_a_scaled_loss(scale: float) -> None:
    """With the scale told, factors and weights are those of the unscaled loss (a power of two: bit for bit)."""

    def run(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = MKOR(model.parameters(), update_interval=1, factor_dtype="float32")
        optimizer.capture(model, loss_scale=lambda: factor)
        for _ in range(4):
            optimizer.zero_grad()
            (model(torch.randn(4, 3)).square().mean() * factor).backward()
            for parameter in model.parameters():
                parameter.grad /= factor
            optimizer.step()
        return model.weight.detach(), next(iter(optimizer.matrix_states.values()))["left_vectors"]

    for plain, scaled in zip(run(1.0), run(scale), strict=True):
        assert torch.equal(plain, scaled)


def test_micro_batches_add_up_without_a_word_of_a_window() -> None:
    model, other = make(), make()
    expected = train(model, build(model, update_interval=1), backward=lambda step: halves(model, step))
    optimizer = build(other, update_interval=1)
    for step in range(STEPS):
        halves(other, step)
        optimizer.step()
        other.zero_grad()
    assert_same(weights(other), expected)


def halves(model: nn.Module, step: int) -> None:
    for part in (slice(0, 4), slice(4, 8)):
        (loss(model, step, part) / 2).backward()
