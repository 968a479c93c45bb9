"""The examples' modules, and one process of numpy that does in float64 what their papers say."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from example_files import EXAMPLES

__all__ = ["EXAMPLES", "Oracle", "load"]


def load() -> tuple[ModuleType, ModuleType]:
    """SOAP's module and Signum's, registered."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    from rankwise.names import BY_NAME

    found = []
    for name, spelling in (("soap", "soap"), ("signsgd", "signsgd")):
        module = importlib.import_module(name)
        if spelling not in BY_NAME:
            module = importlib.reload(module)
        found.append(module)
    return found[0], found[1]


class Oracle:
    """SOAP, Signum or AdamW on whole float64 arrays.

    Args:
        weights: First weights by name.
        rule: "soap" or "signsgd".
        plain: Parameters that take AdamW under SOAP.
        options: lr, weight_decay, betas, eps, frequency, longest (a side that is rotated), momentum.
    """

    def __init__(self, weights: Mapping[str, np.ndarray], rule: str, plain: Sequence[str] = (), **options: Any) -> None:
        self.weights = {name: value.astype(np.float64) for name, value in weights.items()}
        self._rule, self._plain = rule, plain
        self._o = {"lr": 1e-2, "weight_decay": 0.0, "betas": (0.95, 0.95), "eps": 1e-8, "momentum": 0.9} | options
        self._states: dict[str, dict[str, Any]] = {name: {"t": 0} for name in weights}

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        for name, gradient in gradients.items():
            G, s, o = gradient.astype(np.float64), self._states[name], self._o
            if self._rule == "signsgd":
                s["m"] = o["momentum"] * s.get("m", 0.0) + (1 - o["momentum"]) * G
                update = np.sign(s["m"])
            elif name in self._plain or G.ndim < 2:
                update = self._adam(G, G, s, lambda x: x)
            else:
                update = self._soap(G, s)
            if update is not None:
                self.weights[name] *= 1 - o["lr"] * o["weight_decay"]
                self.weights[name] -= o["lr"] * update

    def _adam(self, G: np.ndarray, seen: np.ndarray, s: dict[str, Any], rotate: Any) -> np.ndarray:
        (b1, b2), eps = self._o["betas"], self._o["eps"]
        s["t"] += 1
        s["M"] = b1 * s.get("M", np.zeros_like(G)) + (1 - b1) * G
        s["V"] = b2 * s.get("V", np.zeros_like(G)) + (1 - b2) * seen * seen
        first, second = rotate(s["M"]) / (1 - b1 ** s["t"]), s["V"] / (1 - b2 ** s["t"])
        return first / (np.sqrt(second) + eps)

    def _soap(self, G: np.ndarray, s: dict[str, Any]) -> np.ndarray | None:
        b2, longest = self._o["betas"][1], self._o.get("longest", 10_000)
        sides = [axis for axis in (0, 1) if G.shape[axis] <= longest]
        products = {0: G @ G.T, 1: G.T @ G}
        update = None
        if "Q" in s:
            Q = [s["Q"].get(axis, np.eye(G.shape[axis])) for axis in (0, 1)]
            update = Q[0] @ self._adam(G, Q[0].T @ G @ Q[1], s, lambda x: Q[0].T @ x @ Q[1]) @ Q[1].T
        s["P"] = {axis: b2 * s.get("P", {}).get(axis, 0.0) + (1 - b2) * products[axis] for axis in sides}
        if "Q" not in s:
            s["Q"] = {axis: np.linalg.eigh(s["P"][axis])[1][:, ::-1] for axis in sides}
        elif s["t"] % self._o.get("frequency", 10) == 0:
            for axis in sides:
                P, Q0 = s["P"][axis], s["Q"][axis]
                order = np.argsort(-np.diag(Q0.T @ P @ Q0), kind="stable")
                s["V"] = np.take(s["V"], order, axis)
                s["Q"][axis] = np.linalg.qr(P @ Q0[:, order])[0]
        return update
