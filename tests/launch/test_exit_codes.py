"""How commands end for a script that calls them, and what it finds on stdout and stderr."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cpu_deepspeed import NO_BUILD
from typer.testing import CliRunner

from rankwise.launch.cli import app
from rankwise.launch.terminal import tell_programs

RANKWISE = f"{sys.executable} -m rankwise"


def shell(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **NO_BUILD, "OMP_NUM_THREADS": "1", **environment}
    words = ["bash", "-o", "pipefail", "-c", line.replace("rankwise", RANKWISE, 1)]
    return subprocess.run(words, cwd=folder, env=given, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("rankwise --version >&-", 0, ""),
        ("rankwise train --help > /dev/full", 1, "Error: [Errno 28] No space left on device\n"),
    ],
)
def test_output_that_nobody_takes_ends_the_command_quietly(line: str, status: int, said: str, tmp_path: Path) -> None:
    done = shell(line, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", said)


def test_a_closed_stdouts_number_goes_to_no_other_file(tmp_path: Path) -> None:
    code = (
        "import sys; from rankwise.launch.exit_codes import _open_closed_streams as opened; opened();"
        "file = open('kept', 'w'); print('lost', flush=True); sys.stderr.write(str(file.fileno() > 2))"
    )
    done = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{code}" >&-'], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == "True" and (tmp_path / "kept").read_text() == ""


@pytest.mark.parametrize("asked", ["list", "--rules json train --help"])
def test_a_broken_module_of_rules_is_bad_usage(asked: str, tmp_path: Path) -> None:
    """Named by the variable, which is read before any command."""
    (tmp_path / "broken.py").write_text("import nothing_such")
    done = shell(f"rankwise {asked}", tmp_path, RANKWISE_RULES="broken.py", COLUMNS="300")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert "RANKWISE_RULES: 'broken.py' is invalid: " in done.stderr and "No module named 'nothing_such'" in done.stderr


def alive(word: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended
            continue
    return [line for line in found if word in line]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {number} of the text\n" for number in range(12000)))
    return path


SMALL = "--device cpu --optimizer adamw --ranks 1 --layers 1 --hidden 32 --heads 2 --seq-len 32 --validation-samples 4"


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("group", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_signals_end_train_and_its_ranks(group: bool, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    out, sent = tmp_path / "out", signal.SIGINT if group else signal.SIGTERM
    words = f"{RANKWISE} train {SMALL} --steps 1000000 --data {text} --cache {text.parent} --output {out}".split()
    with subprocess.Popen(
        words,
        cwd=tmp_path,
        env={**os.environ, **NO_BUILD},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background jobs ignore Ctrl-C, and so do their children.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        records = out / "adamw" / "metrics.jsonl"
        while process.poll() is None and not (records.exists() and records.stat().st_size):
            time.sleep(0.1)
        (os.killpg if group else os.kill)(process.pid, sent)  # the group: as Ctrl-C on a terminal
        _, said = process.communicate(timeout=100)
    assert (process.returncode, said) == (128 + sent, "")
    assert alive(str(out)) == []


@pytest.mark.slow
def test_train_ends_with_its_reader(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    line = f"rankwise train {SMALL} --steps 1000000 --data {text} --cache {text.parent} --output {tmp_path}/out"
    done = shell(f"{line} | grep -m 1 'step 10/'", tmp_path)
    assert done.returncode == 141 and "Traceback" not in done.stderr and "step 10/" in done.stdout
    assert alive(f"{tmp_path}/out") == []


def test_json_has_no_word_for_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    tell_programs({"loss": float("nan"), "rows": [(1, float("inf")), {"lr": 0.5}]})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "loss": None,
        "rows": [[1, None], {"lr": 0.5}],
    }


BAD_FILES = {
    "empty": b"",
    "list": b"[]",
    "latin": b'{"a": "\xe9"}',
    "null": b"null",
    "empty.yaml": b"",
    "l.yaml": b"\xe9\xff",
}


@pytest.mark.parametrize("command", ["train", "plan --json", "explain --json"])
@pytest.mark.parametrize("name", [*BAD_FILES, "folder", "-", "x" * 5000])
def test_a_config_that_is_none_is_bad_usage(command: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for file, content in BAD_FILES.items():
        (tmp_path / file).write_bytes(content)
    named = name if name == "-" else str(tmp_path / name)
    done = CliRunner().invoke(app, [*command.split(), "--config", named])
    assert (done.exit_code, done.stdout) == (2, "") and "Error" in done.stderr, (done.exception, done.output)


@pytest.mark.parametrize("command", ["train --help", "compare RUN"])
def test_a_narrow_screen_that_is_no_terminal_gets_no_colours(command: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": NaN}\n')
    words = [str(run) if word == "RUN" else word for word in command.split()]
    for columns in ("40", "60"):
        done = CliRunner().invoke(app, words, env={"COLUMNS": columns, "FORCE_COLOR": None, "TERM": "xterm"})
        assert done.exit_code == 0 and "\x1b" not in done.output
        assert max(map(len, done.output.splitlines())) <= int(columns)


def test_json_of_a_run_that_diverged_is_json(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n')
    done = CliRunner().invoke(app, ["compare", str(tmp_path), "--json"])
    (row,) = json.loads(done.stdout, parse_constant=pytest.fail)
    assert done.exit_code == 0 and row["loss"] is None and row["steps"] == 2


def test_an_output_that_cannot_be_written_is_one_line(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, f"train {SMALL} --data {text} --output {tmp_path}/file/out --dry-run".split())
    assert done.exit_code == 1 and done.stderr.startswith("Error: [Errno 20] Not a directory"), done.exception
