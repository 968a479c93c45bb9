"""Names of users' own: what may be registered, how a module is found, and real launches that know it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cpu_deepspeed import NO_BUILD
from example_rules import EXAMPLES, load

from rankwise.extension import MatrixOptimizer, OptionError, Options, register, shared, unregister
from rankwise.names import BY_NAME, BY_SPELLING, CLASSES, READY, SPELLINGS
from rankwise.rule_modules import VARIABLE, add_rule_modules

ROOT = EXAMPLES.parent


def soap() -> Any:
    return load()[0].SOAP


def test_a_name_is_everywhere_and_is_forgotten_again() -> None:
    register("Soapy", soap(), preset={"precondition_frequency": 1}, ready={"weight_decay": 0.2})
    assert BY_NAME["soapy"] is BY_SPELLING["Soapy"] and SPELLINGS["soapy"] == "Soapy"
    assert READY["soapy"] == {"lr": 3e-3, "weight_decay": 0.2} and soap() in CLASSES
    assert BY_NAME["soapy"].complete({}, "x", "y") == {"precondition_frequency": 1}
    register("Soapy", soap())
    assert BY_NAME["soapy"].complete({}, "x", "y") == {}
    unregister("Soapy")
    unregister("Soapy")
    assert "soapy" not in BY_NAME and "Soapy" not in BY_SPELLING and "soapy" not in READY


def _without_eps() -> Any:
    @dataclass(frozen=True)
    class Fewer(Options):
        lr: float = shared.lr(1.0)
        betas: tuple[float, float] = shared.betas((0.9, 0.9), "")
        weight_decay: float = shared.weight_decay("")
        skip_nonfinite: bool = shared.skip_nonfinite()
        transition_steps: int = shared.transition_steps()

    return type("Forgetful", (soap(),), {"options_type": Fewer})


@pytest.mark.parametrize(
    ("spelling", "cls", "more", "words"),
    [
        ("MKOR", None, {}, "rankwise has an optimizer of this name; register yours under another name"),
        ("SOAP", "signsgd", {}, "module 'soap' has an optimizer of this name"),
        ("two words", None, {}, "it must be letters and digits"),
        ("X", int, {}, "it must be of a class that derives from MatrixOptimizer"),
        ("X", MatrixOptimizer, {}, "define update in it"),
        ("X", type("Half", (MatrixOptimizer,), {"update": lambda *a: None}), {}, "its class has no options or no spec"),
        ("X", _without_eps, {}, "its options lack eps; declare them"),
        ("X", None, {"preset": {"freq": 1}}, "X has no option 'freq'"),
        ("X", None, {"ready": {"lrs": 1}}, "did you mean 'lr'"),
        ("X", None, {"preset": {"precondition_frequency": 0}}, "precondition_frequency=0 is invalid"),
    ],
)
def test_what_cannot_be_registered_is_refused(spelling: str, cls: Any, more: Any, words: str) -> None:
    chosen = cls() if cls is _without_eps else soap() if cls is None else load()[1].SignSGD if cls == "signsgd" else cls
    before = dict(BY_SPELLING)
    with pytest.raises(OptionError, match=words):
        register(spelling, chosen, **more)
    assert before == BY_SPELLING


def run(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_a_command_without_modules_leaves_the_environment_alone() -> None:
    """The fixture of this folder finds what a command in this process would have left."""
    add_rule_modules([])
    assert VARIABLE not in os.environ


def test_modules_are_found_by_the_variable_and_by_entry_points(tmp_path: Path) -> None:
    """A file, which other code may import by its name too, and an installed package."""
    (tmp_path / "packaged.py").write_text((EXAMPLES / "signsgd.py").read_text())
    record = tmp_path / "packaged-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: packaged\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text("[rankwise.rules]\nsign = packaged\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code = (
        "from rankwise.names import BY_NAME\nimport soap\n"
        "assert BY_NAME['soap'].optimizer is soap.SOAP\n"
        "assert BY_NAME['signsgd'].optimizer.__module__ == 'packaged'\n"
    )
    done = run(code, tmp_path, PYTHONPATH=path, **{VARIABLE: str(EXAMPLES / "soap.py")})
    assert done.returncode == 0, done.stderr


UNUSABLE: dict[str, tuple[str | None, str]] = {
    "nothere.py": (None, "'nothere.py' is invalid: it must be a module that can be imported or the path of a .py"),
    "nothere": (None, "'nothere' is invalid: .*No module named 'nothere'"),
    "plain.py": (
        "from dataclasses import dataclass\nfrom rankwise.extension import Options, options_as_keywords\n"
        "@dataclass(frozen=True)\nclass Mine(Options):\n    rate: float = 1.0\n"
        'class Rule:\n    "One."\n    @options_as_keywords(Mine)\n    def __init__(self, params, options): ...\n',
        "'.*plain.py' is invalid: .*Mine.rate is invalid: a field must be an option; write rate = option",
    ),
    "broken.py": ("import nothing_such", "'.*broken.py' is invalid: .*No module named 'nothing_such'"),
    "json.py": ("", "'.*json.py' is invalid: .*a module 'json' is imported already, .*rename the file"),
}
"""Sources of modules that cannot be used, and what a user is told of them."""

ENDS = """
import json, os, sys, torch
from rankwise.options.validation import OptionError
for name in json.load(open("named.json")):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    os.environ["{variable}"] = name
    try:
        import rankwise.names
        said = "nothing was refused"
    except OptionError as error:
        said = str(error)
    print(json.dumps(said), flush=True)
    os._exit(0)
"""


def test_a_module_that_cannot_be_imported_ends_with_its_name(tmp_path: Path) -> None:
    # Not in the folder itself: a json.py there would be the one that everybody imports.
    where = tmp_path / "elsewhere"
    where.mkdir()
    for name, (source, _) in UNUSABLE.items():
        if source is not None:
            (tmp_path / name).write_text(source)
    named = [name if source is None else str(tmp_path / name) for name, (source, _) in UNUSABLE.items()]
    (where / "named.json").write_text(json.dumps(named))
    done = run(ENDS.format(variable=VARIABLE), where)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    for (_, words), told in zip(UNUSABLE.values(), said, strict=True):
        assert re.search(words, told), told


# --- launches ---------------------------------------------------------------------------------------------------------

DEEPSPEED_SCRIPT = """
import sys, deepspeed, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
for step in range(3):
    inputs = torch.randn(4, 16)
    engine.backward((engine(inputs) - inputs).square().mean())
    engine.step()
inner = engine.basic_optimizer
torch.distributed.barrier()
open(f"rank{engine.global_rank}.txt", "w").write(f"{type(inner).__name__} {sorted(inner.owners())}")
engine.destroy()
torch.distributed.destroy_process_group()
"""


def command(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    told = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "DS_ACCELERATOR": "cpu", **NO_BUILD}
    environment = {**os.environ, **told, **variables}
    environment = {name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE")}
    whole = [sys.executable, "-m", "rankwise.launch.cli", *arguments]
    return subprocess.run(whole, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.exhaustive
def test_a_deepspeed_launch_knows_the_type(tmp_path: Path) -> None:
    block = {"type": "SOAP", "params": {"lr": 1e-3, "precondition_frequency": 2}}
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "optimizer": block}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(DEEPSPEED_SCRIPT)
    started = ("deepspeed", "--ranks", "2", "--device", "cpu", "train.py")
    done = command("--rules", str(EXAMPLES / "soap.py"), *started, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    written = {(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)}
    assert written == {"SOAP ['0.weight', '2.weight']"}


MEGATRON_SCRIPT = """
import argparse, os, torch
from megatron.training.arguments import parse_args
from megatron.core.optimizer import get_megatron_optimizer
from megatron.training.training import get_megatron_optimizer_config
args = parse_args()
config, _ = get_megatron_optimizer_config(args)
open(f"rank{os.environ['RANK']}.txt", "w").write(f"{config.optimizer} {config.rankwise}")
"""


@pytest.mark.slow
def test_a_megatron_launch_knows_the_name_and_its_flags(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    sys.path.insert(0, str(ROOT / "tests" / "launch"))
    try:
        from test_end_to_end import MEGATRON_TRAINING
    finally:
        sys.path.pop(0)
    folder = tmp_path / "checkout" / "megatron" / "training"
    folder.mkdir(parents=True)
    for name, source in MEGATRON_TRAINING.items():
        (folder / name).write_text(source)
    (tmp_path / "checkout" / "train.py").write_text(MEGATRON_SCRIPT)
    script = ["checkout/train.py", "--optimizer", "soap", "--soaprw-precondition-frequency", "7"]
    rules = {VARIABLE: str(EXAMPLES / "soap.py")}
    done = command("megatron", "--cpu", "--ranks", "1", *script, cwd=tmp_path, **rules)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "rank0.txt").read_text() == "soap {'precondition_frequency': 7}"


def test_plan_and_explain_know_it(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from rankwise.launch.cli import app

    config = {"optimizer": {"type": "SOAP", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    question = ("--config", str(tmp_path / "ds.json"), "--model", "gpt2-small")
    done = CliRunner().invoke(app, ["plan", *question, "--ranks", "8"])
    assert done.exit_code == 0 and "72 matrices" in done.stdout, done.output
    done = CliRunner().invoke(app, ["explain", *question])
    assert done.exit_code == 0 and "768 x 2304" in done.stdout, done.output


def test_the_list_shows_what_modules_have_brought() -> None:
    from typer.testing import CliRunner

    from rankwise.launch.cli import app

    pytest.importorskip("transformers")
    done = CliRunner().invoke(app, ["list", "--json"])
    assert done.exit_code == 0, done.output
    told = {row["name"]: row for row in json.loads(done.stdout)}
    assert set(told) == set(BY_SPELLING)
    assert (told["SOAP"]["purpose"], told["SOAP"]["betas"]) == ("see soap", "0.95, 0.95") and told["SOAP"]["state"] > 8
    done = CliRunner().invoke(app, ["list"])
    assert done.exit_code == 0 and "of soap" in done.stdout, done.output
