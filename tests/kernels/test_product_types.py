"""The type of products: what a machine says of itself decides, and no other type is multiplied anywhere."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rankwise import MARS, MKOR
from rankwise.kernels import dispatch as forms
from rankwise.kernels import lists, native, product_types
from rankwise.kernels.dispatch import product_dtype_for, using
from rankwise.step.optimizer import ShardedOptimizer

CPU = torch.device("cpu")
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
X86 = platform.machine().lower() in ("x86_64", "amd64")
CHILD = (
    "import torch; from rankwise.kernels.product_types import multiplies_bfloat16; "
    "print(multiplies_bfloat16(torch.device('cpu')))"
)


# --- what a machine says of itself -------------------------------------------------------------------------------


def _answer(
    monkeypatch: pytest.MonkeyPatch,
    *,
    machine: str = "x86_64",
    library: bool = True,
    capability: str = "AVX512",
    instructions: tuple[str, ...] = ("avx512_bf16",),
    **variables: str,
) -> bool:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: library, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(instructions, True), raising=False)
    return product_types._cpu_multiplies_bfloat16()


@pytest.mark.parametrize(
    ("expected", "told"),
    [
        (True, {}),
        (True, {"instructions": ("amx_bf16",)}),
        (True, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}),
        (True, {"ONEDNN_MAX_CPU_ISA": "default", "DNNL_MAX_CPU_ISA": "AVX2"}),
        (True, {"machine": "aarch64", "capability": "DEFAULT", "instructions": ()}),
        (False, {"machine": "aarch64", "capability": "DEFAULT", "library": False}),
        (False, {"library": False}),
        (False, {"instructions": ("avx512_f",)}),
        (False, {"capability": "AVX2"}),
        (False, {"ONEDNN_MAX_CPU_ISA": "avx512_core"}),
        (False, {"DNNL_MAX_CPU_ISA": "AVX512_CORE_VNNI"}),
    ],
    ids=str,
)
def test_flags_decide(expected: bool, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _answer(monkeypatch, **told) is expected


def test_without_the_library_of_products_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _answer(monkeypatch)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not product_types._cpu_multiplies_bfloat16()


@pytest.mark.parametrize(
    ("capability", "hip", "expected"), [((7, 5), None, False), ((8, 0), None, True), ((0, 0), "6", True)]
)
def test_gpus_say_their_generation(
    capability: tuple[int, int], hip: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert product_types.multiplies_bfloat16.__wrapped__(torch.device("cuda", 0)) is expected


def test_devices_that_say_nothing_take_the_published_type() -> None:
    assert product_dtype_for(torch.device("meta"), FP32) == BF16


@pytest.mark.skipif(not X86, reason="the variables name instructions of x86 processors")
def test_variables_that_narrow_the_instructions_count() -> None:
    narrow = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, "-c", CHILD], env=os.environ | narrow, capture_output=True, text=True)
    assert child.stdout.strip() == "False", child.stderr


@pytest.mark.parametrize("fast", [False, True])
def test_what_torch_multiplies_fast_counts(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "multiplies_bfloat16", lambda device: fast)
    assert product_dtype_for(CPU, FP32) == (BF16 if fast else FP32)
    assert product_dtype_for(CPU, FP64) == FP64


# --- what is multiplied -------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts matrix products by their types."""

    names = ("mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "matmul", "mv", "addmv", "linear")

    def __init__(self) -> None:
        super().__init__()
        self.types: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.partition(".")[0] in self.names:
            matrices = [value for value in args if isinstance(value, torch.Tensor)]
            for dtype in {matrix.dtype for matrix in matrices}:
                # Products with a vector move factors; they are never in fewer digits.
                if min(matrix.shape[-1] for matrix in matrices) > 1 and matrices[-1].ndim > 1:
                    self.types[dtype] += 1
        return func(*args, **(kwargs or {}))


MATRICES = 3
# Products of a step for every matrix.
RULES: dict[str, tuple[type[ShardedOptimizer], dict[str, Any], str, int]] = {
    "mars-shampoo": (MARS, {"variant": "shampoo"}, "ns_dtype", 15),
    "mars-m": (MARS, {"variant": "muon"}, "ns_dtype", 15),
    # Without the stabilizer, which multiplies windows by themselves at factor steps.
    "mkor": (MKOR, {"backend": "sgd", "update_interval": 2, "stabilizer": None}, "product_dtype", 4),
}


@pytest.fixture(params=[pytest.param(native, marks=pytest.mark.compiled), lists], ids=["native", "lists"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without tiles of its own for products; whether torch's are fast is up to the test."""
    monkeypatch.setattr("rankwise.mkor.native.products", lambda: None)
    with using(request.param):
        yield


def _built(name: str, dtype: torch.dtype = FP32, **options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 70), nn.Linear(70, 4, bias=False)).to(dtype)
    kind, own, _, _ = RULES[name]
    optimizer = kind(list(model.named_parameters()), **own, **options)
    optimizer.capture(model)
    return model, optimizer


def _step(model: nn.Module, optimizer: ShardedOptimizer, seed: int) -> Counter[torch.dtype]:
    dtype = next(model.parameters()).dtype
    optimizer.zero_grad()
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model(inputs).square().mean().backward()
    with Products() as seen:
        optimizer.step()
    return seen.types


def _multiplies(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(forms, "multiplies_bfloat16", lambda device: fast)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_steps_multiply_in_the_type_of_the_machine(
    name: str, fast: bool, form: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _multiplies(monkeypatch, fast)
    model, optimizer = _built(name)
    lines: list[str] = []
    optimizer.reports.announce = lines.append
    for step in range(3):
        assert _step(model, optimizer, step) == {BF16 if fast else FP32: RULES[name][3] * MATRICES}
    option = RULES[name][2]
    assert f"; products in {'bfloat16' if fast else 'float32'} ({option}='auto');" in lines[0]
    if name == "mkor":
        assert {state["left_vectors"].dtype for state in optimizer.matrix_states.values()} == {BF16}, (
            "stored as the option says"
        )


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", RULES)
def test_a_named_type_is_taken_whatever_the_machine(
    name: str, dtype: torch.dtype, form: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _multiplies(monkeypatch, dtype == FP32)
    model, optimizer = _built(name, **{RULES[name][2]: str(dtype).removeprefix("torch.")})
    assert _step(model, optimizer, 0) == {dtype: RULES[name][3] * MATRICES}


@pytest.mark.parametrize("name", RULES)
def test_float64_parameters_and_wide_factors_keep_their_digits(
    name: str, form: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _multiplies(monkeypatch, True)
    assert _step(*_built(name, FP64), 0) == {FP64: RULES[name][3] * MATRICES}
    if name == "mkor":
        assert set(_step(*_built(name, factor_dtype="float32"), 0)) == {FP32}


@pytest.mark.parametrize("name", RULES)
def test_checkpoints_move_between_machines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold no type of products; what was saved is loaded to the bit, and the step is the new machine's."""
    _multiplies(monkeypatch, True)
    model, optimizer = _built(name)
    _step(model, optimizer, 0)
    saved = optimizer.state_dict()
    _multiplies(monkeypatch, False)
    other, moved = _built(name)
    other.load_state_dict(model.state_dict())
    moved.load_state_dict(saved)
    again = moved.state_dict()
    assert repr(saved) == repr(again)
    assert _step(other, moved, 1) == {FP32: RULES[name][3] * MATRICES}
