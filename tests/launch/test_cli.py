from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rankwise.comm.owner_plan import MatrixTask
from rankwise.launch import environment, optimizer_guide, shim
from rankwise.launch.cli import app
from rankwise.launch.explain import why_owner
from rankwise.launch.optimizer_guide import CHOICES, as_markdown
from rankwise.launch.planning.optimizers import built, chosen
from rankwise.launch.pretrain import _of_device
from rankwise.launch.report import results_table
from rankwise.launch.settings import Settings
from rankwise.names import BY_NAME, BY_SPELLING, is_ours
from rankwise.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> tuple[int, str]:
    # A wide terminal keeps messages on one line.
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, re.sub(r"\s+", " ", result.output)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number} of the text\n" for number in range(12000)))
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "adan"], "optimizer is 'adan': it must be one of adamw, mars"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--data", "no/such/folder"], "data is 'no/such/folder', which does not exist"),
        (["--hidden", "10", "--heads", "4"], "hidden must be a multiple of heads"),
        (["--stage", "4"], "Invalid value for '--stage'"),
        (["--model", "bert"], "Invalid value for '--model'"),
        (["--config", "missing.json"], "'missing.json' does not exist"),
        (["--steps", "0"], "Invalid value for '--steps'"),
        (["--sead", "1"], "No such option: --sead"),
        (["--config", "CONFIG"], "optimizer type 'MARS-M' has no option 'gama': did you mean 'gamma'?"),
        (["--config", "LEFT"], "has no option 'torch_adam': remove it; it chooses a form of the framework's AdamW"),
        (["--config", "UNREAD"], "momentum=0.9 is invalid: backend='adamw' does not read it"),
        (["--optimizer", "mkor", "--lr", "-1"], "lr=-1.0 is invalid"),
    ],
)
def test_train_refuses_bad_options_before_any_rank_starts(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankwise.launch.spawn.run_ranks", lambda *_: pytest.fail("a run was started"))
    for name, kind, params in (
        ("CONFIG", "MARS-M", {"lr": "auto", "gama": 0.1}),
        ("LEFT", "LDAdam", {"torch_adam": True}),
        ("UNREAD", "MKOR", {"momentum": 0.9}),
    ):
        (tmp_path / name).write_text(json.dumps({"optimizer": {"type": kind, "params": params}}))
    arguments = [str(tmp_path / argument) if (tmp_path / argument).exists() else argument for argument in arguments]
    status, output = run("train", *arguments)
    assert status == 2 and message in output


def test_version_and_module() -> None:
    status, output = run("--version")
    assert status == 0 and output.strip() == f"rankwise {__version__}"
    said = subprocess.check_output([sys.executable, "-m", "rankwise", "--version"], text=True, cwd=ROOT)
    assert said.strip() == f"rankwise {__version__}"


def commands() -> list[str]:
    return [command.name or command.callback.__name__ for command in app.registered_commands]  # type: ignore[union-attr]


@pytest.mark.parametrize("command", commands())
def test_help_fits_a_screen_and_has_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"})
    lines = result.output.splitlines()
    assert result.exit_code == 0 and len(lines) <= 50, len(lines)
    assert re.search(rf"Example: rankwise {command} ", " ".join(lines))


@pytest.mark.parametrize(("command", "columns"), [("train", 100), ("plan", 80)])
def test_help_of_the_longest_commands_fits_a_narrower_screen(command: str, columns: int) -> None:
    result = CliRunner().invoke(
        app, [command, "--help"], env={"COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": "1"}
    )
    assert len(result.output.splitlines()) <= 50


def test_help_shows_defaults_in_brackets_as_they_are() -> None:
    status, output = run("train", "--help")
    assert status == 0 and "adamw, mars-m" in output


def test_train_refuses_text_too_short_for_a_window(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.launch.spawn.run_ranks", lambda *_: pytest.fail("a run was started"))
    status, output = run("train", "--data", str(text), "--seq-len", "1000000", "--cache", str(text.parent / "cache"))
    assert status == 2 and "smaller --seq-len" in output


def test_train_reports_a_failed_run_and_goes_on(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict] = []

    def fail(module: str, arguments: list[str], ranks: int, cpu: bool) -> int:
        started.append(json.loads(Path(arguments[0]).read_text()))
        return 3

    monkeypatch.setattr("rankwise.launch.spawn.run_ranks", fail)
    folder = text.parent
    status, output = run(
        *("train", "--data", str(text), "--output", str(folder / "out"), "--cache", str(folder / "cache")),
        *("--device", "cpu", "--seed", "5", "--lr", "0.5"),
    )
    assert status == 1
    assert "adamw: the launcher ended with status 3" in output and "mars-m: the launcher ended with status 3" in output
    assert [settings["label"] for settings in started] == ["adamw", "mars-m"]
    for settings in started:
        assert settings["seed"] == 5 and settings["deepspeed"]["optimizer"]["params"]["lr"] == 0.5


def test_deepspeed_command_keeps_the_scripts_options_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    seen: list[tuple] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("rankwise.launch.spawn.exec_ranks", lambda *arguments: seen.append(arguments))
    status, _ = run("deepspeed", "--ranks", "3", "--device", "cpu", str(script), "--ranks", "9", "--help", "x")
    assert status == 0
    assert seen == [("shim", [str(script), "--ranks", "9", "--help", "x"], 3, True)]


def test_deepspeed_command_runs_in_process_under_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    seen: list[tuple] = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(shim, "run_script", lambda *arguments: seen.append(arguments))
    status, _ = run("deepspeed", str(script), "--deepspeed_config", "ds.json")
    assert status == 0 and seen == [(script, ["--deepspeed_config", "ds.json"])]


def test_deepspeed_command_needs_an_existing_script() -> None:
    status, output = run("deepspeed", "missing.py")
    assert status == 2 and "'missing.py' does not exist" in output


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["train.py", "--a", "1", "--local_rank=7"], ["--a", "1", "--local_rank=7"]),
        (["--local_rank=1", "train.py", "--a", "1"], ["--local_rank=1", "--a", "1"]),
        (["--local-rank", "1", "train.py"], ["--local_rank=1"]),
    ],
)
def test_shim_runs_a_script_as_python_would(tmp_path: Path, given: list[str], expected: list[str]) -> None:
    """The launcher's --local_rank comes before the script's name and must end up behind it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "helper.py").write_text("NAME = 'found beside the script'\n")
    (folder / "train.py").write_text(
        "import json, sys, helper\n"
        "class Pickled: pass\n"
        "assert sys.modules['__main__'].Pickled is Pickled\n"
        "print(json.dumps([__name__, sys.argv, sys.path[0], helper.NAME]))\n"
    )
    script = str(folder / "train.py")
    given = [script if argument == "train.py" else argument for argument in given]
    code = (
        "import sys; from rankwise.launch import shim; shim.register = lambda: None;"
        "sys.argv = ['shim', *sys.argv[1:]]; shim.app()"
    )
    output = subprocess.check_output([sys.executable, "-c", code, *given], text=True)
    assert json.loads(output) == ["__main__", [script, *expected], str(folder), "found beside the script"]


def test_megatron_command_puts_the_files_flags_before_the_typed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, flags = tmp_path / "pretrain_gpt.py", tmp_path / "flags.yaml"
    script.write_text("")
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    flags.write_text("optimizer: mkor\nlr: 0.1\n")
    seen: list[tuple] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("rankwise.launch.spawn.exec_ranks", lambda *arguments: seen.append(arguments))
    given = ["megatron", "--cpu", "--ranks", "3", "--config", str(flags), str(script), "--lr", "0.2", "--cpu"]
    status, _ = run(*given)
    expected = ["--cpu", str(script), "--optimizer", "mkor", "--lr", "0.1", "--lr", "0.2", "--cpu"]
    assert status == 0 and seen == [("megatron_shim", expected, 3, True)]
    flags.write_text("- mkor")
    status, output = run(*given)
    assert status == 2 and "holds no mapping of flags" in output


def test_megatron_command_without_a_gpu_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pretrain_gpt.py").write_text("")
    monkeypatch.delenv("RANK", raising=False)
    status, output = run("megatron", str(tmp_path / "pretrain_gpt.py"))
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        assert status == 2 and "pip's megatron-core does not have it" in output
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    status, output = run("megatron", str(tmp_path / "pretrain_gpt.py"))
    assert status == 2 and "torch sees no GPU; use --cpu" in output


def test_a_checkout_that_needs_a_newer_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM from 0.18 on imports ``typing.override``, which 3.11 does not have."""
    script, models = tmp_path / "pretrain_gpt.py", tmp_path / "megatron/training/models"
    models.mkdir(parents=True)
    script.write_text("")
    (models / "gpt.py").write_text("from typing import override\n")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delattr("typing.override", raising=False)
    status, output = run("megatron", "--cpu", "--dry-run", str(script))
    assert status == 2 and "needs 3.12 or later (typing.override)" in output
    (models / "gpt.py").write_text("from typing import Any\nfrom elsewhere import override\n")
    assert run("megatron", "--cpu", "--dry-run", str(script))[0] == 0
    (models / "gpt.py").write_text("from typing import Any, override\n")
    monkeypatch.setattr("typing.override", lambda function: function, raising=False)
    assert run("megatron", "--cpu", "--dry-run", str(script))[0] == 0


@pytest.mark.parametrize(("rank", "arguments"), [("0", ["--lr", "1"]), (None, ["--help"])])
def test_megatron_command_runs_in_process_under_a_launcher_and_for_help(
    rank: str | None, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("")
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    seen: list[tuple] = []
    monkeypatch.setenv("RANK", "0") if rank else monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("rankwise.launch.megatron_shim.run_script", lambda *given: seen.append(given))
    status, _ = run("megatron", "--cpu", str(script), *arguments)
    assert status == 0 and seen == [(script, arguments, True)]


def test_rank_environment_finds_ninja_and_shares_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "available_cores", lambda: 8)
    made = environment.rank_environment(2, cpu=True, base={"PATH": "/bin"})
    assert made["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/bin"]
    assert made["OMP_NUM_THREADS"] == "4" and made["DS_ACCELERATOR"] == "cpu" and made["CUDA_VISIBLE_DEVICES"] == ""
    made = environment.rank_environment(16, cpu=False, base={"PATH": "/bin"})
    assert made["OMP_NUM_THREADS"] == "1" and "DS_ACCELERATOR" not in made
    assert environment.rank_environment(2, cpu=False, base={"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_missing_compiler_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert environment.missing_build_tools()[:3] == ["c++", "g++", "ninja"]


def test_commands_work_from_a_checkout_that_is_not_installed() -> None:
    code = (
        "import sys, runpy; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)];"
        "sys.argv = ['rankwise', 'train', '--optimizer', 'adan']; runpy.run_module('launch.cli', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and "adan" in result.stderr


def test_explain_lists_every_parameter_and_adds_up_its_state() -> None:
    pytest.importorskip("deepspeed")
    small = "--layers 1 --hidden 32 --heads 2 --seq-len 4".split()
    status, output = run("explain", "--optimizer", "sonew", *small)
    assert status == 0 and "transformer.h.0.attn.c_attn.weight" in output and "32 x 96" in output
    sizes = [int(size.replace(",", "")) for size in re.findall(r"([\d,]+) │ (?=[│├└])", output)]
    assert len(sizes) == 17 and sum(sizes[:-1]) == sizes[-1] > 0, "16 parameters, then their sum"
    status, output = run("explain", "--optimizer", "adamw", *small)
    assert status == 2 and "the optimizer is 'adamw': it must be one of ours" in output


def test_explain_and_list_tell_programs_the_same() -> None:
    pytest.importorskip("transformers")
    small = "--optimizer sonew --layers 1 --hidden 32 --heads 2 --seq-len 4".split()
    (status, text), (_, output) = run("explain", *small), run("explain", *small, "--json")
    told = json.loads(output)
    assert status == 0 and told["optimizer"] == "sonew" and len(told["parameters"]) == 16
    known = {row["parameter"]: row for row in told["parameters"]}
    assert known["transformer.h.0.attn.c_attn.weight"]["shape"] == [32, 96]
    assert f"{sum(row['state_bytes'] for row in known.values()):,}" in text
    status, output = run("list", "--json")
    assert status == 0 and {row["name"] for row in json.loads(output)} == set(CHOICES)


@pytest.mark.parametrize(
    "asked",
    [
        ["list", "--markdown"],
        ["explain", "--optimizer", "mkor"],
        pytest.param(["explain", "--json"], marks=pytest.mark.exhaustive),
    ],
)
def test_whoever_reads_may_stop(asked: list[str]) -> None:
    """As in ``rankwise list | head -1``: no traceback."""
    pytest.importorskip("transformers")
    words = [sys.executable, "-m", "rankwise.launch.cli", *asked]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read().decode()
    assert said == "" and process.returncode == 141, said


def test_explain_makes_no_weights_and_reads_megatrons_files(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    status, output = run("explain", "--optimizer", "ldadam", "--model", "llama-405b")
    assert (
        status == 0
        and "model.layers.*.mlp.down_proj.weight ×126" in output
        and "AdamW's would be 3,096,415.6 MiB" in output
    )
    flags = "optimizer: ldadam\nldadam-rank: 4\nnum-layers: 2\nhidden-size: 64\nnum-attention-heads: 4\nswiglu: true\n"
    (tmp_path / "run.yaml").write_text(flags)
    status, output = run("explain", "--config", str(tmp_path / "run.yaml"))
    assert status == 0 and "decoder.layers.*.mlp.linear_fc1.weight ×2" in output and "MiB" in output
    status, every = run("explain", "--config", str(tmp_path / "run.yaml"), "--all")
    assert status == 0 and "decoder.layers.1.mlp.linear_fc1.weight" in every and "×" not in every
    sums = [re.findall(r"│ all .* ([\d,]+) │", text) for text in (output, every)]
    assert sums[0] == sums[1] and len(sums[0]) == 1


def test_explain_says_which_rank_owns_a_matrix_and_why(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    asked = "explain --optimizer mkor --layers 4 --hidden 96 --heads 2 --ranks 4 --json".split()
    reasons = {}
    for stage in "0", "2", "3":
        status, output = run(*asked, "--stage", stage)
        owners = {row["matrix"]: row for row in json.loads(output)["owners"]}
        assert status == 0 and len(owners) == 16 and {row["owner"] for row in owners.values()} == set(range(4))
        reasons[stage] = {row["why"] for row in owners.values()}
    equal = {"had least work of the 4 ranks that hold as much of it"}
    assert reasons["0"] == reasons["3"] == equal
    assert "holds it whole" in reasons["2"] and any("holds most of it" in why for why in reasons["2"])
    status, text = run(*asked[:-1])
    assert status == 0 and "owners on 4 ranks" in text and "transformer.h.3.mlp.c_fc.weight" in text
    status, output = run("explain", "--stage", "2")
    assert status == 2 and "add --ranks N" in output
    flags = "optimizer: ldadam\nldadam-rank: 4\nnum-layers: 2\nhidden-size: 64\nnum-attention-heads: 4\n"
    (tmp_path / "run.yaml").write_text(
        flags + "tensor-model-parallel-size: 2\npipeline-model-parallel-size: 2\nuse-distributed-optimizer: true\n"
    )
    status, output = run("explain", "--config", str(tmp_path / "run.yaml"))
    assert status == 0 and "decoder.layers.*.mlp.linear_fc1.weight ×2" in output, "both stages, whole"
    status, output = run("explain", "--config", str(tmp_path / "run.yaml"), "--ranks", "4", "--json")
    of_last = [row for row in json.loads(output)["owners"] if "layers.1" in row["matrix"]]
    assert status == 0 and of_last and {row["owner"] for row in of_last} == {2, 3}


def test_explained_reasons_are_those_of_the_plan() -> None:
    task = MatrixTask("a", ("a",), None, 1.0)
    assert why_owner(task, 0, {0: 8}) == "holds it whole"
    assert why_owner(task, 1, {0: 2, 1: 6}) == "holds most of it, 75%"
    assert why_owner(task, 0, {0: 2, 1: 6}) == "the rank that holds most would have over 1.1 times the mean work"
    assert why_owner(task, 2, {0: 4, 1: 4}) == "the ranks that hold most would have over 1.1 times the mean work"
    assert "a slice" in why_owner(MatrixTask("a[0:2]", ("a",), None, 1.0, "a"), 0, {0: 4})


@pytest.mark.parametrize("name", ["ldadam", "mkor", "mars-m"])
def test_explained_states_are_those_of_a_real_step(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=8, n_embd=96, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config)
    optimizer = built(chosen(None, name, []), model)
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    expected: dict[str, int] = {}
    for row in optimizer.explain():  # some weights are several matrices
        key = row.name.partition("[")[0]
        expected[key] = expected.get(key, 0) + row.state_bytes
    sizes = "--layers 1 --hidden 96 --heads 2 --seq-len 8 --vocab-size 64".split()
    status, output = run("explain", "--optimizer", name, *sizes)
    shown = re.findall(r"│ (\S+) │ [\dx ]+ │ [\w-]+ │ [^│]+ │ ([\d,]+) │", output)
    assert status == 0 and {key: int(size.replace(",", "")) for key, size in shown} == expected


def test_list_has_every_type_and_the_page_is_of_today() -> None:
    pytest.importorskip("transformers")
    status, output = run("list")
    names = [spelling for spelling in BY_SPELLING if spelling != "MARS"]
    assert status == 0 and all(f" {name} " in output for name in names), output
    page = (ROOT / "docs" / "choose.md").read_text()
    for table in as_markdown().split("\n\n"):
        assert table in page, "write the tables of docs/choose.md anew: rankwise list --markdown"


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in ("mars", "mars-shampoo", "mkor-h")])
def test_list_shows_what_plan_computes(name: str) -> None:
    """What is read, so that the answer is there at once, is what would be computed."""
    pytest.importorskip("transformers")
    recorded = json.loads(optimizer_guide.RECORDED.read_text())
    now = optimizer_guide.computed(name)._asdict()
    assert recorded[name].pop("betas") == now.pop("betas") and recorded[name] == pytest.approx(now, rel=1e-6), (
        "write it anew: python -m rankwise.launch.optimizer_guide"
    )
    assert set(recorded) == {name for name in BY_NAME if is_ours(name)} == {name.lower() for name in CHOICES}


def test_list_and_help_answer_without_torch() -> None:
    """Its import takes longer than all the rest: with it they would need more than a second."""
    code = (
        "import sys; from typer.testing import CliRunner; from rankwise.launch.cli import app;"
        "done = [CliRunner().invoke(app, words) for words in (['list'], ['list', '--json'], ['plan', '--help'])];"
        "sys.exit('torch' in sys.modules or any(one.exit_code for one in done))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_list_drops_columns_that_are_the_same_in_every_row() -> None:
    telling = optimizer_guide._telling([["a", "1", "2", ""], ["b", "1", "3", ""]])
    assert telling == [0, 2] and optimizer_guide._telling([["a", "1"]]) == [0]


def test_list_shows_what_a_gpu_took() -> None:
    items = json.loads((ROOT / "docs" / "data" / "gpu.json").read_text())["items"]
    timed = {spelling: choice.gpu for spelling, choice in CHOICES.items() if choice.gpu}
    assert len(timed) == 6
    for spelling, (name, ratio) in timed.items():
        (row,) = items[f"step/{name}, llama-7b-layers"]["rows"]
        assert f"{row['ratio']:.2f}" == f"{ratio:.2f}", f"{spelling}: write it into launch/optimizer_guide.py"


@pytest.mark.parametrize(("columns", "arguments"), [(40, []), (80, []), (100, ["--all"]), (200, [])])
def test_list_fits_a_terminal_and_breaks_no_word(columns: int, arguments: list[str]) -> None:
    pytest.importorskip("transformers")
    environment = {"COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": "1"}
    output = CliRunner().invoke(app, ["list", *arguments], env=environment).output
    assert max(map(len, output.splitlines())) <= columns and "…" not in output
    if columns >= 80 and not arguments:
        assert len(output.splitlines()) <= 24, "one screen"
        return
    words = re.sub(r"\s+", " ", output)
    shown = {spelling: choice for spelling, choice in CHOICES.items() if spelling != "MARS"}
    for spelling, choice in shown.items():
        said = f"{spelling} for: {choice.purpose} not for: {choice.against} lr over AdamW's: {choice.rate} "
        assert said in words, spelling
    assert len(re.findall(r"state, bytes per parameter \(AdamW: 8\): \d+\.\d\d sent", words)) == len(shown)


def test_universal_command_says_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    code, output = run("universal", str(tmp_path), str(tmp_path / "out"))
    assert code == 2
    assert "holds no checkpoint; name the folder of a tag" in output


def test_universal_command_does_not_overwrite_and_says_how_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setattr("deepspeed_plugin.checkpoints.convert", lambda source, target, workers: None)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    code, output = run("universal", str(tmp_path), str(tmp_path / "taken"))
    assert code == 2 and "which exists: name a new folder" in output
    code, output = run("universal", str(tmp_path), str(tmp_path / "fresh"))
    assert code == 0 and f"engine.load_checkpoint('{tmp_path}', tag='fresh')" in output


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("--tensor-model-parallel-size 2", True),
        ("--tensor-model-parallel-size=2 --bf16", True),
        ("--context-parallel-size 4", True),
        ("--yaml-cfg x.yaml", True),
        ("--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2", False),
        ("--use-distributed-optimizer", False),
        ("--tensor-model-parallel-size 2 --use-megatron-fsdp", False),
        ("--use-torch-fsdp2 --context-parallel-size 2", False),
    ],
)
def test_one_device_connection_only_where_megatron_asserts_it(arguments: str, wanted: bool) -> None:
    from rankwise.launch.megatron_shim import wants_one_connection

    assert wants_one_connection(arguments.split()) == wanted


def test_train_takes_a_gpus_shape_for_what_was_not_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setattr("rankwise.launch.spawn.choose_device", lambda device, ranks: (False, 1))
    words = ["train", "--dry-run", "--output", str(tmp_path), "--optimizer", "mars-m"]
    status, _ = run(*words, "--layers", "4", "--no-bf16")
    settings = json.loads((tmp_path / "mars-m/settings.json").read_text())
    assert status == 0 and settings["layers"] == 4, "as typed, although it is the default on CPUs"
    assert (settings["hidden"], settings["seq_len"], settings["compiled"]) == (768, 1024, "inductor")
    assert settings["deepspeed"]["optimizer"]["params"]["lr"] == 6e-3, "of the files for GPT-2 small"
    assert "bf16" not in settings["deepspeed"] and settings["deepspeed"]["train_micro_batch_size_per_gpu"] == 16
    monkeypatch.setattr("rankwise.launch.spawn.choose_device", lambda device, ranks: (True, 2))
    run(*words)
    settings = json.loads((tmp_path / "mars-m/settings.json").read_text())
    assert settings["hidden"] == 192 and settings["compiled"] is None and "bf16" not in settings["deepspeed"]


def test_a_gpus_memory_and_share_of_its_peak_are_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)
    found = _of_device(1e5, 10**8, Settings(layers=10, hidden=100, heads=1, seq_len=1000))
    assert found["share_of_peak"] == pytest.approx(1e5 * (6e8 + 12e6) / 989e12) and found["device"].startswith("NVIDIA")
    common = {"parameters": 1, "world_size": 1, "layout": "ZeRO-2", "steps": 1, "tokens": 1, "unigram_entropy": 1.0}
    shown = {"validation_loss": 1.0, "tokens_per_second": 1.0, "step_share": 0.1, "state_bytes_per_rank": 1}
    columns = [len(results_table([{"label": "a", **common, **shown, **of}]).columns) for of in (found, {})]
    assert columns == [7, 5]
