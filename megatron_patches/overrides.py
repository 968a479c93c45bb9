"""Frameworks hand overrides of param groups to Megatron's factory, which are translated here for our optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron.core.optimizer import OptimizerConfig, ParamGroupOverride, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from torch.nn import Parameter

from megatron_patches.parameters import ModelParameter
from rankwise.routing.roles import route
from rankwise.states.optimizer_spec import OptimizerSpec

__all__ = ["from_conditions", "suited"]

Overrides = Mapping[ParamKey, ParamGroupOverride]
# Names of the predicates that ``get_mup_config_overrides`` makes begin so.
_MUP = "mup_"
# Arguments of the factory before megatron-core 0.16, which NeMo still passes.
_CONDITIONS = ("no_weight_decay_cond", "scale_lr_cond", "lr_mult")


def from_conditions(config: OptimizerConfig, given: dict[str, Any]) -> None:
    """Turn the conditions that Megatron's factory took before 0.16 into ``config_overrides``.

    Args:
        config: Megatron's config.
        given: Keyword arguments of the factory, which change in place.
    """
    conditions = [given.pop(name, None) for name in _CONDITIONS]
    no_decay, scaled, lr_mult = conditions
    if conditions == [None, None, None] or (no_decay is None and scaled is None):
        return
    overrides = dict(given.get("config_overrides") or {})
    if no_decay is None:
        overrides |= get_standard_config_overrides(config)
    else:
        key = ParamKey(with_name_predicate=ParamWithNamePredicate("no_weight_decay_cond", _by_name_first(no_decay)))
        overrides[key] = ParamGroupOverride(wd_mult=0.0)
    if scaled is not None:
        factor = 1.0 if lr_mult is None else float(lr_mult)
        rates = {"max_lr": config.lr, "min_lr": config.min_lr}
        key = ParamKey(with_name_predicate=ParamWithNamePredicate("scale_lr_cond", _by_name_first(scaled)))
        scaled_rates = {name: rate * factor for name, rate in rates.items() if rate is not None}
        overrides[key] = ParamGroupOverride(**scaled_rates)  # type: ignore[typeddict-item]
    given["config_overrides"] = overrides


def _by_name_first(condition: Callable[[str, Parameter], bool]) -> Callable[[Parameter, str], bool]:
    return lambda parameter, name: bool(condition(name, parameter))


def suited(
    overrides: Overrides | None,
    config: OptimizerConfig,
    spec: OptimizerSpec,
    parameters: Mapping[Parameter, ModelParameter],
) -> Overrides | None:
    """Translate MuP's overrides (``--use-mup``), which are made for Adam, for one of our optimizers.

    Their eps is a share of ``adam_eps``, which ours do not read: it becomes that share of their own. Their rates of
    matrices are divided by the width, as suits Adam's updates; the updates of orthogonalised matrices have a length of
    their own (option ``scale``), and keep their rate, as those of Megatron's Muon do.

    Args:
        overrides: Overrides that were given to the factory.
        config: Megatron's config.
        spec: Spec of the optimizer.
        parameters: The model's parameters.
    """
    if not overrides:
        return overrides
    eps = getattr(spec.options, "eps", None)
    suited_overrides: dict[ParamKey, ParamGroupOverride] = {}
    for key, override in overrides.items():
        predicate = key.with_name_predicate
        if isinstance(predicate, ParamWithNamePredicate) and predicate.name.startswith(_MUP):
            if "eps" in override:
                share = override["eps"] / config.adam_eps
                override = {**override, "eps": eps * share}  # type: ignore[assignment, operator]
            key = replace(key, with_name_predicate=_without_orthogonal(predicate, spec, parameters))
        suited_overrides[key] = override
    return suited_overrides


def _without_orthogonal(
    predicate: ParamWithNamePredicate, spec: OptimizerSpec, parameters: Mapping[Parameter, ModelParameter]
) -> ParamWithNamePredicate:
    is_orthogonal = getattr(spec, "is_orthogonal", None)
    if is_orthogonal is None:
        return predicate

    def applies(parameter: Parameter, name: str) -> bool:
        facts = parameters.get(parameter)
        orthogonal = facts is not None and is_orthogonal(facts.info) and route(facts.info, spec.policy).rule == "matrix"
        return not orthogonal and bool(predicate(parameter, name))

    return ParamWithNamePredicate(predicate.name, applies)
