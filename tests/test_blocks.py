"""Every block of code of every page runs, is read, or names what exists, as it stands: nothing is added to it."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from ranks import run_ranks

from rankwise.launch.cli import app
from rankwise.launch.run_configs import check_options

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "configs/README.md", ROOT / "examples/README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
UNREAD = {"text", "math", "mermaid", "diff", ""}
"""Languages of blocks that are no code; diffs are run by test_migration_pages.py."""

ELSEWHERE = {
    # Words of a script that needs ranks, an engine or a trainer: the test that runs it as it stands.
    "deepspeed.initialize": "test_readme.py::test_the_deepspeed_script_runs_as_it_stands",
    "Trainer(": "test_recipes.py::test_sharded_models_are_trained",
    "Accelerator(": "test_recipes.py::test_accelerate_prepares_an_optimizer_of_ours",
    "import lightning": "test_recipes.py::test_lightning_steps_an_optimizer_of_ours",
    "init_process_group()": "test_recipes.py::test_sharded_models_are_trained",
    "megatron.core": "test_readme.py::test_the_megatron_loop_runs_as_it_stands",
    "def state_of": "test_readme.py::test_the_megatron_loop_runs_as_it_stands",
}


class Block(NamedTuple):
    """A block of a page."""

    page: str
    line: int
    language: str
    text: str


def blocks() -> Iterator[Block]:
    for path in PAGES:
        text = path.read_text()
        for match in re.finditer(r"^( *)```([\w-]*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
            code = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
            yield Block(str(path.relative_to(ROOT)), text[: match.start()].count("\n") + 1, match[2], code)


BLOCKS = list(blocks())


def of(*languages: str) -> list[Any]:
    return [pytest.param(b, id=f"{b.page}-{b.line}") for b in BLOCKS if b.language in languages]


def test_no_language_is_left_out() -> None:
    assert {block.language for block in BLOCKS} <= UNREAD | {"python", "json", "yaml", "sh"}
    assert len(BLOCKS) > 60


def test_tests_that_run_the_rest_exist() -> None:
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), test
    code = "".join(block.text for block in BLOCKS if block.language == "python")
    assert all(words in code for words in ELSEWHERE)


def _executed(rank: int, world: int, folder: Path, block: Block) -> bool:
    os.chdir(folder)
    exec(compile(block.text, f"{block.page}:{block.line}", "exec", dont_inherit=True), {"__name__": "__main__"})
    return True


@pytest.mark.parametrize(
    "block", [given for given in of("python") if not any(words in given.values[0].text for words in ELSEWHERE)]
)
def test_python_runs(block: Block, tmp_path: Path) -> None:
    """In a process of its own, forked, so that nothing is imported once more."""
    for module in ("transformers", "megatron.core"):
        if module.partition(".")[0] in block.text:
            pytest.importorskip(module)
    assert run_ranks(1, _executed, tmp_path, block) == [True]


@pytest.mark.parametrize("block", of("json"))
def test_json_is_read_and_its_options_exist(block: Block) -> None:
    content = json.loads(block.text)
    if isinstance(content.get("optimizer"), Mapping):
        check_options(content["optimizer"])


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_read(block: Block) -> None:
    assert pytest.importorskip("yaml").safe_load(block.text) is not None


def commands(text: str) -> Iterator[list[str]]:
    """Words of each command, without variables before it."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield words


@pytest.mark.parametrize("block", of("sh", "bash"))
def test_commands_are_known(block: Block) -> None:
    """What they start is there, and our own command reads their options."""
    for words in commands(block.text):
        check = _CHECKS.get(Path(words[0]).name)
        assert check is not None, f"nobody checks {words}"
        check(words[1:])


def _ours(words: list[str]) -> None:
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    typed = words[: words.index("--")] if "--" in words else words  # what follows are Megatron's flags
    given = [word.partition("=")[0] for word in typed if word.startswith("--")]
    if words[0] in ("deepspeed", "megatron"):  # what follows the script is the script's
        script = next(place for place, word in enumerate(words) if word.endswith(".py"))
        given = [word for word in given if word in words[:script]]
    assert set(given) <= known, set(given) - known


def _make(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert words[0] in targets and all("=" in word for word in words[1:])


def _pip(words: list[str]) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for extras in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(setup["options.extras_require"])


def _python(words: list[str]) -> None:
    if words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word.partition("::")[0]).exists() for word in words if word.startswith("tests/"))
    elif words[:2] == ["-m", "benchmarks"]:
        known = (ROOT / "benchmarks/__main__.py").read_text()
        assert f'"{words[2]}"' in known or f"def {words[2].replace('-', '_')}(" in known, words
    else:
        assert words[0] == "-m" or (ROOT / "examples" / words[0]).exists(), words


def _launcher(words: list[str]) -> None:
    for module in re.findall(r"rankwise\.launch\.(\w+)", " ".join(words)):
        assert (ROOT / "launch" / f"{module}.py").exists()


def _slurm(words: list[str]) -> None:
    (job,) = (word for word in words if word.endswith(".sbatch"))
    assert (ROOT / "launch/slurm" / job).exists()


_CHECKS: Mapping[str, Any] = {
    "rankwise": _ours,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "sbatch": _slurm,
    **dict.fromkeys(("torchrun", "deepspeed", "accelerate"), _launcher),
    **dict.fromkeys(("export", "mkdocs"), lambda words: None),
}
