"""The measurements for a GPU, tried without one: real items, going on, deaths, and what is on the page."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.items import Figure, Found, Item, Place, Skipped  # noqa: E402
from benchmarks.gpu.page import gpu_page  # noqa: E402
from benchmarks.gpu.peaks import PEAKS  # noqa: E402
from benchmarks.gpu.predictions import counted_step, seconds_of_step  # noqa: E402
from benchmarks.gpu.records import Records  # noqa: E402
from benchmarks.gpu.sections import SECTIONS, items_of, sections_of  # noqa: E402
from benchmarks.gpu.session import measure_sections  # noqa: E402
from benchmarks.gpu.worker import InProcess, OwnProcess  # noqa: E402

TINY = Place(torch.device("cpu"), "tiny")
H200 = PEAKS["H200"]


def test_the_page_is_what_was_measured() -> None:
    docs = Path(__file__).resolve().parents[1] / "docs"
    assert (docs / "gpu.md").read_text() == gpu_page(json.loads((docs / "data" / "gpu.json").read_text()))


def test_two_sections_here_within_a_tiny_budget(tmp_path: Path) -> None:
    """Real items on tiny tensors: everything but the launches, interrupted and gone on with."""
    path = tmp_path / "gpu.json"
    sections = {name: [item._replace(seconds=1.0) for item in items_of(name, TINY)] for name in ("kernels", "algebra")}
    wanted = [f"{name}/{item.name}" for name, items in sections.items() for item in items]
    worker, ticks = InProcess(TINY), iter(range(1000))
    lefts = []
    for _ in range(3):
        records = Records(path)
        records.open(worker.about())
        # A clock that goes on by one whenever it is looked at.
        lefts.append(measure_sections(sections, worker, records, 66.0, lambda line: None, lambda: float(next(ticks))))
    assert len(wanted) > lefts[0] > lefts[1] >= lefts[2] == 0
    items = json.loads(path.read_text())["items"]
    assert sorted(items) == sorted(wanted)
    assert {row["status"] for row in items.values()} == {"done", "skipped"}, [
        row for row in items.values() if row["status"] == "failed"
    ]
    # Bytes of a rule for each element are those of the counts, within the small tables.
    figures = {key: {figure["name"]: figure["value"] for figure in row["figures"]} for key, row in items.items()}
    for rule, each in (("adamw", 36), ("lion", 28), ("step", 12), ("sonew band 4", 56), ("mkor's gradient passes", 14)):
        of_rule = figures[f"kernels/{rule}"]
        moved = of_rule["memory"] * 1e9 * of_rule["time"] * 1e-3 / (1 << 14)
        assert each * (1 - 1e-9) <= moved < each + 3, (rule, moved)  # a rate times a time is rounded


def test_every_section_has_items_of_different_names() -> None:
    assert list(sections_of(TINY)) == list(SECTIONS)
    for place in (TINY, Place(torch.device("cpu"))):
        for section, items in sections_of(place).items():
            names = [item.name for item in items]
            assert len(set(names)) == len(names) > 1, section
            assert max(item.seconds for item in items) < 200.0, "it could never be fitted into nine minutes"


def dies() -> Found:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hangs() -> Found:
    time.sleep(1000)
    raise AssertionError


def raises() -> Found:
    raise ValueError("no such kernel")


def skips() -> Found:
    raise Skipped("there is one device")


def process() -> Found:
    return Found([Figure("process", float(os.getpid()), "")])


CALLS: list[Callable[[], Found]] = [process, raises, skips, dies, process, hangs, process]


def broken_sections(place: Place) -> dict[str, list[Item]]:
    return {"a": [Item(f"{index} {call.__name__}", 1.0, call) for index, call in enumerate(CALLS)]}


def test_a_process_that_dies_or_hangs_costs_one_item() -> None:
    worker = OwnProcess(TINY, broken_sections, "fork")
    try:
        assert worker.about()["device_type"] == "cpu"
        found = [worker.run("a", item, 0.5) for item in broken_sections(TINY)["a"]]
    finally:
        worker.close()
    assert [outcome.status for outcome in found] == ["done", "failed", "skipped", "failed", "done", "cut", "done"]
    assert "ValueError: no such kernel (test_gpu_sections.py:" in found[1].reason
    assert found[2].reason == "there is one device" and found[3].reason == "the process died with -9"
    processes = {found[index].figures[0].value for index in (0, 4, 6)}
    assert len(processes) == 3 and os.getpid() not in processes


def test_a_steps_time_is_predicted_from_its_counts() -> None:
    counts = counted_step("LDAdam, rank 256", "llama-7b-layers")
    assert counts is not None
    low, high = seconds_of_step(counts, H200)
    # 2,831 FLOP and 55 bytes for each of 810 M parameters. All but 37 of them, those of the second pass of Cholesky QR,
    # run at a third of bfloat16's peak, where bytes take a little longer.
    assert counts.flops["bf16x3"] == pytest.approx(2794 * 810e6, rel=0.01)
    assert counts.flops["float32"] == pytest.approx(37 * 810e6, rel=0.02)
    products = 2794 / (989e12 / 3) + 37 / 67e12
    assert low is not None and 0.8 * low < products * 810e6 < low
    assert (
        low == pytest.approx(0.9 * 55.05 * 810e6 / 4.8e12, rel=0.01) and high is not None and 2 * low < high < 8 * low
    )
    counts = counted_step("MARS-AdamW", "llama-7b-layers")
    assert counts is not None and not counts.flops
    low, high = seconds_of_step(counts, H200)
    assert low == pytest.approx(0.9 * 44 * 810e6 / 4.8e12, rel=0.01) and high is not None and 1.5 * low < high < 2 * low
    assert seconds_of_step(counts, None) == seconds_of_step(None, H200) == (None, None)
