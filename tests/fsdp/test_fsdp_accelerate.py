"""accelerate shards a model (``fsdp_version=2``) whose optimizer of ours was built before, as its users write it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.distributed.fsdp import CPUOffloadPolicy

pytest.importorskip("accelerate")
from accelerate_on_cpu import import_before_forking
from hugging_face import CLASSES, MODELS, OURS, Accelerated, Weights, alone, difference

STEPS = 4
Cell = tuple[str, str]
pytestmark = pytest.mark.usefixtures("_import")


@pytest.fixture(scope="module")
def _import() -> None:
    import_before_forking()


def _trained(rank: int, world: int, cells: list[Cell], dtype: torch.dtype, how: dict[str, Any]) -> dict[Cell, Weights]:
    return {(case, kind): Accelerated(case, kind, dtype, **how).train(STEPS).weights() for case, kind in cells}


def _gaps(cells: list[Cell], dtype: torch.dtype, **how: Any) -> dict[Cell, float]:
    """Between two ranks and one process, which knows of micro-batches and clipping alone."""
    loop = {name: how[name] for name in ("micro", "clip") if name in how}
    found = run_ranks(2, _trained, cells, dtype, how)[1]
    return {cell: difference(found[cell], alone(*cell, STEPS, dtype, **loop), cell[1]) for cell in cells}


@pytest.mark.slow
def test_follows_one_process() -> None:
    cells = [(case, "gpt2") for case in OURS] + [("ldadam", "llama"), ("mkor", "adapted"), ("mkor", "bert")]
    gaps = _gaps(cells, torch.float64)
    assert max(gaps.values()) <= 1e-10, gaps


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", MODELS)
def test_every_model_follows_one_process(kind: str) -> None:
    gaps = _gaps([(case, kind) for case in OURS], torch.float64)
    assert max(gaps.values()) <= 1e-10, gaps
    rounded = _gaps([(case, kind) for case in CLASSES], torch.float32)
    control = rounded.pop(("adamw", kind))
    assert max(rounded.values()) <= max(2e-4, 10 * control), rounded


@pytest.mark.parametrize(
    "how",
    [
        {"micro": 2, "clip": 0.5},
        {"activation_checkpointing": True, "reshard_after_forward": False},
        {"cpu_offload": CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["accumulated", "checkpointed", "offloaded"],
)
@pytest.mark.slow
def test_follows_one_process_whatever_accelerate_is_asked_for(how: dict[str, Any]) -> None:
    gaps = _gaps([("ldadam", "llama-tied"), ("mkor", "gpt2")], torch.float64, **how)
    assert max(gaps.values()) <= 1e-10, gaps


@pytest.mark.exhaustive
def test_one_rank_alone_loads_the_weights() -> None:
    gaps = _gaps([(case, "llama") for case in CLASSES], torch.float32, cpu_ram_efficient_loading=True)
    assert max(gaps.values()) <= 2e-4, gaps


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _saved(rank: int, world: int, cases: list[str], folder: str, form: str) -> dict[str, Weights]:
    found = {}
    for case in cases:
        run = Accelerated(case, "gpt2", torch.float64, state_dict_type=form).train(2, rows=6)
        run.accelerator.save_state(f"{folder}/{case}")
        found[case] = run.train(2, rows=6).weights()
    return found


def _resumed(rank: int, world: int, cases: list[str], folder: str, form: str) -> dict[str, Weights]:
    found = {}
    for case in cases:
        run = Accelerated(case, "gpt2", torch.float64, state_dict_type=form)
        run.count = 2
        run.accelerator.load_state(f"{folder}/{case}")
        found[case] = run.train(2, rows=6).weights()
    return found


@pytest.mark.parametrize(
    ("form", "cases", "worlds"),
    [
        ("SHARDED_STATE_DICT", ["mars-m", "ldadam", "mkor"], [2]),
        pytest.param("SHARDED_STATE_DICT", OURS, [1, 2, 3], marks=pytest.mark.exhaustive),
        pytest.param("FULL_STATE_DICT", OURS, [1, 2, 3], marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
def test_goes_on_from_a_saved_state(form: str, cases: list[str], worlds: list[int], tmp_path: Path) -> None:
    saved = run_ranks(2, _saved, cases, str(tmp_path), form)[0]
    for world in worlds:
        resumed = run_ranks(world, _resumed, cases, str(tmp_path), form)[0]
        gaps = {case: difference(resumed[case], saved[case], "gpt2") for case in cases}
        assert max(gaps.values()) <= (0.0 if world == 2 else 1e-9), (world, gaps)


def _of_another_type(rank: int, world: int, folder: str, form: str) -> tuple[str, bool]:
    Accelerated("ldadam", "gpt2", state_dict_type=form).train(2).accelerator.save_state(folder)
    run = Accelerated("mars-m", "gpt2", state_dict_type=form).train(1)
    before = run.optimizer.state_dict()["state"]
    copies = {key: {name: value.clone() for name, value in own.items()} for key, own in before.items()}
    # That of torch.distributed.checkpoint is no Exception.
    with pytest.raises(BaseException, match="") as refused:
        run.accelerator.load_state(folder)
    after = run.optimizer.state_dict()["state"]
    same = [bool((after[key][name] == value).all()) for key, own in copies.items() for name, value in own.items()]
    return str(refused.value), all(same)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("FULL_STATE_DICT", "MARS-muon: the checkpoint's rankwise='LDAdam' is invalid"),
        ("SHARDED_STATE_DICT", "Missing key in checkpoint"),
    ],
)
@pytest.mark.slow
def test_states_of_another_type_are_refused(form: str, message: str, tmp_path: Path) -> None:
    for text, same in run_ranks(2, _of_another_type, str(tmp_path), form):
        # Whole dictionaries are written over states of the same name by torch itself, before we are asked.
        assert re.search(message, text) and (same or form == "FULL_STATE_DICT"), text


# --- FSDP1 ------------------------------------------------------------------------------------------------------------


def _flattened(rank: int, world: int, original: bool) -> str:
    with pytest.raises(Exception, match="") as refused:
        Accelerated("ldadam", "gpt2", fsdp_version=1, use_orig_params=original).train(1)
    return str(refused.value)


@pytest.mark.parametrize("original", [True, False])
def test_fsdp1_is_refused_on_all_ranks(original: bool) -> None:
    for text in run_ranks(2, _flattened, original):
        assert re.search(r"'transformer\.wte\.weight' is invalid, .*FSDP has flattened.*\(FSDP2\)", text), text
