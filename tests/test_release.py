"""What a release is made of agrees with the package: versions, Pythons, and commands that exist."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest

from rankwise.version import __version__

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def steps() -> list[tuple[str, dict[str, Any]]]:
    files = {path.name: yaml.safe_load(path.read_text()) for path in WORKFLOWS}
    return [(name, step) for name, file in files.items() for job in file["jobs"].values() for step in job["steps"]]


def test_workflows_run_targets_that_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {word for _, step in steps() for word in re.findall(r"^make (\w+)", step.get("run", ""))}
    assert called == {"test", "quick", "lint", "package", "site"} and called <= targets


def test_the_pythons_are_those_of_the_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pythons = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    tests = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    assert len(pythons) == 3
    assert tests["tests"]["strategy"]["matrix"]["python"] == pythons == tests["package"]["strategy"]["matrix"]["python"]
    oldest = tests["torch"]["strategy"]["matrix"]["torch"][0]
    assert f"torch>={oldest.rpartition('.')[0]}\n" in setup["options"]["install_requires"]
    used = {step["with"]["python-version"] for _, step in steps() if "setup-python" in step.get("uses", "")}
    assert used <= {*pythons, "${{ matrix.python }}"}


def test_a_release_stores_no_password_and_checks_its_tag() -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"} and release["permissions"] == {
        "contents": "read"
    }
    assert "secrets." not in "".join(path.read_text() for path in WORKFLOWS)
    (check,) = (step["run"] for _, step in steps() if "GITHUB_REF_NAME" in step.get("run", ""))
    assert "rankwise/version.py" in check


def test_citation_names_this_version_and_every_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__ and citation["license"] == "Apache-2.0"
    cited = {entry["identifiers"][0]["value"].removeprefix("arXiv:") for entry in citation["references"]}
    page = set(re.findall(r"arxiv\.org/abs/([\d.]+)", (ROOT / "docs/citing.md").read_text()))
    assert cited == page


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_images_install_extras_that_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    ((extras),) = re.findall(r'"\.\[([\w,]+)\]"', text)
    assert set(extras.split(",")) <= set(setup["options.extras_require"])
    words = [line.split()[0] for line in re.sub(r"\\\n", "", text).splitlines() if line and line[0] not in "# "]
    assert set(words) <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "CMD"} and words[-1] == "CMD"


def test_the_notes_of_the_release_are_short_and_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first, history = re.findall(r"^## .+$", text, re.MULTILINE)[:2]
    assert first == f"## {__version__}" and history == f"## History of {__version__}, the latest first"
    notes = text.split(first)[1].split(history)[0].strip().splitlines()
    assert len(notes) <= 20


def test_every_cell_about_others_names_its_source() -> None:
    """With the commit at which it was read, where it is a file."""
    page = (ROOT / "docs/beside.md").read_text()
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 8
    for name, *cells in rows:
        assert len(cells) == 5 and all(re.search(r"\]\((https://|fsdp-costs)", cell) for cell in cells), name
    for link in re.findall(r"https://github\.com/\S+?/(?:blob|tree)/([^/]+)/", page):
        assert re.fullmatch(r"[0-9a-f]{7,10}", link), link
