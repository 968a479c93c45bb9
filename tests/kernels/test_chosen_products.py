"""Which form of the symmetric products runs, with made-up times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from benchmarks.compiled_kernels import compiled, recorded  # noqa: E402
from benchmarks.counts import Values  # noqa: E402
from benchmarks.launches import recorded_launches  # noqa: E402
from rankwise import MARS  # noqa: E402
from rankwise.kernels import graphs, triton  # noqa: E402
from rankwise.kernels.dispatch import TIMED, newton_schulz_for, orthogonal_product_for, using  # noqa: E402
from rankwise.kernels.triton import chosen_products, orthogonal_steps  # noqa: E402
from rankwise.kernels.triton.chosen_products import Shape, by_shape, chosen  # noqa: E402
from rankwise.kernels.triton.symmetric_newton_schulz import HALVED  # noqa: E402
from rankwise.layout import layout  # noqa: E402
from rankwise.layout.layout import Layout  # noqa: E402
from rankwise.updates.polynomial_steps import PLAIN  # noqa: E402

META = torch.device("meta")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, float]]]:
    """A device with a clock: the times, of kernel and library, of what is timed next."""
    times: list[tuple[float, float]] = []

    def take(device: torch.device, *calls: Callable[[], object]) -> tuple[float, float]:
        assert len(calls) == 2 and device == META
        calls[1]()  # The library's works on tensors without memory, too.
        return times.pop(0)

    monkeypatch.setattr(chosen_products, "_has_clock", lambda device: True)
    monkeypatch.setattr(chosen_products, "_times", take)
    chosen_products.forget_times()
    yield times
    chosen_products.forget_times()


def stack(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)


def test_the_faster_one_is_taken_and_timed_once(timed: list[tuple[float, float]]) -> None:
    timed += [(1.0, 2.0), (3.0, 1.0)]
    x = stack(2, 256, 512)
    for _ in range(3):
        found = chosen(HALVED, x, timed=True)
        assert found.square is HALVED.square and found.step is PLAIN.step
        assert found.symmetric == PLAIN.symmetric
    assert not timed
    timed += [(1.0, 2.0), (1.0, 2.0)]
    assert chosen(HALVED, stack(4, 256, 512), timed=True) == HALVED, "another batch has times of its own"
    # Lying transposed its square is another one, its polynomial the same.
    timed += [(2.0, 1.0)]
    found = chosen(HALVED, stack(2, 512, 256), turned=True, timed=True)
    assert found.square is PLAIN.square and found.step is PLAIN.step and not timed
    assert chosen(HALVED, x, timed=False) == HALVED, "times are not for who must not look at them"


@pytest.mark.parametrize(("rows", "aligned"), [(256, True), (273, False)])
def test_within_the_noise_the_shape_decides(rows: int, aligned: bool, timed: list[tuple[float, float]]) -> None:
    timed += [(1.0, 1.04), (1.04, 1.0)]
    found = chosen(HALVED, stack(1, rows, 512), timed=True)
    assert (found == HALVED) == aligned and (found == PLAIN) == (not aligned)


@pytest.mark.parametrize(
    ("rows", "columns", "kernel"),
    [
        (4096, 11008, True),
        (512, 2048, True),
        (2048, 5461, True),
        (4097, 4096, False),
        (128, 4096, False),
        (144, 4096, True),
    ],
)
def test_without_times_the_shape_decides(rows: int, columns: int, kernel: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(chosen_products, "_times", lambda *given: pytest.fail("it must not be timed"))
    assert chosen_products._has_clock(torch.device("cuda")) and not chosen_products._has_clock(META)
    for may_be_timed in (False, True):
        found = chosen(HALVED, stack(1, rows, columns), timed=may_be_timed)
        assert (found.square is HALVED.square) == kernel
    assert by_shape(Shape("square", 1, rows, columns, False, torch.bfloat16, META)) == kernel


def test_a_capture_takes_what_was_timed_before(
    timed: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed += [(2.0, 1.0), (2.0, 1.0)]
    assert chosen(HALVED, stack(1, 256, 512), timed=True) == PLAIN
    monkeypatch.setattr(graphs, "is_capturing", lambda device: True)
    assert chosen(HALVED, stack(1, 256, 512), timed=True) == PLAIN
    assert chosen(HALVED, stack(2, 256, 512), timed=True) == HALVED, "it cannot be timed there"
    monkeypatch.setattr(graphs, "is_capturing", lambda device: False)
    timed += [(2.0, 1.0), (2.0, 1.0)]
    assert chosen(HALVED, stack(2, 256, 512), timed=True) == PLAIN, "nor was it taken for timed"


def test_nothing_is_timed_where_all_is_to_be_the_same(timed: list[tuple[float, float]]) -> None:
    timed += [(2.0, 1.0), (2.0, 1.0)]
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(HALVED, stack(1, 256, 512), timed=True) == HALVED and len(timed) == 2
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_least_of_some_times_counts_and_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = -1.0

        def record(self) -> None:
            self.at = now

        def elapsed_time(self, other: Any) -> float:
            return float(other.at - self.at)

        def synchronize(self) -> None:
            assert self.at == now, "the last one"

    calls = {"kernel": [100.0, 5.0, 3.0, 4.0], "library": [90.0, 7.0, 6.0, 8.0]}

    def call(name: str) -> None:
        nonlocal now
        now += calls[name].pop(0)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    forms = [lambda name=name: call(name) for name in calls]
    assert chosen_products._times(torch.device("cuda", 0), *forms) == [3.0, 6.0] and calls == {
        "kernel": [],
        "library": [],
    }


def test_without_memory_to_time_the_shape_decides(
    timed: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0

    def fail(device: torch.device, *calls: Callable[[], object]) -> list[float]:
        nonlocal tried
        tried += 1
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(chosen_products, "_times", fail)
    for _ in range(3):
        assert chosen(HALVED, stack(1, 256, 512), timed=True) == HALVED
        assert chosen(HALVED, stack(1, 273, 512), timed=True) == PLAIN
    assert tried == 4, "each shape once: two squares and two polynomials"


@pytest.mark.parametrize(
    ("shape", "turned"),
    [((256, 512), False), ((341, 256), True), ((512, 250), True)],
)
def test_the_shape_decides_for_what_is_copied_in_wide_pieces(shape: tuple[int, int], turned: bool) -> None:
    """As compiled for an H100: copies to shared memory take 4 bytes at least, what is narrower goes by registers."""
    x = stack(2, *shape).mT if turned else stack(2, *shape)
    (launch,) = recorded(lambda: HALVED.square(x))
    code = compiled(launch).asm["ptx"]
    assert ("cp.async.cg" in code or "cp.async.bulk.tensor" in code) == by_shape(
        Shape("square", 2, x.shape[1], x.shape[2], turned, x.dtype, META)
    )


def test_in_the_interpreter_it_is_the_kernel() -> None:
    assert chosen(HALVED, torch.zeros(1, 3, 5), timed=True) is HALVED


@pytest.mark.parametrize(("ranks", "world", "whole"), [(1, None, True), (1, 1, True), (1, 2, False), (2, 4, False)])
def test_a_run_is_whole_where_nobody_else_computes(
    ranks: int, world: int | None, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone process; one of replicas that know nothing of each other; half of the ranks, the others with copies."""
    monkeypatch.setattr(layout.dist, "is_initialized", lambda: world is not None)
    monkeypatch.setattr(layout.dist, "get_world_size", lambda group=None: world)
    assert Layout(ranks=((),) * ranks).is_whole_run == whole


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("asked", ["auto", "bfloat16", "float16"])
def test_long_matrices_are_multiplied_in_float16_unless_a_type_is_named(
    asked: str, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 1.5 times as long as wide on, tall or wide; the line that a run begins with has both types."""
    seen: dict[tuple[int, ...], torch.dtype] = {}

    def look(halved: Any, x: Tensor, turned: bool, timed: bool) -> Any:
        seen[tuple(x.shape[1:])] = x.dtype
        return halved

    monkeypatch.setattr(orthogonal_steps, "chosen", look)
    shapes = ((32, 32), (32, 47), (32, 48), (64, 32))
    weights = [nn.Parameter(torch.empty(shape, device=META)) for shape in shapes]
    named = [(f"{index}.weight", weight) for index, weight in enumerate(weights)]
    optimizer = MARS(named, variant="muon", ns_dtype=asked, clip=clip)
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    with recorded_launches(), using(triton), Values(None):
        optimizer.step()
    narrow, long = (torch.bfloat16, torch.float16) if asked == "auto" else (getattr(torch, asked),) * 2
    assert seen == dict(zip(shapes, (narrow, narrow, long, long), strict=True))
    words = "bfloat16 and float16" if asked == "auto" else asked
    assert f"products in {words} (ns_dtype={asked!r})" in optimizer.reports._product_types()


@pytest.mark.parametrize(
    ("device", "product", "long"),
    [
        ("cuda", torch.bfloat16, torch.float16),
        ("cuda", torch.float32, torch.float32),
        ("cuda", torch.float64, torch.float64),
        ("cpu", torch.bfloat16, torch.bfloat16),
        ("cpu", torch.float32, torch.float32),
    ],
)
def test_only_gpus_take_another_type_for_long_matrices(device: str, product: torch.dtype, long: torch.dtype) -> None:
    found = [orthogonal_product_for(torch.device(device), product, *shape) for shape in ((4, 5), (4, 6), (6, 4))]
    assert found == [product, long, long] and orthogonal_product_for(torch.device(device), product) == long


@pytest.mark.parametrize(("asked", "world"), [(None, 1), ("0", 1), ("1", 1), ("1", 2)])
def test_an_optimizer_times_what_it_is_asked_to_and_computes_alone(
    asked: str | None, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TIMED, raising=False)
    if asked is not None:
        monkeypatch.setenv(TIMED, asked)
    seen: list[bool] = []

    def look(halved: Any, x: Tensor, turned: bool, timed: bool) -> Any:
        seen.append(timed)
        return halved

    monkeypatch.setattr(orthogonal_steps, "chosen", look)
    model = nn.Linear(16, 24, bias=False)
    optimizer = MARS(list(model.named_parameters()), variant="muon")
    model.weight.grad = torch.ones_like(model.weight)
    with recorded_launches(), using(triton):
        optimizer.step()
        monkeypatch.setattr(layout.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(layout.dist, "get_world_size", lambda group=None: world)
        optimizer.step()
        assert newton_schulz_for(META, timed=True).keywords == {"timed": asked == "1"}  # type: ignore[attr-defined]
    assert seen == [asked == "1", asked == "1" and world == 1]
