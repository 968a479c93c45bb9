"""The kernels compile for CUDA down to machine code: the compiler and the assembler need no device."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")

from triton_compiler import Launch, compiled, recorded  # noqa: E402
from triton_interpreter import kernel_modules  # noqa: E402

from rankwise.kernels.passes import FIELDS, Pass, Scalars  # noqa: E402

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 3):
    pytest.skip("another compiler interface before Triton 3.3", allow_module_level=True)
from triton.backends import backends  # noqa: E402

if "nvidia" not in backends:
    pytest.skip("Triton without its CUDA back end", allow_module_level=True)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def run(length: int = 4096) -> list[torch.Tensor]:
    return [torch.zeros(5), torch.zeros(length)]


def counts(of_device: bool) -> Any:
    return torch.ones(2) + 1 if of_device else 2


def update(rule: Any, compared: bool = True, of_device: bool = False, lr: Any = 0.1) -> None:
    from rankwise.kernels import triton

    names = (*FIELDS[rule], *(("reference",) if compared else ()))
    numbers = counts(of_device) if rule == "adamw" else 1
    scalars = Scalars(lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=numbers, k=0.5, advance=rule != "lion")
    triton.run(Pass(rule, {name: run() for name in names}, scalars, None if rule == "lion" else torch.ones(2)))


def mars_adamw(of_device: bool) -> None:
    update("adamw", of_device=of_device, lr=torch.tensor(0.1))


def norms(compared: bool) -> None:
    from rankwise.kernels import triton

    triton.squared_norms(run(), run() if compared else None, 0.5)


class Place(NamedTuple):
    start: int
    chain: int | None


def sonew(band: int, of_device: bool = False, graft: str = "adam") -> None:
    from rankwise.sonew.cuda import sonew_directions

    sonew_directions(
        [Place(0, None), Place(3, 1024)],
        *(run() for _ in range(3)),
        [run() for _ in range(band)],
        [None, None],
        betas=(0.9, 0.99),
        eps=1e-8,
        gamma=1e-2,
        step=counts(of_device),
        graft=graft,
        graft_eps=1e-8,
        out=run(),
    )


def newton_schulz(dtype: torch.dtype) -> None:
    from rankwise.kernels.triton.symmetric_newton_schulz import symmetric_polynomial, symmetric_product

    x = torch.zeros(2, 64, 64, dtype=dtype)
    symmetric_product(x)
    symmetric_polynomial(x, 1.0, 2.0)


def factors(rule: str, dtype: torch.dtype) -> None:
    from rankwise.mkor.cuda import update_factors_

    inverses = list(torch.zeros(2, 64, 64, dtype=dtype))
    update_factors_(inverses, torch.zeros(2, 64), decay=0.9, rule=rule, seen=torch.ones(2, dtype=torch.bool))


def rescale() -> None:
    from rankwise.mkor.cuda_rescale import rescale_

    rescale_(run(), run(), 64)


def moments() -> None:
    from rankwise.ldadam.cuda import low_rank_moments

    for step in (1, 2, torch.tensor([2, 3])):
        low_rank_moments(*torch.zeros(4, 2, 64, 64), step, (0.9, 0.99), 1e-8, True)


def low_rank_step(right: bool) -> None:
    from rankwise.ldadam.cuda_fragments import Factors, low_rank_step_

    part = [Factors(0, torch.zeros(8, 4), torch.zeros(4, 8), torch.zeros(4, 8))]
    errors = [torch.zeros(64, dtype=torch.bfloat16)]
    low_rank_step_([torch.zeros(64)], part, [torch.zeros(64)], errors, cols=8, right=right, lr=0.1, weight_decay=0.1)


def low_rank_matrices(rank: int) -> None:
    from rankwise.ldadam.cuda_moments import advance_moments_
    from rankwise.ldadam.cuda_products import Operand, grouped_product_, keep_, places_of

    stack = torch.zeros(2, rank, 256)
    for strides, scales in (((256, 1), None), ((1, 256), torch.ones(2, rank))):
        operand = Operand(places_of(stack), strides)
        grouped_product_(torch.zeros(2, rank, rank), operand, operand.turned, 256, scales=scales, precision="tf32x3")
    keep_(stack, places_of(stack), torch.zeros(2, dtype=torch.bool))
    settings: dict[str, Any] = {"step": 2, "betas": (0.9, 0.99), "eps": 1e-8, "error_feedback": True}
    rotation = torch.zeros(2, rank, rank)
    advance_moments_(stack, rotation, list(stack), list(stack), precision="tf32x3", **settings)


CALLS: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (mars_adamw, (False,)),
    (mars_adamw, (True,)),
    (update, ("lion",)),
    (update, ("momentum",)),
    (update, ("step", False)),
    (norms, (True,)),
    (norms, (False,)),
    (sonew, (0,)),
    (sonew, (1,)),
    (sonew, (1, True)),
    (sonew, (1, True, "adam_official")),
    (newton_schulz, (torch.bfloat16,)),
    (newton_schulz, (torch.float32,)),
    (factors, ("official", torch.bfloat16)),
    (rescale, ()),
    (moments, ()),
    (low_rank_step, (False,)),
    (low_rank_matrices, (256,)),
]
MORE = [
    *((sonew, (band,)) for band in range(2, 9)),
    *((factors, (rule, torch.float32)) for rule in ("official", "ema", "paper_literal")),
    (low_rank_step, (True,)),
    (low_rank_matrices, (16,)),
    (low_rank_matrices, (512,)),
]


def launches_of(call: Callable[..., None], arguments: tuple[Any, ...]) -> list[Launch]:
    launches = recorded(lambda: call(*arguments), kernel_modules())
    assert launches
    return launches


@pytest.mark.parametrize(
    ("call", "arguments"), [*CALLS, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)]
)
def test_machine_code(call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    for launch in launches_of(call, arguments):
        code = compiled(launch).asm
        assert code["cubin"]
        assert not re.search(r"\b(atom|red)\.", code["ptx"]), "atomics: sums would depend on the order of programs"


@pytest.mark.parametrize(
    ("call", "arguments", "reads", "writes"), [(mars_adamw, (True,), 5, 4), (update, ("step", False), 2, 1)]
)
def test_full_tiles_move_16_bytes_at_a_time(
    call: Callable[..., None], arguments: tuple[Any, ...], reads: int, writes: int
) -> None:
    """As many fields, each in the path of the full and aligned tiles."""
    code = compiled(launches_of(call, arguments)[-1]).asm["ptx"]
    found = [len(set(re.findall(rf"{kind}\.global\S*\.v4\.b32[^;]*\[ *%rd(\d+)", code))) for kind in ("ld", "st")]
    assert found[0] >= reads and found[1] >= writes


def test_the_package_needs_no_triton_to_be_imported() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, rankwise.kernels\n"
        "from rankwise.kernels import triton\n"
        "assert not triton.is_available(torch.device('cpu'))\n"
        "try: triton.squared_norms([torch.ones(1)])\n"
        "except ImportError: pass\n"
        "else: raise SystemExit('where does it come from?')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
