"""Passes over narrow states: the bits of opening, passing and keeping them one after the other."""

from __future__ import annotations

from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from narrow_cases import BEGINNINGS, FIRSTS, LENGTHS, assert_same, copy_of, runs_of, values_of

from rankwise.kernels import native
from rankwise.kernels.low_precision_runs import BFLOAT16, ROOT, SIGNED, LowPrecisionRuns
from rankwise.kernels.opened_passes import norms_with_opened, run_opened
from rankwise.kernels.passes import FIELDS, Pass, Rule, Scalars
from rankwise.kernels.quantization import encode_

CASES = [
    (rule, state, reference, step)
    for rule, state, reference, step in product(FIELDS, (SIGNED, BFLOAT16, None), (SIGNED, BFLOAT16, None), (None, 7))
    if (state or reference) and (rule != "step" or (state is None and reference))
]


def fields_of(
    rule: Rule, state: Any, reference: Any, step: Any, firsts: tuple[int, ...] = BEGINNINGS
) -> dict[str, Any]:
    """Of a pass, with a wide reference where there is none in codes."""
    types = {"exp_avg": state, "exp_avg_sq": ROOT if state == SIGNED else state, "reference": reference}
    found: dict[str, Any] = {}
    for at, name in enumerate((*FIELDS[rule], "reference")):
        kind = ROOT if name == "exp_avg_sq" else SIGNED
        found[name] = [values_of(numel, kind, 100 * at + run) for run, numel in enumerate(LENGTHS)]
        if types.get(name) is not None:
            runs = runs_of(LENGTHS, firsts, types[name], step)
            encode_(found[name], runs)
            found[name] = runs
    return found


def copies(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: copy_of(field) if isinstance(field, LowPrecisionRuns) else [tensor.clone() for tensor in field]
        for name, field in fields.items()
    }


def assert_as_opened(form: ModuleType, rule: Rule, fields: dict[str, Any], cautious: bool, advance: bool) -> None:
    expected = copies(fields)
    scalars = Scalars(
        lr=0.1,
        betas=(0.9, 0.99),
        eps=1e-8,
        weight_decay=0.1,
        cautious=cautious,
        step=4,
        k=0.5,
        advance=advance,
        nesterov=0.3,
    )
    # Factors keep AdamW from torch's own kernel, whose last bits are others.
    factors = (
        torch.rand(len(LENGTHS), generator=torch.Generator().manual_seed(1)) if cautious else torch.ones(len(LENGTHS))
    )
    form.run(Pass(rule, fields, scalars, factors if cautious else None))
    run_opened(Pass(rule, expected, scalars, factors), form.run)
    for name, field in fields.items():
        assert_same(field, expected[name])


@pytest.mark.compiled
@pytest.mark.parametrize("rule, state, reference, step", CASES)
def test_the_compiled_pass(rule: Rule, state: Any, reference: Any, step: Any) -> None:
    fields = fields_of(rule, state, reference, step)
    for cautious, advance in ((False, True), (True, False)):
        own = copies(fields)
        assert_as_opened(native, rule, own, cautious, advance)
    if state is not None and rule != "step":
        del own["reference"]
        assert_as_opened(native, rule, own, False, False)
    if reference is not None:
        found = native.squared_norms(fields["grad"], fields["reference"], 0.5)
        assert_same([found], [norms_with_opened(fields["grad"], fields["reference"], 0.5, native.squared_norms)])


@pytest.mark.compiled
def test_runs_that_begin_within_a_block_are_opened() -> None:
    assert_as_opened(native, "adamw", fields_of("adamw", SIGNED, SIGNED, 7, FIRSTS), False, True)
