"""Codes and narrow passes in one launch, in the interpreter, against the plain forms: the same bits."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from narrow_cases import FIRSTS  # noqa: E402
from test_narrow_passes import assert_as_opened, fields_of  # noqa: E402
from test_quantization import assert_same_bits  # noqa: E402

from rankwise.kernels import triton  # noqa: E402
from rankwise.kernels.dispatch import quantization_for, using  # noqa: E402
from rankwise.kernels.low_precision_runs import BFLOAT16, ROOT, SIGNED  # noqa: E402
from rankwise.kernels.passes import Pass, Scalars  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.fixture
def launched() -> ModuleType:
    with using(triton):
        return quantization_for(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("dtype, step", [(SIGNED, None), (ROOT, torch.tensor(7)), (BFLOAT16, 5)])
def test_the_same_bits(launched: ModuleType, launches: list[str], dtype: torch.dtype, step: Any) -> None:
    assert_same_bits(launched, dtype, step)
    assert len(launches) == (4 if dtype == BFLOAT16 else 6)


@pytest.mark.parametrize(
    "rule, state, reference, step",
    [("adamw", SIGNED, SIGNED, 7), ("lion", BFLOAT16, SIGNED, None), ("step", None, BFLOAT16, None)],
)
def test_passes(launches: list[str], rule: Any, state: Any, reference: Any, step: Any) -> None:
    assert_as_opened(triton, rule, fields_of(rule, state, reference, step), True, True)
    assert launches[0] == "update_kernel" and launches.count("update_kernel") <= 12


def test_codes_that_begin_within_a_block_are_refused_and_bfloat16_has_no_blocks(launches: list[str]) -> None:
    with pytest.raises(ValueError, match="must begin with a block"):
        triton.run(Pass("lion", fields_of("lion", SIGNED, SIGNED, 7, FIRSTS), Scalars(lr=0.1)))
    fields = fields_of("momentum", BFLOAT16, BFLOAT16, 7, FIRSTS)
    launches.clear()
    assert_as_opened(triton, "momentum", fields, False, True)
    assert launches.count("update_kernel") <= 12


def test_other_lengths_are_refused(launched: ModuleType) -> None:
    from narrow_cases import runs_of

    values, kept = torch.zeros(65), runs_of([65], [0], SIGNED)
    with pytest.raises(ValueError, match="of its length"):
        launched.add_decoded([values], kept, [values[1:]])
    with pytest.raises(ValueError, match="it must have a code for each"):
        launched.encode_([values[1:]], kept)
    with pytest.raises(ValueError, match="exponents has the shape"):
        launched.encode_([values], kept, torch.zeros(3, dtype=torch.int8))
