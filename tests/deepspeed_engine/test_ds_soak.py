"""The soak in small: a run that is killed and moved to other ranks, beside one that is not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak as soaking
from benchmarks.soak import Start, final_weights, soak
from benchmarks.soak_page import condensed, faults, losses, soak_section
from benchmarks.soak_rank import Segment, live

STEPS, EVERY = 12, (2, 3)
DISTURBED = [Start(2, 5, kill=True), Start(3, 8, kill=False), Start(2, STEPS, kill=False)]


def _plan(run: str, *_: Any) -> list[Start]:
    return DISTURBED if run == "disturbed" else [Start(2, STEPS, kill=False)]


class _Waiting:
    """Progress of ranks that take their time from a step on, so that whoever watches comes in time to kill one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __setitem__(self, rank: int, step: int) -> None:
        self._inner[rank] = step
        if step >= DISTURBED[0].until:
            time.sleep(1.0)


def _live(rank: int, segment: Segment, store: str, progress: Any, report: Any) -> None:
    folder = Path(segment.folder)
    to_be_killed = folder.name == f"{segment.type}-disturbed".lower() and not (folder / "latest").exists()
    live(rank, segment, store, _Waiting(progress) if to_be_killed else progress, report)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["MKOR", pytest.param("LDAdam", marks=pytest.mark.exhaustive)])
def test_a_disturbed_run_follows_the_undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(soaking, "planned", _plan)
    monkeypatch.setattr(soaking, "live", _live)
    file = tmp_path / "soak.jsonl"

    def run(runs: tuple[str, ...]) -> list[dict[str, Any]]:
        return list(soak([kind], runs, STEPS, 0, file, tmp_path, EVERY))

    rows = run(("undisturbed", "disturbed"))
    assert rows == [json.loads(line) for line in file.read_text().splitlines()]
    assert run(("undisturbed", "disturbed")) == [], "what is done is not done again"

    calm, killed, stopped, last = (row for row in rows if row["kind"] == "segment")
    assert (calm["first"], calm["last"], calm["end"]) == (0, STEPS, "stop")
    assert (killed["first"], killed["end"]) == (0, "kill") and 5 <= killed["last"] < STEPS
    assert stopped["first"] in (3, 6, 9) and stopped["first"] <= killed["last"], "a whole checkpoint"
    assert (stopped["world"], stopped["last"], last["first"], last["last"]) == (3, 8, 8, STEPS)

    undisturbed, disturbed = losses(rows, kind, "undisturbed"), losses(rows, kind, "disturbed")
    assert undisturbed.keys() == disturbed.keys() == set(range(2, STEPS + 1, 2))
    assert undisturbed[STEPS] < undisturbed[2]
    assert disturbed == pytest.approx(undisturbed, rel=1e-5)
    (apart,) = final_weights(rows, tmp_path)
    assert apart["run"] == "disturbed" and 0.0 < apart["mean"] < 1e-3

    assert faults(rows) == []
    page = soak_section([*condensed(rows), apart])
    assert "| kills; clean ends | 1; 2 |" in page and f"Loss, {kind}:" in page


def _counts(step: int, segment: int = 0, resident: int = 0, state: int = 8, **more: int) -> dict[str, Any]:
    counts = dict.fromkeys(("units", "index tables", "entries of units", "module hooks", "states"), 1)
    counts |= dict.fromkeys(("matrix states", "tensors", "objects"), 1)
    sizes = {"counts": {**counts, **more}, "resident": resident, "state_bytes": state}
    return {"kind": "counts", "type": "MKOR", "run": "disturbed", "segment": segment, "world": 4, "step": step, **sizes}


def test_what_grows_is_found() -> None:
    assert faults([_counts(50), _counts(100)]) == []
    assert faults([_counts(50), _counts(100, tensors=2)]) == [
        "MKOR, disturbed, steps 50 to 100 on 4 ranks: 1 more tensors"
    ]
    mib = 2**20
    settling = [_counts(50), _counts(1000, resident=9 * mib), _counts(2000, resident=9 * mib + mib // 2)]
    assert faults(settling) == faults(condensed(settling)) == []
    (leak,) = faults([_counts(50), _counts(1000, resident=9 * mib)])
    assert leak.endswith("9.0 MiB more memory in the last 950 steps")
    again = {"kind": "started", "type": "MKOR", "run": "disturbed", "segment": 0}
    interrupted = [_counts(50), _counts(100), again, _counts(150, resident=9 * mib), _counts(200, resident=9 * mib)]
    assert faults(interrupted) == faults(condensed(interrupted)) == [], "two processes are not compared"
    (other,) = faults([_counts(50), _counts(100, segment=1, state=12)])
    assert other == "MKOR on 4 ranks: rank 0 held [8, 12] bytes of state"
