from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.launch.sampler import WindowSampler, validation_batches

TOKENS = np.arange(1000, dtype=np.uint16)


def global_batch(world: int, accumulation: int, total: int, step: int) -> torch.Tensor:
    sampler = WindowSampler(TOKENS, 16, total // world // accumulation, accumulation, world, seed=3)
    assert sampler.global_batch == total
    return torch.cat([sampler.batch(step, k, rank) for k in range(accumulation) for rank in range(world)])


@settings(deadline=None, max_examples=25)
@given(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 4]), st.integers(0, 10**6))
def test_no_world_size_or_accumulation_changes_a_global_batch(world: int, accumulation: int, step: int) -> None:
    torch.testing.assert_close(global_batch(world, accumulation, 48, step), global_batch(1, 1, 48, step))


def test_samples_are_consecutive_tokens_with_one_more_to_predict() -> None:
    batch = WindowSampler(TOKENS, 16, 5, 2, 2, seed=1).batch(0, 1, 1)
    assert batch.shape == (5, 17) and batch.dtype == torch.int64
    assert torch.equal(batch - batch[:, :1], torch.arange(17).expand(5, 17))


def test_seed_and_step_change_the_samples() -> None:
    first = WindowSampler(TOKENS, 16, 8, 1, 1, seed=0)
    other = WindowSampler(TOKENS, 16, 8, 1, 1, seed=1)
    assert not np.array_equal(first.positions(0), other.positions(0))
    assert not np.array_equal(first.positions(0), first.positions(1))
    np.testing.assert_array_equal(first.positions(7), WindowSampler(TOKENS, 16, 8, 1, 1, seed=0).positions(7))


def test_every_position_can_be_drawn() -> None:
    sampler = WindowSampler(TOKENS[:20], 16, 64, 1, 1)
    assert set(sampler.positions(0)) == {0, 1, 2, 3}
    assert int(sampler.batch(0, 0, 0).max()) == 19


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 40))
def test_validation_covers_the_same_windows_on_any_number_of_ranks(world: int, batch: int, samples: int) -> None:
    shares = [list(validation_batches(TOKENS, 16, samples, batch, rank, world)) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1, "a forward pass may hold collectives"
    assert all(
        tokens.shape == share[0].shape
        for share in zip(*[[t for t, _ in s] for s in shares], strict=True)
        for tokens in share
    )
    kept = [
        int(row[0])
        for share in shares
        for tokens, weights in share
        for row, weight in zip(tokens, weights, strict=True)
        if weight
    ]
    alone = [int(row[0]) for tokens, _ in validation_batches(TOKENS, 16, samples, 1000, 0, 1) for row in tokens]
    assert sorted(kept) == alone and len(alone) == samples


def test_short_validation_text_gives_fewer_windows() -> None:
    ((tokens, weights),) = validation_batches(TOKENS[:50], 16, 100, 1000, 0, 1)
    assert len(tokens) == 3 and weights.tolist() == [1, 1, 1]
    assert int(tokens.max()) == 49


@pytest.mark.parametrize("name", ["window", "micro_batch", "accumulation", "world_size"])
def test_counts_must_be_positive(name: str) -> None:
    numbers = {"window": 4, "micro_batch": 1, "accumulation": 1, "world_size": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        WindowSampler(TOKENS, **numbers)


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 17"):
        WindowSampler(TOKENS[:16], 16, 1, 1, 1)
    with pytest.raises(ValueError, match="at least 17"):
        next(validation_batches(TOKENS[:16], 16, 1, 1, 0, 1))
