"""Which options a checkpoint's states are compared by: every option of every class is on one of these lists.

A state of the same name and shape may be another one under another option. Then the option is part of what a
dictionary says of its writer, or travels in its param groups; every other one is harmless, and the reason stands there.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.names import CLASSES
from rankwise.step.optimizer import ShardedOptimizer

RATE = "a rate or bound of the steps to come"
STORED = "states are brought to the type or the place that is asked for"
ROUTE = "it decides which parameters have states at all, which are compared by name and shape"
MESSAGE = "of what travels or is computed, not of what is kept"
WEIGHTS = "what weights lack is kept, or named as lost"

HARMLESS: dict[str, str] = {
    **dict.fromkeys(("lr", "lr_scale", "lr_1d", "weight_decay_1d", "weight_decay", "weight_decay_method"), RATE),
    **dict.fromkeys(("betas", "betas_1d", "eps", "momentum", "nesterov", "gamma", "rho", "graft_eps", "scale"), RATE),
    **dict.fromkeys(("ns_steps", "ns_coefficients", "transition_steps", "skip_nonfinite", "rescale"), RATE),
    **dict.fromkeys(("factor_decay", "update_interval", "stabilizer", "stabilizer_norm"), RATE),
    **dict.fromkeys(("output_gain", "sketch_gain"), "the factors follow what is gained by their decay"),
    **dict.fromkeys(("state_dtype", "error_dtype", "reference_dtype", "factor_dtype", "capturable"), STORED),
    **dict.fromkeys(("state_rounding", "comm_dtype", "ns_dtype", "product_dtype", "offload_compute"), MESSAGE),
    **dict.fromkeys(("exclude", "optimize_1d", "max_factor_dim", "tp_mode"), ROUTE),
    **dict.fromkeys(("blocks", "split_heads"), "states of other blocks start afresh, which is said"),
    **dict.fromkeys(("hybrid", "hybrid_beta", "hybrid_patience", "hybrid_min_steps", "hybrid_ema"), RATE),
    "store_param_remainders": WEIGHTS,
    "clip": "it travels in param groups; whether there is one decides the names of states, which are compared",
    "band": "every distance has a state of its own; those that are needed must be there",
    "graft": "its own states must be there, and the others mean the same under all",
}

COMPARED: dict[type[ShardedOptimizer], dict[str, Any]] = {
    MARS: {"variant": "lion", "exact": True},
    SONew: {"chain": "tensor"},
    LDAdam: {},
    MKOR: {"backend": "lamb", "rule": "ema"},
}
"""With another value than the default."""
TRAVELS: dict[type[ShardedOptimizer], dict[str, Any]] = {LDAdam: {"rank": 3, "error_feedback": False}}
"""A dictionary brings them along, in its param groups."""


def _model() -> nn.Module:
    return nn.Linear(24, 16, bias=False)


def _build(kind: type[ShardedOptimizer], **options: Any) -> ShardedOptimizer:
    own = {"rank": 4} if issubclass(kind, LDAdam) else {}
    model = _model()
    optimizer = kind(model.named_parameters(), **{**own, **options})
    if optimizer.needs_capture:
        optimizer.capture(model)
    return optimizer


@pytest.mark.parametrize("kind", CLASSES)
def test_every_option_is_compared_or_harmless(kind: type[ShardedOptimizer]) -> None:
    known = {*COMPARED[kind], *TRAVELS.get(kind, {}), *HARMLESS}
    assert set(kind.options_type.names()) <= known
    assert not {*COMPARED[kind], *TRAVELS.get(kind, {})} & set(HARMLESS)


@pytest.mark.parametrize(("kind", "option"), [(kind, option) for kind, found in COMPARED.items() for option in found])
def test_what_is_compared_is_refused_both_ways(kind: type[ShardedOptimizer], option: str) -> None:
    plain, other = _build(kind), _build(kind, **{option: COMPARED[kind][option]})
    for saved, built in ((plain, other), (other, plain)):
        with pytest.raises(ValueError, match="names the optimizer that wrote it"):
            built.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("rule", ["ema", "paper_literal", "sketch"])
def test_factors_of_another_rule_are_refused(rule: str) -> None:
    """Without biases they have the same shapes."""
    with pytest.raises(ValueError, match=f"rankwise='MKOR-adamw-rule={rule}' is invalid"):
        _build(MKOR).load_state_dict(_build(MKOR, rule=rule).state_dict())


@pytest.mark.parametrize("kind", CLASSES)
def test_a_subclass_and_its_base_read_each_other(kind: type[ShardedOptimizer]) -> None:
    derived = type("Mine", (kind,), {})
    base, own = _build(kind), _build(derived)
    own.load_state_dict(base.state_dict())
    base.load_state_dict(own.state_dict())


@pytest.mark.parametrize("kind", CLASSES)
def test_other_classes_are_refused(kind: type[ShardedOptimizer]) -> None:
    for other in CLASSES:
        if other is not kind:
            with pytest.raises(ValueError, match="names the optimizer that wrote it"):
                _build(type("Mine", (other,), {})).load_state_dict(_build(kind).state_dict())
