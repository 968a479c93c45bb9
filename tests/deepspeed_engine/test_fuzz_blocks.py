"""Mutated optimizer blocks start right, or end before the first step in an error that names the key."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import mutations
import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from torch import nn

import deepspeed_plugin
from deepspeed_plugin.optimizer_block import JSON_TYPES, types_by_spelling
from deepspeed_plugin.registry import build
from rankwise.configs import deepspeed_config_path
from rankwise.options.validation import OptionError

CASES = 400
MANY = 6000


def blocks() -> list[dict[str, Any]]:
    """Those of the shipped files, and some with every kind of option."""
    folder = deepspeed_config_path("LDAdam").parent
    found = [json.loads(path.read_text())["optimizer"] for path in sorted(folder.glob("*.json"))]
    found = [block for block in found if block["type"] in types_by_spelling()]
    for name, (cls, preset) in JSON_TYPES.items():
        unread = cls.options_type(**preset).unread()
        full = {key: value for key, value in vars(cls.options_type()).items() if key not in {*preset, *unread}}
        full |= {key: list(default) for key, default in full.items() if isinstance(default, tuple)}
        found.append({"type": name, "params": full})
    for block in found:
        if block["type"] == "LDAdam":
            block["params"]["rank"] = 4
    return found


def _options_of_all() -> list[str]:
    return sorted({key for cls, _ in JSON_TYPES.values() for key in cls.options_type.names()} | {"params", "name"})


def mutate(rng: random.Random, block: dict[str, Any]) -> set[str]:
    """Change a block in one place; the words of which a message must have one."""
    params = block.get("params")
    kind = rng.randrange(10)
    if kind < 4 and isinstance(params, dict) and params:
        key = rng.choice(list(params))
        params[key] = mutations.value(rng) if rng.random() < 0.4 else mutations.near(rng, params[key])
        return {key}
    if kind == 4 and isinstance(params, dict) and params:
        key = rng.choice(list(params))
        other = mutations.misspelt(rng, key)
        params[other] = params.pop(key)
        return {other, key}
    if kind in (5, 6) and isinstance(params, dict):
        key = rng.choice(_options_of_all())
        params[key] = mutations.value(rng)
        return {key}
    if kind == 7:
        key = rng.choice(("type", "params", *_options_of_all()))
        block[key] = mutations.value(rng)
        return {key}
    if kind == 8:
        key = rng.choice(list(block)) if block else "type"
        other = mutations.misspelt(rng, key)
        block[other] = block.pop(key, None)
        return {other, key}
    name = block.get("type")
    block["type"] = mutations.misspelt(rng, name) if isinstance(name, str) and name else rng.choice(list(JSON_TYPES))
    # Options of one type are refused by another.
    return {"type", *(params if isinstance(params, dict) else ())}


def cases(count: int, seed: int = 0) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """Blocks with one to three changes each."""
    rng = random.Random(seed)
    known = blocks()
    for _ in range(count):
        block = copy.deepcopy(rng.choice(known))
        words: set[str] = set()
        for _ in range(rng.choice((1, 1, 1, 1, 2))):
            words |= mutate(rng, block)
        yield block, words


def _outcome(block: dict[str, Any]) -> str:
    """As DeepSpeed goes about it: the configuration, then the optimizer, then steps."""
    config = {"train_batch_size": 1, "optimizer": block}
    deepspeed_plugin.validate_config(config)
    read = DeepSpeedConfig(config)
    name, params = read.optimizer_name, read.optimizer_params
    if name not in types_by_spelling():
        return "another's"

    def made(model: nn.Module) -> Any:
        return build(name, list(model.parameters()), **(params or {}))

    mutations.trial(made, {key: value for key, value in (params or {}).items() if not _is_auto(value)})
    return "started"


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def fuzz(count: int, seed: int = 0) -> Counter[str]:
    """How the cases end.

    Raises:
        AssertionError: With the block, if one ends otherwise.
    """
    found: Counter[str] = Counter()
    for block, words in cases(count, seed):
        try:
            found[_outcome(copy.deepcopy(block))] += 1
        except OptionError as error:
            text = str(error).lower()
            assert any(word.lower() in text for word in words), (block, str(error), words)
            found["refused"] += 1
        except Exception as error:
            raise AssertionError(f"{block!r:.600}: {type(error).__name__}: {error}") from error
    return found


@pytest.mark.filterwarnings("ignore")
def test_mutated_blocks() -> None:
    found = fuzz(CASES)
    assert found["started"] > CASES // 12 and found["refused"] > CASES // 3, found


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_many_mutated_blocks() -> None:
    found = fuzz(MANY, seed=1)
    print(dict(found))
    assert found.total() == MANY


def test_unmutated_blocks_start() -> None:
    for block in blocks():
        assert _outcome(block) == "started"
