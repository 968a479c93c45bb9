"""What each Triton kernel becomes on devices that need not be there: registers, spills, shared memory, accesses."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.launches import kernel_modules
from benchmarks.performance import markdown
from rankwise.kernels.passes import FIELDS, Pass, Scalars

__all__ = [
    "CALLS",
    "MORE",
    "TARGETS",
    "Launch",
    "Resources",
    "compiled",
    "kernels_page",
    "measured",
    "recorded",
    "resources",
]

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
"""A100, H100 and H200, MI300."""

TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.int8: "i8",
}


class Launch(NamedTuple):
    """A kernel and what it was to be called with."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def recorded(call: Callable[[], Any], target: str = "sm_90") -> list[Launch]:
    """The launches of a call on a target's device, none of which takes place."""
    from rankwise.kernels.triton import symmetric_newton_schulz

    launches: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
        launches.append(Launch(kernel, arguments, constants))

    with ExitStack() as stack:
        described = mock.patch.object(symmetric_newton_schulz, "_has_descriptors", lambda device: target == "sm_90")
        stack.enter_context(described)
        stack.enter_context(mock.patch.object(torch.version, "hip", "6" if TARGETS[target][0] == "hip" else None))
        for module in kernel_modules():
            if hasattr(module, "launch"):
                stack.enter_context(mock.patch.object(module, "launch", record))
        call()
    return launches


def _type(value: Any) -> str:
    if hasattr(value, "block_shape"):
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>"
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


def compiled(launch: Launch, target: str = "sm_90") -> Any:
    """What Triton would run: aligned pointers, and integers specialised as it does itself.

    Args:
        launch: The kernel and its arguments.
        target: Target of :data:`TARGETS`.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel, arguments, constants = launch
    names = kernel.arg_names
    values = {**dict(zip(names, arguments, strict=False)), **constants}
    fixed = {param.name for param in kernel.params if param.is_constexpr}
    fixed |= {name for name in names if type(values[name]) is int and values[name] == 1}
    signature = {name: "constexpr" if name in fixed else _type(values[name]) for name in names}

    def divisible(value: Any) -> bool:
        return isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)

    hints = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in fixed and divisible(values[name])
    }
    source = ASTSource(kernel, signature, {name: values[name] for name in names if name in fixed}, hints)
    options = {name: value for name, value in constants.items() if name not in names}
    return compile(source, target=GPUTarget(*TARGETS[target]), options=options)


class Resources(NamedTuple):
    """What one compiled kernel takes.

    Attributes:
        registers: Registers of a thread; of AMD's the vector registers.
        spills: Bytes of a thread that do not fit into them; of AMD's the vector registers that do not.
        shared: Bytes of shared memory of a block.
        threads: Threads of a block.
        widest: Bytes of the widest access to memory by one thread.
    """

    registers: int
    spills: int
    shared: int
    threads: int
    widest: int


def resources(kernel: Any, target: str) -> Resources:
    """What a compiled kernel takes.

    Args:
        kernel: As :func:`compiled` gave it.
        target: What it was compiled for.
    """
    threads, shared = kernel.metadata.num_warps * TARGETS[target][2], kernel.metadata.shared
    if "amdgcn" in kernel.asm:
        code = kernel.asm["amdgcn"]
        registers, spills = (int(_only(rf"\.{name}:\s+(\d+)", code)) for name in ("vgpr_count", "vgpr_spill_count"))
        accesses = re.findall(r"\b(?:global|buffer)_(?:load|store)_(?:dword|b)(?:x?(\d+))?\b", code)
        widest = max((int(size or 1) for size in accesses), default=0)
        return Resources(registers, spills, shared, threads, widest if widest > 4 else 4 * widest)
    registers, spills = _assembled(kernel.asm["cubin"])
    widths = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)\b", kernel.asm["ptx"])
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?,\s*0x([0-9a-f]+)", kernel.asm["ptx"])
    sizes = [int(count or 1) * int(bits) // 8 for count, bits in widths] + [int(size, 16) for size in copies]
    return Resources(registers, spills, shared, threads, max(sizes, default=0))


def _only(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return found[1]


def _assembled(code: bytes) -> tuple[int, int]:
    """Registers, and bytes of a thread's stack, which only spills need here."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(code)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(_only(r"REG:(\d+)", told)), int(_only(r"STACK:(\d+)", told)) + int(_only(r"LOCAL:(\d+)", told))


def measured(cases: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> Iterator[dict[str, Any]]:
    """A row for each kernel of each case and device.

    Args:
        cases: Calls that launch kernels, and their arguments.
    """
    for call, arguments in cases:
        for target in TARGETS:
            seen: dict[str, int] = {}
            for launch in recorded(partial(call, *arguments), target):
                name = launch.kernel.fn.__name__
                seen[name] = seen.get(name, 0) + 1
                found = resources(compiled(launch, target), target)
                yield {"case": _words(call, arguments), "kernel": name, "launch": seen[name], "target": target} | (
                    found._asdict()
                )


def _words(call: Callable[..., None], arguments: tuple[Any, ...]) -> str:
    given = ", ".join(str(argument).removeprefix("torch.") for argument in arguments)
    name = call.__name__.replace("_", " ")
    return f"{name} ({given})" if given else name


_INTRODUCTION = """# What the kernels become

This page shows what the compiler makes of every Triton kernel: registers, spills, shared memory and the width of memory
accesses. The short answer: {spilling} of the {launches} compiled launches spill registers to memory.

Each kernel was compiled with the configuration that it is launched with, for an A100 (sm_80), an H100 or H200 (sm_90)
and an MI300 (gfx942). None of these devices was needed. *Registers* are those of a thread. *Spilled* is what does not
fit into them, in bytes (on gfx942 in registers). *Widest* is the widest access of a thread to memory, in bytes. Triton
{triton} made the figures with

```
python -m benchmarks kernels --output docs/data/kernels.json --page docs/kernels.md
```

"""


def kernels_page(rows: Sequence[Mapping[str, Any]], version: str) -> str:
    """The page of these figures.

    Args:
        rows: As :func:`measured` gives them.
        version: Triton's.
    """
    found: dict[tuple[str, str, int], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["case"], row["kernel"], row["launch"]), {})[row["target"]] = row
    lines = [
        [
            case,
            f"`{kernel.strip('_')}`",
            *(" / ".join(str(by[target][what]) for target in TARGETS) for what in Resources._fields),
        ]
        for (case, kernel, _), by in found.items()
    ]
    headings = ["call", "kernel", "registers", "spilled", "shared bytes", "threads", "widest"]
    spilling = sum(bool(row["spills"]) for row in rows)
    introduction = _INTRODUCTION.format(triton=version, spilling=spilling, launches=len(rows))
    return introduction + "Each cell: sm_80 / sm_90 / gfx942.\n\n" + markdown(headings, lines)


# --- what is called ----


def run(length: int = 4096) -> list[torch.Tensor]:
    return [torch.zeros(5), torch.zeros(length)]


def counts(of_device: bool) -> Any:
    return torch.ones(2) + 1 if of_device else 2


def update(rule: Any, compared: bool = True, of_device: bool = False, lr: Any = 0.1) -> None:
    from rankwise.kernels import triton

    names = (*FIELDS[rule], *(("reference",) if compared else ()))
    numbers = counts(of_device) if rule == "adamw" else 1
    scalars = Scalars(lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=numbers, k=0.5, advance=rule != "lion")
    scalars.clip = 1.0 if compared else None
    factors, measured = None if rule == "lion" else torch.ones(2), rule in ("momentum", "nesterov")
    triton.run(Pass(rule, {name: run() for name in names}, scalars, factors, measured))


def step_of_products(dtype: torch.dtype) -> None:
    from rankwise.kernels import triton

    scalars = Scalars(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    fields = {name: run() for name in FIELDS["adamw"]} | {"grad": [each.to(dtype) for each in run()]}
    triton.run(Pass("adamw", fields, scalars, torch.ones(2)))


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


def narrow_sonew(band: int, second: torch.dtype = torch.bfloat16) -> None:
    from rankwise.sonew.cuda import sonew_directions

    grads, out = [[torch.zeros(each) for each in (64, 4096)] for _ in range(2)]
    sonew_directions(
        [Place(0, None), Place(0, 1024)],
        grads,
        narrow(torch.int8),
        narrow(second),
        [narrow(torch.int8) for _ in range(band)],
        [None, None],
        betas=(0.9, 0.99),
        eps=1e-8,
        gamma=1e-2,
        step=2,
        graft="adam",
        graft_eps=1e-8,
        out=out,
    )


def newton_schulz(dtype: torch.dtype) -> None:
    from rankwise.kernels.triton.symmetric_newton_schulz import symmetric_product, symmetric_step

    x = torch.zeros(2, 64, 64, dtype=dtype)
    symmetric_product(x)
    symmetric_product(x.mT)
    symmetric_step(x, x, x, 1.0, 2.0)
    symmetric_step(x, x, x, 1.0, 2.0, torch.zeros_like(x), 3.0)
    symmetric_step(x, torch.zeros_like(x), x, 2.0)
    symmetric_product(torch.zeros(2, 48, 36, dtype=dtype))


def orthogonal_steps(product: torch.dtype, rows: int, columns: int) -> None:
    from rankwise.kernels.orthogonal_step import OrthogonalStep
    from rankwise.kernels.triton.orthogonal_steps import orthogonal_steps_

    pair = torch.ones(2, 2 * rows * columns)
    orthogonal_steps_([OrthogonalStep((rows, columns), pair[:1], pair[1:], 1e-7, 0.2, 0.1, 1)], product)


def factors(dtype: torch.dtype) -> None:
    from rankwise.mkor.cuda.factor_updates import update_factors_

    inverses = list(torch.zeros(2, 64, 64, dtype=dtype))
    update_factors_(inverses, torch.zeros(2, 64), decay=0.9, seen=torch.ones(2, dtype=torch.bool))


def preconditioning(dtype: torch.dtype, bias: bool, in_fp32: bool) -> None:
    from rankwise.mkor.cuda import preconditioning_together as together
    from rankwise.mkor.preconditioning import Gradient
    from rankwise.mkor.product_groups import ProductGroups

    found = Gradient(64, 64, [torch.zeros(4096)], [torch.zeros(64)] if bias else (), False, torch.eye(64), None)
    if in_fp32:
        together.precondition_into([[torch.zeros_like(run) for run in found.runs]], [found], dtype, True)
    else:
        arrangement = ProductGroups([found.form])
        together.preconditioned_as(arrangement, found.runs, [found.left], [found.right], dtype, True)


def low_rank_step(right: bool, side: int = 8) -> None:
    from rankwise.ldadam.cuda.low_rank_step import Factors, low_rank_step_

    part = [Factors(0, torch.zeros(side, 16), torch.zeros(16, side), torch.zeros(16, side))]
    weight, source = torch.zeros(2, side * side)
    errors = [torch.zeros(side * side, dtype=torch.bfloat16)]
    settings: dict[str, Any] = {"cols": side, "right": right, "lr": 0.1, "weight_decay": 0.1}
    low_rank_step_([weight], part, [source], errors, **settings)


def narrow(dtype: torch.dtype, length: int = 4096) -> Any:
    from rankwise.kernels.low_precision_runs import BLOCK, LowPrecisionRuns, blocks_of, is_coded

    lengths = (BLOCK, length)
    exponents = [torch.zeros(blocks_of(0, each), dtype=torch.int8) for each in lengths] if is_coded(dtype) else []
    return LowPrecisionRuns([torch.zeros(each, dtype=dtype) for each in lengths], exponents, [0, 0], [1, 2], 3)


def narrow_update(first: torch.dtype, second: torch.dtype) -> None:
    from rankwise.kernels import triton

    states = {"exp_avg": narrow(first), "exp_avg_sq": narrow(second), "reference": narrow(first)}
    wide = {name: [torch.zeros(64), torch.zeros(4096)] for name in ("grad", "param")}
    scalars = Scalars(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=2, k=0.5, advance=True, clip=1.0)
    triton.run(Pass("adamw", {**wide, **states}, scalars, torch.ones(2)))
    triton.squared_norms(wide["grad"], states["reference"], 0.5)


def quantization(dtype: torch.dtype) -> None:
    from rankwise.kernels.triton import launched_quantization as launched

    values, kept = [torch.zeros(64), torch.zeros(4096)], narrow(dtype)
    launched.encode_(values, kept)
    launched.encode_(values, kept, launched.exponents_of(values, kept))
    launched.decode_(values, kept)
    launched.add_decoded(values, kept, values)


def low_rank_matrices(rank: int) -> None:
    """Of halves beside float32, turned or not, and of float32."""
    from rankwise.ldadam.cuda.grouped_products import Operand, grouped_product_, judge_, operand_of, places_of
    from rankwise.ldadam.cuda.halves import in_halves
    from rankwise.ldadam.cuda.low_rank_moments import advance_moments_

    stack, square = torch.zeros(2, rank, 256), torch.zeros(2, rank, rank)
    halves = in_halves(list(stack))
    in_halves([stack], scaled=True)
    for strides in ((256, 1), (1, 256)):
        operand, matrix = operand_of(halves * 32, strides), operand_of(list(stack) * 32, strides)
        grouped_product_(torch.zeros(64, 256, 256), operand, operand.turned, 256)
        grouped_product_(torch.zeros(64, 256, 256), operand, matrix, 256)
    whole, failed = Operand(places_of(stack), (256, 1)), torch.zeros(2, dtype=torch.uint8)
    grouped_product_(square, whole, whole.turned, 256)
    judge_(square, square, torch.zeros(2, dtype=torch.int32), failed, 0.5)
    both = torch.zeros(2, 2, rank, rank, dtype=torch.bfloat16)
    grouped_product_(both, whole, whole.turned, 256, added=places_of(square), failed=failed)
    settings: dict[str, Any] = {"step": 2, "betas": (0.9, 0.99), "eps": 1e-8, "error_feedback": True}
    advance_moments_(stack, square, list(stack), list(stack), **settings)


CALLS: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (mars_adamw, (False,)),
    (mars_adamw, (True,)),
    (update, ("lion",)),
    (update, ("momentum",)),
    (update, ("nesterov", False)),
    (update, ("step", False)),
    (norms, (True,)),
    (norms, (False,)),
    (sonew, (0,)),
    (sonew, (1,)),
    (sonew, (1, True)),
    (sonew, (1, True, "adam_official")),
    (sonew, (4,)),
    (narrow_sonew, (0,)),
    (narrow_sonew, (1,)),
    (newton_schulz, (torch.bfloat16,)),
    (newton_schulz, (torch.float32,)),
    (factors, (torch.bfloat16,)),
    (preconditioning, (torch.bfloat16, False, False)),
    (preconditioning, (torch.bfloat16, True, True)),
    (step_of_products, (torch.bfloat16,)),
    (low_rank_step, (False,)),
    (low_rank_step, (False, 16)),
    (low_rank_matrices, (256,)),
    (narrow_update, (torch.int8, torch.uint8)),
    (narrow_update, (torch.bfloat16, torch.bfloat16)),
    (quantization, (torch.int8,)),
    (quantization, (torch.uint8,)),
    (orthogonal_steps, (torch.bfloat16, 128, 64)),
]
MORE = [
    (orthogonal_steps, (torch.float32, 64, 128)),
    *((sonew, (band,)) for band in (2, 3, 5, 6, 7, 8)),
    (narrow_sonew, (4,)),
    (narrow_sonew, (1, torch.uint8)),
    (preconditioning, (torch.float32, True, False)),
    (factors, (torch.float32,)),
    (low_rank_step, (True,)),
    (low_rank_step, (True, 16)),
    (low_rank_matrices, (16,)),
    (low_rank_matrices, (512,)),
]
