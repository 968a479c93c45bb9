"""The measurements for a GPU, tried without one: real items, going on, deaths, and what is on the page."""

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

pytest.importorskip("triton")

from benchmarks.gpu.items import Figure, Found, Item, Place, Skipped  # noqa: E402
from benchmarks.gpu.page import gpu_page  # noqa: E402
from benchmarks.gpu.peaks import PEAKS  # noqa: E402
from benchmarks.gpu.predictions import counted_step, seconds_of_step  # noqa: E402
from benchmarks.gpu.race_items import errors_in  # noqa: E402
from benchmarks.gpu.records import Records  # noqa: E402
from benchmarks.gpu.revisions import fingerprint, meaning  # noqa: E402
from benchmarks.gpu.sections import SECTIONS, code_of, items_of, sections_of, worth_of  # noqa: E402
from benchmarks.gpu.session import measure, queued  # noqa: E402
from benchmarks.gpu.steady_items import Living, kept_bytes  # noqa: E402
from benchmarks.gpu.whole_page import whole_section  # noqa: E402
from benchmarks.gpu.whole_steps import ADAMW, ENGINES, measure_whole_steps  # noqa: E402
from benchmarks.gpu.worker import InProcess, OwnProcess  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

TINY = Place(torch.device("cpu"), "tiny")
H200 = PEAKS["H200"]


def test_the_page_is_what_was_measured() -> None:
    docs = Path(__file__).resolve().parents[1] / "docs"
    paths = [docs / "data" / f"{name}.json" for name in ("gpu", "cpu-frameworks", "gpu-frameworks")]
    contents = [json.loads(path.read_text()) if path.exists() else None for path in paths]
    assert contents[0] is not None
    assert (docs / "gpu.md").read_text() == gpu_page(*contents)


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
        queue = queued(sections, records)
        lefts.append(measure(queue, worker, records, 66.0, lambda line: None, lambda: float(next(ticks))))
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


def test_steps_below_deepspeed_wait_for_a_machine_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """There they would fail, and count as measured."""
    named = lambda: {item.name for item in items_of("whole-steps", TINY) if "ZeRO-2" in item.name}  # noqa: E731
    assert named()
    monkeypatch.setattr("benchmarks.gpu.whole_items.find_spec", lambda package: None)
    assert not named()


def test_the_queue_goes_by_state_and_worth(tmp_path: Path) -> None:
    """Unmeasured before stale before measured, in each by worth; a change of words makes nothing stale."""
    path = tmp_path / "gpu.json"
    found = Found([Figure("value", 1.0, "")])
    items = [Item(name, 1.0, lambda: found, worth) for name, worth in (("low", 1.0), ("high", 3.0), ("middle", 2.0))]
    sections, worker = {"step": items}, InProcess(TINY)

    def names(records: Records) -> list[tuple[str, str]]:
        return [(entry.item.name, entry.state) for entry in queued(sections, records)]

    records = Records(path)
    assert names(records) == [("high", "unmeasured"), ("middle", "unmeasured"), ("low", "unmeasured")]
    records.open(worker.about() | {"revision": "abc"})
    measure(queued(sections, records), worker, records, 60.0, lambda line: None)
    again = Records(path)
    assert {state for _, state in names(again)} == {"measured"}
    assert again.rows["step/high"]["about"]["revision"] == "abc" and again.rows["step/high"]["about"]["torch"]
    again.rows["step/middle"]["code"] = "of other code"
    again.rows["step/low"]["status"] = "cut"
    assert names(again) == [("low", "unmeasured"), ("middle", "stale"), ("high", "measured")]
    ran: list[str] = []
    queue = queued(
        {"step": [item._replace(run=lambda name=item.name: ran.append(name) or found) for item in items]}, again
    )
    again.open(worker.about())
    measure(queue, worker, again, 60.0, lambda line: None)
    assert ran == ["low", "middle"]
    with pytest.raises(ValueError, match="name another file"):
        Records(path).open({"device": "another"})


def test_what_code_does_is_told_from_its_words() -> None:
    assert meaning('def f():\n    """Words."""\n    return 1  # more\n') == meaning("def f():\n    return 1\n")
    assert meaning("def f():\n    return 1\n") != meaning("def f():\n    return 2\n")
    assert fingerprint(("rankwise/mkor",)) != fingerprint(("rankwise/mars",))
    # An item of one paper is not made stale by another's room; one that names none knows the section's code alone.
    assert code_of("kernels", "sonew band 1") == code_of("kernels", "sonew band 4") != code_of("kernels", "lion")


def test_every_figure_of_the_page_is_an_item() -> None:
    """No name of an item was changed, under which a figure would be lost."""
    docs = Path(__file__).resolve().parents[1] / "docs"
    items = json.loads((docs / "data" / "gpu.json").read_text())["items"]
    names = {
        f"{section}/{item.name}" for section, found in sections_of(Place(torch.device("cpu"))).items() for item in found
    }
    assert {key for key in items if "(torchao)" not in key and "(bitsandbytes)" not in key} <= names


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
    # 2,831 FLOP and 48 bytes for each of 810 M parameters. All but 37 of them, those of the second pass of Cholesky QR,
    # run at a third of bfloat16's peak, where bytes take a little longer.
    assert counts.flops["bf16x3"] == pytest.approx(2794 * 810e6, rel=0.01)
    assert counts.flops["float32"] == pytest.approx(37 * 810e6, rel=0.02)
    products = 2794 / (989e12 / 3) + 37 / 67e12
    assert low is not None and 0.8 * low < products * 810e6 < low
    assert (
        low == pytest.approx(0.9 * 48.43 * 810e6 / 4.8e12, rel=0.01) and high is not None and 2 * low < high < 8 * low
    )
    counts = counted_step("MARS-AdamW", "llama-7b-layers")
    assert counts is not None and not counts.flops
    low, high = seconds_of_step(counts, H200)
    assert low == pytest.approx(0.9 * 44 * 810e6 / 4.8e12, rel=0.01) and high is not None and 1.5 * low < high < 2 * low
    assert seconds_of_step(counts, None) == seconds_of_step(None, H200) == (None, None)


@pytest.mark.parametrize("engine", ENGINES)
def test_whole_steps_of_a_toy_under_each_engine(engine: str) -> None:
    """Everything that is timed on a card, with a toy: micro-batches add up, ours and torch's optimizer step."""
    pytest.importorskip("deepspeed")
    rows = run_ranks(1, _whole_steps, engine)[0]
    for row in rows:
        assert row["tokens_of_a_step"] == {"131072": 128, "524288": 512} and row["operations"] > 0
        assert 0 < row["update_seconds"] and set(row["whole_seconds"]) == set(row["tokens_of_a_step"])


def _whole_steps(rank: int, world: int, engine: str) -> list[dict[str, Any]]:
    return [measure_whole_steps("gpt2-small", name, engine, torch.device("cpu"), True) for name in (ADAMW, "MARS-M")]


@pytest.mark.parametrize("contender", ["MARS-AdamW", "MARS-M", "SONew, tridiagonal", "LDAdam, rank 16", "MKOR"])
def test_a_steady_step_keeps_no_memory(contender: str) -> None:
    (item,) = [item for item in items_of("steady", TINY) if item.name == f"{contender}, tiny"]
    (figure,) = item.run().figures
    assert figure.value == 0 and not figure.surprising


def test_memory_that_a_step_keeps_is_seen() -> None:
    class Leaky:
        def __init__(self) -> None:
            self.kept: list[torch.Tensor] = []

        def step(self) -> None:
            self.kept.append(torch.zeros(5) + 1)

    assert kept_bytes(Leaky()) == 2 * 5 * 4
    with Living() as living:
        kept = torch.zeros(3)
        view = kept[1:]
        assert living.bytes == 12, "a view is no memory of its own"
        del kept, view
        assert living.bytes == 0


def test_summaries_of_the_sanitizer() -> None:
    assert errors_in("========= ERROR SUMMARY: 3 errors\n") == 3
    assert errors_in("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n") == 0
    assert errors_in("Killed") is None


def test_kernels_of_every_paper_run_at_odd_sizes() -> None:
    """What the checker watches on a card, here on the CPU."""
    from benchmarks.gpu.race_cases import PAPERS, run_paper

    assert [run_paper(paper, torch.device("cpu")) for paper in PAPERS] == [len(PAPERS[paper]) for paper in PAPERS]
    assert max(worth_of("whole-steps", item) for item in items_of("whole-steps", TINY)) == 10.0


def test_the_page_begins_with_whole_steps_measured_or_not() -> None:
    row = {"name": "MARS-M", "model": "gpt2-small", "engine": "plain", "update_seconds": 0.02, "planned_seconds": 0.016}
    row |= {"whole_seconds": {"131072": 0.25, "524288": 1.0}, "tokens_of_a_step": {"131072": 131072, "524288": 524288}}
    row |= {"operations": 8e8, "peak_rate": 800e12, "peak_bytes": 3 << 30}
    lines = whole_section([row]).splitlines()
    measured = next(line for line in lines if "MARS-M" in line)
    assert measured.endswith("| 524,288 | 52% | 8.0% | 2.0% | 20.0 | 16.0 (+25%) | 3.0 |")
    left = [line for line in lines if "not yet measured" in line]
    assert len(left) == 5 and '--item "llama-1b, FSDP2"`' in left[-1]
    assert not any(character.isdigit() for line in left for character in line.split("`")[2])
