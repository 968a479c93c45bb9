"""README and docs: snippets run as they stand, links lead somewhere, and what is said to be tested is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_deepspeed import NO_BUILD
from ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "configs/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
STATES = ("yes", "partly", "no", "refused")


def snippets(section: str, language: str, page: str = "README.md") -> list[str]:
    """Code blocks of a section of a page."""
    _, text = re.split(rf"\n##+ {re.escape(section)}\n", (ROOT / page).read_text())
    return re.findall(rf"```{language}\n(.*?)```", re.split(r"\n##+ ", text)[0], re.DOTALL)


def run(folder: Path, *command: str) -> str:
    given = {"capture_output": True, "text": True, "timeout": 500, "env": {**os.environ, **NO_BUILD}}
    found = subprocess.run(command, cwd=folder, check=False, **given)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    return found.stdout + found.stderr


def _executed(rank: int, world: int, folder: Path, section: str, page: str) -> bool:
    (code,) = snippets(section, "python", page)
    os.chdir(folder)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="true")
    exec(compile(code, section, "exec"), {"__name__": "__main__"})
    return True


@pytest.mark.parametrize(
    ("section", "page"),
    [
        ("Plain PyTorch", "README.md"),
        ("The Trainer without DeepSpeed", "docs/frameworks/huggingface.md"),
        ("Looking inside", "docs/frameworks/pytorch.md"),
    ],
)
def test_python_runs_as_it_stands(section: str, page: str, tmp_path: Path) -> None:
    """Forked, so that nothing is imported once more."""
    assert run_ranks(1, _executed, tmp_path, section, page) == [True]


def test_the_optimizer_of_the_page_on_extending_trains() -> None:
    page = (ROOT / "docs/extending.md").read_text()
    (code,) = re.findall(r"```python\n(# my_muon.py\n.*?)```", page, re.DOTALL)
    from rankwise.extension import unregister
    from rankwise.names import BY_NAME

    room: dict[str, Any] = {"__name__": "my_muon"}
    try:
        exec(compile(code, "docs/extending.md", "exec", dont_inherit=True), room)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32))
        optimizer, given = room["MyMuon"](model.named_parameters()), torch.randn(16, 64)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            losses.append((model(given) - 1.0).square().mean())
            losses[-1].backward()
            optimizer.step()
        assert losses[-1].item() < 0.1 * losses[0].item()
        assert BY_NAME["mymuon"].optimizer is room["MyMuon"]
    finally:
        unregister("MyMuon")


@pytest.mark.slow
def test_the_deepspeed_script_runs_as_it_stands(tmp_path: Path) -> None:
    (config,), (script,) = snippets("DeepSpeed", "json"), snippets("DeepSpeed", "python")
    (tmp_path / "ds.json").write_text(config)
    # In one piece: two ranks print at once.
    said = "print(f'trained by {type(engine.basic_optimizer).__name__}\\n', end='')\n"
    (tmp_path / "train.py").write_text(script + said)
    launcher = shutil.which("rankwise", path=str(Path(sys.executable).parent))
    assert launcher is not None
    assert "trained by MARS" in run(tmp_path, launcher, "deepspeed", "--ranks", "2", "train.py")


def _own_loop(rank: int, world: int, folder: Path) -> tuple[str, int]:
    from megatron.core import optimizer

    from megatron_patches import revert
    from megatron_patches.cpu import cpu_megatron

    os.chdir(folder)
    page = (ROOT / "docs/frameworks/megatron.md").read_text()
    loop, checkpoints = snippets("A loop of your own", "python", "docs/frameworks/megatron.md")
    names: dict[str, Any] = {"__name__": "__main__"}
    with cpu_megatron():
        try:
            exec(compile(loop, "loop.py", "exec", dont_inherit=True), names)
        finally:
            revert()
        (quoted,) = re.findall(r"Megatron ends with `(.+?)`", page)
        with pytest.raises(Exception, match=re.escape(quoted)):
            optimizer.get_megatron_optimizer(optimizer.OptimizerConfig(optimizer="ldadam", lr=1e-3), [names["chunk"]])
        exec(compile(checkpoints, "checkpoints", "exec", dont_inherit=True), names)

        def stepped() -> list[torch.Tensor]:
            torch.manual_seed(rank)
            names["train_step"]()
            return [parameter.detach().clone() for parameter in names["model"].parameters()]

        after = stepped()
        stepped()
        step = names["load"]("checkpoints/step_3")
        assert all(map(torch.equal, after, stepped()))
        return type(names["optimizer"].chained_optimizers[0].optimizer).__name__, step


def test_the_megatron_loop_runs_as_it_stands(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    assert run_ranks(2, _own_loop, tmp_path) == [("LDAdam", 3)] * 2


def test_the_megatron_command_is_read(tmp_path: Path) -> None:
    """By our parser, before the script it names is looked for."""
    (command,) = snippets("Megatron-LM", "sh")
    words = command.split()
    assert words[:2] == ["rankwise", "megatron"]
    from rankwise.names import BY_NAME

    optimizer = words[words.index("--optimizer") + 1]
    options = BY_NAME[optimizer].optimizer.options_type
    known = {f"--{options.flag(name)}" for name in options.names()}
    assert {word for word in words if word.startswith(f"--{optimizer}")} <= known


def test_pythons_are_those_of_the_package() -> None:
    classifiers = (ROOT / "setup.cfg").read_text()
    known = re.findall(r"^    Programming Language :: Python :: (3\.\d+)$", classifiers, re.MULTILINE)
    said = f"Python {', '.join(known[:-1])} or {known[-1]} and torch"
    assert [page for page in ("README.md", "docs/index.md") if said not in (ROOT / page).read_text()] == []


def links_of(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("http", "#"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name if page.parent.name != "configs" else "configs")
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in links_of(page) if not (page.parent / link.partition("#")[0]).exists()]
    assert not missing


def test_every_page_is_linked() -> None:
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links_of(page)}
    assert not [page.name for page in PAGES if page.resolve() not in linked and page != ROOT / "README.md"]


def test_tests_that_pages_name_exist() -> None:
    named = re.findall(r"([\w/]+\.py)::(\w+)", (ROOT / "docs/blocks.md").read_text())
    assert len(named) > 7
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), (file, name)


def test_what_is_supported_is_tested() -> None:
    rows = [line for line in (ROOT / "docs/support.md").read_text().splitlines() if line.count("|") >= 5]
    # Megatron's rows go on with what ran on each version.
    cells = [[cell.strip() for cell in row.strip("|").split("|")][:4] for row in rows]
    cells = [row for row in cells if row[1] not in ("state", "---")]
    assert len(cells) > 40
    for what, state, _, test in cells:
        assert state in STATES, what
        file, _, name = test.partition("::")
        if test or state in ("yes", "refused"):
            assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), what
