"""Mutated flags end in the parser with the flag's name, or give an optimizer that has their values and steps."""

from __future__ import annotations

import argparse
import contextlib
import io
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import mutations
import pytest
from torch import nn

from megatron_patches.arguments import add_flags, flags, given_options
from megatron_patches.registry import NAMES, resolve
from rankwise.options.validation import OptionError

CASES = 400
MANY = 6000


def parser() -> argparse.ArgumentParser:
    """With the few of Megatron's arguments that ours touch."""
    made = argparse.ArgumentParser(prog="pretrain_gpt.py", allow_abbrev=False)
    made.add_argument("--optimizer", type=str, default="adam", choices=["adam", "sgd"])
    made.add_argument("--yaml-cfg", type=str, default=None)
    add_flags(made)
    return made


def _text(value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [str(part) for part in value]
    return [str(value)]


def _typed(rng: random.Random, flag: Any) -> list[str]:
    """A flag as one might type it."""
    option = mutations.misspelt(rng, flag.option) if rng.random() < 0.1 else flag.option
    kind = rng.random()
    if isinstance(flag.default, bool) and kind < 0.8:
        return [option if kind < 0.5 else option.replace("--", "--no-", 1)]
    if kind < 0.35:
        return [option, *_text("none" if flag.default is None else flag.default)]
    value = mutations.near(rng, flag.default) if kind < 0.6 else mutations.value(rng)
    return [option, *_text(value)]


def cases(count: int, seed: int = 0) -> Iterator[list[str]]:
    """Command lines with one to three of our flags."""
    rng = random.Random(seed)
    for _ in range(count):
        name = rng.choice(list(NAMES))
        own = [flag for flag in flags() if name in flag.names]
        line = ["--optimizer", mutations.misspelt(rng, name) if rng.random() < 0.05 else name]
        for flag in rng.sample(own, rng.choice((1, 1, 2, 3))):
            line += _typed(rng, rng.choice(flags()) if rng.random() < 0.05 else flag)
        yield line


def outcome(made: argparse.ArgumentParser, line: list[str]) -> str:
    """Parse, build and step."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = made.parse_args(line)
    except SystemExit as stopped:
        assert stopped.code == 2
        message = said.getvalue().splitlines()[-1]
        named = [word for word in line if word.startswith("--") and word in message]
        assert named or any(word in message for word in line), (line, message)
        return "refused"
    name = args.rankwise_optimizer
    if name is None:
        return "another's"
    options = given_options(args, name)
    resolved = resolve(name, options)
    if "rank" in NAMES[name][0].options_type.names() and resolved.get("rank", 16) > 12:
        resolved["rank"] = 4  # more than the network's matrices are worth

    def build(model: nn.Module) -> Any:
        return NAMES[name][0](list(model.parameters()), lr=1e-3, weight_decay=0.1, **resolved)

    if resolved.get("exclude"):
        resolved["exclude"] = ()  # whether patterns match is for the model to say
    try:
        mutations.trial(build, {key: value for key, value in options.items() if key not in ("rank", "exclude")})
    except OptionError as error:  # only with the model at hand
        assert any(key in str(error) for key in options), (line, str(error))
        return "refused"
    return "started"


def fuzz(count: int, seed: int = 0) -> Counter[str]:
    """How the cases end; the line of one that ends otherwise is in the error."""
    made, found = parser(), Counter[str]()
    for line in cases(count, seed):
        try:
            found[outcome(made, line)] += 1
        except Exception as error:
            raise AssertionError(f"{line!r:.600}: {type(error).__name__}: {error}") from error
    return found


@pytest.mark.filterwarnings("ignore")
def test_mutated_flags() -> None:
    found = fuzz(CASES)
    assert found["started"] > CASES // 8 and found["refused"] > CASES // 8, found


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_many_mutated_flags() -> None:
    found = fuzz(MANY, seed=1)
    print(dict(found))
    assert found.total() == MANY
