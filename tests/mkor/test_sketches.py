"""Rule "sketch": factors follow combinations of a gradient's rows and columns, of which nothing need be captured."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from counted_launches import Launches
from ranks import run_ranks
from simulated import Conv1D
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise import MKOR, annotate
from rankwise.comm.exchange import MatrixExchange
from rankwise.comm.owner_plan import MatrixTask
from rankwise.mkor.layer_signature import LayerSignature
from rankwise.mkor.sketches import Sketches, sign_table
from rankwise.options.validation import OptionError
from rankwise.routing.roles import Role, assign_role

F64 = {"factor_dtype": "float64", "weight_decay": 0.0}
STEPS = 6
Factors = dict[str, dict[str, Tensor]]


def network(seed: int = 0) -> nn.Sequential:
    """Matrices of unequal sides, two of one shape, a transposed one, biases."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), Conv1D(3, 8)
    ).double()


def gradients(model: nn.Module, step: int, rows: slice = slice(None)) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    (model(x[rows]) - y[rows]).square().mean().backward()


def optimizer_of(model: nn.Module, **options: Any) -> MKOR:
    annotate(model)
    return MKOR(model.named_parameters(), **{"lr": 1e-2, "rule": "sketch", **F64, **options})


def train(model: nn.Module, optimizer: Any, steps: Any = range(STEPS)) -> list[Tensor]:
    for step in steps:
        optimizer.zero_grad()
        gradients(model, step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


# --- against dense linear algebra ------------------------------------------------------------------------------------


def signs(side: str, step: int, length: int) -> Tensor:
    """Written out once more: a bit of a fixed text's digest, from a place that side and step choose."""
    drawn = hashlib.shake_256(b"signs").digest((2**16 + 64) // 8)
    start = int.from_bytes(hashlib.blake2b(f"{side} {step}".encode(), digest_size=8).digest(), "big") % 2**16
    bits = [drawn[place // 8] >> place % 8 & 1 for place in range(start, start + length)]
    return torch.tensor([2.0 * bit - 1.0 for bit in bits], dtype=torch.float64)


def dense(inverse: Tensor, vector: Tensor, decay: float, gain: float) -> Tensor:
    """By inverting what MKOR never inverts."""
    eye = torch.eye(len(vector), dtype=vector.dtype)
    vector = vector / vector.norm() * math.sqrt(gain * len(vector))
    return torch.linalg.inv(torch.linalg.inv(decay * inverse + (1 - decay) * eye) + torch.outer(vector, vector))


class Dense:
    """The rule on the matrices of a model, with AdamW behind it."""

    def __init__(self, model: nn.Module, interval: int = 1, decay: float = 0.998, gain: float = 0.04) -> None:
        self.model, self.interval, self.decay, self.gain = model, interval, decay, gain
        self.inner = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        self.factors: Factors = {}
        self.count = 0

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        for module_name, module in self.model.named_modules():
            if isinstance(module, nn.Linear | Conv1D):
                self._precondition(f"{module_name}.weight", module.weight, isinstance(module, Conv1D))
        self.inner.step()
        self.count += 1

    def kept_at(self, update: int) -> float:
        """Every so many updates, as much as the published decay lets go of."""
        every = {0.998: 26, 0.995: 10, 0.99: 5, 0.9: 1}[self.decay]
        return self.decay**every if update % every == 0 else 1.0

    def _precondition(self, key: str, weight: Tensor, transposed: bool) -> None:
        lies = weight.grad
        assert lies is not None
        by_row = lies @ signs("columns", self.count + 1, lies.shape[1])
        by_column = lies.T @ signs("rows", self.count + 1, lies.shape[0])
        D, out, inp = (lies.T, by_column, by_row) if transposed else (lies, by_row, by_column)
        eyes = {"left": torch.eye(len(out)).double(), "right": torch.eye(len(inp)).double()}
        state = self.factors.setdefault(key, eyes)
        if self.count % self.interval == 0:
            decay = self.kept_at(self.count // self.interval + 1)
            state["left"] = dense(state["left"], out, decay, self.gain)
            state["right"] = dense(state["right"], inp, decay, self.gain)
        V = state["left"] @ D @ state["right"]
        V = V * (D.norm() / V.norm())
        weight.grad = (V.T if transposed else V).contiguous()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"update_interval": 3},
        {"factor_decay": 0.9, "sketch_gain": 2.0},
        {"factor_decay": 0.99, "update_interval": 2, "sketch_gain": 1.0},
    ],
    ids=str,
)
def test_follows_dense_linear_algebra(options: dict[str, Any]) -> None:
    model, other = network(), network()
    optimizer = optimizer_of(model, **options)
    names = {"update_interval": "interval", "factor_decay": "decay", "sketch_gain": "gain"}
    reference = Dense(other, **{names[key]: value for key, value in options.items()})
    steps = range(28)  # beyond the first time that factors forget
    for ours, theirs in zip(train(model, optimizer, steps), train(other, reference, steps), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
    assert optimizer.matrix_states.everything().keys() == reference.factors.keys()
    for key, factors in reference.factors.items():
        for side, inverse in factors.items():
            torch.testing.assert_close(optimizer.matrix_states[key][side], inverse, rtol=1e-7, atol=1e-9)
            assert float((inverse - torch.eye(len(inverse))).abs().max()) > 0.05


def test_factors_follow_the_second_moments_of_gradients() -> None:
    """Over many steps the mean of what they take in is D D^T and D^T D: the signs are as good as independent."""
    torch.manual_seed(0)
    D = torch.randn(6, 9, dtype=torch.float64) * torch.linspace(0.2, 2.0, 9)
    task = _task("w", 6, 9)
    sums = [torch.zeros(6, 6).double(), torch.zeros(9, 9).double()]
    table, steps = sign_table(9, D.device, D.dtype), 4000
    for step in range(1, steps + 1):
        inputs, outputs, seen = Sketches({"w": step}, table, 0.95, 1).of([task], [D.flatten()])["w"]
        assert seen.tolist() == [1.0]
        sums[0] += torch.outer(outputs, outputs) / steps
        sums[1] += torch.outer(inputs, inputs) / steps
    for found, exact in zip(sums, (D @ D.T, D.T @ D), strict=True):
        # Of independent signs the error would be 0.02 to 0.03.
        assert float((found - exact).norm() / exact.norm()) < 0.06


def test_signs_are_the_same_for_ever() -> None:
    """A run that is resumed with another version of torch, of Python or of this project goes on alike."""
    table = sign_table(1000, torch.device("cpu"), torch.float32)
    bits = bytes((table > 0).to(torch.uint8).tolist())
    assert table.abs().eq(1).all() and len(table) == 2**16 + 1000 and abs(float(table.mean())) < 0.01
    assert hashlib.sha256(bits).hexdigest()[:16] == "7e42c43e6de60112"


def test_matrices_behind_one_another_are_combined_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """On accelerators: what comes out is what each gives alone, in any order, at any distance, at other steps."""
    shape, table = (4, 3), sign_table(4, torch.device("cpu"), torch.float64)
    buffer = torch.randn(200, dtype=torch.float64)
    starts = [24, 0, 12, 36, 60, 80, 100, 121, 133]
    tasks = [_task(f"w{place}", *shape) for place in range(len(starts) + 1)]
    gradients = [*(buffer[start : start + 12] for start in starts), torch.randn(12, dtype=torch.float64)]
    sketches = Sketches({task.key: 5 if task.key == "w8" else 2 for task in tasks}, table, 0.95, 1)
    alone = sketches.of(tasks, gradients)
    monkeypatch.setattr(MatrixExchange, "one_by_one_on", ())
    with Launches([]) as launches:
        together = sketches.of(tasks, gradients)
    # [0, 12, 24, 36], [60, 80, 100], 121, 133 of another step, and another tensor.
    assert [launches.found.count(name) for name in ("bmm", "mv")] == [4, 6]
    for key, vectors in alone.items():
        for one, other in zip(vectors, together[key], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


def _task(key: str, outputs: int, inputs: int) -> MatrixTask:
    return MatrixTask(key, (key,), LayerSignature(outputs, inputs, False, False, 0), 1.0)


# --- blocks ----------------------------------------------------------------------------------------------------------


def test_blocks_of_a_fused_weight_have_scales_of_their_own() -> None:
    """Gradients of values are far larger than those of queries; either's factor takes in as much."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12, bias=False)).double()
    parts = {"0.weight": {"q": 4, "k": 4, "v": 4}}
    moved = {}
    for scale in (1.0, 1e3):
        other = copy.deepcopy(model)
        optimizer = optimizer_of(other, blocks=parts)
        weight = other[0].weight
        weight.grad = torch.randn(12, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        weight.grad[8:] *= scale
        optimizer.step()
        (state,) = optimizer.matrix_states.everything().values()
        moved[scale] = {side: value for side, value in state.items() if side.startswith("left")}
    assert len(moved[1.0]) == 3
    for side, inverse in moved[1.0].items():
        torch.testing.assert_close(moved[1e3][side], inverse, rtol=1e-9, atol=1e-12)


# --- gradients that say nothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_gradients_that_say_nothing_leave_factors_as_they_are(value: float) -> None:
    model = network()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    before = copy.deepcopy({key: dict(state) for key, state in optimizer.matrix_states.everything().items()})
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    for parameter, old in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(old)
    for key, state in optimizer.matrix_states.everything().items():
        for side in ("left", "right"):
            assert torch.equal(state[side], before[key][side])
    assert optimizer.read_health()["factors_skipped"] == (0 if value == 0.0 else 4)


def test_a_scale_of_all_gradients_says_nothing() -> None:
    """Loss scales, clipping and accumulation are not seen by the factors."""
    found: list[Factors] = []
    for scale in (1.0, 2.0**20):
        model = network()
        optimizer = optimizer_of(model, lr=0.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            gradients(model, step)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= scale
            optimizer.step()
        found.append({key: dict(state) for key, state in optimizer.matrix_states.everything().items()})
    for key, state in found[0].items():
        for side, value in state.items():
            torch.testing.assert_close(found[1][key][side], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e18, 1e30])
def test_no_scale_is_too_small_or_too_large(scale: float) -> None:
    """Squares of such numbers are 0 or infinite in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40, bias=False))
    optimizer = optimizer_of(model, lr=0.0, factor_dtype="float32")
    for _ in range(20):
        model[0].weight.grad = torch.randn(40, 30) * scale
        optimizer.step()
    (state,) = optimizer.matrix_states.everything().values()
    assert 0.3 < float(state["left"].diagonal().mean()) < 0.9 and 0.3 < float(state["right"].diagonal().mean()) < 0.9


def test_factors_in_bfloat16_forget() -> None:
    """Rows without a gradient from some step on: two thousandths of what is left would be rounded away."""
    found = {}
    for dtype in ("bfloat16", "float32"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 16, bias=False))
        optimizer = optimizer_of(model, factor_dtype=dtype, lr=0.0)
        for step in range(1000):
            model[0].weight.grad = torch.randn(16, 24)
            model[0].weight.grad[8:] *= step < 200
            optimizer.step()
        (state,) = optimizer.matrix_states.everything().values()
        found[dtype] = float(state["left"].diagonal()[8:].float().mean())
    assert found["float32"] > 0.7 and abs(found["bfloat16"] - found["float32"]) < 0.05, found


@pytest.mark.parametrize(("dtype", "beyond"), [("bfloat16", 0.1), ("float32", 1e-5)])
def test_factors_stay_between_nothing_and_the_identity(dtype: str, beyond: float) -> None:
    """So there is no stabilizer; rounding takes them a little beyond, where gradients repeat themselves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64, bias=False))
    optimizer = optimizer_of(model, factor_dtype=dtype, lr=0.0)
    base = torch.randn(64, 3) @ torch.randn(3, 96)
    for _ in range(300):
        model[0].weight.grad = base + 0.01 * torch.randn(64, 96)
        optimizer.step()
    (state,) = optimizer.matrix_states.everything().values()
    for side in ("left", "right"):
        inverse = state[side].double()
        values = torch.linalg.eigvalsh(inverse)
        assert torch.equal(inverse, inverse.T) and 0 < float(values[0]) and float(values[-1]) < 1 + beyond
        assert float(values[0]) < 0.05 and float(values[4]) > 0.2  # what repeats itself is damped, and that alone


# --- nothing is captured or sent -------------------------------------------------------------------------------------


def _hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_a_capture_hooks_nothing_and_changes_nothing() -> None:
    model, other = network(), network()
    plain, captured = optimizer_of(model), MKOR(other.named_parameters(), lr=1e-2, rule="sketch", **F64)
    captured.capture(other)  # which tells it what is a linear weight, and which way it lies
    assert not plain.needs_capture and not captured.needs_capture and _hooks(other) == 0
    for ours, theirs in zip(train(model, plain), train(other, captured), strict=True):
        assert torch.equal(ours, theirs)


def test_weights_that_lie_the_other_way_start_anew() -> None:
    """Only a capture tells that a square weight is a Conv1D's: its factors would change their places."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), Conv1D(6, 6), nn.Tanh(), Conv1D(3, 6)).double()
    optimizer = MKOR(model.named_parameters(), lr=1e-2, rule="sketch", **F64)
    x = torch.randn(12, 5, dtype=torch.float64)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    kept = optimizer.matrix_states["0.weight"]["left"].clone()
    optimizer.capture(model)
    assert sorted(optimizer.matrix_states.everything()) == ["0.weight"]
    assert torch.equal(optimizer.matrix_states["0.weight"]["left"], kept)
    step()
    assert sorted(optimizer.matrix_states.everything()) == ["0.weight", "2.weight", "4.weight"]


def test_works_without_modules() -> None:
    """Weights that no module is called for: statistics would see nothing of them."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 4))
    optimizer = MKOR([("attention.weight", weight)], lr=1e-2, rule="sketch")
    for _ in range(3):
        weight.grad = torch.randn(6, 4)
        optimizer.step()
    assert optimizer.read_health()["factors_updated"] == 3


def test_experts_have_factors() -> None:
    """Their inputs are padded, which a mean of them would see; a gradient is the sum over their tokens."""
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4, bias=False)]), "plain": nn.Linear(4, 4)})
    annotate(model)
    assign_role(model["experts"].parameters(), Role.EXPERT)
    rules = {}
    for rule in ("official", "sketch"):
        optimizer = MKOR(model.named_parameters(), rule=rule)
        rules[rule] = optimizer.table.routes["experts.0.weight"].rule
    assert rules == {"official": "fallback", "sketch": "matrix"}


@pytest.mark.parametrize(
    "how", [{}, {"backend": "lamb"}, {"state_dtype": "int8"}, {"blocks": {"e*": {"a": 5, "b": 4}}}]
)
def test_a_stack_of_experts_equals_its_matrices(how: dict[str, Any]) -> None:
    stack = torch.randn(3, 9, 8, generator=torch.Generator().manual_seed(1))
    together = [("experts", nn.Parameter(stack.clone()))]
    apart = [(f"experts.{index}", nn.Parameter(matrix.clone())) for index, matrix in enumerate(stack)]
    optimizers = [MKOR(weights, lr=1e-2, rule="sketch", update_interval=2, **how) for weights in (together, apart)]
    for step in range(5):
        together[0][1].grad = torch.randn(3, 9, 8, generator=torch.Generator().manual_seed(step))
        for (_, weight), gradient in zip(apart, together[0][1].grad, strict=True):
            weight.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(together[0][1], torch.stack([weight for _, weight in apart]))
    states = [list(optimizer.matrix_states.everything().values()) for optimizer in optimizers]
    for one, other in zip(*states, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert all(row.reason == "stack of matrices" for row in optimizers[0].explain())


def _counted(rank: int, world: int, rule: str, wrapped: bool) -> tuple[list[Tensor], dict[str, float], list[str]]:
    model = network()
    if wrapped:
        model = DistributedDataParallel(model)  # type: ignore[assignment]
    annotate(model)
    optimizer = MKOR(model.named_parameters(), lr=1e-2, rule=rule, update_interval=2, **F64)
    optimizer.capture(model)
    for step in range(4):
        optimizer.zero_grad()
        gradients(model, step, slice(rank * 12 // world, (rank + 1) * 12 // world))
        optimizer.step()
    owned = sorted(optimizer.matrix_states.everything())
    return [parameter.detach() for parameter in model.parameters()], optimizer.read_health(), owned


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_divide_the_factors_and_send_no_vectors(world: int) -> None:
    alone, _, keys = _counted(0, 1, "sketch", False)
    ranks = run_ranks(world, _counted, "sketch", True)
    assert sorted(key.removeprefix("module.") for _, _, owned in ranks for key in owned) == keys
    for weights, _, _ in ranks:
        for ours, theirs in zip(weights, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    official = run_ranks(world, _counted, "official", True)
    assert ranks[0][1]["collectives"] < official[0][1]["collectives"]


# --- resuming --------------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_same_bits() -> None:
    model = network()
    optimizer = optimizer_of(model, update_interval=2)
    train(model, optimizer, range(3))
    other = network(1)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = optimizer_of(other, update_interval=2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for ours, theirs in zip(train(model, optimizer, range(3, 8)), train(other, resumed, range(3, 8)), strict=True):
        assert torch.equal(ours, theirs)


# --- options ---------------------------------------------------------------------------------------------------------


def test_defaults_by_rule() -> None:
    found = {rule: optimizer_of(network(), rule=rule).options for rule in ("official", "ema", "sketch")}
    assert {rule: (o.interval, o.decay) for rule, o in found.items()} == {
        "official": (10, 0.95),
        "ema": (10, 0.95),
        "sketch": (1, 0.998),
    }
    given = optimizer_of(network(), update_interval=10, factor_decay=0.95).options
    assert (given.interval, given.decay) == (10, 0.95)


def _refused() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"output_gain": 2.0}, "output_gain=2.0 is invalid: rule='sketch' does not read it"
    yield {"stabilizer": None}, "stabilizer=None is invalid: rule='sketch' does not read it"
    yield {"stabilizer_norm": "max_entry"}, "stabilizer_norm='max_entry' is invalid: rule='sketch'"
    yield {"rule": "official", "sketch_gain": 0.2}, "sketch_gain=0.2 is invalid: rule='official' does not read it"
    yield {"sketch_gain": 0.0}, "sketch_gain=0.0 is invalid: it must be > 0"


@pytest.mark.parametrize(("options", "words"), _refused(), ids=str)
def test_what_the_rule_does_not_read_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words.replace("(", r"\(")):
        optimizer_of(network(), **options)


def test_mkor_h_hears_of_losses_without_a_capture() -> None:
    model = network()
    optimizer = optimizer_of(model, hybrid=True, hybrid_min_steps=3, hybrid_patience=1, hybrid_beta=1e3)
    for step in range(5):
        optimizer.zero_grad()
        gradients(model, step)
        optimizer.record_loss(1.0 / (step + 1))
        optimizer.step()
    assert optimizer.switched and not optimizer.matrix_states.everything()
