"""The registry has the optimizer names for Megatron, and the factory that builds its wrappers around our optimizers."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import megatron.core.optimizer as stock
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer import distrib_optimizer as stock_distributed
from megatron.core.optimizer import layer_wise_optimizer as stock_layer_wise
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron_patches.fsdp2 import refuse_beside_fsdp2
from megatron_patches.groups import ParallelGroups
from megatron_patches.megatron_fsdp import own_weights, refuse_beside_megatron_fsdp, with_empty_shards
from megatron_patches.memory import hidden, hide
from megatron_patches.monitor import remember
from megatron_patches.norms import check_norms
from megatron_patches.overrides import from_conditions, suited
from megatron_patches.parameter_names import describe_model
from megatron_patches.support import (
    SupportError,
    refuse_beyond_engines,
    refuse_settings,
    refuse_wrapping,
)
from megatron_patches.wrappers import Adoption, LayerWise, wrapper_classes
from rankwise.names import BY_NAME, Named
from rankwise.options.validation import OptionError, called, check_given
from rankwise.routing.patterns import checked_later
from rankwise.states.parameter_table import idle_allowed
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["NAMES", "RankwiseConfig", "get_megatron_optimizer", "option_names", "replace_adam", "resolve"]

NAMES: Mapping[str, Named] = BY_NAME
"""Optimizer class and preset options of each ``--optimizer`` name."""

# These names are left to Megatron, however close they are to ours.
_STOCK_NAMES = ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon")
# These come from Megatron's own settings.
_MEGATRON_OPTIONS = ("lr", "weight_decay", "store_param_remainders")
_stock_factory: Callable[..., MegatronOptimizer] = stock.get_megatron_optimizer
# Fields of RankwiseConfig that Megatron's own class lacks begin so.
_OUR_FIELDS = "rankwise"
_in_place_of_adam: list[RankwiseConfig] = []
"""The configuration of :func:`replace_adam`, at most one."""


@dataclasses.dataclass
class RankwiseConfig(OptimizerConfig):
    """Megatron's ``OptimizerConfig`` with the options of one of our optimizers.

    ``lr`` and ``weight_decay`` are Megatron's own fields; its ``adam_*`` and ``muon_*`` fields are not read.

    Attributes:
        rankwise: Keywords of the optimizer's class, for example ``{"rank": 256}``.
        rankwise_layer_wise: Whether data-parallel ranks get whole parameters, as in Megatron's layer-wise optimizer;
            without the distributed optimizer, in bf16 and fp32.
        rankwise_tp_mode: ``"exact"``: tensor parallelism changes nothing but the order of sums. ``"block"``: every
            tensor-parallel shard is a matrix of its own, which needs no exchange between tensor-parallel ranks, but
            the trajectory and the checkpointed states depend on their number.
        rankwise_override_checkpoint: Whether the options in ``rankwise`` count on resuming if a checkpoint's differ, as
            with ``--override-opt_param-scheduler``. By default the checkpoint's count, as they do for the
            hyper-parameters of Megatron's own optimizers, and one line says so.
        rankwise_log_norms: ``"layer"`` or ``"weight"``: ``read_health()`` and Megatron's writers also get norms of
            updates and weights, for each transformer layer or each weight.
        rankwise_log_interval: Steps from one measured step to the next; in Megatron's own loop ``--log-interval``.
    """

    rankwise: dict[str, Any] = dataclasses.field(default_factory=dict)
    rankwise_layer_wise: bool = False
    rankwise_tp_mode: str = "exact"
    rankwise_override_checkpoint: bool = False
    rankwise_log_norms: str | None = None
    rankwise_log_interval: int = 1

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            OptionError: The optimizer or a key is unknown, or a value is outside its range.
            SupportError: A setting cannot work; the message names the nearest one that does.
        """
        for key in ("rankwise_layer_wise", "rankwise_override_checkpoint"):
            if not isinstance(getattr(self, key), bool):
                raise OptionError(
                    f"RankwiseConfig: {key}={getattr(self, key)!r} is invalid: it must be True or False; the default "
                    "is False"
                )
        check_norms(self.rankwise_log_norms, self.rankwise_log_interval)
        if self.optimizer in NAMES:
            tp_mode(self, resolve(self.optimizer, self.rankwise))
            refuse_settings(self, self.optimizer)
        else:
            _refuse_unknown(self.optimizer, self.rankwise)
        with hidden(self) if self.optimizer in NAMES else nullcontext():
            super().__post_init__()

    def provide(
        self,
        model_chunks: Sequence[nn.Module],
        config_overrides: Any = None,
        use_gloo_process_groups: bool = True,
        pg_collection: Any = None,
    ) -> MegatronOptimizer:
        """Build the optimizer; Megatron-Bridge calls this method of configs that have it."""
        return get_megatron_optimizer(
            self,
            list(model_chunks),
            config_overrides,
            use_gloo_process_groups=use_gloo_process_groups,
            pg_collection=pg_collection,
        )


def _refuse_unknown(name: Any, options: Mapping[str, Any]) -> None:
    """Refuse an unknown name that resembles one of ours; Megatron's own names are left to it."""
    meant = [] if name in _STOCK_NAMES else [str(name).lower().replace("_", "-")]
    near = [name_near for word in meant for name_near in difflib.get_close_matches(word, NAMES, n=1, cutoff=0.75)]
    if near or options:
        fix = f"did you mean '{near[0]}'?" if near else "leave rankwise out with Megatron's own optimizers"
        raise OptionError(
            f"RankwiseConfig: optimizer={name!r} is invalid with rankwise={options!r}: it must be one of "
            f"{', '.join(NAMES)}; {fix}"
        )


def option_names(name: str) -> list[str]:
    """Return the options of an optimizer that a user may set beside Megatron's own.

    Args:
        name: A key of :data:`NAMES`.
    """
    named = NAMES[name]
    return [
        key for key in named.optimizer.options_type.names() if key not in named.preset and key not in _MEGATRON_OPTIONS
    ]


def resolve(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check options and turn them into constructor keywords.

    Args:
        name: A key of :data:`NAMES`.
        options: Options in the form of ``rankwise`` of :class:`RankwiseConfig`.

    Raises:
        OptionError: A key is unknown, or a value is outside its range.
        SupportError: Megatron's schedules do not serve a mode.
    """
    if not isinstance(options, Mapping):
        raise OptionError(
            f"optimizer '{name}': rankwise={options!r} is invalid: it must be a dictionary of options; write e.g. "
            "rankwise={'eps': 1e-8}"
        )
    owner, cls = f"optimizer '{name}'", NAMES[name].optimizer
    if options.get("store_param_remainders"):
        raise OptionError(
            f"{owner}: store_param_remainders=True is invalid under Megatron, which keeps main weights of its own: "
            "leave it out, and set --use-precision-aware-optimizer, which keeps them in this form"
        )
    resolved = NAMES[name].complete(options, owner, cls.__name__.lower(), option_names(name))
    with called(name):
        checked = cls.options_type(**resolved)
    check_given(options, checked.unread(), owner)
    refuse_beyond_engines(name, checked)
    return resolved


def tp_mode(config: OptimizerConfig, options: Mapping[str, Any]) -> str:
    """Return how matrices that tensor parallelism cuts are treated.

    Args:
        config: Megatron's config.
        options: The optimizer's options, whose own ``tp_mode`` counts first.

    Raises:
        SupportError: The mode is unknown.
    """
    mode = options.get("tp_mode", getattr(config, "rankwise_tp_mode", "exact"))
    if mode not in ("exact", "block"):
        raise SupportError(
            f"rankwise_tp_mode={mode!r} is invalid: it must be 'exact' or 'block'; the default is 'exact'"
        )
    return str(mode)


@functools.wraps(_stock_factory)
def get_megatron_optimizer(
    config: OptimizerConfig, model_chunks: list[nn.Module], *args: Any, **kwargs: Any
) -> MegatronOptimizer:
    """Build an optimizer as Megatron's factory does, by our names, too; other names go to the stock function.

    Args:
        config: Config whose ``optimizer`` is one of :data:`NAMES`; a :class:`RankwiseConfig` has options.
        model_chunks: This rank's model chunks, wrapped by Megatron's ``DistributedDataParallel``.
        args: Further arguments of the stock function.
        kwargs: Further arguments of the stock function, by name.

    Returns:
        Megatron's own wrappers (distributed optimizer, half precision, fp32) around our optimizer.

    Raises:
        OptionError: An option is bad, or the model has nothing to update.
        SupportError: A setting cannot work; the message names the nearest one that does.
    """
    config = _chosen(config)
    name = config.optimizer
    if name not in NAMES:
        return _stock_factory(config, model_chunks, *args, **kwargs)
    from_conditions(config, kwargs)
    options = resolve(name, getattr(config, "rankwise", {}))
    refuse_settings(config, name)
    refuse_wrapping(model_chunks, config, name)
    refuse_beside_fsdp2(model_chunks, config, name)
    refuse_beside_megatron_fsdp(model_chunks, config, name)
    given = inspect.signature(_stock_factory).bind(config, model_chunks, *args, **kwargs).arguments
    groups = ParallelGroups(given.get("pg_collection"), tp_mode(config, options) == "block")
    with own_weights(model_chunks) as as_optimized:
        described = as_optimized(describe_model(model_chunks, groups))
    adoption = Adoption(described, groups, model_chunks)
    cls = NAMES[name].optimizer
    spec = cls.spec_class(cls.__name__, cls.options_type(**options))
    given["config_overrides"] = suited(given.get("config_overrides"), config, spec, adoption.parameters)
    layer_wise = getattr(config, "rankwise_layer_wise", False)
    # Megatron knows our optimizers as its most general kind; what it then builds is ours.
    stock_config = copy.copy(config)
    stock_config.optimizer = "adam"
    stock_config.rankwise_memory = hide(stock_config)
    if layer_wise:
        stock_config.bf16 = False  # The fp32 copies are made of a rank's own parameters alone, once they are dealt out.
    with idle_allowed(), checked_later(), _our_wrappers(functools.partial(_build, name, options), adoption):
        built = _stock_factory(**{**given, "config": stock_config})
        if layer_wise:
            collection = given.get("pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
            stock_config.bf16 = config.bf16
            built = LayerWise(adoption, built.chained_optimizers, stock_config, collection)
    adoption.finish(built)
    remember(built, name, groups.pipeline)
    return built


def replace_adam(name: str | None, options: Mapping[str, Any] | None = None, **settings: Any) -> None:
    """Build one of our optimizers wherever Megatron's factory is asked for ``"adam"``, in this process.

    For frameworks that know a closed list of names or construct Megatron's ``OptimizerConfig`` themselves: they go on
    believing in Adam, and check their settings as for it. Does not call :func:`megatron_patches.apply`.

    Args:
        name: A key of :data:`NAMES`; None builds Adam again.
        options: Options in the form of ``rankwise`` of :class:`RankwiseConfig`.
        settings: Further fields of that class, which begin with ``rankwise_``.

    Raises:
        OptionError: The optimizer or a key is unknown, or a value is outside its range.
        SupportError: A setting cannot work; the message names the nearest one that does.
    """
    if name is None:
        _in_place_of_adam.clear()
        return
    if name not in NAMES:
        raise OptionError(f"replace_adam: name={name!r} is invalid: it must be one of {', '.join(NAMES)}, or None")
    settable = [f.name for f in dataclasses.fields(RankwiseConfig) if f.name.startswith(_OUR_FIELDS + "_")]
    for key in settings:
        if key not in settable:
            raise OptionError(f"replace_adam: {key} is no setting: those are {', '.join(settable)}")
    _in_place_of_adam[:] = [RankwiseConfig(optimizer=name, rankwise=dict(options or {}), **settings)]


def _chosen(config: OptimizerConfig) -> OptimizerConfig:
    if config.optimizer != "adam" or not _in_place_of_adam:
        return config
    template, config = _in_place_of_adam[0], copy.copy(config)
    for field in dataclasses.fields(template):
        if field.name == "optimizer" or field.name.startswith(_OUR_FIELDS):
            setattr(config, field.name, copy.copy(getattr(template, field.name)))
    return config


def _build(name: str, options: Mapping[str, Any], params: Any, lr: float, weight_decay: float, **_: Any) -> Any:
    """Construct our optimizer where Megatron calls Adam's constructor."""
    cls = NAMES[name].optimizer
    further = [key for key in cls.options_type.decay_options if key not in (*_MEGATRON_OPTIONS, *options)]
    for group in params:
        if group.get("wd_mult") == 0:
            group.update(dict.fromkeys(further, 0.0))  # Megatron wants no decay of these parameters
    build: Callable[..., ShardedOptimizer] = cls
    with called(name):
        return build(params, lr=lr, weight_decay=weight_decay, **options)


@contextmanager
def _our_wrappers(build: Callable[..., Any], adoption: Adoption) -> Iterator[None]:
    """Let the stock factory construct our optimizer and our wrappers in place of Adam and its own."""
    replacements: list[tuple[Any, str, Any]] = [
        (stock, "Adam", build),
        (stock, "USING_PYTORCH_OPTIMIZER", False),
        (stock_distributed, "Adam", (stock_distributed.Adam, ShardedOptimizer)),
    ]
    replacements += with_empty_shards(stock, adoption.chunks)
    for name, wrapper in wrapper_classes(adoption).items():
        owners = (
            [stock, stock_layer_wise] if name in ("Float16OptimizerWithFloat16Params", "FP32Optimizer") else [stock]
        )
        replacements += [(owner, name, wrapper) for owner in owners]
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)
