"""The official rule's windows of vectors against its dense form in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factor_windows import dense, fresh, inverse
from preconditioning import BF16, generator
from test_mkor import build, make, train
from torch import Tensor

from rankwise import MKOR
from rankwise.comm.owner_plan import MatrixTask
from rankwise.layout.fused_blocks import Block
from rankwise.mkor import vector_windows as module
from rankwise.mkor.layer_signature import LayerSignature
from rankwise.mkor.rule import factor_norm, factor_step, stabilize
from rankwise.mkor.vector_windows import Window, multiply_, names_of, resized, update_windows_, window_length
from rankwise.options.validation import OptionError

GAMMA = 0.95
F64 = torch.float64


def draws(steps: int, count: int, side: int, scale: float, seed: int = 0) -> Tensor:
    """Vectors with a common part, of about this squared norm."""
    noise = torch.randn(steps, count, side, generator=generator(seed), dtype=F64)
    shared = torch.randn(count, side, generator=generator(seed + 1), dtype=F64)
    return (noise + shared) * (scale / side / 2) ** 0.5


def test_the_length_is_where_weights_fall_below_the_rounding() -> None:
    assert window_length(0.95, BF16) == 128
    for dtype in (BF16, torch.float16, torch.float32, F64):
        for decay in (0.5, 0.9, 0.95, 0.99):
            length, unit = window_length(decay, dtype), torch.finfo(dtype).eps / 4
            assert length % 16 == 0 and decay**length <= unit < decay ** (length - 16)


@pytest.mark.parametrize("norm", ["row_sum", "max_entry"])
@pytest.mark.parametrize("stabilizer", [(1.02, 0.9), (2.0, 0.5), None])
def test_it_is_the_rule_while_nothing_is_given_up(stabilizer: Any, norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at once, one of which misses every other step; J's rows a few at a time; the stabilizer fires, and not."""
    monkeypatch.setitem(module._TILE, "cpu", 3 * 11 * 4)
    found, J = fresh(3, 48, 11, F64), torch.eye(11, dtype=F64).expand(3, 11, 11).clone()
    fired = 0
    for step, vectors in enumerate(draws(40, 3, 11, 3.0)):
        seen = torch.tensor([True, step % 2 == 0, True])
        fired += 0 if stabilizer is None else int((factor_norm(J, norm) > stabilizer[0]).sum())
        stable = J if stabilizer is None else stabilize(J, *stabilizer, norm)
        moved = factor_step(stable, vectors, GAMMA, "official", None)
        J = torch.where(seen[:, None, None], moved, J)
        ok = update_windows_(found, vectors, decay=GAMMA, stabilizer=stabilizer, norm=norm, seen=seen)
        assert torch.equal(ok, seen)
    assert fired > 10 or stabilizer != (1.02, 0.9) or norm != "row_sum"
    assert (torch.stack([dense(window) for window in found]) - J).abs().max() < 1e-12


@pytest.mark.parametrize("scale", [0.05, 1.0, 30.0, 1000.0])
def test_errors_of_a_window_that_forgets(scale: float) -> None:
    """Of J and of J G beside dense bfloat16, after 400 updates: the bounds of the design's table."""
    side, length = 192, window_length(GAMMA, BF16)
    exact, stored = torch.eye(side, dtype=F64), torch.eye(side).to(BF16)
    found, narrow = fresh(1, length, side), fresh(1, length, side, BF16)
    for vector in draws(400, 1, side, scale):
        exact = factor_step(exact, vector[0], GAMMA, "official", None)
        stored = factor_step(stored.float(), vector[0].float(), GAMMA, "official", None).to(BF16)
        for windows in (found, narrow):
            assert update_windows_(windows, vector.float(), decay=GAMMA, stabilizer=None)
    G = torch.randn(side, 64, generator=generator(5), dtype=F64)

    def errors(J: Tensor) -> tuple[float, float]:
        return float((J - exact).norm() / exact.norm()), float(((J - exact) @ G).norm() / (exact @ G).norm())

    of_J, of_product = errors(dense(found[0]))
    assert of_J < 1.4e-3 and of_product < 1.4e-3
    of_narrow, of_dense = errors(dense(narrow[0])), errors(stored.double())
    assert of_narrow[0] <= of_dense[0] and of_narrow[1] <= of_dense[1]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_what_is_not_finite_stays_where_it_is(dtype: torch.dtype) -> None:
    """A bad vector leaves the stabilized factor, a damaged window begins anew; their neighbours move as always."""
    found = fresh(4, 16, 20, dtype)
    for vectors in draws(5, 4, 20, 2.0):
        update_windows_(found, vectors.float(), decay=0.9, stabilizer=None)
    found[2].vectors[0, 4] = torch.nan
    before = [Window(*(part.clone() for part in window)) for window in found]
    (vectors,) = draws(1, 4, 20, 2.0, seed=9)
    vectors[0, 3], vectors[3, 0] = torch.nan, torch.inf
    ok = update_windows_(found, vectors.float(), decay=0.9, stabilizer=(1e-3, 0.75))
    assert ok.tolist() == [False, True, True, False]
    for place in (0, 3):
        assert torch.equal(found[place].vectors, before[place].vectors)
        assert torch.equal(found[place].weights, 0.75 * before[place].weights)
    assert int((found[1].vectors != before[1].vectors).any(1).sum()) == 1
    assert found[2].weights.count_nonzero() == 1 and found[2].vectors.isfinite().all()
    reset = factor_step(torch.eye(20, dtype=F64), vectors[2], 0.9, "official", None)
    torch.testing.assert_close(dense(found[2]), reset, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-2)


def test_without_a_stabilizer_a_damaged_window_stays() -> None:
    found = fresh(1, 16, 8)
    found[0].vectors[0, 0], found[0].weights[0] = torch.inf, 1.0
    before = found[0].vectors.clone()
    ok = update_windows_(found, torch.ones(1, 8), decay=0.9, stabilizer=None)
    assert not ok.item() and torch.equal(found[0].vectors, before)


def test_many_are_moved_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    together, apart = fresh(5, 16, 7), fresh(5, 16, 7)
    monkeypatch.setitem(module._AT_ONCE, "cpu", 5 * 16 * 7)
    for vectors in draws(20, 5, 7, 2.0):
        update_windows_(together, vectors.float(), decay=0.9)
    monkeypatch.setitem(module._AT_ONCE, "cpu", 2 * 16 * 7)
    for vectors in draws(20, 5, 7, 2.0):
        assert update_windows_(apart, vectors.float(), decay=0.9).all()
    for pair in zip(together, apart, strict=True):
        torch.testing.assert_close(pair[0].vectors, pair[1].vectors, rtol=1e-5, atol=1e-6)


def _task(key: str, outputs: int, inputs: int, bias: bool = False, parts: int = 0) -> MatrixTask:
    blocks = tuple(Block(name, False, 8 * place, 8, 8) for place, name in enumerate("qkv"[:parts]))
    return MatrixTask(key, (key,), LayerSignature(outputs, inputs, bias, False, 0, blocks, 32), 1.0)


def test_sides_of_one_length_move_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers with a bias or blocks or neither, as each for itself; one has seen no token, one a bad vector."""
    monkeypatch.setattr(module, "_AT_ONCE", {})
    tasks = [_task("a", 8, 8), _task("b", 8, 8), _task("bias", 8, 7, True), _task("fused", 24, 8, parts=3)]
    tasks += [_task("longer", 32, 8, parts=3), _task("other", 8, 20)]
    tasks += [_task("part", 24, 20, parts=1), _task("longer part", 32, 20, parts=1)]
    factors = MKOR([("w", torch.nn.Parameter(torch.zeros(8, 8)))], output_gain=3.0).spec.factors

    def fresh_states() -> list[Any]:
        states: list[Any] = []
        for task in tasks:
            own = task.signature
            sides = {"right": own.inputs + own.has_bias, **own.lefts}
            windows = {side: fresh(1, 32, length, F64)[0] for side, length in sides.items()}
            state = {name: part for side in windows for name, part in zip(names_of(side), windows[side], strict=True)}
            states.append({**state, "failures": torch.zeros((), dtype=torch.int64)})
        return states

    together, apart = fresh_states(), fresh_states()
    for step in range(6):
        draw = generator(step)
        vectors: Any = {}
        for task in tasks:
            sides = (task.signature.inputs, task.signature.outputs)
            made = [torch.randn(side, generator=draw, dtype=F64) for side in sides]
            vectors[task.key] = (*made, torch.full((1,), float(task.key != "b" or step == 2), dtype=F64))
        if step == 3:
            vectors["fused"][1][9] = torch.nan
        counts = factors.move(tasks, together, vectors, GAMMA)
        pairs = [factors.move([task], [state], vectors, GAMMA) for task, state in zip(tasks, apart, strict=True)]
        assert [int(count) for count in counts] == [sum(int(pair[place]) for pair in pairs) for place in (0, 1)]
        assert int(counts[1]) == (step == 3) and int(counts[0]) == len(tasks) - (step != 2) - (step == 3)
    for found, expected in zip(together, apart, strict=True):
        assert all(found[name].any() for name in found if name != "failures")
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("sides", ["both", "left", "right"])
def test_products(sides: str, stacked: bool) -> None:
    pairs = []
    for side, seed in ((12, 1), (9, 2)):
        windows = fresh(3, 16, side, F64)
        for vectors in draws(10, 3, side, 2.0, seed):
            update_windows_(windows, vectors, decay=0.9)
        pairs.append(windows)
    G = torch.randn(3, 12, 9, generator=generator(3), dtype=F64)
    expected = G.clone()
    expected = torch.stack([dense(window) for window in pairs[0]]) @ expected if sides != "right" else expected
    expected = expected @ torch.stack([dense(window) for window in pairs[1]]) if sides != "left" else expected
    left, right = (None if sides == "right" else pairs[0]), (None if sides == "left" else pairs[1])
    if stacked:
        found = multiply_(G.clone(), *(None if side is None else Window.of(side) for side in (left, right)))
    else:
        found = torch.stack(
            [
                multiply_(G[place].clone(), *(None if side is None else side[place] for side in (left, right)))
                for place in range(3)
            ]
        )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("along", [False, True])
@pytest.mark.parametrize("scale", [0.05, 1.0, 30.0, 1000.0])
def test_bfloat16_throughout_is_no_worse_than_dense_bfloat16(scale: float, along: bool) -> None:
    """Both sides, rescaled, on a gradient of noise or one that lies along the vectors; beside float64."""
    sides, exact, stored, found = (96, 160), [], [], []
    shared = []
    for place, side in enumerate(sides):
        J, narrow, window = torch.eye(side, dtype=F64), torch.eye(side).to(BF16), fresh(1, 128, side, BF16)
        vectors = draws(200, 1, side, scale, 10 * place)
        for vector in vectors:
            J = factor_step(J, vector[0], GAMMA, "official", None)
            narrow = factor_step(narrow.float(), vector[0].float(), GAMMA, "official", None).to(BF16)
            update_windows_(window, vector.float(), decay=GAMMA, stabilizer=None, product=BF16)
        exact.append(J), stored.append(narrow), found.extend(window), shared.append(vectors.mean((0, 1)))
    G = torch.randn(*sides, generator=generator(4), dtype=F64)
    if along:
        direction = torch.outer(*shared)
        G = 0.1 * G + 5.0 * direction / direction.norm() * G.numel() ** 0.5
    wanted = exact[0] @ G @ exact[1]

    def error(V: Tensor) -> float:
        return float((V.double() / V.double().norm() - wanted / wanted.norm()).norm())

    of_dense = error((stored[0] @ G.to(BF16)) @ stored[1])
    of_windows = error(multiply_(G.to(BF16), *found))
    assert of_windows <= 1.1 * of_dense
    assert error(multiply_(G.float(), *found)) < 5e-3


@pytest.mark.parametrize("length", [8, 40])
def test_another_length_keeps_what_weighs_most(length: int) -> None:
    (window,) = fresh(1, 24, 6, F64)
    for vectors in draws(24, 1, 6, 2.0):
        update_windows_([window], vectors, decay=0.8)
    other = resized(window, length)
    assert other.vectors.shape == (length, 6) and other.weights.shape == (length,)
    assert (dense(other) - dense(window)).abs().max() < (1e-12 if length == 40 else 0.8**8)
    assert update_windows_([other], torch.ones(1, 6, dtype=F64), decay=0.8) and float(other.weights.max()) == 1.0


# --- checkpoints -----------------------------------------------------------------------------------------------------


def trained(steps: int = 3, **options: Any) -> tuple[Any, MKOR]:
    model = make()
    optimizer = build(model, update_interval=1, **options)
    train(model, optimizer, range(steps))
    return model, optimizer


@pytest.mark.parametrize(
    "options", [{"factor_decay": 0.8}, {"factor_decay": 0.97}, {"factor_dtype": "bfloat16"}], ids=str
)
def test_windows_continue_under_other_options(options: dict[str, Any]) -> None:
    _, before = trained()
    model, after = trained(0, **options)
    after.load_state_dict(before.state_dict())
    loaded = {
        key: {name: value.clone() for name, value in state.items()} for key, state in before.matrix_states.items()
    }
    length = window_length(options.get("factor_decay", 0.95), BF16 if "factor_dtype" in options else F64)
    for key, state in after.matrix_states.everything().items():
        for side in ("left", "right"):
            assert len(state[f"{side}_vectors"]) == len(state[f"{side}_weights"]) == length
            assert (inverse(state, side) - inverse(loaded[key], side)).abs().max() < 1e-12
    train(model, after, range(3, 5))
    assert all(int(state["failures"]) == 0 for state in after.matrix_states.values())


def test_square_factors_of_older_checkpoints_are_refused_by_name() -> None:
    _, optimizer = trained()
    saved = optimizer.state_dict()
    for key, state in optimizer.matrix_states.items():
        dense_form = {side: inverse(state, side) for side in ("left", "right")}
        saved["matrix_states"][key] = {**dense_form, "failures": state["failures"]}
    with pytest.raises(ValueError, match=r"has 'left', which is invalid: it must be one of left_vectors, left_weights"):
        trained(0)[1].load_state_dict(saved)


def test_memories_longer_than_any_side_are_refused() -> None:
    with pytest.raises(OptionError, match=r"factor_decay=0\.9999 is invalid: it must leave no more than 8192 vectors"):
        build(make(), factor_decay=0.9999)
    assert build(make(), factor_decay=0.9999, rule="ema").options.window == 0
