"""Every bad value is refused before the first step, with its key, the value, the rule and a fix."""

from __future__ import annotations

import inspect
import math
import os
import re
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.options.validation import OptionError, check_keys

CLASSES = [MARS, SONew, LDAdam, MKOR]
NOT_A_NUMBER = [math.nan, math.inf, "0.1", None, True, torch.ones(2)]
NEGATIVE = [-1e-3, -math.inf]
PAIRS = [(0.9,), (0.9, 1.0), (-0.1, 0.9), 0.9, ("a", 0.9), None]
FLAGS = [1, "true", None]
PATTERNS = ["*gate*", (1,), 3, None]
LAYOUTS = {
    "it must be a dictionary from name patterns to layouts": ["qkv", ["*qkv*"], 3, {1: "qkv"}],
    r"the layout of '\*' must be one of qkv, heads, groups, none, or sizes": [{"*": "kqv"}, {"*": None}, {"*": 3}],
    r"the sizes of '\*' must be": [
        {"*": [4]},
        {"*": [4, 0]},
        {"*": {"q": 1.0}},
        {"*": {"q": True}},
        {"*": {"groups": 2}},
    ],
    r"the part 'a\[b' of '\*' must be named by a word": [{"*": {"a[b": 2}}],
    r"'groups' of '\*' must be an integer >= 1": [{"*": {"q": 2, "groups": 0}}, {"*": {"q": 2, "groups": "2"}}],
    r"'heads' of '\*' must be": [{"*": {"q": 2, "k": 2, "heads": [1]}}, {"*": {"q": 2, "heads": "2"}}],
}
STATES: dict[type, str] = {MARS: "reference", SONew: "covariance", LDAdam: "error", MKOR: "momentum_buffer"}
DTYPES = ["float", "int8", torch.int64, 32]
HUGE = [10**400, 10**5000]  # no float; not even text

# (class, key, values, rule, fix)
CHECKS: list[tuple[type, str, list[Any], str, str]] = [
    (MARS, "scale", ["RMS", "adamw", None], "it must be one of 'published', 'rms'", ""),
    (MARS, "variant", ["adam", "Muon", None], "it must be one of 'adamw', 'lion', 'shampoo', 'muon'", ""),
    (MARS, "betas", PAIRS, r"it must be two numbers in \[0, 1\)", r"the default is \[0.95, 0.99\]"),
    (MARS, "betas_1d", PAIRS, r"it must be two numbers in \[0, 1\)", r"the default is \[0.9, 0.95\]"),
    (MARS, "gamma", NEGATIVE[:1], "it must be >= 0", "the default is 0.025"),
    (MARS, "gamma", NOT_A_NUMBER, "", ""),
    (MARS, "exact", FLAGS, "it must be true or false", "the default is False"),
    (MARS, "clip", [0.0, -1.0], "it must be > 0", "the default is 1.0"),
    (MARS, "optimize_1d", FLAGS, "it must be true or false", "the default is False"),
    (MARS, "lr_1d", [-1.0], "it must be >= 0", "the default is None"),
    (MARS, "weight_decay_1d", [-0.1], "it must be >= 0", "the default is 0.1"),
    (MARS, "ns_steps", [0, 2.5, True], "it must be an integer >= 1", "the default is 5"),
    (
        MARS,
        "ns_coefficients",
        ["quintic", "Cans", None, 5],
        "it must be one of 'published', 'polar_express', 'cans'",
        "",
    ),
    (MARS, "ns_dtype", [*DTYPES, None], "it must name a floating-point type.*, or be 'auto'", "write 'float32'"),
    (MARS, "comm_dtype", ["float", 32], "it must name a floating-point type.*, or be 'int8'", "write 'float32'"),
    *(
        (
            kind,
            "offload_compute",
            ["gpu", 3, None],
            "it must be one of 'auto', 'host', 'device'",
            "the default is 'auto'",
        )
        for kind in (MARS, LDAdam, MKOR)
    ),
    (SONew, "band", [-1, 1.0, True], "it must be an integer >= 0", "the default is 1"),
    (SONew, "betas", PAIRS, r"it must be two numbers in \[0, 1\)", r"the default is \[0.9, 0.99\]"),
    (SONew, "graft", ["adam2", "", None], "it must be one of 'adam', 'adam_official', 'rmsprop'", ""),
    (SONew, "graft_eps", [-1e-8], "it must be >= 0", "the default is 1e-08"),
    (SONew, "gamma", [-0.1, 1.0, 2.0], r"it must lie in \[0, 1\)", "the default is 0.01"),
    (SONew, "chain", ["rows", None], "it must be one of 'row', 'tensor'", ""),
    (LDAdam, "rank", [0, -2, 4.0, "4"], "it must be an integer >= 1", "the default is 16"),
    (LDAdam, "rho", [-0.1, 1.1], r"it must lie in \[0, 1\]", "the default is 0.908"),
    (LDAdam, "betas", PAIRS, r"it must be two numbers in \[0, 1\)", r"the default is \[0.908, 0.99\]"),
    (LDAdam, "error_feedback", FLAGS, "it must be true or false", "the default is True"),
    (LDAdam, "error_dtype", ["float", 32], "it must name a floating-point type.*, or be 'int8'", "write 'float32'"),
    (LDAdam, "error_dtype", ["uint8", "int4", torch.int64], "it must name a floating-point type", "write 'int8'"),
    (MARS, "reference_dtype", [*DTYPES, "float16"], "it must name a floating-point type", "write '.*float"),
    (LDAdam, "comm_dtype", ["float", 32], "it must name a floating-point type.*, or be 'int8'", "write 'float32'"),
    (MKOR, "backend", ["adam", "SGD"], "it must be one of 'adamw', 'lamb', 'sgd'", "did you mean"),
    (MKOR, "factor_decay", [-0.1, 1.0, 0.0, 0], r"it must lie in \(0, 1\)", "the default is None"),
    (MKOR, "update_interval", [0, 1.5], "it must be an integer >= 1", "the default is None"),
    (MKOR, "rule", ["paper", "EMA"], "it must be one of 'official', 'ema', 'paper_literal', 'sketch'", ""),
    (MKOR, "sketch_gain", [0.0, -1.0], "it must be > 0", "the default is 0.04"),
    (
        MKOR,
        "stabilizer",
        [(0.0, 0.9), (2.0, 1.1), (2.0,), 2.0, ("a", 0.9), (2.0, None), (math.nan, 0.5)],
        r"it must be \[threshold > 0, retention in \[0, 1\]\] or null",
        r"the default is \[2.0, 0.9\]",
    ),
    (MKOR, "stabilizer_norm", ["rows"], "it must be one of 'row_sum', 'max_entry'", "did you mean 'row_sum'"),
    (MKOR, "rescale", ["sum", False], r"it must be one of 'joint', null \(None\)", "the default is 'joint'"),
    (MKOR, "max_factor_dim", [0, 1e4], "it must be an integer >= 1", "the default is 16384"),
    (MKOR, "factor_dtype", [*DTYPES, None, "auto"], "it must name a floating-point type", "write 'float32'"),
    (
        MKOR,
        "product_dtype",
        [*DTYPES, None],
        "it must name a floating-point type: float32, bfloat16 or float64, or be 'auto'",
        "write 'float32'",
    ),
    (MKOR, "comm_dtype", ["float", 32], "it must name a floating-point type.*, or be 'int8'", "write 'float32'"),
    (MKOR, "tp_mode", ["exakt"], "it must be one of 'exact', 'block'", "did you mean 'exact'"),
    (MKOR, "hybrid", FLAGS, "it must be true or false", "the default is False"),
    (MKOR, "hybrid_beta", [0.0, -1.0], "it must be > 0", "the default is 0.1"),
    (MKOR, "hybrid_patience", [0, 1.5], "it must be an integer >= 1", "the default is 20"),
    (MKOR, "hybrid_min_steps", [1, 2.0], "it must be an integer >= 2", "the default is 100"),
    (MKOR, "hybrid_ema", [1.0, -0.1], r"it must lie in \[0, 1\)", "the default is 0.95"),
    (MKOR, "output_gain", [0.0, -1.0], "it must be > 0", "the default is 1.0"),
    (MKOR, "betas", PAIRS, r"it must be two numbers in \[0, 1\)", r"the default is \[0.9, 0.999\]"),
    (MKOR, "momentum", [-0.1, 1.0], r"it must lie in \[0, 1\)", "the default is 0.9"),
    (MKOR, "nesterov", FLAGS, "it must be true or false", "the default is False"),
    *[
        check
        for cls in (MARS, LDAdam, MKOR)
        for check in (
            *[(cls, "blocks", values, rule, "") for rule, values in LAYOUTS.items()],
            (cls, "split_heads", FLAGS, "it must be true or false", "the default is False"),
        )
    ],
    *[(cls, "capturable", FLAGS, "it must be true or false", "the default is False") for cls in (MARS, SONew, LDAdam)],
    *[
        check
        for cls in CLASSES
        for check in (
            (cls, "lr", NEGATIVE[:1], "it must be >= 0", "the default is"),
            (cls, "lr", [torch.tensor(-1.0)], "it must be >= 0", "the default is"),
            (cls, "lr", [torch.ones(2)], "a tensor value must have one element", "pass a float or a 0-d tensor"),
            (cls, "lr", NOT_A_NUMBER[:5], "it must be a finite number", "write e.g."),
            (cls, "eps", NEGATIVE[:1], "it must be >= 0", "the default is 1e-08"),
            (cls, "eps", NOT_A_NUMBER[:5], "it must be a finite number", "write e.g. 1e-08"),
            (cls, "weight_decay", NEGATIVE[:1], "it must be >= 0", "the default is 0.0"),
            (cls, "weight_decay", NOT_A_NUMBER[:5], "it must be a finite number", "write e.g. 0.0"),
            (cls, "weight_decay_method", ["l2", "Cautious", None], "it must be one of 'decoupled', 'independent'", ""),
            (
                cls,
                "lr_scale",
                ["*embed*", ["*embed*"], {1: 0.1}],
                "it must be a dictionary from name patterns",
                "write e.g.",
            ),
            *[
                (cls, "lr_scale", [{"*": wrong}], "the multiplier of .* must be a number > 0", "")
                for wrong in (0, -1.0, "1")
            ],
            (cls, "exclude", PATTERNS, "it must be a list of name patterns", r'write e.g. \["\*gate\*"\]'),
            (
                cls,
                "state_dtype",
                ["float16", "fp8", 8, ["int8"]],
                "it must be 'float32', 'bfloat16' or 'int8'",
                "write '",
            ),
            (cls, "state_dtype", [{"exp_av": "int8"}], "'exp_av' must be a state", "did you mean 'exp_avg"),
            (cls, "state_dtype", [{"error_feedback": "int8"}, {1: "int8"}], ".* must be a state", ""),
            (cls, "state_dtype", [{STATES[cls]: "int4"}], "the type of '.*' must be 'float32'", "write 'int8'"),
            (cls, "state_rounding", ["near", None], "it must be one of 'auto', 'nearest'", ""),
            (cls, "skip_nonfinite", FLAGS, "it must be true or false", "the default is False"),
            (cls, "store_param_remainders", FLAGS, "it must be true or false", "the default is False"),
            (cls, "transition_steps", [-1, 1.0, True, None], "it must be an integer >= 0", "the default is 20"),
        )
    ],
]
_NUMBERS = {
    MARS: ("lr", "betas", "eps", "weight_decay", "gamma", "clip", "lr_1d", "betas_1d", "weight_decay_1d", "ns_steps"),
    SONew: ("lr", "band", "betas", "eps", "weight_decay", "graft_eps", "gamma"),
    LDAdam: ("lr", "rank", "rho", "betas", "eps", "weight_decay"),
    MKOR: ("lr", "factor_decay", "update_interval", "max_factor_dim", "output_gain", "stabilizer", "momentum"),
}
TOO_LARGE = [
    (MARS, "ns_steps", 101, "it must be <= 100, a handful", "the default is 5"),
    (MARS, "gamma", 1e7, r"it must be <= 1e\+06", "the default is 0.025"),
    (SONew, "band", 33, "it must be <= 32, as every neighbour costs", "the default is 1"),
    (LDAdam, "rank", 10**10, "it must be <= 1000000000, lower the rank", "the default is 16"),
    (MKOR, "update_interval", 2 * 10**9, "it must be <= 1000000000", "the default is None"),
    *[(cls, key, 1e30, r"it must be <= 1e\+06", "the default") for cls in CLASSES for key in ("lr", "weight_decay")],
]
BAD = [
    pytest.param(cls, key, value, rule, fix, id=f"{cls.__name__}-{key}-{value}")
    for cls, key, values, rule, fix in CHECKS
    for value in values
]


def parameters() -> list[tuple[str, nn.Parameter]]:
    return [("body.weight", nn.Parameter(torch.ones(80, 80))), ("body.bias", nn.Parameter(torch.ones(80)))]


@pytest.mark.parametrize(("cls", "key", "value", "rule", "fix"), BAD)
def test_bad_values(cls: type, key: str, value: Any, rule: str, fix: str) -> None:
    with pytest.raises(OptionError, match=rf"(?s)^{cls.__name__}: {key}=.* is invalid: {rule}.*; .*{fix}") as caught:
        cls(parameters(), **{key: value})
    assert repr(value) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("cls", "key", "value", "rule", "fix"),
    [check for check in BAD if check.values[1] in check.values[0].options_type.per_group()],  # type: ignore[attr-defined]
)
def test_bad_values_of_a_group(cls: type, key: str, value: Any, rule: str, fix: str) -> None:
    first, second = parameters()
    with pytest.raises(OptionError, match=rf"(?s)^{cls.__name__}: {key}=.* is invalid: {rule}.*; .*{fix}"):
        cls([{"params": [first]}, {"params": [second], key: value}])
    optimizer = cls([first])
    with pytest.raises(OptionError, match=f"{key}="):
        optimizer.add_param_group({"params": [second], key: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("cls", CLASSES)
def test_every_option_is_checked_here(cls: type) -> None:
    known = {field.name for field in fields(cls.options_type)}  # type: ignore[attr-defined]
    assert known == {key for owner, key, *_ in CHECKS if owner is cls}
    signature = inspect.signature(cls).parameters
    assert known == set(signature) - {"params"}
    defaults = {field.name: field.default for field in fields(cls.options_type)}  # type: ignore[attr-defined]
    assert {name: signature[name].default for name in known} == defaults


GOOD: list[tuple[type, dict[str, Any]]] = [
    (MARS, {"clip": None, "lr_1d": 0.0, "gamma": 0.0, "betas": [0.0, 0.0], "exclude": ["*.bias"]}),
    (MARS, {"lr": torch.tensor(0.1), "ns_dtype": "float16", "variant": "muon"}),
    (SONew, {"band": 0, "gamma": 0.0, "eps": 0.0, "graft_eps": 0.0, "lr": 1}),
    (LDAdam, {"rank": 1, "rho": 1.0, "error_dtype": None, "state_dtype": {"exp_avg": "int8"}}),
    (LDAdam, {"rank": 1, "rho": 0.0, "error_dtype": "float16"}),
    (MKOR, {"stabilizer": None, "rescale": None, "momentum": 0.0, "backend": "sgd", "exclude": ("*bias",)}),
    (MKOR, {"stabilizer": [1, 0], "hybrid": True, "hybrid_ema": 0.0, "hybrid_min_steps": 2, "hybrid_patience": 1}),
]


@pytest.mark.parametrize(("cls", "options"), GOOD, ids=str)
def test_limits_of_the_ranges_are_accepted(cls: type, options: dict[str, Any]) -> None:
    assert cls(parameters(), **options).options.lr == options.get("lr", cls.options_type().lr)  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", HUGE, ids=("400 digits", "5000 digits"))
@pytest.mark.parametrize(("cls", "key"), [(cls, key) for cls, keys in _NUMBERS.items() for key in keys])
def test_huge_integers(cls: type, key: str, value: int) -> None:
    pair = key in ("stabilizer", "betas", "betas_1d")
    with pytest.raises(OptionError, match=rf"^{cls.__name__}: {key}=.* is invalid: it must .*; ") as caught:
        cls(parameters(), **{key: (value, 0.5) if pair else value})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("cls", "key", "value", "rule", "fix"), TOO_LARGE)
def test_upper_bounds(cls: type, key: str, value: float, rule: str, fix: str) -> None:
    with pytest.raises(OptionError, match=rf"^{cls.__name__}: {key}=.* is invalid: {rule}.*; {fix}"):
        cls(parameters(), **{key: value})


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (LDAdam, {"comm_dtype": "bf16"}, "write 'bfloat16'"),
        (LDAdam, {"comm_dtype": "torch.fp16"}, "write 'float16'"),
        (MKOR, {"factor_dtype": "single"}, "write 'float32'"),
        (MKOR, {"product_dtype": "float16"}, "float32, bfloat16 or float64, or be 'auto'; write 'bfloat16'"),
        (MARS, {"ns_dtype": "Auto"}, "write 'auto'"),
        (MARS, {"variant": "MARS-M"}, "did you mean 'muon'"),
        (MARS, {"variant": "mars-lion"}, "did you mean 'lion'"),
        (MARS, {"variant": "zebra"}, "the default is 'adamw'"),
        (MKOR, {"rescale": "none"}, r"did you mean null \(None\)\?"),
        (MARS, {"variant": torch.ones(2)}, "it must be one of"),
        (SONew, {"graft": ["adam"]}, "it must be one of"),
        (MARS, {"lr": torch.tensor(math.nan)}, "it must be a finite number"),
    ],
)
def test_what_was_probably_meant(cls: type, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        cls(parameters(), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 0.5}, "momentum=0.5 is invalid: backend='adamw' does not read it; .* set backend to 'sgd'"),
        ({"nesterov": True, "backend": "lamb"}, "nesterov=True is invalid: backend='lamb' does not read it"),
        ({"betas": (0.8, 0.9), "backend": "sgd"}, "betas=.* set backend to 'adamw' or 'lamb'"),
        ({"eps": 1e-6, "backend": "sgd"}, "eps=1e-06 is invalid: backend='sgd' does not read it"),
        ({"hybrid_patience": 5}, "hybrid_patience=5 is invalid: nothing reads it without hybrid"),
    ],
)
def test_options_that_nothing_would_read(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=f"MKOR: {words}"):
        MKOR(parameters(), **options)
    first, second = parameters()
    if "momentum" in options:
        with pytest.raises(OptionError, match=words):
            MKOR([{"params": [first]}, {"params": [second], **options}])


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_polynomials_for_each_iteration_are_so_many(steps: int) -> None:
    words = "MARS: ns_steps=.* is invalid: it must be from 3 to 8 with ns_coefficients='cans'.*; write 5, or set"
    with pytest.raises(OptionError, match=words):
        MARS(parameters(), variant="muon", ns_coefficients="cans", ns_steps=steps)
    with pytest.raises(OptionError, match=words):
        MARS([{"params": parameters(), "ns_coefficients": "cans"}], variant="muon", ns_steps=steps)
    MARS(parameters(), variant="muon", ns_coefficients="cans", ns_steps=8)
    MARS(parameters(), variant="muon", ns_steps=steps)


def test_polynomials_that_nothing_would_read() -> None:
    for variant in ("adamw", "lion"):
        with pytest.raises(OptionError, match="MARS: ns_coefficients='cans' is invalid: .* orthogonalises nothing"):
            MARS(parameters(), variant=variant, ns_coefficients="cans")


def test_lr_1d_needs_a_peak_lr() -> None:
    with pytest.raises(OptionError, match="MARS: lr_1d=0.1 is invalid with lr=0: .*; pass the peak lr"):
        MARS(parameters(), lr=0.0, lr_1d=0.1)
    MARS(parameters(), lr=0.0)


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(OptionError, match="MKOR: nesterov=True is invalid: .*momentum above 0; set momentum to"):
        MKOR(parameters(), backend="sgd", momentum=0.0, nesterov=True)


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (MARS, "variant", "lion"),
        (MARS, "lr_1d", 0.1),
        (MARS, "reference_dtype", "bfloat16"),
        (SONew, "band", 4),
        (SONew, "chain", "tensor"),
        (LDAdam, "error_dtype", "bfloat16"),
        (LDAdam, "error_dtype", "int8"),
        (MKOR, "update_interval", 3),
    ],
)
def test_options_common_to_all_groups(cls: type, key: str, value: Any) -> None:
    """Silently ignoring them in a group would be worse."""
    with pytest.raises(OptionError, match=rf"{cls.__name__}: {key}={value!r} in a param group .* to the constructor"):
        cls([{"params": parameters(), key: value}])
    cls([{"params": parameters(), key: value, "name": "decayed"}], **{key: value})


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("gama", "did you mean 'gamma'?"),
        ("weight_decy", "did you mean 'weight_decay'?"),
        ("beta", "did you mean 'betas'?"),
        ("optimise_1d", "did you mean 'optimize_1d'?"),
        ("learning_rate", "did you mean 'lr'?"),
        ("epsilon", "did you mean 'eps'?"),
        ("zzz", "valid keys are betas, betas_1d, blocks, capturable, clip, "),
        ("amsgrad", "remove it; it belongs to Adam"),
        (3, "valid keys are"),
    ],
)
def test_unknown_keys_name_the_nearest(key: Any, hint: str) -> None:
    with pytest.raises(OptionError, match=f"MARS has no option {key!r}: ") as caught:
        check_keys(["lr", key], MARS.options_type.names(), "MARS")
    assert hint in str(caught.value)
    check_keys(["lr", "gamma"], MARS.options_type.names(), "MARS")


@pytest.mark.parametrize("cls", CLASSES)
def test_a_model_without_matrices_is_refused(cls: type) -> None:
    vectors = [("norm.weight", nn.Parameter(torch.ones(9))), ("norm.bias", nn.Parameter(torch.ones(9)))]
    words = (
        rf"{cls.__name__} would update none of the 2 parameters .* fallback: vector\)\. Pass parameters with matrices"
    )
    with pytest.raises(OptionError, match=words):
        cls(vectors)
    with pytest.raises(OptionError, match=r"none of the 2 .*: excluded by '\*body\*'.*loosen 'exclude', or use AdamW"):
        cls(parameters(), exclude=["*body*"])


def test_mars_with_vectors_on_its_rule_needs_no_matrix() -> None:
    MARS([nn.Parameter(torch.ones(9))], optimize_1d=True)


def test_ldadam_refuses_a_rank_that_saves_nothing() -> None:
    with pytest.raises(
        OptionError, match=r"none of the 2 .* fallback: rank 27 saves nothing, vector\)\. .* lower 'rank'"
    ):
        LDAdam(parameters(), rank=27)
    LDAdam(parameters(), rank=26)  # 26 (80 + 2 * 80) + 6400 < 2 * 6400
    LDAdam(parameters(), rank=53, error_feedback=False)


def test_mkor_refuses_a_model_it_cannot_watch() -> None:
    """Its parameters belong to none of the model's linear modules."""
    optimizer = MKOR(parameters())
    with pytest.raises(OptionError, match="MKOR would update none .*no linear module uses it, vector"):
        optimizer.capture(nn.Linear(80, 80))


def test_paper_literal_warns(caplog: pytest.LogCaptureFixture) -> None:
    MKOR(parameters(), rule="paper_literal")
    assert "amplifies what it should damp" in caplog.text


def test_an_empty_parameter_list_is_refused_as_in_torch() -> None:
    for cls in CLASSES:
        with pytest.raises(ValueError, match="empty parameter list"):
            cls([])


def test_a_torch_dtype_means_its_name() -> None:
    optimizer = LDAdam(parameters(), error_dtype=torch.bfloat16, comm_dtype=torch.float16)  # type: ignore[arg-type]
    assert (optimizer.options.error_dtype, optimizer.options.comm_dtype) == ("bfloat16", "float16")


@pytest.mark.parametrize(("cls", "key"), [(SONew, "eps"), (SONew, "graft_eps"), (LDAdam, "eps"), (MKOR, "eps")])
def test_divisors_that_vanish_are_announced(cls: type, key: str, caplog: pytest.LogCaptureFixture) -> None:
    cls(parameters(), **{key: 1e-300})
    assert f"{cls.__name__}: with {key}=1e-300" in caplog.text and "0 / 0" in caplog.text


@pytest.mark.parametrize("cls", CLASSES)
def test_help_shows_an_example_and_every_option_with_its_range(cls: type) -> None:
    text = inspect.getdoc(cls) or ""
    sections = re.split(r"^(Example|Args|Raises):\n", text, flags=re.MULTILINE)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert list(found) == ["Example", "Args", "Raises"]
    assert f"    >>> optimizer = rankwise.{cls.__name__}(" in found["Example"]
    entries = [" ".join(entry.split()) for entry in re.split(r"^ {4}(?=\w)", found["Args"], flags=re.MULTILINE)[1:]]
    assert [re.split(r"\W", entry)[0] for entry in entries] == list(inspect.signature(cls).parameters)
    for known, entry in zip(cls.options_type.table().values(), entries[1:], strict=True):  # type: ignore[attr-defined]
        default = f'"{known.default}"' if isinstance(known.default, str) else known.default
        scope = "; per group" * known.per_group + "; fixed by the first step" * known.structural
        assert entry == f"{known.name} ({known.check.range}; default {default}{scope}): {known.text}"
        assert re.match(r'["A-Z].*\.$', known.text), known.text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("cls", CLASSES)
def test_the_signature_names_types_and_defaults_alone(cls: type) -> None:
    text = str(inspect.signature(cls))
    assert text.startswith("(params: Any, lr: float | torch.Tensor = ") and text.endswith(" = False) -> None")
    assert "'float" not in text and "Options" not in text and "*" not in text
    assert cls.__init__.__qualname__ == f"{cls.__name__}.__init__"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "keywords", "words"),
    [
        ((), {"weight_decoy": 1}, r"LDAdam\(\) got an unexpected .* 'weight_decoy'; did you mean 'weight_decay'\?"),
        ((), {"learning_rate": 1}, "did you mean 'lr'"),
        (
            (),
            {"zzz": 1},
            r"LDAdam\(\) got an unexpected keyword argument 'zzz'; valid keys are betas, .*weight_decay_method\.$",
        ),
        ((), {"fused": True}, r"unexpected keyword argument 'fused'; remove it; which kernels run is found out here$"),
        ((1e-3,), {"lr": 1}, r"LDAdam\(\) multiple values for argument 'lr'"),
        ((1,) * 99, {}, r"LDAdam\(\) too many positional arguments"),
    ],
)
def test_wrong_keywords_are_named_as_in_any_call(given: tuple[Any, ...], keywords: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        LDAdam(parameters(), *given, **keywords)


def test_options_by_position_and_of_a_subclass() -> None:
    class Mine(LDAdam):
        def __init__(self, params: Any, **keywords: Any) -> None:
            super().__init__(params, 0.5, 3, **keywords)

    optimizer = Mine(parameters(), rho=0.5)
    assert (optimizer.defaults["lr"], optimizer.defaults["rank"], optimizer.options.rho) == (0.5, 3, 0.5)
    with pytest.raises(TypeError, match=r"^Mine\(\) got an unexpected keyword argument 'rhoo'; did you mean 'rho'\?"):
        Mine(parameters(), rhoo=1)


def test_sets_of_patterns_read_alike_in_every_process() -> None:
    """Their order depends on the process, and ranks compare the options that they were given."""
    program = (
        "import torch, rankwise\n"
        "weights = [(f'{name}.weight', torch.nn.Parameter(torch.ones(80, 80))) for name in 'abcdefg']\n"
        "print(rankwise.LDAdam(weights, exclude={f'{name}.*' for name in 'bcdef'}).options.exclude)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in "12"
    }
    assert found == {"('b.*', 'c.*', 'd.*', 'e.*', 'f.*')\n"}


@pytest.mark.parametrize("cls", CLASSES)
def test_models_and_groups_that_have_nothing_yet(cls: type) -> None:
    lazy = nn.Sequential(nn.LazyLinear(99), nn.Linear(99, 99))
    with pytest.raises(OptionError, match=r"'0\.weight' is invalid, because its module is lazy.*run one forward pass"):
        cls(lazy.named_parameters())
    lazy(torch.ones(2, 99))
    cls(lazy.named_parameters())
    with pytest.raises(OptionError, match=f"{cls.__name__}: params is invalid.*pass model.named_parameters"):
        cls([{"params": []}, {"params": [], "lr": 1.0}])
