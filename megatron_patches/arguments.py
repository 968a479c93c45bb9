"""Our optimizers' options become flags of Megatron's own parser."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from megatron_patches.norms import BY
from megatron_patches.registry import NAMES, option_names, resolve
from megatron_patches.resuming import flag_of
from megatron_patches.support import SupportError, refused_flags
from rankwise.options.fields import Option
from rankwise.options.validation import OptionError
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["OptionFlag", "add_flags", "flags", "given_options"]

LAYER_WISE = "--rankwise-layer-wise"
LOG_NORMS = "--rankwise-log-norms"
_STOCK_NAME = "adam"
# Arguments whose names begin so are read by Megatron's own optimizers, and not by ours.
_UNREAD = ("adam_", "sgd_", "muon_", "lion_", "soap_", "adaptive_muon_")


class OptionFlag(NamedTuple):
    """One option on the command line.

    Attributes:
        option: Flag as it is typed, ``--mars-gamma``.
        known: Declaration of the option in its class.
        names: The ``--optimizer`` names that have the option.
    """

    option: str
    known: Option
    names: tuple[str, ...]

    @property
    def key(self) -> str:
        """The constructor's keyword, ``gamma``."""
        return self.known.name

    @property
    def default(self) -> Any:
        """Value of the option if it is not given."""
        return self.known.default

    @property
    def help(self) -> str:
        """Text that says what the option does, its values and its default."""
        values = self.known.check.range
        return f"{self.known.text} {values[:1].upper()}{values[1:]}. Default: {_shown(self.default)}."

    @property
    def dest(self) -> str:
        """Attribute of Megatron's ``args``, which exists only if the flag was given."""
        return self.option.removeprefix("--").replace("-", "_")


def flags() -> tuple[OptionFlag, ...]:
    """Return every option of every optimizer, prefixed with the name of its class."""
    classes = dict.fromkeys(named.optimizer for named in NAMES.values())
    return tuple(flag for cls in classes for flag in _flags_of(cls))


def given_options(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the options of an optimizer that were on the command line, by keyword.

    Args:
        args: Result of the parser.
        name: Name of the optimizer.
    """
    return {
        flag.key: _as_option(flag, getattr(args, flag.dest))
        for flag in flags()
        if name in flag.names and hasattr(args, flag.dest)
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our optimizers and their flags to a parser with Megatron's arguments.

    After parsing, ``args.rankwise_optimizer`` holds one of our names or None. ``args.optimizer`` is then "adam", so
    that Megatron checks all other arguments as for the optimizer it supports best.

    Args:
        parser: Megatron's parser. A wrong value ends it as argparse's own errors do, with the flag and the rule.
    """
    chooser = parser._option_string_actions["--optimizer"]
    theirs = tuple(chooser.choices or ())
    chooser.choices = [*theirs, *(name for name in NAMES if name not in theirs)]
    group = parser.add_argument_group(
        title="rankwise",
        description=f"Options of --optimizer {', '.join(NAMES)}; each flag belongs to the optimizers that begin as it "
        "does. Learning rate, weight decay and clipping are Megatron's own flags.",
    )
    for flag in flags():
        if flag.option in parser._option_string_actions:
            parser.error(
                f"{flag.option} of --optimizer {', '.join(flag.names)} is a flag of Megatron's own: give the options "
                "another owner, with which their flags begin"
            )
        group.add_argument(flag.option, dest=flag.dest, default=argparse.SUPPRESS, **_parsing(flag))
    group.add_argument(
        LAYER_WISE,
        action="store_true",
        help="Whole parameters dealt out over the data-parallel ranks by Megatron's layer-wise optimizer, without "
        "--use-distributed-optimizer.",
    )
    group.add_argument(
        LOG_NORMS,
        choices=BY,
        help="Norms of updates and weights on the writers every --log-interval iterations, for each transformer layer "
        "or each weight.",
    )
    parse = parser.parse_known_args

    def parse_known_args(*args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        namespace, remaining = parse(*args, **kwargs)
        _refuse_taken(parser, namespace.optimizer, theirs)
        _settle(parser, namespace)
        return namespace, remaining

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


# --- after parsing ---------------------------------------------------------------------------------------------------


def _refuse_taken(parser: argparse.ArgumentParser, name: str, theirs: Collection[str]) -> None:
    """Refuse a registered name that is also an optimizer of Megatron's."""
    if name in NAMES and name in theirs:
        free_names = [other for other, named in NAMES.items() if named == NAMES[name] and other not in theirs]
        fix = f"use --optimizer {free_names[0]}" if free_names else "register yours under another name"
        parser.error(
            f"argument --optimizer: {name!r} is ambiguous: Megatron has an optimizer of this name, and "
            f"{NAMES[name].optimizer.__module__} has registered another; {fix}"
        )


def _settle(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check our flags, and move our name to an argument that Megatron does not read."""
    name = args.optimizer
    ours = name in NAMES
    for flag in flags():
        if hasattr(args, flag.dest) and name not in flag.names:
            parser.error(f"argument {flag.option}: it is invalid with --optimizer {name}: {_owners(flag, name)}")
    for flag_text, given in ((LAYER_WISE, args.rankwise_layer_wise), (LOG_NORMS, args.rankwise_log_norms)):
        if given and not ours:
            parser.error(
                f"argument {flag_text}: it is invalid with --optimizer {name}: it needs one of {', '.join(NAMES)}"
            )
    args.rankwise_optimizer = name if ours else None
    if not ours:
        return
    if getattr(args, "yaml_cfg", None) is not None:
        parser.error(
            f"argument --yaml-cfg: it is invalid with --optimizer {name}: the file would replace every argument"
        )
    for flag_text, reason in refused_flags(args, name):
        parser.error(f"argument {flag_text}: it is invalid with --optimizer {name}: {reason}")
    _check_values(parser, name, given_options(args, name))
    _warn_of_unread(parser, args, name)
    args.optimizer = _STOCK_NAME


def _owners(flag: OptionFlag, name: str) -> str:
    names = ", ".join(flag.names)
    if name in NAMES and NAMES[name][0] is NAMES[flag.names[0]][0]:
        return f"that name fixes it; use --optimizer {names}"
    return f"it belongs to --optimizer {names}"


def _check_values(parser: argparse.ArgumentParser, name: str, options: Mapping[str, Any]) -> None:
    typed = {flag.key: flag.option for flag in flags() if name in flag.names}
    try:
        resolve(name, options)
    except (OptionError, SupportError) as error:
        # Without any one of these the options are valid: options may be wrong in combination only.
        alone = [key for key in options if not _is_refused(name, {k: v for k, v in options.items() if k != key})]
        blamed = [typed[key] for key in alone or (key for key in options if f"{key}=" in str(error)) or options]
        parser.error(f"argument{'s' * (len(blamed) > 1)} {', '.join(blamed)}: {error}")


def _is_refused(name: str, options: Mapping[str, Any]) -> bool:
    try:
        resolve(name, options)
    except (OptionError, SupportError):
        return True
    return False


def _warn_of_unread(parser: argparse.ArgumentParser, args: argparse.Namespace, name: str) -> None:
    given = [action for action in parser._actions if action.dest.startswith(_UNREAD) and action.option_strings]
    unread = [action for action in given if getattr(args, action.dest, action.default) != action.default]
    if unread and os.environ.get("RANK", "0") == "0":
        typed = ", ".join(action.option_strings[0] for action in unread)
        prefix = flag_of(NAMES[name][0])
        print(f"{typed}: not read by --optimizer {name}, whose own flags begin with {prefix}", file=sys.stderr)


# --- from the option classes -----------------------------------------------------------------------------------------


def _flags_of(cls: type[ShardedOptimizer]) -> Iterator[OptionFlag]:
    names = [name for name, named in NAMES.items() if named.optimizer is cls]
    table = cls.options_type.table()
    for key in dict.fromkeys(key for name in names for key in option_names(name)):
        owners = tuple(name for name in names if key in option_names(name))
        yield OptionFlag(flag_of(cls, key), table[key], owners)


def _parsing(flag: OptionFlag) -> dict[str, Any]:
    """Return how argparse must read a flag."""
    check = flag.known.check
    text = flag.help.replace("%", "%%")
    if check.kind is bool:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    metavar = "PATTERN" if check.count is None else check.kind.__name__.upper()
    parsing = {"type": _optional(check.kind) if check.optional else check.kind, "metavar": metavar, "help": text}
    if check.count is None:
        return parsing | {"nargs": "*"}
    if check.count > 1:  # A single word may be "none".
        return parsing | {"nargs": "+" if check.optional else check.count}
    return parsing


def _optional(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    read.__name__ = f"{kind.__name__} or none"  # argparse puts this name into its message.
    return read


def _as_option(flag: OptionFlag, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return None if value == [None] else tuple(value)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
