"""What rounding on GPUs does to training, tried on CPUs: LDAdam's halves, MARS-M's float16 on Gram matrices.

A byte-level transformer (2 layers, width 64) learns Python's standard library with the rounding of CPUs and with that
of GPUs, from the same weights on the same samples. The command is ``python -m benchmarks.device_numerics FILE.json``.
"""

from __future__ import annotations

import json
import statistics
import sys
import sysconfig
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import rankwise

__all__ = ["ARMS", "Halves", "interval", "trained"]

WIDTH, HEADS, CONTEXT, BATCH, STEPS, SEEDS = 64, 4, 64, 16, 300, (0, 1, 2)
_T = 4.303  # Student's, 95 %, of three differences.


class Halves(TorchDispatchMode):
    """Multiplies float32 matrices as three products of bfloat16 halves."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        matrices = args[-2:]
        known = func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        if not known or any(matrix.dtype != torch.float32 for matrix in matrices):
            return func(*args, **(kwargs or {}))
        high = [matrix.bfloat16().float() for matrix in matrices]
        low = [(matrix - top).bfloat16().float() for matrix, top in zip(matrices, high, strict=True)]
        return func(high[0], high[1]) + (func(high[0], low[1]) + func(low[0], high[1]))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attn_in, self.attn_out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_in, self.mlp_out = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.attn_in(self.norms[0](x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attn_out(mixed)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norms[1](x))))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(_Block(), _Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def _ldadam(model: nn.Module) -> Any:
    return rankwise.LDAdam(list(model.named_parameters()), lr=3e-3, rank=16)


def _mars_m(dtype: str) -> Callable[[nn.Module], Any]:
    return lambda model: rankwise.MARS(list(model.named_parameters()), lr=1.2e-2, variant="muon", ns_dtype=dtype)


ARMS: dict[str, tuple[Callable[[nn.Module], Any], bool]] = {
    "LDAdam, float32": (_ldadam, False),
    "LDAdam, halves": (_ldadam, True),
    "MARS-M, bfloat16": (_mars_m("bfloat16"), False),
    "MARS-M, float16": (_mars_m("float16"), False),
}
"""Optimizer, and whether its products are of halves."""
PAIRS = (("LDAdam, halves", "LDAdam, float32"), ("MARS-M, float16", "MARS-M, bfloat16"))


@cache
def _corpus() -> tuple[Tensor, Tensor]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]


def _batch(tokens: Tensor, source: torch.Generator, size: int) -> Tensor:
    starts = torch.randint(0, len(tokens) - CONTEXT - 1, (size, 1), generator=source)
    return tokens[starts + torch.arange(CONTEXT + 1)]


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def trained(name: str, seed: int, steps: int = STEPS) -> float:
    """Train an arm of :data:`ARMS`, and return its loss on held-out text, in nats per byte."""
    build, halved = ARMS[name]
    torch.manual_seed(seed)
    model = _Model()
    optimizer, source = build(model), torch.Generator().manual_seed(seed)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        share = min(1.0, (step + 1) / (0.1 * steps)) * (1 - step / steps)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        _loss(model, _batch(_corpus()[0], source, BATCH)).backward()
        with Halves() if halved else nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return _loss(model, _batch(_corpus()[1], torch.Generator().manual_seed(99), 256)).item()


def interval(differences: list[float]) -> tuple[float, float]:
    """Return the mean of three differences and half of its 95 % interval."""
    return statistics.mean(differences), _T * statistics.stdev(differences) / len(differences) ** 0.5


def main(output: Path) -> None:
    """Train all arms, and write losses and differences."""
    losses: dict[str, list[float]] = {}
    for name in ARMS:
        losses[name] = [trained(name, seed) for seed in SEEDS]
        print(name, losses[name], flush=True)
    rows = []
    for new, old in PAIRS:
        mean, half = interval([a - b for a, b in zip(losses[new], losses[old], strict=True)])
        rows.append({"arm": new, "beside": old, "difference": mean, "half_interval": half})
    about = {"torch": torch.__version__, "steps": STEPS, "seeds": SEEDS}
    output.write_text(json.dumps({"about": about, "losses": losses, "differences": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
