"""The configuration is read as DeepSpeed reads it, whichever way it comes in."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest

import deepspeed_plugin
from rankwise.optimizers.options import OptionError

COMMENTED = """{
  "train_batch_size": 4,  # over all ranks
  /* one block */ "optimizer": {
    "type": "%s",
    "params": {"lr": 1e-3,}, // a trailing comma
  },
}"""


def _base64(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


def _forms(text: str, folder: Path) -> list[Any]:
    path = folder / "ds.json"
    path.write_text(text)
    return [str(path), path, _base64(text)]


def test_comments_and_trailing_commas(tmp_path: Path) -> None:
    for config in _forms(COMMENTED % "LDAdam", tmp_path):
        deepspeed_plugin.validate_config(config)
    for config in _forms(COMMENTED % "LDAdamm", tmp_path):
        with pytest.raises(OptionError, match="did you mean 'LDAdam'"):
            deepspeed_plugin.validate_config(config)
    deepspeed_plugin.validate_config({"optimizer": {"type": "MARS", "params": None}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"optimizer": {"type": "MARS"}', "line 1 column"),
        ('{"optimizer": {}, "optimizer": {}}', "Duplicate keys"),
        ("[1, 2]", "holds no JSON object"),
    ],
)
def test_a_broken_file_is_named(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(OptionError) as failure:
        deepspeed_plugin.validate_config(path)
    assert str(path) in str(failure.value) and words in str(failure.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"absent\.json' cannot be read: there is no such file"):
        deepspeed_plugin.validate_config(tmp_path / "absent.json")


def test_only_what_can_be_captured_has_the_option() -> None:
    for name in ("MARS-AdamW", "MARS-M", "SONew", "LDAdam"):
        deepspeed_plugin.validate_config({"optimizer": {"type": name, "params": {"capturable": True}}})
        with pytest.raises(OptionError, match="capturable=True is invalid: it must be false with skip_nonfinite=True"):
            both = {"capturable": True, "skip_nonfinite": True}
            deepspeed_plugin.validate_config({"optimizer": {"type": name, "params": both}})
    for name in ("MKOR", "MKOR-H"):
        with pytest.raises(OptionError, match=f"optimizer type '{name}' has no option 'capturable'"):
            deepspeed_plugin.validate_config({"optimizer": {"type": name, "params": {"capturable": True}}})


def test_initialize_finds_the_config_wherever_it_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(
        args: Any = None, model: Any = None, mpu: Any = None, config: Any = None, config_params: Any = None
    ) -> str:
        return "started"

    monkeypatch.setattr(deepspeed, "initialize", started)
    bad = _base64(COMMENTED % "MKORR")
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {"config": bad}),
        ((), {"config_params": bad}),
        ((None, None, None, bad), {}),
        ((SimpleNamespace(deepspeed_config=bad),), {}),
        ((), {"args": SimpleNamespace(deepspeed_config=bad)}),
    ]
    for positional, named in calls:
        with pytest.raises(OptionError, match="did you mean 'MKOR'"):
            deepspeed_plugin.initialize(*positional, **named)
    assert deepspeed_plugin.initialize(config=_base64(COMMENTED % "MKOR")) == "started"
