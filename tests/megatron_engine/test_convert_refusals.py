"""``rankwise convert`` with what it cannot convert: the reason is said, and nothing is there afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cpu_deepspeed import choose_cpu
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

choose_cpu()
pytest.importorskip("deepspeed")

from typer.testing import CliRunner  # noqa: E402

from rankwise import MKOR, LDAdam  # noqa: E402
from rankwise.launch.cli import app  # noqa: E402
from rankwise.launch.convert import CONVERSION_ERRORS, convert_checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Make = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3))


def _save(folder: Path, make: Make, steps: int = 2, optimizer: bool = True) -> Path:
    model = _model()
    own = make(list(model.named_parameters()))
    if isinstance(own, MKOR):
        own.capture(model)
    for _ in range(steps):
        model(torch.ones(4, 6)).square().sum().backward()
        own.step()
        own.zero_grad()
    weights, states = get_state_dict(model, own)
    dcp.save({"model": weights, **({"optimizer": states} if optimizer else {})}, checkpoint_id=folder, no_dist=True)
    return folder


def _ldadam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return LDAdam(named, rank=2)


def _refused(source: Path, target: Path, said: str, to: Any = "deepspeed", **further: Any) -> None:
    before = sorted(target.parent.iterdir())
    with pytest.raises(CONVERSION_ERRORS, match=said):
        convert_checkpoint(source, target, to, **further)
    assert sorted(target.parent.iterdir()) == before


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return _save(tmp_path / "saved", _ldadam)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "new").mkdir()
    return tmp_path / "new" / "made"


def test_where_nothing_can_come_of_it(saved: Path, target: Path) -> None:
    _refused(saved, target, "already", to="torch")
    _refused(saved, saved, "exists")
    _refused(saved, target, "like must be a checkpoint of the run", to="megatron")
    _refused(saved, target, "like is for 'megatron'", like=saved)
    _refused(saved.parent, target, "none of the formats")
    _refused(saved / "absent", target, "no folder")
    (target.parent / "file").write_text("")
    _refused(target.parent / "file", target, "no folder")


def test_an_iteration_is_no_checkpoint_of_torch(saved: Path, target: Path) -> None:
    shutil.copytree(saved, target.parent / "like")
    torch.save({"iteration": 1}, target.parent / "like" / "common.pt")
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {f"{name}_version": 1 for name in backends}
    (target.parent / "like" / "metadata.json").write_text(json.dumps(backends | versions))
    _refused(target.parent / "like", target, "another optimizer than rankwise's")


def test_another_optimizers_checkpoint(tmp_path: Path, target: Path) -> None:
    source = _save(tmp_path / "adamw", lambda named: torch.optim.AdamW([p for _, p in named]))
    _refused(source, target, "written by another optimizer than rankwise's")


def test_weights_without_states(tmp_path: Path, target: Path) -> None:
    _refused(_save(tmp_path / "weights", _ldadam, optimizer=False), target, "none of the formats")


@pytest.mark.parametrize("which", [".metadata", "__0_0.distcp"])
def test_files_that_are_cut_off(saved: Path, target: Path, which: str) -> None:
    whole = (saved / which).read_bytes()
    (saved / which).write_bytes(whole[: len(whole) // 2])
    _refused(saved, target, "")
    (saved / which).unlink()
    _refused(saved, target, "")


def test_files_of_deepspeed_that_are_cut_off(saved: Path, target: Path) -> None:
    made = target.parent / "universal"
    convert_checkpoint(saved, made, "deepspeed")
    for which in ("mp_rank_00_model_states.pt", "rankwise/common.pt", "rankwise/__0_0.distcp", "rankwise/.metadata"):
        whole = (made / which).read_bytes()
        (made / which).write_bytes(whole[: len(whole) // 2])
        _refused(made, target, "", to="torch")
        (made / which).unlink()
        _refused(made, target, "", to="torch")
        (made / which).write_bytes(whole)
    convert_checkpoint(made, target, "torch")


def test_new_names(saved: Path, target: Path) -> None:
    names = target.parent / "names.json"
    names.write_text(json.dumps({"*.weight": "decoder.*.weight", "2.bias": "head.bias"}))
    convert_checkpoint(saved, target, "deepspeed", names)
    found = {path.name for path in (target / "zero").iterdir() if path.is_dir()}
    assert found == {"decoder.0.weight", "decoder.1.weight", "decoder.2.weight", "0.bias", "head.bias"}
    back = target.parent / "back.json"
    back.write_text(json.dumps({"decoder.*": "*", "head.bias": "2.bias"}))
    convert_checkpoint(target, target.parent / "again", "torch", back)
    first, second = ({}, {})  # type: ignore[var-annotated]
    for folder, values in ((saved, first), (target.parent / "again", second)):
        values.update(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
    assert first.keys() == second.keys()
    for text, said in (
        ({"absent.*": "*"}, "no parameter of the checkpoint matches"),
        ({"*.weight": "same"}, "as many"),
        ({"0.weight": "../../evil"}, "must be a parameter's name"),
        ({"0.weight": "1.weight[0]"}, "must be a parameter's name"),
        ({"0.weight": ""}, "must be a parameter's name"),
        ({"0.weight": "x", "1.weight": "x"}, "would be called"),
        (["no", "map"], "JSON of new names"),
    ):
        names.write_text(json.dumps(text))
        _refused(saved, target.parent / "other", said, names=names)
    names.write_text("{")
    _refused(saved, target.parent / "other", "names.json is no JSON", names=names)


def test_no_framework_of_that_name(saved: Path, target: Path) -> None:
    _refused(saved, target, "to is 'fsdp': it must be one of deepspeed, megatron, torch", to="fsdp")


def test_deepspeed_has_no_room_for_float64(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    double = nn.Sequential(nn.Linear(6, 8)).double()
    monkeypatch.setattr(torch, "ones", partial(torch.ones, dtype=torch.float64))
    monkeypatch.setitem(globals(), "_model", lambda: double)
    _refused(_save(tmp_path / "saved", _ldadam), target, "'0.weight' is float64: DeepSpeed keeps float32")


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.embed(x) + self.head(x))


def test_weights_of_two_names_are_known_for_one(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed takes a weight that it does not know for tied for one that ZeRO does not cut."""
    monkeypatch.setitem(globals(), "_model", _Tied)
    (target.parent / "latest_universal").write_text("earlier")
    convert_checkpoint(_save(tmp_path / "saved", _ldadam), target, "deepspeed")
    content = torch.load(target / "mp_rank_00_model_states.pt", weights_only=False)
    assert content["shared_params"] == {"head.weight": "embed.weight"} and content["buffer_names"] == []
    assert (target.parent / "latest_universal").read_text() == "earlier", "that is another run's"


def test_an_interrupted_conversion_leaves_nothing(saved: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deepspeed_plugin.checkpoints.universal_by_name._write_common", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(saved, target, "deepspeed")
    assert not list(target.parent.iterdir())


def test_the_command(saved: Path, target: Path) -> None:
    done = CliRunner().invoke(app, ["convert", str(saved), str(target), "--to", "deepspeed"])
    assert done.exit_code == 0 and "load_universal" in done.output, done.output
    assert (target.parent / "latest_universal").read_text() == target.name
    again = CliRunner().invoke(app, ["convert", str(saved), str(target), "--to", "deepspeed"])
    assert again.exit_code == 2 and "exists" in again.output
