"""Logs of every kind become runs side by side; what cannot be read says why."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rankwise.launch.cli import app
from rankwise.launch.comparing.logged_run import Curve, LogError
from rankwise.launch.comparing.logs import read_runs
from rankwise.launch.comparing.side_by_side import as_rows

LOSSES = {10: 4.0, 20: 3.0, 30: 2.5}
TOKENS = 64


def of_ours(folder: Path, label: str, losses: dict[int, float], seconds: float) -> Path:
    """As the loop of ``rankwise train`` writes it."""
    folder.mkdir(parents=True)
    lines = []
    for step, loss in losses.items():
        lines += [
            {"step": step, "loss": loss + 0.1, "seconds": seconds * step},
            {"step": step, "validation_loss": loss},
        ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "settings.json").write_text(json.dumps({"label": label}))
    summary = {"label": label, "steps": 30, "tokens": 30 * TOKENS, "step_share": 0.1, "state_bytes_per_rank": 2**20}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def of_megatron(file: Path) -> Path:
    """Lines as Megatron's training loop prints them, ten iterations each."""
    lines = ["    max allocated: 12.5 | something else"]
    for step, loss in LOSSES.items():
        lines += [
            f" [2026-01-01 00:00:00.000000] iteration {step:8d}/      30 | consumed samples: {step * 8:12d} |"
            f" elapsed time per iteration (ms): 500.0 | learning rate: 1.000000E-03 | global batch size:     8 |"
            f" lm loss: {loss + 0.1:.6E} | loss scale: 1.0 | grad norm: 1.000 | number of nan iterations:   0 |",
            f" validation loss at iteration {step} | lm loss value: {loss:.6E} | lm loss PPL: 1.0E+00 | ",
        ]
    file.write_text("\n".join(lines))
    return file


def of_deepspeed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """By DeepSpeed's own monitor: counted in samples, eight a step."""
    monitor = pytest.importorskip("deepspeed.monitor.csv_monitor")
    monkeypatch.setattr(monitor.dist, "get_rank", lambda: 0)
    writer = monitor.csvMonitor(SimpleNamespace(enabled=True, output_path=str(folder), job_name="job"))
    for step in range(1, 31):
        shown = [("Train/Samples/lr", 1e-3, step * 8), ("optim/mkor/collectives", 1, step * 8)]
        shown += [("Train/Samples/train_loss", LOSSES[step], step * 8)] if step in LOSSES else []
        parts = [(f"Train/Samples/elapsed_time_ms_{part}", 1.0, step * 8) for part in ("forward", "backward", "step")]
        writer.write_events([*shown, *parts])
    return folder


def test_every_log_of_a_run_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [of_ours(tmp_path / "ours", "ours", LOSSES, 0.5), of_megatron(tmp_path / "megatron.log")]
    paths.append(of_deepspeed(tmp_path / "ds", monkeypatch))
    state = pytest.importorskip("transformers").TrainerState
    (tmp_path / "trainer").mkdir()
    history = [{"step": step, "loss": loss} for step, loss in LOSSES.items()]
    state(log_history=history).save_to_json(str(tmp_path / "trainer/trainer_state.json"))
    ours, megatron, ds, trainer = runs = read_runs([*paths, tmp_path / "trainer"], seq_len=TOKENS // 8)
    assert [run.label for run in runs] == ["ours", "megatron", "job", "trainer"]
    assert ours.validation == megatron.validation == trainer.loss and ours.loss == megatron.loss
    assert [run.total("steps") for run in runs] == [30] * 4
    assert [run.total("tokens") for run in runs] == [30 * TOKENS] * 3 + [None]
    assert [run.total("seconds") for run in runs] == [15, 15, None, None]
    assert ds.loss == trainer.loss, "in steps, though counted in samples"
    assert ds.step_share == pytest.approx(1 / 3) and megatron.peak_bytes == 12.5 * 2**20


def test_event_files_are_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "engine")) as writer:
        for step, loss in LOSSES.items():
            writer.add_scalar("Train/Samples/train_loss", loss, step * 8, walltime=100 + step)
    with SummaryWriter(str(tmp_path / "trainer")) as writer:
        for step, loss in LOSSES.items():
            writer.add_scalar("train/loss", loss, step, walltime=100 + step)
            writer.add_scalar("mine", loss - 1, step, walltime=100 + step)
    engine, trainer = read_runs([tmp_path], seq_len=2)
    # The first loss here is that of step 10, and nobody wrote how many samples a step has.
    assert engine.loss.steps == (1, 2, 3) and engine.total("tokens") == 30 * 8 * 2
    assert trainer.loss == Curve.of({float(step): loss for step, loss in LOSSES.items()})
    assert trainer.total("seconds") == 20 and trainer.total("tokens") is None
    assert read_runs([tmp_path / "trainer"], loss="mine")[0].loss.values == (3.0, 2.0, 1.5)


def test_the_others_are_measured_by_the_first(tmp_path: Path) -> None:
    paths = [
        of_ours(tmp_path / "a/adamw", "adamw", LOSSES, 1.0),
        of_ours(tmp_path / "a/mkor", "mkor", {10: 3.5, 20: 1.5, 30: 1.0}, 2.0),
        of_ours(tmp_path / "a/slow", "slow", {10: 5.0, 20: 4.0, 30: 3.0}, 1.0),
    ]
    rows = as_rows(read_runs(paths))
    assert [row["of_steps"] for row in rows] == [1.0, 0.5, None]  # on the line from 3.5 at 10 to 1.5 at 20
    assert [row["of_tokens"] for row in rows] == [1.0, 0.5, None]
    assert [row["of_seconds"] for row in rows] == [1.0, 1.0, None]


def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("x", "y"):
        of_ours(tmp_path / name / "[adamw]", "[adamw]", LOSSES, 0.5)
    picture = tmp_path / "pictures/losses.png"
    result = CliRunner().invoke(app, ["compare", str(tmp_path), "--png", str(picture)], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "x/[adamw]" in result.output and "y/[adamw]" in result.output and "2.5000" in result.output
    assert "peak" not in result.output, "nobody knows it"
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(CliRunner().invoke(app, ["compare", str(tmp_path), "--json"]).output)
    assert [row["tokens_per_second"] for row in rows] == [128.0, 128.0]


def test_a_run_that_goes_on_or_was_killed_is_read_as_far_as_it_is(tmp_path: Path) -> None:
    folder = of_ours(tmp_path / "mkor", "mkor", LOSSES, 0.5)
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')
    (run,) = read_runs([folder])
    assert run.label == "mkor" and run.steps == 30 and run.total("tokens") is None and run.total("seconds") == 15


def test_a_run_counts_once(tmp_path: Path) -> None:
    folder = of_ours(tmp_path / "a/adamw", "adamw", LOSSES, 0.5)
    for step in (10, 20, 100):
        (tmp_path / f"a/trainer/checkpoint-{step}").mkdir(parents=True)
        history = [{"step": at, "loss": 1.0} for at in range(0, step + 1, 10)]
        (tmp_path / f"a/trainer/checkpoint-{step}/trainer_state.json").write_text(json.dumps({"log_history": history}))
    runs = read_runs([folder, tmp_path / "a", tmp_path / "a/../a"])
    assert [(run.label, run.steps) for run in runs] == [("adamw", 30), ("trainer", 100)]


def test_a_loss_at_the_start_alone_is_no_division_by_zero(tmp_path: Path) -> None:
    row = as_rows(read_runs([of_ours(tmp_path / "x", "x", {0: 4.0}, 0.5)]))[0]
    assert row["steps"] == 0 and row["of_steps"] is None and row["tokens_per_second"] is None


def test_what_cannot_be_compared_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    folder = of_ours(tmp_path / "run", "run", LOSSES, 0.5)
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv/Train_Samples_lr.csv").write_text("step,lr\n8,0.1\n")
    (tmp_path / "words.txt").write_text("nothing\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/cities.csv").write_text("city,country\nBern,Switzerland\n")
    for path, message in (
        (tmp_path / "gone", "does not exist"),
        (tmp_path / "empty", "no log in it or below"),
        (tmp_path / "csv", "name one of Train/Samples/lr by --loss"),
        (tmp_path / "words.txt", "has no loss yet"),
        (tmp_path / "data", "cities.csv is not a file of csv_monitor"),
    ):
        with pytest.raises(LogError, match=message):
            read_runs([path])
    with pytest.raises(LogError, match="has no loss yet; see --loss"):
        read_runs([folder], loss="other")
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "gone")], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and "does not exist" in result.output
