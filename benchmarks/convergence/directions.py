"""How near MKOR's direction comes to that of K-FAC with dense factors, along one training run of E2's autoencoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor, nn

from benchmarks.convergence.autoencoders import E2
from benchmarks.convergence.optimizers import make_optimizer
from benchmarks.convergence.plots import COLORS
from benchmarks.convergence.rivals.dense import Layer
from benchmarks.convergence.runner import schedule
from benchmarks.convergence.tasks import Autoencoder, make_task
from benchmarks.performance import markdown

matplotlib.use("Agg")
import matplotlib.pyplot as plt

__all__ = ["SHADOWS", "directions_section", "draw_directions", "measure_directions"]

Row = dict[str, Any]

_MKOR = {"backend": "sgd", "momentum": 0.0}
SHADOWS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gradient": ("sgd", {}),
    "MKOR": ("mkor", _MKOR),
    "MKOR, every step": ("mkor", {**_MKOR, "update_interval": 1}),
    "MKOR, rule ema, every step": ("mkor", {**_MKOR, "update_interval": 1, "rule": "ema"}),
    "MKOR, rule ema, every step, stabilizer at 20": (
        "mkor",
        {**_MKOR, "update_interval": 1, "rule": "ema", "stabilizer": (20.0, 0.9)},
    ),
    "MKOR, decay 0.5": ("mkor", {**_MKOR, "factor_decay": 0.5}),
    "MKOR, factors in bfloat16": ("mkor", {**_MKOR, "factor_dtype": "bfloat16"}),
    "MKOR, output gain 10": ("mkor", {**_MKOR, "output_gain": 10.0}),
    "MKOR, output gain 100": ("mkor", {**_MKOR, "output_gain": 100.0}),
    "Eva": ("eva", {"momentum": 0.0, "damping": 3e-2}),
    "K-FAC of batches": ("kfac", {"momentum": 0.0, "damping": 1e-2}),
}
"""Optimizers that see every step of the run and change nothing."""

_DAMPING = 1e-2
_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class _Dense:
    """Dense factors of a layer over all images, and what their first directions hold of them.

    Attributes:
        right: Inverse of the damped input factor.
        left: Inverse of the damped factor of output gradients.
        facts: Shares of the factors' traces.
    """

    right: Tensor
    left: Tensor
    facts: Mapping[str, float]


def measure_directions(
    steps: int = E2.steps, seed: int = 1, lr: float = 8e-3, task: Mapping[str, Any] | None = None
) -> list[Row]:
    """Train with MKOR on SGD, and ask every shadow for its direction at some of the steps.

    Args:
        steps: Steps of the run.
        seed: Seed of weights and order.
        lr: Lr of the optimizer that trains; the shadows step with 1 and are taken back.
        task: E2's by default.

    Returns:
        A row per step, shadow and layer: the cosine of its direction with the dense one, and shares of the dense
        factors' traces that their largest eigenvalue holds and that MKOR's own vector holds.
    """
    made = make_task(task or E2.task, seed)
    assert isinstance(made, Autoencoder)
    trainer = make_optimizer("mkor", made.model, lr, {"backend": "sgd"})
    shadows = {name: make_optimizer(kind, made.model, 1.0, options) for name, (kind, options) in SHADOWS.items()}
    layers = [Layer(module).watch() for module in made.model.modules() if isinstance(module, nn.Linear)]
    looked_at = {round(share * (steps - 1)) for share in _SHARES}
    rows: list[Row] = []
    for step in range(steps):
        trainer.param_groups[0]["lr"] = lr * schedule(step, steps)
        for optimizer in (trainer, *shadows.values()):
            optimizer.zero_grad()  # what the passes over all images have shown is no statistic of a step
        made.gradient(step)
        grads = [layer.grad for layer in layers]
        moved = {name: _moved(shadow, layers) for name, shadow in shadows.items()}
        trainer.step()
        if step in looked_at:
            for place, (dense, grad) in enumerate(zip(_dense(made, layers), grads, strict=True)):
                wanted = dense.left @ grad @ dense.right
                rows += [
                    {"step": step, "layer": place, "name": name, "cosine": _cosine(found[place], wanted)} | dense.facts
                    for name, found in moved.items()
                ]
    return rows


def _moved(shadow: Any, layers: list[Layer]) -> list[Tensor]:
    """What a step with a learning rate of one takes off the weights, which are put back, as are the gradients."""
    parameters = [parameter for layer in layers for parameter in layer.module.parameters()]
    before = [(parameter.detach().clone(), parameter.grad.clone()) for parameter in parameters]
    old = [_joined(layer) for layer in layers]
    shadow.step()
    found = [was - _joined(layer) for was, layer in zip(old, layers, strict=True)]
    with torch.no_grad():
        for parameter, (weight, grad) in zip(parameters, before, strict=True):
            parameter.copy_(weight)
            parameter.grad.copy_(grad)
    return found


def _joined(layer: Layer) -> Tensor:
    return torch.cat([layer.module.weight.detach(), layer.module.bias.detach()[:, None]], 1)


def _cosine(one: Tensor, other: Tensor) -> float:
    return round(float((one * other).sum() / (one.norm() * other.norm()).clamp(min=1e-30)), 4)


def _dense(task: Autoencoder, layers: list[Layer]) -> list[_Dense]:
    """K-FAC's factors at the present weights over all images of the training set."""
    kept = [layer.module.weight.grad.clone() for layer in layers], [layer.module.bias.grad.clone() for layer in layers]
    task.everything().backward()
    found = [_factors(layer) for layer in layers]
    for layer, weight, bias in zip(layers, *kept, strict=True):
        layer.module.weight.grad, layer.module.bias.grad = weight, bias
    return found


def _factors(layer: Layer) -> _Dense:
    count = len(layer.inputs)
    inputs = layer.inputs.T @ layer.inputs / count
    outputs = layer.output_grads.T @ layer.output_grads * count
    share = (inputs.diagonal().mean() / outputs.diagonal().mean().clamp(min=1e-30)).sqrt()
    damped = [
        factor + damping * torch.eye(len(factor))
        for factor, damping in ((inputs, _DAMPING**0.5 * share), (outputs, _DAMPING**0.5 / share))
    ]
    facts = {
        "input_top": float(torch.linalg.eigvalsh(inputs)[-1] / inputs.trace()),
        "input_mean": float(layer.inputs.mean(0).square().sum() / inputs.trace()),
        "output_top": float(torch.linalg.eigvalsh(outputs)[-1] / outputs.trace()),
        "output_mean": float(layer.output_grads.sum(0).square().sum() / outputs.trace()),
    }
    facts = {name: float(f"{value:.3g}") for name, value in facts.items()}
    return _Dense(torch.linalg.inv(damped[0]), torch.linalg.inv(damped[1]), facts)


def mean_of(rows: list[Row], key: str, **chosen: Any) -> float:
    """The mean of a figure over the rows that have given values."""
    found = [row[key] for row in rows if all(row[name] == value for name, value in chosen.items())]
    return sum(found) / len(found)


def draw_directions(rows: list[Row], path: Path) -> None:
    """Cosines with the dense direction over the run, means over the layers.

    Args:
        rows: From :func:`measure_directions`.
        path: PNG file to write.
    """
    figure, axes = plt.subplots(figsize=(9, 5))
    axes.set_prop_cycle(color=COLORS)
    steps = sorted({row["step"] for row in rows})
    for name in SHADOWS:
        axes.plot(steps, [mean_of(rows, "cosine", step=step, name=name) for step in steps], marker="o", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("cosine with dense K-FAC's direction, mean over layers")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


_EXPLAINED = """
### MKOR's direction beside dense K-FAC's

One run of E2's autoencoder with MKOR on SGD (learning rate 0.008, seed 1). At some of its steps the gradient goes
through the preconditioners below, none of which moves the weights, and the result is compared with K-FAC's dense
factors of *all* images at the present weights (damping 0.01): cosines, mean over the layers. "K-FAC of batches" has the
same factors from running averages over batches, every ten steps. `python -m benchmarks directions` repeats it.
"""

_SPECTRA = """
What one vector can hold of a factor: the share of its trace in the largest eigenvalue, and along the mean that MKOR
keeps; means over the layers.
"""


def directions_section(rows: list[Row]) -> str:
    """Part of the page; empty without rows.

    Args:
        rows: From :func:`measure_directions`.
    """
    if not rows:
        return ""
    steps = sorted({row["step"] for row in rows})
    headings = ("direction", *(f"step {step}" for step in steps))
    cosines = [
        (name, *(f"{mean_of(rows, 'cosine', step=step, name=name):.2f}" for step in steps))
        for name in dict.fromkeys(row["name"] for row in rows)
    ]
    words = {
        "input_top": "inputs: largest eigenvalue",
        "input_mean": "inputs: mean input",
        "output_top": "output gradients: largest eigenvalue",
        "output_mean": "output gradients: mean",
    }
    shares = [(text, *(f"{mean_of(rows, key, step=step):.2g}" for step in steps)) for key, text in words.items()]
    plot = "\n![cosines with dense K-FAC's direction](images/evidence-directions.png)\n"
    table = markdown(("share of the trace", *headings[1:]), shares)
    return f"{_EXPLAINED}\n{markdown(headings, cosines)}{plot}{_SPECTRA}\n{table}\n{_summary(rows)}"


def _summary(rows: list[Row]) -> str:
    """What the tables say, in words, over the later half of the run."""
    late = [row for row in rows if 2 * row["step"] > rows[-1]["step"]]
    cosine = {name: mean_of(late, "cosine", name=name) for name in dict.fromkeys(row["name"] for row in late)}
    share = {key: mean_of(late, key) for key in ("input_mean", "input_top", "output_mean", "output_top")}
    variants = {name: value for name, value in cosine.items() if name.startswith("MKOR, ")}
    text = (
        f"In the later half of the run MKOR's direction has a cosine of {cosine['MKOR']:.2f} with the dense one, the\n"
        f"gradient {cosine['gradient']:.2f}. The mean input holds {share['input_mean']:.2f} of the trace of its factor,"
        f" where the largest eigenvalue holds {share['input_top']:.2f};\nthe mean output gradient "
        f"{share['output_mean']:.3f} where the largest eigenvalue holds {share['output_top']:.2f}: gradients of samples"
        " cancel in their\nmean, so that MKOR preconditions the side of the inputs and hardly that of the outputs."
    )
    if variants:
        low, high = min(variants, key=variants.__getitem__), max(variants, key=variants.__getitem__)
        text += f"\nIts options move the cosine from {variants[low]:.2f} ({low}) to {variants[high]:.2f} ({high})."
    return text + "\n"
