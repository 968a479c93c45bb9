"""Owners and batches: balanced, reproducible, and close to where the data are."""

from __future__ import annotations

import random
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import random_shards

from rankwise.comm.owner_plan import IMBALANCE_TOLERANCE, MatrixTask, assign_owners, plan_matrices
from rankwise.layout.layout import Layout, Shard

quick = settings(max_examples=60, deadline=None)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[MatrixTask], dict[str, dict[int, int]], list[float]]:
    world = draw(st.integers(1, 6))
    costs = draw(st.lists(st.integers(1, 50).map(float), max_size=20))
    tasks = [MatrixTask(f"m{i}", (f"m{i}",), (), cost) for i, cost in enumerate(costs)]
    shares = st.dictionaries(st.integers(0, world - 1), st.integers(1, 100), max_size=world)
    held = {task.key: draw(shares) for task in tasks}
    loads = draw(st.one_of(st.just([0.0] * world), st.lists(st.floats(0, 100), min_size=world, max_size=world)))
    return tasks, held, loads


@quick
@given(problem=problems(), seed=st.integers(0, 1000))
def test_assignment_invariants(problem: tuple, seed: int) -> None:
    tasks, held, loads = problem
    before = list(loads)
    owners, after = assign_owners(tasks, held, loads)
    assert loads == before
    assert set(owners) == {task.key for task in tasks} and set(owners.values()) <= set(range(len(loads)))
    for rank, load in enumerate(after):
        assert load == pytest.approx(loads[rank] + sum(task.cost for task in tasks if owners[task.key] == rank))
    shuffled = random.Random(seed).sample(tasks, len(tasks))
    assert assign_owners(shuffled, dict(reversed(held.items())), loads)[0] == owners
    mean = sum(after) / len(after)
    largest = max((task.cost for task in tasks), default=0.0)
    assert max(after) <= max(IMBALANCE_TOLERANCE * mean, mean + largest, *loads) * (1 + 1e-12)


@quick
@given(world=st.integers(1, 6), per_rank=st.integers(1, 5))
def test_a_sole_holder_keeps_its_matrix_when_balanced(world: int, per_rank: int) -> None:
    tasks = [MatrixTask(f"m{i}", (f"m{i}",), (), 7.0) for i in range(world * per_rank)]
    held = {task.key: {i % world: 10} for i, task in enumerate(tasks)}
    owners, _ = assign_owners(tasks, held, [0.0] * world)
    assert owners == {task.key: i % world for i, task in enumerate(tasks)}


def test_the_largest_share_wins_and_an_overloaded_rank_gives_away() -> None:
    tasks = [MatrixTask(key, (key,), (), 1.0) for key in "abcd"]
    mostly_second = {key: {0: 1, 1: 9} for key in "abcd"}
    assert assign_owners(tasks[:1], mostly_second, [0.0, 0.0], tolerance=2.0)[0] == {"a": 1}
    owners, loads = assign_owners(tasks, mostly_second, [0.0, 0.0])
    assert loads == [2.0, 2.0]
    # A rank already loaded by another param group is spared.
    assert set(assign_owners(tasks, mostly_second, [0.0, 100.0])[0].values()) == {0}


def _gpt(layers: int, width: int) -> dict[str, tuple[int, int]]:
    shapes = {}
    for layer in range(layers):
        shapes |= {
            f"h{layer}.qkv": (3 * width, width),
            f"h{layer}.proj": (width, width),
            f"h{layer}.up": (4 * width, width),
            f"h{layer}.down": (width, 4 * width),
        }
    return shapes


def _flat_partition(shapes: dict[str, tuple[int, int]], world: int) -> Layout:
    size = -(-sum(map(prod, shapes.values())) // world)
    ranks: list[list[Shard]] = [[] for _ in range(world)]
    position = 0
    for key, shape in shapes.items():
        for rank in range(world):
            start, end = max(position, rank * size), min(position + prod(shape), (rank + 1) * size)
            if start < end:
                ranks[rank].append(
                    Shard(key, start - position, end - position, start - rank * size, shape=shape, tensor=0)
                )
        position += prod(shape)
    return Layout(tuple(map(tuple, ranks)))


def _tasks(shapes: dict[str, tuple[int, int]]) -> list[MatrixTask]:
    return [
        MatrixTask(key, (key,), shape, float(6 * min(shape) ** 2 * max(shape))) for key, shape in sorted(shapes.items())
    ]


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("replicated", [False, True])
def test_gpt_matrices_are_balanced_and_mostly_stay(world: int, replicated: bool) -> None:
    shapes = _gpt(layers=12, width=16)
    layout = _flat_partition(shapes, world)
    if replicated:
        whole = tuple(Shard(key, 0, prod(shape), 0, shape=shape, tensor=0) for key, shape in shapes.items())
        layout = Layout((whole,) * world, replicated=True)
    plan, loads = plan_matrices(layout, _tasks(shapes), [0.0] * world)
    assert max(loads) <= 1.15 * sum(loads) / world
    if not replicated:
        moved = sum(plan.owners[key] not in layout.holders[key] for key in shapes)
        assert moved <= len(shapes) // 10


@quick
@given(world=st.integers(1, 4), seed=st.integers(0, 10**6), limit=st.sampled_from([1, 40, 100, 1 << 24]))
def test_batches_hold_every_task_once(world: int, seed: int, limit: int) -> None:
    rng = random.Random(seed)
    shapes = {f"m{i}": rng.choice([(4, 5), (2, 10), (6, 6)]) for i in range(rng.randint(1, 12))}
    layout = Layout(random_shards(shapes, world, seed))
    tasks = _tasks(shapes)
    plan, _ = plan_matrices(layout, tasks, [0.0] * world, batch_elements=limit)
    assert sorted(task.key for batch in plan.batches for task in batch.tasks) == sorted(shapes)
    for batch in plan.batches:
        assert all(task.signature == batch.signature for task in batch.tasks)
        counts = [sum(plan.owners[task.key] == rank for task in batch.tasks) for rank in range(world)]
        assert max(counts) <= max(1, limit // prod(batch.signature))
    # No owner idles in a batch while it still has a matrix of that shape: the first batch of a shape serves them all.
    for signature in set(shapes.values()):
        first = next(batch for batch in plan.batches if batch.signature == signature)
        owners = {plan.owners[key] for key, shape in shapes.items() if shape == signature}
        assert {plan.owners[task.key] for task in first.tasks} == owners
    shuffled, _ = plan_matrices(layout, rng.sample(tasks, len(tasks)), [0.0] * world, batch_elements=limit)
    assert shuffled == plan and shuffled.digest() == plan.digest()


def test_digest_tells_plans_apart() -> None:
    shapes = _gpt(2, 8)
    layout = _flat_partition(shapes, 2)
    digests = {
        plan_matrices(layout, tasks, loads)[0].digest()
        for tasks, loads in [
            (_tasks(shapes), [0.0, 0.0]),
            (_tasks(shapes)[1:], [0.0, 0.0]),
            (_tasks(shapes), [1e9, 0.0]),
            ([MatrixTask(t.key, t.parts, (*t.signature, "other"), t.cost) for t in _tasks(shapes)], [0.0, 0.0]),
        ]
    }
    assert len(digests) == 4


def test_loads_pass_from_one_group_to_the_next() -> None:
    shapes = {"a": (4, 4), "b": (4, 4)}
    whole = tuple(Shard(key, 0, 16, 0, shape=shape, tensor=0) for key, shape in shapes.items())
    layout = Layout((whole, whole), replicated=True)
    tasks = _tasks(shapes)
    first, loads = plan_matrices(layout, tasks[:1], [0.0, 0.0])
    second, loads = plan_matrices(layout, tasks[1:], loads)
    assert first.owners["a"] != second.owners["b"] and loads[0] == loads[1]
