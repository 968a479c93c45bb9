"""The flags in Megatron's parser: one per option, read and checked by the option classes."""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any

import pytest

from megatron_patches.arguments import add_flags, flags, given_options
from megatron_patches.registry import NAMES, option_names, resolve

STORE_TRUE = (
    *("--optimizer-cuda-graph", "--use-custom-fsdp"),
    *("--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--reuse-grad-buf-for-mxfp8-param-ag"),
)


def parser() -> argparse.ArgumentParser:
    """With the few of Megatron's arguments that ours touch."""
    made = argparse.ArgumentParser(prog="pretrain_gpt.py", allow_abbrev=False)
    made.add_argument("--optimizer", type=str, default="adam", choices=["adam", "sgd"])
    made.add_argument("--adam-beta2", type=float, default=0.999)
    made.add_argument("--muon-no-split-qkv", action="store_false", default=True, dest="muon_split_qkv")
    made.add_argument("--muon-num-ns-steps", type=int, default=5)
    made.add_argument("--lion-beta1", type=float, default=0.95)
    made.add_argument("--yaml-cfg", type=str, default=None)
    for flag in STORE_TRUE:
        made.add_argument(flag, action="store_true")
    add_flags(made)
    return made


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def options(*arguments: str) -> dict[str, Any]:
    args = parser().parse_args(arguments)
    return given_options(args, args.rankwise_optimizer)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_every_optimizer_has_a_flag(name: str) -> None:
    cls = NAMES[name][0]
    found = {flag.key: flag for flag in flags() if name in flag.names}
    assert list(found) == option_names(name)
    for key, flag in found.items():
        assert flag.option == f"--{cls.__name__.lower()}-{key.replace('_', '-')}"
        assert flag.default == inspect.signature(cls.__init__).parameters[key].default
        assert flag.help


def words(value: Any, default: Any) -> list[str]:
    return [str(part) for part in value] if isinstance(default, tuple) else [str(value)]


_BESIDE: dict[str, dict[str, str]] = {
    **dict.fromkeys(("--mkor-momentum", "--mkor-nesterov"), {"backend": "sgd"}),
    "--mkor-sketch-gain": {"rule": "sketch"},
}


@pytest.mark.parametrize("flag", flags(), ids=lambda flag: flag.option)
def test_every_default_can_be_typed_and_comes_back_unchanged(flag: Any) -> None:
    """Also that a number stays a number of its type."""
    # Options of one backend, or rule, are refused beside another.
    name = "mkor-h" if "mkor-h" in flag.names else flag.names[-1]
    beside = _BESIDE.get(flag.option, {})
    if isinstance(flag.default, bool):
        typed = [flag.option if flag.default else flag.option.replace("--", "--no-", 1)]
    else:
        typed = [flag.option, *("none" if value is None else value for value in words(flag.default, flag.default))]
    typed += [part for key, value in beside.items() for part in (f"--mkor-{key}", value)]
    read = options("--optimizer", name, *(word if word != "None" else "none" for word in typed))
    assert read == {**beside, flag.key: flag.default} and type(read[flag.key]) is type(flag.default)


def test_help_lists_the_flags_in_a_group_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(["--help"])
    assert stopped.value.code == 0
    stock, ours = capsys.readouterr().out.split("\nrankwise:\n")
    stock = stock.split("\noptions:\n")[1]
    for flag in flags():
        assert f"  {flag.option}" in ours and flag.option not in stock
    assert "--optimizer" in stock


def test_values_are_named_by_what_is_typed() -> None:
    known = {action.metavar for action in parser()._actions if action.dest.startswith(("mars_", "mkor_", "sonew_"))}
    assert known == {None, "FLOAT", "INT", "STR", "JSON", "PATTERN", "DTYPE"}


def test_values_of_every_kind() -> None:
    read = options(*"--optimizer ldadam --ldadam-rank 256 --ldadam-betas 0.9 0.99 --no-ldadam-error-feedback".split())
    assert read == {"rank": 256, "betas": (0.9, 0.99), "error_feedback": False}
    read = options(
        *"--optimizer mars --mars-variant lion --mars-clip none --no-mars-exact --mars-exclude *a* *b".split()
    )
    assert read == {"variant": "lion", "clip": None, "exclude": ("*a*", "*b"), "exact": False}
    assert options(*"--optimizer mkor-h --mkor-stabilizer none --mkor-rescale None".split()) == {
        "stabilizer": None,
        "rescale": None,
    }
    assert options(*"--optimizer mkor --mkor-stabilizer 3 0.5".split()) == {"stabilizer": (3.0, 0.5)}
    assert options(*"--optimizer sonew --sonew-state-dtype int8".split()) == {"state_dtype": "int8"}
    by_state = options("--optimizer", "mars-m", "--mars-state-dtype", '{"exp_avg": "int8"}')
    assert by_state == {"state_dtype": {"exp_avg": "int8"}}
    assert options("--optimizer", "sonew") == {}


def test_what_is_not_given_is_left_to_the_class() -> None:
    args = parser().parse_args(["--optimizer", "ldadam", "--ldadam-rank", "8"])
    ours = {key: value for key, value in vars(args).items() if key.startswith(("mars_", "ldadam_", "mkor_", "sonew_"))}
    assert ours == {"ldadam_rank": 8}
    assert resolve("ldadam", given_options(args, "ldadam")) == {"rank": 8}


def test_megatron_sees_adam_and_plain_values() -> None:
    args = parser().parse_args("--optimizer mars-m --mars-betas 0.9 0.95".split())
    assert args.optimizer == "adam" and args.rankwise_optimizer == "mars-m" and args.rankwise_layer_wise is False
    assert json.loads(json.dumps(vars(args))) == vars(args)  # They go into checkpoints.


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_other_optimizers_stay_as_they_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = parser().parse_args(["--optimizer", name, "--adam-beta2", "0.95"])
    assert args.optimizer == name and args.rankwise_optimizer is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--optimizer ldadam --ldadam-rank 0",
            "argument --ldadam-rank: ldadam: rank=0 is invalid: it must be an",
        ),
        ("--optimizer ldadam --ldadam-rank 2.5", "argument --ldadam-rank: invalid int value: '2.5'"),
        ("--optimizer mars-m --mars-gamma -1", "argument --mars-gamma: mars-m: gamma=-1.0 is invalid: it must be >= 0"),
        ("--optimizer sonew --sonew-graft adan", "argument --sonew-graft: sonew: graft='adan' is invalid"),
        ("--optimizer mkor --mkor-stabilizer 3", "argument --mkor-stabilizer: mkor: stabilizer=(3.0,) is invalid"),
        (
            "--optimizer mkor --mkor-backend sgd --mkor-nesterov --mkor-momentum 0",
            "arguments --mkor-momentum, --mkor-nesterov: mkor: nesterov=True is invalid",
        ),
        (
            "--optimizer ldadam --sonew-band 1",
            "argument --sonew-band: it is invalid with --optimizer ldadam: it belongs to --optimizer sonew",
        ),
        ("--optimizer adam --mars-gamma 0.1", "with --optimizer adam: it belongs to --optimizer mars, mars-adamw,"),
        ("--mkor-h 1", "unrecognized arguments: --mkor-h 1"),
        ("--optimizer mars-m --mars-variant lion", "that name fixes it; use --optimizer mars"),
        ("--optimizer mkor-h --mkor-hybrid", "that name fixes it; use --optimizer mkor"),
        ("--optimizer mkor --mkor-momentum 0.9", "argument --mkor-momentum: optimizer 'mkor': momentum=0.9 is invalid"),
        ("--optimizer adan", "argument --optimizer: invalid choice: 'adan'"),
        ("--rankwise-layer-wise", "--rankwise-layer-wise: it is invalid with --optimizer adam: it needs one of mars,"),
        ("--optimizer mars-m --mars-exact", "argument --mars-exact: exact=True is invalid with --optimizer mars-m:"),
        ("--optimizer mkor --yaml-cfg x.yaml", "--yaml-cfg: it is invalid with --optimizer mkor"),
    ],
)
def test_wrong_values_end_before_anything_starts(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments.split())


@pytest.mark.parametrize(
    ("given", "way_out"),
    [
        (STORE_TRUE[0], "leave it out"),
        (STORE_TRUE[1], "use --use-megatron-fsdp"),
        *((flag, "add --use-distributed-optimizer") for flag in STORE_TRUE[2:]),
    ],
)
def test_flags_that_cannot_work_end_before_anything_starts(
    given: str, way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = given.split()[0]
    message = refused(capsys, "--optimizer", "ldadam", *given.split())
    assert f"argument {flag}: it is invalid with --optimizer ldadam: " in message and way_out in message
    parser().parse_args(["--optimizer", "adam", *given.split()])


def test_flags_of_other_optimizers_that_ours_do_not_read_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    parser().parse_args("--optimizer ldadam --adam-beta2 0.95".split())
    assert capsys.readouterr().err == (
        "--adam-beta2: not read by --optimizer ldadam, whose own flags begin with --ldadam-\n"
    )
    parser().parse_args("--optimizer mars-m --muon-no-split-qkv --lion-beta1 0.9 --muon-num-ns-steps 6".split())
    assert capsys.readouterr().err == (
        "--muon-no-split-qkv, --muon-num-ns-steps, --lion-beta1: not read by --optimizer mars-m, whose own flags begin "
        "with --mars-\n"
    )


def test_unknown_arguments_may_be_left_to_the_caller() -> None:
    """As Megatron's own in-process restart parses."""
    args, rest = parser().parse_known_args("--optimizer mkor --mkor-eps 1e-6 --theirs 3".split())
    assert args.rankwise_optimizer == "mkor" and rest == ["--theirs", "3"]
