"""``rankwise convert``: what one framework has saved, another one loads to the bit and goes on with."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cpu_deepspeed import choose_cpu, prepare_ranks
from ranks import once, run_ranks

choose_cpu()
pytest.importorskip("deepspeed")

from conversions import CASES, RUNS, Job, Seen, Values, assembled  # noqa: E402

from deepspeed_plugin.checkpoints import convert as make_universal  # noqa: E402
from rankwise.launch.convert import convert_checkpoint  # noqa: E402
from rankwise.layout.chunked_vectors import load_vectors, stored_tensors  # noqa: E402


class Way(NamedTuple):
    """A conversion: from which framework to which, and of what."""

    source: str
    target: str
    case: str


DIRECTIONS = list(permutations(RUNS, 2))
ALL = tuple(Way(*direction, case) for direction in DIRECTIONS for case in CASES)
# Every direction, every type from and to two frameworks or three.
USUAL = tuple(Way(*direction, ("ldadam", "mkor-h", "mars-m")[place % 3]) for place, direction in enumerate(DIRECTIONS))
# Of the largest weight: the frameworks sum gradients in another order.
ROUNDING = 1e-6


def _run(form: str, jobs: list[Job]) -> list[Seen]:
    """Every job's states and weights, whole."""
    world, run = RUNS[form]
    ranks = run_ranks(world, run, jobs)
    return [Seen(assembled([seen.states for seen in each]), each[0].weights) for each in zip(*ranks, strict=True)]


def _stage(case: str, first: int) -> int:
    """ZeRO's: one in turn."""
    return (first, 4 - first)[list(CASES).index(case) % 2]


@once
def _sources(folder: Path, ways: tuple[Way, ...], stage: int) -> dict[tuple[str, str], Seen]:
    """Trained and saved by the frameworks that ways begin in; the folder has the checkpoints then."""
    prepare_ranks()
    found = {}
    for form in RUNS:
        (folder / form).mkdir(parents=True, exist_ok=True)
        # A way to Megatron ends in the form of a checkpoint of its own.
        cases = dict.fromkeys(way.case for way in ways if form == way.source or form == way.target == "megatron")
        jobs = [Job(case, save=folder / form / f"{case}-saved", stage=_stage(case, stage)) for case in cases]
        found.update({(form, case): seen for case, seen in zip(cases, _run(form, jobs), strict=True)})
        for job in jobs:
            assert job.save is not None
            if form == "deepspeed":
                make_universal(job.save, folder / form / job.case, workers=1)
            else:
                job.save.rename(folder / form / job.case)
    return found


def _convert(folder: Path, way: Way) -> Path:
    made = folder / way.target / f"{way.case}-of-{way.source}"
    like = folder / "megatron" / f"{way.case}-saved-like" if way.target == "megatron" else None
    convert_checkpoint(folder / way.source / way.case, made, way.target, like=like)
    return made


@once
def _resumed(folder: Path, ways: tuple[Way, ...], stage: int) -> dict[Way, Seen]:
    """Gone on with."""
    _sources(folder, ways, stage)
    found = {}
    for target in RUNS:
        mine = [way for way in ways if way.target == target]
        jobs = [Job(way.case, load=_convert(folder, way), stage=_stage(way.case, 4 - stage)) for way in mine]
        found.update(zip(mine, _run(target, jobs), strict=True))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("convert")


def _check(folder: Path, way: Way, ways: tuple[Way, ...], stage: int) -> None:
    before = _sources(folder, ways, stage)[way.source, way.case]
    after = _resumed(folder, ways, stage)[way]
    assert after.states.keys() == before.states.keys()
    assert len(before.states) > 20
    for name, value in before.states.items():
        assert after.states[name].dtype == value.dtype and torch.equal(after.states[name], value), name
    largest = max(float(value.abs().max()) for value in before.weights.values())
    gaps = {name: float((after.weights[name] - value).abs().max()) for name, value in before.weights.items()}
    assert max(gaps.values()) <= ROUNDING * largest, gaps


@pytest.mark.slow
@pytest.mark.parametrize("way", USUAL, ids="-".join)
def test_goes_on_under_another_framework(folder: Path, way: Way) -> None:
    _check(folder / "usual", way, USUAL, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 3])
def test_all_types_go_on_under_another_framework(folder: Path, stage: int) -> None:
    for way in ALL:
        _check(folder / f"all-{stage}", way, ALL, stage)


def _tensors(checkpoint: Path) -> Values:
    found = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in stored_tensors(checkpoint).items()}
    load_vectors(found, checkpoint, None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", [way.case for way in USUAL if way.source == "torch"])
def test_there_and_back_is_the_same(folder: Path, case: str) -> None:
    _sources(folder / "usual", USUAL, 1)
    saved = folder / "usual" / "torch" / case
    convert_checkpoint(saved, folder / f"{case}-there", "deepspeed")
    convert_checkpoint(folder / f"{case}-there", folder / f"{case}-back", "torch")
    first, second = _tensors(saved), _tensors(folder / f"{case}-back")
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert second[name].dtype == value.dtype and torch.equal(second[name], value), name
