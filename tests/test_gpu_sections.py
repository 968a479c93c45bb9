"""The measurements for a GPU, tried without one: budgets, going on, deaths, and what is a surprise."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

from benchmarks.__main__ import app  # noqa: E402
from benchmarks.gpu.command import seconds_of  # noqa: E402
from benchmarks.gpu.items import Figure, Found, Item, Place, Skipped  # noqa: E402
from benchmarks.gpu.page import gpu_page  # noqa: E402
from benchmarks.gpu.peaks import PEAKS, peaks_of  # noqa: E402
from benchmarks.gpu.predictions import counted_step, seconds_of_step  # noqa: E402
from benchmarks.gpu.records import Records  # noqa: E402
from benchmarks.gpu.sections import SECTIONS, items_of, sections_of  # noqa: E402
from benchmarks.gpu.session import Outcome, measure_sections  # noqa: E402
from benchmarks.gpu.worker import InProcess, OwnProcess  # noqa: E402

TINY = Place(torch.device("cpu"), "tiny")
H200 = PEAKS["H200"]


class Clock:
    """Goes on by what an item takes."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class MadeUp:
    """A worker whose items take what they say, or longer."""

    def __init__(self, clock: Clock, slowness: float = 1.0) -> None:
        self.clock, self.slowness, self.ran = clock, slowness, []  # type: ignore[var-annotated]

    def about(self) -> dict[str, Any]:
        return {"device": "A device", "torch": "2.99", "triton": "3.77", "date": "2030-01-02"}

    def run(self, section: str, item: Item, limit: float) -> Outcome:
        self.ran.append(f"{section}/{item.name}")
        took = item.seconds * self.slowness
        self.clock.now += min(took, limit)
        if took > limit:
            return Outcome("cut", [], [], f"not done after {limit:.0f} s")
        found = item.run()
        return Outcome("done", found.figures, found.rows)


def made_up(*costs: float) -> list[Item]:
    return [
        Item(f"item {index}", cost, lambda: Found([Figure("speed", 3.0, "TB/s", 4.0, 4.8)]))
        for index, cost in enumerate(costs)
    ]


def session(path: Path, items: list[Item], budget: float, slowness: float = 1.0) -> tuple[int, list[str], float, Any]:
    clock, said = Clock(), []  # type: ignore[var-annotated]
    worker, records = MadeUp(clock, slowness), Records(path)
    records.open(worker.about())
    left = measure_sections({"a": items}, worker, records, budget, said.append, clock)
    return left, said, clock.now, worker.ran


def test_a_call_keeps_within_its_budget_and_the_next_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    items = made_up(4.0, 30.0, 5.0, 6.0)
    left, said, took, ran = session(path, items, 10.0)
    assert (left, took, ran) == (2, 9.0, ["a/item 0", "a/item 2"]), "a shorter one takes the place of one too long"
    assert "item 1 needs 30 s: give it a larger budget" in said and said[-1] == "2 items are left: run it again"
    left, _, took, ran = session(path, items, 40.0)
    assert (left, took, ran) == (0, 36.0, ["a/item 1", "a/item 3"])
    left, said, took, ran = session(path, items, 40.0)
    assert (left, took, ran) == (0, 0.0, []) and said == ["--- a", "    all 4 items are there", "nothing is left"]
    content = json.loads(path.read_text())
    assert list(content["items"]) == ["a/item 0", "a/item 2", "a/item 1", "a/item 3"]
    assert content["about"]["device"] == "A device"


def test_what_takes_longer_than_planned_is_cut_and_planned_for(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    items = made_up(1.0, 9.0)
    left, said, took, _ = session(path, items, 12.0, slowness=2.0)
    assert (left, took) == (1, 2.0), "the first one has shown how slow this machine is"
    left, _, took, ran = session(path, items[1:], 12.0, slowness=2.0)
    assert (left, took, ran) == (1, 0.0, [])
    path.unlink()
    left, said, took, _ = session(path, items[1:], 12.0, slowness=2.0)
    assert (left, took) == (1, 12.0), "it has known no better" and any(
        "item 1 cut: not done after 12 s" in line for line in said
    )
    left, _, took, _ = session(path, items[1:], 20.0, slowness=2.0)
    assert (left, took) == (1, 0.0), "twice what it was cut off after"
    left, _, took, _ = session(path, items[1:], 30.0, slowness=2.0)
    assert (left, took) == (0, 18.0)
    left, said, took, _ = session(tmp_path / "hangs.json", made_up(1.0), 500.0, slowness=1e6)
    assert (left, took) == (0, 60.0) and any("SURPRISE item 0 failed: took more than 60 s" in line for line in said)


@pytest.mark.parametrize(
    ("value", "low", "high", "surprising"),
    [
        (3.0, 4.0, 4.8, True),
        (4.4, 4.0, 4.8, False),
        (4.9, 4.0, 4.8, True),
        (9.0, None, None, False),
        (None, None, None, True),
        (float("nan"), None, None, True),
        (3.0, 4.0, None, True),
    ],
)
def test_what_leaves_its_range_is_a_surprise(
    value: float | None, low: float | None, high: float | None, surprising: bool
) -> None:
    figure = Figure("copy", value, "TB/s", low, high)
    assert figure.surprising == figure.line().startswith("SURPRISE copy: ") == surprising
    assert figure.row()["surprising"] == surprising


def test_a_surprise_is_printed_and_on_the_page(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    _, said, _, _ = session(path, made_up(1.0), 10.0)
    assert "    SURPRISE speed: 3 TB/s (expected 4 to 4.8)" in said
    content = json.loads(path.read_text())
    page = gpu_page(content)
    assert "A device, torch 2.99, triton 3.77, 2030-01-02." in page and "### a\n" in page
    assert "| item 0 | speed | 3 TB/s | 4 to 4.8 |  | **outside** |" in page


def test_the_page_is_what_was_measured() -> None:
    docs = Path(__file__).resolve().parents[1] / "docs"
    assert (docs / "gpu.md").read_text() == gpu_page(json.loads((docs / "data" / "gpu.json").read_text()))


def test_only_items_that_are_named_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    words = ["gpu", "--device", "cpu", "--model", "tiny", "--section", "kernels", "--item", "factors of side 64"]
    assert CliRunner().invoke(app, [*words, "--output", str(path)]).exit_code == 0
    assert list(json.loads(path.read_text())["items"]) == ["kernels/factors of side 64"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_is_said_at_once(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["gpu", "--output", str(tmp_path / "gpu.json")])
    said = " ".join(found.output.replace("│", " ").split())
    assert found.exit_code == 2 and "no device 'cuda' here; --device cpu tries all but the launches" in said
    assert not any(tmp_path.iterdir())


def test_rows_of_another_device_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    session(path, made_up(1.0), 10.0)
    with pytest.raises(ValueError, match=r"is of device 'A device', this is 'B'; name another file with --output"):
        Records(path).open({"device": "B"})


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
        lefts.append(measure_sections(sections, worker, records, 60.0, lambda line: None, lambda: float(next(ticks))))
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


def test_peaks_are_found_by_the_devices_name() -> None:
    assert peaks_of("NVIDIA H200") is H200 and peaks_of("NVIDIA H100 80GB HBM3") is PEAKS["H100 80GB HBM3"]
    assert peaks_of("NVIDIA A100-SXM4-40GB") is PEAKS["A100"] and peaks_of("Some CPU") is None
    assert all(peaks.float32 < peaks.tf32 < peaks.bfloat16 and peaks.source for peaks in PEAKS.values())


def test_a_steps_time_is_predicted_from_its_counts() -> None:
    counts = counted_step("LDAdam, rank 256", "llama-7b-layers")
    assert counts is not None
    low, high = seconds_of_step(counts, H200)
    # 2,762 FLOP and 48 bytes for each of 810 M parameters: products take longer than bytes. 1,024 of them, those of the
    # step, are in float32, the others run at a third of tf32's peak.
    products = 1738 / (494e12 / 3) + 1024 / 67e12
    assert low == pytest.approx(products * 810e6, rel=0.01) and high is not None and 2 * low < high < 8 * low
    counts = counted_step("MARS-AdamW", "llama-7b-layers")
    assert counts is not None and not counts.flops
    low, high = seconds_of_step(counts, H200)
    assert low == pytest.approx(0.9 * 44 * 810e6 / 4.8e12, rel=0.01) and high is not None and 1.5 * low < high < 2 * low
    assert seconds_of_step(counts, None) == seconds_of_step(None, H200) == (None, None)


@pytest.mark.parametrize(("text", "seconds"), [("540", 540.0), ("540s", 540.0), ("9m", 540.0), ("0.5m", 30.0)])
def test_budgets(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "9 m", "9h", "-1", "m"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a budget is seconds or minutes, as 540, 540s or 9m"):
        seconds_of(text)
