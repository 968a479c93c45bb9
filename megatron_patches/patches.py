"""While :func:`apply` is in force, these functions of Megatron are replaced, as few as possible.

Nothing of Megatron is imported before :func:`apply` or :func:`check` is called.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from megatron_patches.apex import detect_apex

__all__ = ["PATCHES", "Patch", "PatchError", "PatchState", "apply", "check", "revert"]

Function = Callable[..., Any]


class PatchError(RuntimeError):
    """This Megatron differs from the tested versions, or somebody else has replaced a function."""


@dataclass(frozen=True)
class Patch:
    """One replaced function.

    Attributes:
        module: Module that defines the function.
        name: Name of the function.
        parameters: Names of all its parameters, or of the first ones, in order, in every tested version.
        tested: Minor versions of megatron-core that the patch was run with.
        reason: Why the function is replaced.
        replace: Makes our function from the stock one.
        command_line: Whether the function belongs to ``megatron.training``.
        open_end: Whether more parameters may follow, which are passed on.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    tested: tuple[str, ...]
    reason: str
    replace: Callable[[Function], Function]
    command_line: bool
    open_end: bool = False

    @property
    def symbol(self) -> str:
        """Full name."""
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class PatchState:
    """What :func:`check` returns for a patch.

    Attributes:
        symbol: Full name of the replaced function.
        tested: Minor versions of megatron-core that the patch was run with.
        reason: Why the function is replaced.
        applied: Whether the patch is in force.
    """

    symbol: str
    tested: tuple[str, ...]
    reason: str
    applied: bool


def _factory(stock: Function) -> Function:
    from megatron_patches.registry import get_megatron_optimizer

    if inspect.unwrap(get_megatron_optimizer, stop=lambda function: function is stock) is not stock:
        raise PatchError(
            "megatron.core.optimizer.get_megatron_optimizer was replaced by another package; call apply() before it"
        )
    return get_megatron_optimizer


def _add_arguments(stock: Function) -> Function:
    from megatron_patches.arguments import add_flags

    @functools.wraps(stock)
    def add_megatron_arguments(parser: Any) -> Any:
        parser = stock(parser)
        add_flags(parser)
        return parser

    return add_megatron_arguments


def _optimizer_config(stock: Function) -> Function:
    from megatron_patches.arguments import given_options
    from megatron_patches.formats import refuse_format
    from megatron_patches.memory import hidden, take_settings
    from megatron_patches.registry import NAMES

    @functools.wraps(stock)
    def get_megatron_optimizer_config(args: Any) -> Any:
        name = getattr(args, "rankwise_optimizer", None)
        with hidden(args) if name is not None else nullcontext():
            config, overrides = stock(args)
        if name is not None:
            refuse_format(args, name, NAMES[name][0])
            take_settings(config, args)
            config.optimizer = name
            config.rankwise = given_options(args, name)
            config.rankwise_layer_wise = args.rankwise_layer_wise
            config.rankwise_log_norms = args.rankwise_log_norms
            config.rankwise_log_interval = getattr(args, "log_interval", 1)
            config.rankwise_override_checkpoint = getattr(args, "override_opt_param_scheduler", False)
        return config, overrides

    return get_megatron_optimizer_config


def _load(stock: Function) -> Function:
    @functools.wraps(stock)
    def load(sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        from megatron_patches.checkpoint import explained_load

        with explained_load(sharded_state_dict, str(checkpoint_dir)) as relocate:
            loaded = stock(sharded_state_dict, checkpoint_dir, *args, **kwargs)
            relocate(loaded[0] if isinstance(loaded, tuple) else loaded)
            return loaded

    return load


def _load_checkpoint(stock: Function) -> Function:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        from megatron_patches.resuming import overriding_rates

        given = signature.bind(*args, **kwargs).arguments
        with overriding_rates(given["optimizer"], given["opt_param_scheduler"]):
            return stock(*args, **kwargs)

    return load_checkpoint


def _scheduler(stock: Any) -> Any:
    @functools.wraps(stock, updated=())
    class OptimizerParamScheduler(stock):  # type: ignore[misc]
        def load_state_dict(self, state_dict: Any) -> None:
            from megatron_patches.resuming import wrappers_of_ours

            before = self.num_steps
            super().load_state_dict(state_dict)
            if before and wrappers_of_ours(self.optimizer):
                self.step(increment=-before)

    return OptimizerParamScheduler


def _training_log(stock: Function) -> Function:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        from megatron_patches.monitor import report_health

        result = stock(*args, **kwargs)
        report_health(signature.bind(*args, **kwargs).arguments["iteration"])
        return result

    return training_log


def _clip_qk(stock: Function) -> Function:
    @functools.wraps(stock)
    def clip_qk(model: Any, log_max_only: bool = False) -> Any:
        from megatron_patches.qk_clip import main_weights_follow

        if log_max_only:
            return stock(model, log_max_only)
        with main_weights_follow(model):
            return stock(model)

    return clip_qk


def _content_metadata(stock: Function) -> Function:
    @functools.wraps(stock)
    def load_content_metadata(checkpoint_dir: Any = None, *, preloaded_state_dict: Any = None) -> Any:
        from megatron.core.dist_checkpointing.serialization import load_common_state_dict

        from megatron_patches.records import any_layout

        if preloaded_state_dict is None and checkpoint_dir is not None:
            preloaded_state_dict = load_common_state_dict(checkpoint_dir)
        metadata = stock(checkpoint_dir, preloaded_state_dict=preloaded_state_dict)
        return any_layout(metadata, preloaded_state_dict)

    return load_content_metadata


_TESTED = ("0.16", "0.17", "0.18", "0.19", "0.20")

PATCHES: tuple[Patch, ...] = (
    Patch(
        module="megatron.core.optimizer",
        name="get_megatron_optimizer",
        parameters=(
            "config",
            "model_chunks",
            "config_overrides",
            "use_gloo_process_groups",
            "pg_collection",
            "dump_param_to_param_group_map",
        ),
        tested=_TESTED,
        reason="the factory every training loop calls refuses names it does not know; other names still go to it",
        replace=_factory,
        command_line=False,
    ),
    Patch(
        module="megatron.core.dist_checkpointing.serialization",
        name="load",
        parameters=("sharded_state_dict", "checkpoint_dir"),
        tested=_TESTED,
        reason="a checkpoint that another optimizer wrote ends in a KeyError of a tensor's name, before we are asked",
        replace=_load,
        command_line=False,
        open_end=True,
    ),
    Patch(
        module="megatron.core.dist_checkpointing.serialization",
        name="load_content_metadata",
        parameters=("checkpoint_dir", "preloaded_state_dict"),
        tested=_TESTED,
        reason="Megatron takes our states for a format of its own that belongs to one tensor- and pipeline-parallel "
        "size, and has no word for those written without the distributed optimizer",
        replace=_content_metadata,
        command_line=False,
    ),
    Patch(
        module="megatron.core.optimizer.qk_clip",
        name="clip_qk",
        parameters=("model", "log_max_only"),
        tested=_TESTED,
        reason="Megatron scales a full-precision copy as if it had the weight's shape, which a shard has not",
        replace=_clip_qk,
        command_line=False,
    ),
    Patch(
        module="megatron.core.optimizer_param_scheduler",
        name="OptimizerParamScheduler",
        parameters=("optimizer", "init_lr", "max_lr", "min_lr"),
        tested=_TESTED,
        reason="a schedule that has begun adds the steps of a checkpoint to its own, and goes on at another rate",
        replace=_scheduler,
        command_line=False,
        open_end=True,
    ),
    Patch(
        module="megatron.training.arguments",
        name="add_megatron_arguments",
        parameters=("parser",),
        tested=_TESTED,
        reason="--optimizer has a closed list of names, and scripts pass no hook of ours to the parser",
        replace=_add_arguments,
        command_line=True,
    ),
    Patch(
        module="megatron.training.training",
        name="get_megatron_optimizer_config",
        parameters=("args",),
        tested=_TESTED,
        reason="OptimizerConfig takes from the arguments only what is one of its own fields",
        replace=_optimizer_config,
        command_line=True,
    ),
    Patch(
        module="megatron.training.checkpointing",
        name="load_checkpoint",
        parameters=("ddp_model", "optimizer", "opt_param_scheduler"),
        tested=_TESTED,
        reason="from 0.20 on, --override-opt_param-scheduler gives every param group --lr, those of --decoupled-lr and "
        "of MuP too",
        replace=_load_checkpoint,
        command_line=True,
        open_end=True,
    ),
    Patch(
        module="megatron.training.training",
        name="training_log",
        parameters=("loss_dict", "total_loss_dict", "learning_rate", "iteration"),
        tested=_TESTED,
        reason="Megatron's TensorBoard and Weights & Biases writers have no hook for an optimizer's own figures",
        replace=_training_log,
        command_line=True,
        open_end=True,
    ),
)

_applied: dict[str, tuple[Function, Function, frozenset[str]]] = {}
"""Stock function, our function, and modules that had imported ours before it was applied, by symbol."""


def apply(command_line: bool | None = None) -> None:
    """Add our optimizers to Megatron's. A second call adds what is missing.

    Modules that have already imported a replaced function by its name are updated, too.

    Args:
        command_line: Whether ``megatron.training`` gets our ``--optimizer`` names and flags. True imports it; None
            means only if it has been imported already.

    Raises:
        PatchError: megatron-core is untested, or a function's parameters have changed; nothing is replaced then.
        ModuleNotFoundError: Megatron is not installed.
    """
    apex = detect_apex()
    if apex.kind == "other":
        warnings.warn(apex.message, stacklevel=2)
    wanted = _wanted(command_line)
    for patch in wanted:
        _verify(patch)
    for patch in wanted:
        if patch.symbol not in _applied:
            stock = _current(patch)
            ours = patch.replace(stock)
            importers = frozenset(
                name for name, module in list(sys.modules.items()) if _holds(module, patch.name, ours)
            )
            _rebind(patch.name, stock, ours)
            _applied[patch.symbol] = (stock, ours, importers)


def revert() -> None:
    """Put every replaced function back, in all modules that have imported ours. A second call does nothing.

    Raises:
        PatchError: Somebody has replaced a function after us; undo that first.
    """
    for patch in reversed(PATCHES):
        if patch.symbol not in _applied:
            continue
        stock, ours, importers = _applied[patch.symbol]
        if _current(patch) is not ours:
            raise PatchError(f"{patch.symbol} was replaced by another package after apply(); undo that first")
        _rebind(patch.name, ours, stock, importers)
        del _applied[patch.symbol]


def check(command_line: bool | None = None) -> tuple[PatchState, ...]:
    """Check that the patches fit this Megatron, and return which are in force. Nothing changes.

    Args:
        command_line: Whether to check patches of ``megatron.training``; None means only if it has been imported.

    Raises:
        PatchError: megatron-core is untested, or a function's parameters have changed.
        ModuleNotFoundError: Megatron is not installed.
    """
    wanted = _wanted(command_line)
    for patch in wanted:
        _verify(patch)
    return tuple(PatchState(p.symbol, p.tested, p.reason, p.symbol in _applied) for p in wanted)


def _wanted(command_line: bool | None) -> list[Patch]:
    if command_line is None:
        command_line = "megatron.training.training" in sys.modules
    return [patch for patch in PATCHES if command_line or not patch.command_line]


def _current(patch: Patch) -> Function:
    function: Function = getattr(importlib.import_module(patch.module), patch.name)
    return function


def _verify(patch: Patch) -> None:
    version: str = importlib.import_module("megatron.core.package_info").__version__
    if ".".join(version.split(".")[:2]) not in patch.tested:
        raise PatchError(
            f"megatron-core {version} is not supported: {patch.symbol} was tested with "
            f"{', '.join(f'{minor}.*' for minor in patch.tested)}; install one of these"
        )
    if not hasattr(importlib.import_module(patch.module), patch.name):
        raise PatchError(f"megatron-core {version} has no {patch.symbol}: this copy was changed; use the released one")
    parameters = tuple(inspect.signature(_current(patch)).parameters)
    if parameters[: len(patch.parameters) if patch.open_end else None] != patch.parameters:
        expected = (*patch.parameters, "...") if patch.open_end else patch.parameters
        raise PatchError(
            f"{patch.symbol} of megatron-core {version} takes ({', '.join(parameters)}), expected "
            f"({', '.join(expected)}): it was changed, here or by another package; use the released one"
        )


def _rebind(name: str, old: Function, new: Function, except_in: Collection[str] = ()) -> None:
    """Replace the function in every loaded module that has it under its own name, as most import it by name."""
    for module_name, module in list(sys.modules.items()):
        if module_name not in except_in and _holds(module, name, old):
            setattr(module, name, new)


def _holds(module: object, name: str, function: Function) -> bool:
    return getattr(module, "__dict__", {}).get(name) is function
