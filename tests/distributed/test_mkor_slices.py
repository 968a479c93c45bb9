"""MKOR's matrices of which several ranks own slices: as one process computes them, in messages linear in the width."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import simulated
import torch
from collectives import Wire
from factor_windows import inverse
from ranks import run_ranks
from simulated import CASES, Framework, reference, run_of, world_group
from torch import Tensor

from rankwise.comm.quantized_messages import wire_of
from rankwise.comm.slice_holders import Holders
from rankwise.estimate import estimate
from rankwise.layout.layout_source import SLOWER_IN_PAIRS, TensorParallel
from rankwise.mkor.sliced_windows import SlicedWindows, exchanged, sends_less
from rankwise.mkor.vector_windows import Window, window_norm

KEY, ROWS, COLUMNS, STEPS = "c.weight", 12, 20, 7


def _case(**options: Any) -> str:
    name = f"mkor {sorted(options.items())}"
    own = {"update_interval": 2, "factor_dtype": "DTYPE", "factor_decay": 0.9, **options}
    CASES[name] = replace(CASES["mkor-official-adamw"], name=name, options=own)
    return name


class Outcome(NamedTuple):
    error: float
    slices: dict[str, dict[str, tuple[int, ...]]]
    sent: list[list[tuple[str, int]]]
    health: dict[str, float]
    estimated: int


def _train(rank: int, world: int, axis: int, options: dict[str, Any], spoil: str = "") -> Outcome:
    """Follow one process with the rows (0) or columns (1) of a matrix cut."""
    simulated.TENSOR_CUTS[KEY] = axis
    case = _case(**options)
    framework = Framework("tensor", CASES[case], torch.float64, rank, world, world_group())
    optimizer, sent = framework.optimizer, []
    for step in range(STEPS):
        if spoil == "window" and step == 3:
            for key, state in optimizer.matrix_states.items():
                if key.startswith(f"{KEY}[") and rank == 0:
                    state["left_vectors"][0, 0] = torch.nan
        with Wire() as wire:
            framework.step()
        sent.append([(message.operation, message.bytes) for message in wire.messages])
    final, _, _ = reference(case, torch.float64, STEPS)
    pieces = [(piece, weight) for piece, weight in framework.pieces() if weight.numel()]
    if "comm_dtype" in options:  # the other matrices are rounded on their way to owners
        pieces = [(piece, weight) for piece, weight in pieces if piece.key == KEY]
    error = max(float((weight - run_of(final[piece.key], piece)).abs().max()) for piece, weight in pieces)
    slices = {
        key: {name: tuple(value.shape) for name, value in state.items()}
        for key, state in optimizer.matrix_states.items()
        if key.startswith(f"{KEY}[")
    }
    return Outcome(error, slices, sent, optimizer.read_health(), estimate(optimizer)[rank].bytes_sent)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"stabilizer": (1.02, 0.9)},
    {"stabilizer": (1.02, 0.9), "stabilizer_norm": "max_entry", "backend": "lamb"},
    {"rescale": None, "backend": "sgd"},
    {"max_factor_dim": 16},
]


def _train_all(rank: int, world: int) -> list[tuple[int, dict[str, Any], Outcome]]:
    return [(axis, options, _train(rank, world, axis, options)) for axis in (0, 1) for options in OPTIONS]


def test_slices_follow_one_process() -> None:
    """Both sides are cut: one along its vectors, the other one into some of them."""
    for axis, options, outcome in (found for rank in run_ranks(2, _train_all) for found in rank):
        assert outcome.error < 1e-12, (axis, options)
        (state,) = outcome.slices.values()
        window = state["left_weights"][0]
        sides = (ROWS // 2, COLUMNS) if axis == 0 else (ROWS, COLUMNS // 2)
        counts = (window, window // 2) if axis == 0 else (window // 2, window)
        for side, length, count in zip(("left", "right"), sides, counts, strict=True):
            if side == "left" or "max_factor_dim" not in options:
                assert state[f"{side}_vectors"] == (count, length)
            else:
                assert f"{side}_vectors" not in state


def _in_codes(rank: int, world: int) -> list[Outcome]:
    options = {"comm_dtype": "int8", "rescale": None, "backend": "sgd"}
    return [_train(rank, world, axis, options) for axis in (0, 1)]


def test_coded_messages_round() -> None:
    """Sums and vectors travel in codes, as planned; factors move by exact vectors."""
    for rank in run_ranks(2, _in_codes):
        for outcome in rank:
            assert 1e-9 < outcome.error < 1e-3, outcome.error
            for step in range(2, STEPS):
                assert sum(size for _, size in outcome.sent[step]) >= outcome.estimated
            assert sum(size for _, size in outcome.sent[3]) == outcome.estimated


@pytest.mark.exhaustive
def test_two_by_two_ranks() -> None:
    """Each half of the rows lies on two ranks, one of which owns it."""
    outcomes = run_ranks(4, _train, 0, {})
    assert max(outcome.error for outcome in outcomes) < 1e-12
    assert sum(len(outcome.slices) for outcome in outcomes) == 2


def test_no_message_has_the_size_of_a_matrix() -> None:
    """A step sends a sum of K x n, some vectors and two norms; a factor step the other vectors and J's norms, too."""
    window = 368
    vectors, summed, norms = (message.bytes for message in exchanged(window, (ROWS, COLUMNS), 0, 2, (8, 8)))
    steps = [outcome.sent for outcome in run_ranks(2, _train, 0, {})]
    for sent in steps:
        for step in range(2, STEPS):
            kinds = [(operation, size) for operation, size in sent[step] if size in (vectors, summed, norms)]
            gathers, sums = ([size for kind, size in kinds if name in kind] for name in ("allgather", "allreduce"))
            own = window * ROWS // 2 * 8
            assert gathers.count(vectors) == 1 and sums.count(summed) == 1 and norms in sums
            assert (("allgather_", own) in sent[step]) == (step % 2 == 0), "of the rows' vectors, at factor steps alone"


def test_a_damaged_window_begins_anew_on_all_ranks() -> None:
    for outcome in run_ranks(2, partial(_train, spoil="window"), 0, {}):
        assert outcome.health["factors_skipped"] == 0.0
        assert 1e-6 < outcome.error < 1.0


@pytest.mark.parametrize("norm", ["row_sum", "max_entry"])
def test_a_side_shorter_than_the_number_of_ranks(norm: Any) -> None:
    """Ranks without a row overlook nothing: what others have seen is larger, in whatever order it is compared."""
    vectors, weights = torch.randn(1, 16, 3, dtype=torch.float64), torch.rand(1, 16, dtype=torch.float64) / 16

    def norms() -> Tensor:
        found = []
        for rank in range(8):
            holders = Holders(rank, lambda values: values, lambda values: values, 8)
            found.append(SlicedWindows(0, [], holders, False).norms([Window(vectors[0], weights[0])], norm, None))
        assert not any(value.isnan() for value in found)
        return torch.cat(found).amax()

    torch.testing.assert_close(norms(), window_norm(vectors, weights, norm, torch.float64)[0])
    vectors[0, 2, 1] = torch.nan
    assert norms().isinf()


def _whole(rank: int, world: int) -> list[dict[str, dict[str, Tensor]]]:
    return [_whole_of(rank, world, axis) for axis in (0, 1)]


def _whole_of(rank: int, world: int, axis: int) -> dict[str, dict[str, Tensor]]:
    """The states of the matrix put together, after they have been taken apart again."""
    from rankwise.saving.shared_matrices import owned_parts, whole_states

    simulated.TENSOR_CUTS[KEY] = axis
    framework = Framework("tensor", CASES[_case()], torch.float64, rank, world, world_group())
    for _ in range(STEPS):
        framework.step()
    optimizer, found = framework.optimizer, {}
    for unit in optimizer.planned_units:
        saved: dict[str, dict[str, Tensor]] = {}
        for key, name, value in whole_states(unit, optimizer.matrix_states.everything()):
            saved.setdefault(key, {})[name] = value
        parts = owned_parts("mkor", unit, saved)
        for key, state in parts.items():
            assert all(torch.equal(value, optimizer.matrix_states[key][name]) for name, value in state.items()), key
        found |= saved
    return found


def test_checkpoints_have_whole_windows() -> None:
    """Of any number of ranks: those of one process, which owns the matrix alone."""
    (alone,) = run_ranks(1, _whole)
    for rank in run_ranks(2, _whole):
        for found, expected in zip(rank, alone, strict=True):
            assert found.keys() == expected.keys()
            for side in ("left", "right"):
                difference = inverse(found[KEY], side) - inverse(expected[KEY], side)
                assert found[KEY][f"{side}_vectors"].shape == expected[KEY][f"{side}_vectors"].shape
                assert difference.abs().max() < 1e-12


def test_slices_where_they_send_less() -> None:
    """In float32, with bfloat16 vectors: K = 128 rows of a matrix cost more than its slices only above some height."""
    widths = (4, 2, 4.0)
    assert sends_less(128, (4096, 14336), 0, 8, widths)
    assert sends_less(128, (14336, 4096), 0, 64, widths)
    assert not sends_less(128, (4096, 4096), 0, 64, widths)
    wire, in_codes = wire_of("int8", torch.float32), 65 / 64
    assert not sends_less(128, (4096, 4096), 0, 64, (2, 2, in_codes), wire)
    assert sends_less(128, (4096, 4096), 0, 64, (2, 2, SLOWER_IN_PAIRS * in_codes), wire)
    assert not sends_less(128, (1024, 4096), 0, 64, (2, 2, SLOWER_IN_PAIRS * in_codes), wire)


@pytest.mark.parametrize(("said", "slower"), [(None, 1.0), ("16", 1.0), ("8", SLOWER_IN_PAIRS)])
def test_pairs_are_slower_across_nodes(monkeypatch: pytest.MonkeyPatch, said: str | None, slower: float) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv("LOCAL_SIZE", said)
    assert TensorParallel.far((tuple(range(16)),), None).slower_in_pairs == slower
