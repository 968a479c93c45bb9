"""Importing this module makes rankwise's optimizers valid ``optimizer_name`` values of torchtitan.

A configuration names them in ``ParamGroupConfig``; torchtitan's trainer, containers and checkpoints stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.trainer import Trainer

from rankwise.layout.agreement import gather_together
from rankwise.layout.dtensors import is_sharded
from rankwise.names import BY_SPELLING, SPELLINGS
from rankwise.options.hints import nearest, shown
from rankwise.options.validation import OptionError, called, check_given
from rankwise.routing.patterns import checked_later, refuse_unmatched
from rankwise.routing.roles import attach_info, describe
from rankwise.states.parameter_table import idle_allowed
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["OPTIMIZER_NAMES", "build", "is_registered", "register", "unregister"]

OPTIMIZER_NAMES: Mapping[str, str] = SPELLINGS
"""An optimizer's own spelling, by each spelling that is accepted."""

_THEIRS = ("Adam", "AdamW", "DistMuon")
_IMPLEMENTATION = ("fused", "foreach")
_KEPT = ("params", "param_names", "fallback")
# If the module is loaded again, it finds what it has replaced before.
_originals: dict[str, Any] = globals().get("_originals", {})
Facts = dict[str, tuple[bool, list[str]]]
"""Whether each optimizer has matrices on a rank, and the names of its parameters there."""


# --- one optimizer ----------------------------------------------------------------------------------------------------


def build(name: str, groups: Sequence[Mapping[str, Any]], **options: Any) -> ShardedOptimizer:
    """Construct the optimizer of some param groups.

    Args:
        name: A key of :data:`OPTIMIZER_NAMES`.
        groups: Param groups of torchtitan: parameters, their names, and each group's ``optimizer_kwargs``.
        options: Options of all groups, from ``optimizer_factory_kwargs_by_name``.

    Raises:
        OptionError: A key is unknown, a value is outside its range, or groups differ in options that they must share.
    """
    named = BY_SPELLING[OPTIMIZER_NAMES[name]]
    # torchtitan writes into every group which implementation its own optimizers should use.
    given = [{key: v for key, v in group.items() if key not in (*_KEPT, *_IMPLEMENTATION)} for group in groups]
    resolved = [_resolved(OPTIMIZER_NAMES[name], {**options, **keywords}) for keywords in given]
    varying = named.optimizer.options_type.per_group()
    shared = [{key: v for key, v in keywords.items() if key not in varying} for keywords in resolved]
    for other in shared[1:]:
        _refuse_difference(OPTIMIZER_NAMES[name], shared[0], other)
    kept = [{key: group[key] for key in _KEPT if key in group} for group in groups]
    keywords = [{key: v for key, v in complete.items() if key in varying} for complete in resolved]
    with called(OPTIMIZER_NAMES[name]):
        return named.optimizer([{**group, **values} for group, values in zip(kept, keywords, strict=True)], **shared[0])


def _resolved(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor's keywords for one group."""
    named, owner = BY_SPELLING[name], f"optimizer_name='{name}'"
    resolved = named.complete(given, owner, instead=named.optimizer.__name__)
    with called(name):
        checked = named.optimizer.options_type(**resolved)
    for key, reason in checked.beyond_engines().items():
        raise OptionError(
            f"{owner}: {key}={shown(resolved[key])} is invalid under torchtitan: its trainer runs the backward passes "
            f"of one batch per step, {reason}; leave it out"
        )
    check_given(given, checked.unread(), owner)
    return resolved


def _refuse_difference(name: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for key in (*first, *other):
        if key not in first or key not in other or first[key] != other[key]:
            values = " and ".join(shown(options[key]) if key in options else "nothing" for options in (first, other))
            raise OptionError(
                f"optimizer_name='{name}': {key} is invalid, because it is {values} in two of its param groups: "
                f"groups of one name are one optimizer, which has one {key}; write the same into all of them, or once "
                "into optimizer_factory_kwargs_by_name"
            )


# --- registration -----------------------------------------------------------------------------------------------------


def is_registered() -> bool:
    """Whether torchtitan knows the names."""
    return bool(_originals)


def register() -> None:
    """Add the names to torchtitan's; a second call changes nothing.

    It wraps three methods: one that looks names up, one that builds the optimizers of a model, which MKOR captures, and
    one that returns the loss, which MKOR-H watches.
    """
    if not _originals:
        for name, (owner, ours) in _REPLACED.items():
            _originals[name] = vars(owner)[name]
            setattr(owner, name, ours)


def unregister() -> None:
    """Undo :func:`register`."""
    for name in list(_originals):
        setattr(_REPLACED[name][0], name, _originals.pop(name))


def _resolve_optimizer_factory(name: str) -> Callable[..., Any]:
    """Do what torchtitan's method does, with our names, and a message that names the nearest one."""
    if name in OPTIMIZER_NAMES:
        return functools.partial(build, name)
    try:
        return _originals["_resolve_optimizer_factory"](name)  # type: ignore[no-any-return]
    except NotImplementedError:
        near = nearest(name, [*BY_SPELLING, *_THEIRS])
        hint = f"did you mean '{near}'?" if near else f"rankwise adds {', '.join(BY_SPELLING)}."
        raise OptionError(
            f"optimizer_name={shown(name)} is invalid: neither torchtitan nor rankwise has it; {hint}"
        ) from None


@functools.wraps(OptimizersContainer.__init__)
def _init(container: OptimizersContainer, config: Any, *, model_parts: list[nn.Module]) -> None:
    """Build the optimizers as torchtitan does, and give ours what they must know of the model; a collective."""
    for group in config.param_groups:
        _resolve_optimizer_factory(group.optimizer_name)
    _refuse_unused(config)
    if not any(group.optimizer_name in OPTIMIZER_NAMES for group in config.param_groups):
        _originals["__init__"](container, config, model_parts=model_parts)
        return
    for part in model_parts:
        _annotate(part)
    # A single stage may have no matrices, and no parameter that a pattern matches, but all stages together must.
    with idle_allowed(), checked_later():
        group = dist.group.WORLD if dist.is_initialized() else None
        everywhere = gather_together(lambda: _built(container, config, model_parts), group)
    for optimizer in _ours(container):
        facts = [facts[optimizer.identity] for facts in everywhere if optimizer.identity in facts]
        if not any(busy for busy, _ in facts):
            optimizer.table.refuse_if_idle()
        for key, patterns in optimizer.options.patterns.items():
            refuse_unmatched(optimizer.spec.name, patterns, [name for _, names in facts for name in names], key)


def _join_replicas(container: OptimizersContainer) -> None:
    """Let torchft's container give states as they are when it is asked: it would cache those of the start."""
    if any(kind.__name__ == "TorchFTOptimizersContainer" for kind in type(container).__mro__):
        for optimizer in _ours(container):
            optimizer.refuse_replicas()
        container.state_dict = functools.partial(OptimizersContainer.state_dict, container)  # type: ignore[method-assign]
        container.init_cache_state_dict = lambda: None  # type: ignore[method-assign]


def _refuse_unused(config: Any) -> None:
    """Refuse keywords that torchtitan would ignore, because it looks them up by the spelling of the groups."""
    names = list(dict.fromkeys(group.optimizer_name for group in config.param_groups))
    for name in config.optimizer_factory_kwargs_by_name:
        if name not in names:
            raise OptionError(
                f"optimizer_factory_kwargs_by_name: {shown(name)} is invalid: no group has this optimizer_name; it "
                f"must be written as in the groups, {', '.join(map(shown, names))}"
            )


def _built(container: OptimizersContainer, config: Any, model_parts: list[nn.Module]) -> Facts:
    facts: Facts = {}
    _originals["__init__"](container, config, model_parts=model_parts)
    _join_replicas(container)
    for optimizer in _ours(container):
        if optimizer.needs_capture:
            mine = next(iter(optimizer.table.parameters.values()))
            optimizer.capture(next(part for part in model_parts if any(p is mine for p in part.parameters())))  # type: ignore[attr-defined]
        busy, names = facts.get(optimizer.identity, (False, []))
        facts[optimizer.identity] = (busy or not optimizer.table.is_idle, [*names, *optimizer.table.catalog])
    return facts


def _annotate(part: nn.Module) -> None:
    """Annotate parameters as :func:`rankwise.routing.roles.annotate` does, with torchtitan's names without wrappers."""
    for parameter, info in describe(part).items():
        bias = None if info.bias is None else canonical_fqn(info.bias)
        attach_info(parameter, replace(info, name=canonical_fqn(info.name), bias=bias))


def _ours(container: OptimizersContainer) -> list[ShardedOptimizer]:
    return [optimizer for optimizer in container.optimizers if isinstance(optimizer, ShardedOptimizer)]


@functools.wraps(Trainer.forward_backward_step)
def _forward_backward_step(trainer: Trainer, **batch: Any) -> Tensor:
    """Do what torchtitan's method does, and report the loss to MKOR-H."""
    optimizers = _ours(trainer.optimizers)
    if any(optimizer.needs_capture for optimizer in optimizers) and not trainer.config.training.disable_cuda_graphs:
        raise OptionError(
            "training.disable_cuda_graphs=False is invalid with MKOR: it must be True, because a replayed graph runs "
            "no hooks, and MKOR would learn nothing of the layers' inputs; set it, or choose another optimizer"
        )
    loss: Tensor = _originals["forward_backward_step"](trainer, **batch)
    listening = [optimizer for optimizer in optimizers if optimizer.needs_loss]
    if listening:
        heard = _mean_loss(trainer, loss.detach())
        for optimizer in listening:
            optimizer.record_loss(heard, is_propagated=True)
    return loss


def _mean_loss(trainer: Trainer, loss: Tensor) -> Tensor:
    """Scale the loss so that its mean over micro-batches and ranks is that of all tokens; a collective of stages."""
    if is_sharded(loss):
        loss = loss.to_local()  # type: ignore[attr-defined]
    dims = trainer.parallel_dims
    if dims.pp_enabled:
        # Only the last stage has a loss; other stages have a placeholder.
        loss = loss.reshape(()).clone() if trainer.pp_has_last_stage else loss.new_zeros(())
        dist.all_reduce(loss, group=dims.get_mesh("pp").get_group())
    mesh = dims.get_optional_mesh("loss")
    # The loss is a sum over the tokens of this rank and micro-batch, divided by the number of all tokens.
    return loss * (trainer.gradient_accumulation_steps * (1 if mesh is None else mesh.size()))


_REPLACED: Mapping[str, tuple[type, Any]] = {
    "_resolve_optimizer_factory": (OptimizersContainer, staticmethod(_resolve_optimizer_factory)),
    "__init__": (OptimizersContainer, _init),
    "forward_backward_step": (Trainer, _forward_backward_step),
}
register()
