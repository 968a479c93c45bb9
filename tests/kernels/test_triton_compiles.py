"""The kernels compile for CUDA down to machine code: the compiler and the assembler need no device."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from benchmarks.compiled_kernels import (  # noqa: E402
    CALLS,
    MORE,
    Launch,
    compiled,
    kernels_page,
    mars_adamw,
    measured,
    narrow_sonew,
    recorded,
    sonew,
    update,
)

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 3):
    pytest.skip("another compiler interface before Triton 3.3", allow_module_level=True)
from triton.backends import backends  # noqa: E402

import rankwise  # noqa: E402

if "nvidia" not in backends:
    pytest.skip("Triton without its CUDA back end", allow_module_level=True)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


FIGURES = json.loads((Path(__file__).parents[2] / "docs/data/kernels.json").read_text())
# Bytes, of matrices whose rows begin at odd places, on an A100.
SPILLS = {("_symmetric_kernel", "sm_80"): 8}
# Whose fields are read 4 or 8 bytes at a time: an address, or a place in a row, says nothing of alignment.
NARROW = re.compile(r"_(choose|exponents|halves|judge|squares|step|sum)_kernel")
# Four elements of fp32, which a thread takes, are fewer where 64 threads share a tile for 32.
WIDEST = {(f"{kernel}_kernel", "gfx942"): 8 for kernel in ("update", "_moments", "_grouped_product")}


def launches_of(call: Callable[..., None], arguments: tuple[Any, ...]) -> list[Launch]:
    launches = recorded(lambda: call(*arguments))
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


@pytest.mark.parametrize(("call", "arguments"), [(sonew, (4,)), (narrow_sonew, (1,))])
def test_sonew_reads_a_tile_before_it_writes_and_passes_values_on_within_warps(
    call: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """A warp reads what belongs to the next one, so that a barrier must lie between all that is read and written."""
    (launch,) = (found for found in launches_of(call, arguments) if found.kernel.fn.__name__.startswith("sonew"))
    code = compiled(launch).asm["ptx"]
    before = code[: code.index("st.global")]
    barrier = before.rindex("bar.sync")
    reads = [found.start() for found in re.finditer(r"ld\.global\S*\.v4|ld\.global\S*\.b16", code)]
    assert reads and max(reads) < barrier
    if call is sonew:
        # One barrier for that, three for the norms, and the rest where a tile is not full or not aligned.
        assert len(re.findall(r"bar\.sync", code)) <= 18 and len(re.findall(r"\bshfl", code)) <= 54
        assert len(reads) >= 2 * 7 and code.count("ld.shared") <= 2


def test_older_compilers_read_the_kernels() -> None:
    """Triton 3.2, the oldest that is supported, knows no chain of more than two conditions."""
    kernels = 0
    for file in Path(rankwise.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and any(
                ast.unparse(mark) == "jit" for mark in function.decorator_list
            ):
                kernels += 1
                chains = [node for node in ast.walk(function) if isinstance(node, ast.BoolOp) and len(node.values) > 2]
                assert not chains, f"{file.name}:{chains[0].lineno}"
    assert kernels > 40


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


def test_nothing_spills_and_the_page_has_these_figures() -> None:
    """For A100, H100 and MI300; with another Triton than the page's the figures may be others."""
    for row in FIGURES["rows"]:
        assert row["spills"] <= SPILLS.get((row["kernel"], row["target"]), 0), row
        widest = WIDEST.get((row["kernel"], row["target"]), 16)
        assert row["widest"] >= widest or NARROW.fullmatch(row["kernel"]), row
    page = Path(__file__).parents[2] / "docs/kernels.md"
    assert page.read_text() == kernels_page(FIGURES["rows"], FIGURES["triton"])


@pytest.mark.skipif(triton.__version__ != FIGURES["triton"], reason="another compiler than that of the figures")
@pytest.mark.parametrize(
    "case", [CALLS[0], CALLS[13], *(pytest.param(case, marks=pytest.mark.exhaustive) for case in [*CALLS, *MORE])]
)
def test_figures_are_those_of_the_code(case: tuple[Callable[..., None], tuple[Any, ...]]) -> None:
    found = list(measured([case]))
    assert found == [row for row in FIGURES["rows"] if row["case"] == found[0]["case"]]
