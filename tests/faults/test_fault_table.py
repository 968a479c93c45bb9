"""Every row of the fault table: what is seen must be what is expected.

With ``RANKWISE_FAULT_TABLE=faults.jsonl`` the rows are appended to that file; ``python -m benchmarks reliability``
makes docs/reliability.md of them.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_faults import after_the_signal, seen_by_engines
from fault_table import ENGINES, FILES, KILLED, MEGATRON, PLAIN, TABLE, Row
from file_faults import damage, seen_while_loading, seen_while_saving
from killed_ranks import EVENTS, Kill, job_of, survivor_of
from plain_faults import seen_on_a_rank
from ranks import once, run_ranks
from seeing import Sentences, alike

ROOT = Path(__file__).resolve().parents[2]
# Rank 0 names a checkpoint: only another rank's death while saving can leave an incomplete one behind.
VICTIMS = {"backward": 0, "exchange": 1, "step": 0, "save": 1}
STEPS, SAVED = 4, 2


def _kill(event: str) -> Kill:
    return Kill(job_of("LDAdam", 2), event, VICTIMS[event], SAVED, STEPS)


@once
def _plain() -> Sentences:
    return alike(run_ranks(2, seen_on_a_rank))


@once
def _engines(root: Path) -> Sentences:
    folder = root / "signal"
    folder.mkdir()
    found = alike(run_ranks(2, seen_by_engines, str(folder)))
    resumed = alike(run_ranks(2, _resumed, str(folder)))
    return found | {name: f"{found[name]}; {sentence}" for name, sentence in resumed.items()}


def _resumed(rank: int, world: int, folder: str) -> Sentences:
    import deepspeed

    deepspeed.init_distributed("gloo")
    return {"signal": after_the_signal(rank, world, folder)}


@once
def _files(root: Path) -> Sentences:
    """Of files, and of runs that are continued where a rank was killed."""
    survivors, kills = {}, []
    for event in EVENTS:
        folder = str(root / event)
        survivors[event] = survivor_of(_kill(event), folder, str(root / f"{event} store"))
        kills.append((_kill(event), folder))
    folder = root / "files"
    folder.mkdir()
    saved = alike(run_ranks(2, seen_while_saving, str(folder)))
    damage(folder)
    loaded = alike(run_ranks(2, seen_while_loading, str(folder), kills))
    before = saved | survivors
    return {name: f"{before[name]}; {seen}" if name in before else seen for name, seen in loaded.items()}


@once
def _megatron(root: Path) -> Sentences:
    pytest.importorskip("megatron.core")
    from megatron_faults import seen_by_megatron

    folder = root / "megatron"
    folder.mkdir()
    return alike(run_ranks(2, seen_by_megatron, str(folder)))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def _record(row: Row, seen: str) -> None:
    path = os.environ.get("RANKWISE_FAULT_TABLE")
    if path:
        line = {"fault": row.fault, "where": row.where, "expected": row.expected, "seen": seen}
        with Path(path).open("a") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


_HERE = [pytest.param(row, id=row.label, marks=pytest.mark.slow) for row in TABLE if not row.elsewhere]
_ELSEWHERE = [pytest.param(row, id=row.label) for row in TABLE if row.elsewhere]


@pytest.mark.parametrize("row", _HERE)
def test_seen_is_expected(root: Path, row: Row) -> None:
    runs = {ENGINES: _engines, FILES: _files, KILLED: _files, MEGATRON: _megatron}
    seen = (_plain() if row.source == PLAIN else runs[row.source](root))[row.name]
    _record(row, seen)
    assert seen == row.expected


@pytest.mark.parametrize("row", _ELSEWHERE)
def test_the_test_it_names_exists(row: Row) -> None:
    path, name = row.source.split("::")
    assert f"def {name}(" in (ROOT / path).read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", _ELSEWHERE)
def test_the_test_it_names_passes(row: Row) -> None:
    command = [sys.executable, "-m", "pytest", "-q", row.source]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    _record(row, f"`{row.source.split('::')[1]}` passes")


def test_no_row_is_empty_and_none_appears_twice() -> None:
    assert all(row.fault and row.where and row.expected and row.source for row in TABLE)
    assert len({row.label for row in TABLE}) == len(TABLE)
    for module in ("engine_faults", "plain_faults"):
        scenarios = importlib.import_module(module).SCENARIOS
        assert set(scenarios) <= {row.name for row in TABLE}
