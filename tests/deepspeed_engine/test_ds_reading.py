"""Files of checkpoints are read without running what they say, where that is possible."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from deepspeed_plugin.checkpoints import CheckpointError, reading
from deepspeed_plugin.checkpoints.reading import read

PLAIN: dict[str, Any] = {
    "zero_stage": ZeroStageEnum.gradients,
    "loss_scaler": DynamicLossScaler(2.0**8, 2.0, 1000, 1.0, 2),
    "param_slice_mappings": [{"weight": fragment_address(numel=3, start=1)}],
    "state": torch.arange(4.0),
}


class _Arguments:
    """A class of a user's: argparse's own is among the safe ones once Megatron has been imported."""

    depth = 3


class _Marker:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of files, however libraries have left the loggers."""
    reading._say_what_it_holds.cache_clear()
    messages: list[str] = []
    monkeypatch.setattr(reading.logger, "warning", lambda text, *values: messages.append(text % values))
    return messages


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_deepspeed_are_plain_data(
    tmp_path: Path, zipped: bool, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked, load = tmp_path / "optim_states.pt", [], torch.load
    torch.save(PLAIN, path, _use_new_zipfile_serialization=zipped)
    monkeypatch.setattr(torch, "load", lambda *a, **k: (asked.append(k["weights_only"]), load(*a, **k))[1])
    found = read(path)
    assert asked == [True] and not said
    assert found["zero_stage"] is ZeroStageEnum.gradients
    assert found["loss_scaler"].cur_scale == 2.0**8
    assert found["param_slice_mappings"][0]["weight"].start == 1
    assert torch.equal(found["state"], PLAIN["state"])


def test_objects_of_users_are_read_as_deepspeed_reads_them_and_named(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "model_states.pt"
    torch.save({"args": _Arguments(), **PLAIN}, path)
    assert read(path)["args"].depth == 3
    read(path)
    (message,) = said
    assert "_Arguments" in message and "deepspeed.runtime" not in message


def test_a_file_is_inspected_before_anything_in_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tmp_path / "model_states.pt", tmp_path / "ran"
    torch.save({"state": _Marker(folder)}, path)
    seen: list[bool] = []
    monkeypatch.setattr(reading, "_say_what_it_holds", lambda *_: seen.append(folder.exists()))
    read(path)
    assert seen == [False] and folder.exists(), "the warning comes first"


@pytest.mark.parametrize("kept", [0, 100, 900])
def test_damaged_files_are_damaged_files(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "optim_states.pt"
    torch.save(PLAIN, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="not written to the end"):
        read(path)
