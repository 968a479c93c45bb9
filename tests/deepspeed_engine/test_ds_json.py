"""The configuration is read as DeepSpeed reads it, whichever way it comes in."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
from deepspeed.runtime.config import DeepSpeedConfig

import deepspeed_plugin
from rankwise.options.validation import OptionError

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


def test_types_of_products_may_be_left_to_the_machine() -> None:
    for name, key in (("MARS-M", "ns_dtype"), ("MKOR", "product_dtype")):
        deepspeed_plugin.validate_config({"optimizer": {"type": name, "params": {key: "auto"}}})
        with pytest.raises(OptionError, match=f"{key}='fast' is invalid: .*, or be 'auto'"):
            deepspeed_plugin.validate_config({"optimizer": {"type": name, "params": {key: "fast"}}})
    with pytest.raises(OptionError, match="factor_dtype='auto' is invalid: only .*product_dtype, .*may be 'auto'"):
        deepspeed_plugin.validate_config({"optimizer": {"type": "MKOR", "params": {"factor_dtype": "auto"}}})


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


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "MKOR", "params": 3}, "optimizer.params=3 is invalid: it must be an object of options"),
        ({"type": "MKOR", "params": [["lr", 1e-3]]}, r"optimizer.params=\[\['lr', 0.001\]\] is invalid"),
        ({"type": "LDAdam", "param": {"rank": 4}}, "optimizer has no key 'param': did you mean 'params'?"),
        ({"type": "LDAdam", "rank": 4}, 'optimizer.rank=4 is invalid: .* read inside "params" alone; move it there'),
        ({"type": "LDAdam", "params": {}, "lr": 1}, "optimizer.lr=1 is invalid"),
        ({"type": "LDAdam", "zebra": 4}, "optimizer has no key 'zebra': its keys are type, params, legacy_fusion"),
        ({"typ": "LDAdam", "params": {}}, "optimizer has no key 'typ': did you mean 'type'?"),
        ({"name": "LDAdam"}, "optimizer has no key 'name': did you mean 'type'?"),
        ({"type": 3}, "optimizer.type=3 is invalid: it must be the name of an optimizer"),
        (3, "optimizer=3 is invalid: it must be an object"),
        (None, "optimizer=None is invalid"),
        ({"type": "MKOR", "params": {"momentum": 0.9}}, "momentum=0.9 is invalid: backend='adamw' does not read it"),
        (
            {"type": "MKOR", "params": {"hybrid_ema": 0.95}},
            "hybrid_ema=0.95 is invalid: nothing reads it",
        ),
        ({"type": "MKOR-H", "params": {"hybrid": False}}, r"'hybrid', which the name fixes .* under the name 'MKOR'"),
        ({"type": "MARS-M", "params": {"variant": "lion"}}, r"'variant', which .*variant='lion' under the name 'MARS'"),
        ({"type": "MARS", "params": {"lr": 10**400}}, r"lr=1000+\.\.\. \(401 characters\) is invalid: it must be"),
        ({"type": "MARS", "params": {"name": "x", "params": 3}}, "'MARS' has no option 'name'"),
        ({"type": "MARS", "params": {"exact": True}}, "exact=True is invalid under DeepSpeed: an engine runs one"),
        ({"type": "muonn", "params": {}}, "did you mean 'muon'"),
        ({"type": "zzz"}, "rankwise adds MARS, "),
    ],
)
def test_blocks_that_would_be_read_in_part(block: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        deepspeed_plugin.validate_config({"optimizer": block})
    if "muonn" not in str(block) and "zzz" not in str(block):  # those are for DeepSpeed to look up
        with pytest.raises(OptionError, match=words):
            DeepSpeedConfig({"train_batch_size": 1, "optimizer": block})


def test_blocks_that_are_read() -> None:
    for block in (
        {"type": "MKOR", "params": {"backend": "sgd", "momentum": 0.9, "betas": "auto", "eps": 1e-8}},
        {"type": "MKOR", "legacy_fusion": True},
        {"type": "AdamW", "rank": 4, "params": {"momentum": 3}},  # not ours to judge
        {},
    ):
        deepspeed_plugin.validate_config({"optimizer": block})
        DeepSpeedConfig({"train_batch_size": 1, "optimizer": block})


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
