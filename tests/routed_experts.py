"""Experts that are linear modules with tokens routed to them, and what MKOR makes of them, by explicit inverses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, EXPERTS, STEPS, INTERVAL, TOKENS = 6, 5, 9, 2, 12
LR, MOMENTUM = 0.05, 0.8
# Tokens of each expert at each step, in this order: ranks have a slice each, so that most experts have all of theirs on
# one. The last expert never has any, expert 3 none at first; expert 1 has none at a factor step in the middle.
ROUTED = [
    [7, 1, 4, 0, 0],
    [3, 5, 4, 0, 0],
    [9, 0, 3, 0, 0],
    [1, 1, 9, 1, 0],
    [2, 3, 1, 6, 0],
    [4, 4, 0, 4, 0],
    [0, 5, 3, 4, 0],
    [1, 6, 1, 4, 0],
    [0, 5, 5, 2, 0],
]


class Expert(nn.Module):
    """A two-layer perceptron, as Mixtral's and Qwen's are."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 9, bias=False)
        self.down = nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Routed(nn.Module):
    """Every token goes to the expert that is named for it; an expert without tokens is called, or is not."""

    def __init__(self, calls_idle: bool) -> None:
        super().__init__()
        self.calls_idle = calls_idle
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        h = torch.tanh(self.mix(x))
        result = h.clone()
        for number, expert in enumerate(self.experts):
            (where,) = torch.where(chosen == number)
            if len(where) or self.calls_idle:
                result = result.index_add(0, where, expert(h[where]))
        return result


def make(calls_idle: bool) -> Routed:
    torch.manual_seed(0)
    return Routed(calls_idle).double()


def data(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64) + 0.3
    chosen = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(ROUTED[step]))
    return x, chosen, torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)


class Dense:
    """The published update by explicit inverses of one weight, with momentum; its bias is the last column."""

    def __init__(self) -> None:
        self.inverse: dict[str, Tensor] = {}
        self.momentum: Tensor | None = None
        self.count = self.moved = 0
        self.left_out = False

    def _move(self, side: str, vector: Tensor) -> None:
        eye = torch.eye(len(vector), dtype=vector.dtype)
        J = self.inverse.get(side, eye)
        if J.abs().sum(1).max() > 2.0:
            J = 0.9 * J + 0.1 * eye
        held = torch.linalg.inv(0.95 * J + 0.05 * eye)
        self.inverse[side] = torch.linalg.inv(held + torch.outer(vector, vector))

    def step(self, D: Tensor, inputs: Tensor, outputs: Tensor, lr: float = LR) -> Tensor:
        """The change of the weight (outputs, inputs), by its gradient and what each token brings to it.

        Args:
            D: The gradient.
            inputs: Inputs of each token (tokens, inputs).
            outputs: The loss's gradient with respect to each token's outputs (tokens, outputs).
            lr: Learning rate.
        """
        due, first = self.count % INTERVAL == 0, self.count == 0
        self.count += 1
        if due and len(inputs) and not self.left_out:
            self._move("right", inputs.mean(0))
            self._move("left", outputs.sum(0))
            self.moved += 1
        elif due:
            # What has no token at first gets factors when a factor step finds some; the next one moves them.
            self.left_out = (self.left_out or first) and not len(inputs)
        V = D
        if self.inverse:
            V = self.inverse["left"] @ D @ self.inverse["right"]
            V = V * (D.norm() / V.norm()) if V.norm() > 0 else V
        self.momentum = V if self.momentum is None else MOMENTUM * self.momentum + V
        return self.momentum * lr


def by_hand(calls_idle: bool) -> tuple[dict[str, Tensor], dict[str, int]]:
    """One process, forward and backward written out, all tokens at once; also how often factors have moved."""
    named = {name: p.detach().clone() for name, p in make(calls_idle).named_parameters()}
    layers = ["mix"] + [f"experts.{n}.{part}" for n in range(EXPERTS) for part in ("up", "down")]
    dense = {name: Dense() for name in layers}
    for step in range(STEPS):
        x, chosen, y = data(step)
        h = torch.tanh(x @ named["mix.weight"].T + named["mix.bias"])
        result = h.clone()
        inner = {}
        for n in range(EXPERTS):
            mine = chosen == n
            inner[n] = torch.tanh(h[mine] @ named[f"experts.{n}.up.weight"].T)
            result[mine] += inner[n] @ named[f"experts.{n}.down.weight"].T + named[f"experts.{n}.down.bias"]
        back = 2 * (result - y) / result.numel() * 4
        dh = back.clone()
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for n in range(EXPERTS):
            mine = chosen == n
            d_up = (back[mine] @ named[f"experts.{n}.down.weight"]) * (1 - inner[n] ** 2)
            found[f"experts.{n}.up"] = h[mine], d_up
            found[f"experts.{n}.down"] = inner[n], back[mine]
            dh[mine] += d_up @ named[f"experts.{n}.up.weight"]
        found["mix"] = x, dh * (1 - h**2)
        for name, (inputs, outputs) in found.items():
            if not len(inputs) and not calls_idle:
                continue  # no gradient: torch's optimizers leave it alone
            has_bias = f"{name}.bias" in named
            a = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1) if has_bias else inputs
            change = dense[name].step(outputs.T @ a, a, outputs)
            width = inputs.shape[1]
            named[f"{name}.weight"] -= change[:, :width]
            if has_bias:
                named[f"{name}.bias"] -= change[:, width]
    return named, {name: layer.moved for name, layer in dense.items()}
