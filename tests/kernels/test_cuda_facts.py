"""What is asked of CUDA and ROCm, where neither is: which stream is captured, where Triton runs, its tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rankwise.kernels import graphs, triton
from rankwise.kernels.product_types import multiplies_bfloat16
from rankwise.ldadam import dispatch as forms


@pytest.mark.parametrize(("asked", "captured"), [("cuda:0", False), ("cuda:1", True), ("cuda", False)])
def test_the_stream_of_the_tensors_device_counts(asked: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 1 is being captured, device 0 is the current one."""
    current = [0]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 1)
    assert graphs.is_capturing(torch.device(asked)) is captured
    assert current == [0] and not graphs.is_capturing(torch.device("cpu"))


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize(
    ("hip", "capability", "runs", "halves"),
    [
        (None, (6, 0), False, False),
        (None, (7, 5), True, False),
        (None, (9, 0), True, True),
        ("6", (9, 4), True, True),
    ],
)
def test_where_triton_runs_and_how_it_multiplies(
    hip: str | None, capability: tuple[int, int], runs: bool, halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LDAdam in halves, where tensor cores multiply bfloat16."""
    multiplies_bfloat16.cache_clear()
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0)
    assert triton.is_available(device) is runs
    assert not triton.is_available(device, torch.float64)
    assert (forms.steps_in_place_for(device, torch.float32) is not None) is halves
    assert (forms.shards_step_for(device, torch.float32) is not None) is halves
    multiplies_bfloat16.cache_clear()


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize("lengths", [(), (0,), (1,), (4,), (0, 5, 0, 8, 1, 0)])
def test_tiles_cover_every_run(lengths: tuple[int, ...]) -> None:
    from rankwise.kernels.triton.segments import Tiles

    tiles = Tiles(lengths, 4, torch.device("cpu"))
    wanted = [(run, start) for run, length in enumerate(lengths) for start in range(0, length, 4)]
    assert tiles.rows.view(-1, 2).tolist() == list(map(list, wanted)) and tiles.count == len(wanted)
    bounds = tiles.bounds.tolist()
    assert [last - first for first, last in zip(bounds, bounds[1:], strict=False)] == [-(-n // 4) for n in lengths]


class _OnTheHost(TorchDispatchMode):
    """Counts the elements of what operations make on the host."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            self.elements += result.numel()
        return result


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
def test_the_host_makes_no_table_of_all_tiles() -> None:
    """Of 7 B parameters in tiles of 512 elements it was 400 MiB and most of a second."""
    from rankwise.kernels.triton.segments import Tiles

    lengths = (4096 * 11008,) * 155
    with _OnTheHost() as made:
        tiles = Tiles(lengths, 512, torch.device("meta"))
    assert tiles.rows.shape == (2 * tiles.count,) and tiles.count == sum(lengths) // 512
    assert made.elements <= 4 * (len(lengths) + 1)
