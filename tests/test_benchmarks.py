"""The measurements, as far as they can be tested without timing anything."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import communication
from benchmarks.communication import FlatPiece, Waits, measure_communication
from benchmarks.contenders import OURS, others, selected
from benchmarks.host import calls_of, host_times
from benchmarks.models import fill_gradients, layer_set
from benchmarks.orthogonality import measure_errors, measure_times, newton_schulz_page
from benchmarks.performance import performance_page
from benchmarks.products import measure_products, products_of
from benchmarks.step import environment, measure, merged
from tests.ranks import run_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# --- waits -----------------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_only_what_ends_with_a_message_counts_and_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    class Work:
        def wait(self) -> None:
            clock.now += 1.0

    def all_reduce(values: Any, async_op: bool = False) -> Work | None:
        clock.now += 10.0
        return Work() if async_op else Work().wait()

    monkeypatch.setattr(communication, "time", clock)
    monkeypatch.setattr(dist, "Work", Work)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    before = dist.all_reduce, Work.wait
    with Waits(CPU) as waits:
        dist.all_reduce(None)
        assert (waits.count, waits.seconds) == (1, 11.0)
        work = dist.all_reduce(None, async_op=True)
        assert (waits.count, waits.seconds) == (1, 11.0), "it has only been started"
        clock.now += 100.0
        work.wait()  # type: ignore[union-attr]
    assert (waits.count, waits.seconds) == (2, 12.0)
    assert (dist.all_reduce, Work.wait) == before
    dist.all_reduce(None)
    assert waits.count == 2


def _messages(rank: int, world: int) -> list[int]:
    """Waits seen of each kind of message that a step sends, with the real process group."""
    one, two = torch.ones(2), torch.empty(2)
    parts = [torch.empty(2) for _ in range(world)]
    calls = (
        lambda: dist.all_reduce(one),
        lambda: dist.all_reduce(one, async_op=True).wait(),
        lambda: dist.all_to_all_single(two, one),
        lambda: dist.all_to_all_single(two, one, async_op=True).wait(),
        lambda: dist.all_gather(parts, one),
        lambda: dist.all_gather_object([None] * world, rank),
    )
    found = []
    for call in calls:
        with Waits(CPU) as waits:
            call()
        assert waits.seconds > 0.0
        found.append(waits.count)
    return found


def test_every_message_of_a_step_is_seen() -> None:
    assert run_ranks(2, _messages) == [[1] * 6] * 2


def test_what_the_optimizers_call_is_covered() -> None:
    """Collectives by name in the sources of a step; Work.wait is where the others end."""
    root = Path(__file__).resolve().parents[1] / "rankwise"
    text = "".join(path.read_text() for path in sorted(root.rglob("*.py")))
    used = {name for name in dir(dist) if f"dist.{name}(" in text and name.startswith(("all_", "reduce", "broadcast"))}
    assert used == set(communication._COLLECTIVES)


# --- the layout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_pieces_hold_every_element_once(world: int) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1, bias=False))
    found = {name: torch.full_like(parameter, torch.nan).view(-1) for name, parameter in model.named_parameters()}
    for rank in range(world):
        piece = FlatPiece(model, rank, world)
        assert piece.tensor.numel() == -(-25 // world)
        for part in piece.contents(piece.tensor).slices:
            run = found[part.name][part.start : part.end]
            assert run.isnan().all()
            run.copy_(piece.tensor[part.offset :][: part.end - part.start])
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name].view_as(parameter), parameter)


@pytest.mark.slow
def test_communication_of_real_ranks(tmp_path: Path) -> None:
    names = ["MARS-AdamW", "MKOR"]
    rows = measure_communication("tiny", CPU, 2, 1, names)
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert 0.0 < row["waited_seconds"] <= row["most_waited_seconds"] < row["seconds"]
        assert 0.0 < row["host_seconds"] < row["seconds"] and row["ranks"] == 2 and row["peak_bytes"] == 0
    assert rows[0]["waits"] == 1, "the norm of the corrected gradients"
    assert performance_page(rows).count("## Exposed communication, tiny on 2 ranks") == 1


# --- the host's share ------------------------------------------------------------------------------------------------


def test_host_times_beside_adamws() -> None:
    names = ["MARS-AdamW", "MKOR", "MKOR, factor step"]
    rows = host_times(10, 2, set(names))
    assert [row["name"] for row in rows] == names
    assert all(0.0 < row["few_seconds"] and 0.0 < row["ratio"] < 50.0 for row in rows)
    assert performance_page(rows).count("## The host's share, 10 matrices of 16 x 16") == 1


# Calls of functions for every further tensor, and for every further shard of one.
CALLS = {
    "MARS-AdamW": (61, 0),
    "MARS-Lion": (50, 0),
    "MARS-M": (79, 31),
    "SONew, tridiagonal": (75, 18),
    "LDAdam, rank 4": (88, 49),
    "MKOR": (67, 14),
    "MKOR, factor step": (96, 43),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_host_calls_no_more_functions_than_this(name: str) -> None:
    """Deterministic where times are not: what the host does for a tensor grows with what it calls."""
    pytest.importorskip("triton")
    further = [(calls_of(name, 120, shards) - calls_of(name, 20, shards)) / 100 for shards in (False, True)]
    assert further[0] <= CALLS[name][0] + 3 and further[1] <= CALLS[name][1] + 3, further


# --- contenders ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_apex: None) -> Path:
    """NVIDIA's apex as far as it is called; its compiled module is yet to be made."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    source = (
        "import torch\nclass FusedAdam(torch.optim.AdamW):\n    def __init__(self, params, adam_w_mode, **options):\n"
    )
    source += "        assert adam_w_mode\n        super().__init__(params, **options)\n"
    (tmp_path / "apex" / "optimizers.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_apex_is_timed_where_it_can_run(fake_apex: Path) -> None:
    assert len(others(CPU)) == 1 and "apex" not in sys.modules
    assert len(others(CUDA)) == 1, "without its kernels it fails when called"
    (fake_apex / "amp_C.py").touch()
    assert len(others(CPU)) == 1
    muon, fused = others(CUDA)
    model = nn.Linear(3, 2)
    optimizer = fused.build(model)
    assert type(optimizer).__module__ == "apex.optimizers" and fused.bytes_per_parameter == 28.0
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert optimizer.param_groups[0]["weight_decay"] == torch.optim.AdamW(model.parameters()).defaults["weight_decay"]


def test_without_apex_there_is_torchs_muon() -> None:
    assert [contender.name for contender in others(CUDA)] == ["Muon (torch), linear weights only"]


def test_types_are_chosen_by_name() -> None:
    assert selected(OURS, ()) == list(OURS)
    assert [contender.name for contender in selected(OURS, ["MKOR", "MARS-M"])] == ["MKOR", "MARS-M"]
    with pytest.raises(ValueError, match="no type 'SONew' here; there are: MARS-AdamW; .*SONew, tridiagonal"):
        selected(OURS, ["MKOR", "SONew"])


# --- rows and the page -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    """A real one, of a step on this machine."""
    (found,) = measure("tiny", CPU, 3, ["MARS-AdamW"])
    return {**found, "model": "tiny", **environment(CPU)}


def test_rows_say_what_they_depend_on(row: dict[str, Any]) -> None:
    assert row["device_type"] == "cpu" and row["torch"] == torch.__version__ and row["peak_bytes"] == 0
    assert bool(row["triton"]) == (importlib.util.find_spec("triton") is not None)
    assert row["host_seconds"] == row["seconds"] and row["adamw_host_seconds"] == row["adamw_seconds"] > 0.0
    assert row["adamw_peak_bytes"] == 0


def on_cuda(row: dict[str, Any]) -> dict[str, Any]:
    count = row["parameters"]
    times = {"seconds": 4e-3, "host_seconds": 1.5e-3, "peak_bytes": 2 * count}
    baseline = {"adamw_seconds": 2e-3, "adamw_host_seconds": 0.5e-3, "adamw_peak_bytes": count}
    where = {"device": "A device", "device_type": "cuda", "torch": "2.99", "triton": "3.77", "date": "2030-01-02"}
    return {**row, **times, **baseline, **where}


def test_a_page_of_a_cpu_has_no_columns_of_a_gpu(row: dict[str, Any]) -> None:
    page = performance_page([row])
    assert "host ms" not in page and "*Peak*" not in page
    assert f"torch {torch.__version__}" in page and row["date"] in page and row["device"] in page


def test_a_page_of_a_gpu_keeps_host_time_and_memory_apart(row: dict[str, Any]) -> None:
    page = performance_page([on_cuda(row)])
    assert "A device, 1 thread, torch 2.99, triton 3.77, 2030-01-02; " in page
    assert "fused AdamW 2.0 ms, host 0.5 ms, peak 1.00 bytes per parameter" in page
    assert "| type | ms | over fused AdamW | floor | host ms | peak, bytes per parameter | state," in page
    floor = f"{row['ratio']:.2f} | {row['floor_ratio']:.2f}"
    assert f"| MARS-AdamW | 4.0 | {floor} | 1.5 | 2.00 | {row['state_bytes'] / row['parameters']:.2f} |" in page


def test_rows_of_several_days_say_so(row: dict[str, Any]) -> None:
    assert f"{row['date']} / 2030-01-02; " in performance_page([row, {**row, "date": "2030-01-02"}])


def test_rows_from_before_there_were_versions_are_read(row: dict[str, Any]) -> None:
    later = ("triton", "device_type", "adamw_host_seconds", "adamw_peak_bytes")
    page = performance_page([{key: value for key, value in row.items() if key not in later}])
    assert "| MARS-AdamW |" in page and "triton 3" not in page


def communicated(row: dict[str, Any], ranks: int) -> dict[str, Any]:
    waits = {"seconds": 0.2, "host_seconds": 0.15, "waited_seconds": 0.05, "most_waited_seconds": 0.06, "waits": 3.5}
    kept = ("name", "model", "device", "device_type", "threads", "torch", "date", "parameters")
    return {**{key: row[key] for key in kept}, **waits, "ranks": ranks, "peak_bytes": 0}


def test_exposed_communication_has_sections_of_its_own(row: dict[str, Any]) -> None:
    page = performance_page([communicated(row, 2), row, communicated(row, 4)])
    assert page.index("Optimizer step alone, tiny") < page.index("tiny on 2 ranks") < page.index("tiny on 4 ranks")
    assert page.count("| MARS-AdamW | 200 | 150 | 50.0 | 60.0 | 25% | 3.5 |") == 2
    assert page.count("processes of one machine") == 2 and "stands still" not in page
    assert "stands still" in performance_page([communicated(on_cuda(row), 2)])


def test_rows_replace_those_of_the_same_measurement(row: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    for new in (row, communicated(row, 2), communicated(row, 4), {**row, "seconds": 1.0}):
        output.write_text(json.dumps(merged(output, new)))
    assert [found.get("ranks") for found in json.loads(output.read_text())] == [2, 4, None]
    assert json.loads(output.read_text())[-1]["seconds"] == 1.0


def test_the_page_of_newton_schulz_has_every_set_form_and_shape() -> None:
    errors, times = measure_errors(), measure_times(1, ((4, 6), (4, 16)))
    by_key = {(row["name"], row["steps"], row["lowest"], row["dtype"]): row["error"] for row in errors}
    assert by_key["cans", 5, 0.01, "float64"] < 0.3 < by_key["published", 5, 0.01, "float64"]
    assert by_key["polar_express", 8, 0.1, "float64"] < 1e-12
    shares = {tuple(row["shape"]): row["share"] for row in times if row["form"] != "matrices" and row["steps"] == 5}
    assert shares[4, 16] < shares[4, 6] == 1.0, "one and a half times as long as wide is where both are as much work"
    page = newton_schulz_page(errors, times)
    assert page.count("| `cans` |") == 3 + 2 and page.count("| `published` |") == 1
    assert page.count("(0.67)") == 2 and "4 x 16" in page


@pytest.mark.parametrize(("name", "count"), [("MARS-M", 15 * 8), ("MKOR", 2 * 8)])
def test_steps_are_timed_over_exactly_their_products(name: str, count: int) -> None:
    """Of two blocks of four matrices each, in float32 whatever the step takes."""
    (row,) = measure_products("tiny", CPU, 1, [name])
    assert row["products"] in ("bfloat16", "float32") and row["product_ratio"] > 0
    (contender,) = selected(OURS, [name])
    model = layer_set("tiny")
    fill_gradients(model, 0)
    optimizer = contender.build(model)
    optimizer.step()
    found = [product() for product in products_of(optimizer, CPU)]
    assert len(found) == count and {matrix.dtype for matrix in found} == {torch.float32}
    assert max(matrix.shape[1] for matrix in found) == 4 * 64 + (name == "MKOR")
