"""Diffs of docs/choose.md: one step and a few of theirs and of ours, from the same gradients, are of the same size.

Settings are read from the page. Theirs are torch's and DeepSpeed's own classes where these are installed, else a few
lines from the paper's formula. Where the page gives a factor, the factor is computed, and the page's numbers with it.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rankwise.names import BY_NAME

PAGE = (Path(__file__).resolve().parent.parent / "docs/choose.md").read_text()
SHAPES = {"up.weight": (256, 64), "down.weight": (64, 256), "square.weight": (128, 128), "norm.weight": (128,)}
STEPS = 3
Weights = dict[str, Tensor]


class Diff(NamedTuple):
    """A diff of the page: what stood there, and what is to stand there."""

    theirs: str
    ours: str


def diffs(section: str) -> list[Diff]:
    text = PAGE.split(f"\n## Coming from {section}\n")[1].split("\n## ")[0]
    found = []
    for block in re.findall(r"```diff\n(.*?)```", text, re.DOTALL):
        lines = block.splitlines()
        found.append(Diff(*("\n".join(line[1:] for line in lines if line[0] in f" {sign}") for sign in "-+")))
    return found


def settings(text: str) -> tuple[str, dict[str, Any]]:
    """The optimizer's name and its options, from a JSON block, a constructor's call, or a command line."""
    if text.startswith('"optimizer"'):
        block = json.loads("{" + text + "}")["optimizer"]
        return block["type"].lower(), block["params"]
    if text.startswith("pretrain_gpt.py"):
        flags = dict(re.findall(r"--([\w-]+) ((?:[^-\s]\S*\s?)+)", text))
        name = flags.pop("optimizer").strip()
        values = {key.removeprefix("mars-").replace("-", "_"): value.split() for key, value in flags.items()}
        return name, {
            key: [_value(each) for each in value] if len(value) > 1 else _value(value[0])
            for key, value in values.items()
        }
    call = ast.parse(text).body[0].value  # type: ignore[attr-defined]
    options = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    groups = call.args[0]
    if isinstance(groups, ast.List):  # GaLore's: what the first group says of matrices
        of_matrices = groups.elts[0]
        options |= {
            k.value: v.value
            for k, v in zip(of_matrices.keys, of_matrices.values, strict=True)
            if isinstance(v, ast.Constant)
        }  # type: ignore[attr-defined]
    return ast.unparse(call.func), options


def _value(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def start(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Weights:
    torch.manual_seed(1)
    return {name: torch.randn(shape) / math.sqrt(shape[-1]) for name, shape in shapes.items()}


def gradients(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> list[Weights]:
    """Of some steps: alike, as successive batches' are."""
    torch.manual_seed(2)
    base = {name: torch.randn(shape) for name, shape in shapes.items()}
    return [{name: grad + 0.2 * torch.randn(grad.shape) for name, grad in base.items()} for _ in range(STEPS)]


def sizes(
    build: Callable[[dict[str, nn.Parameter]], Any], given: Mapping[str, tuple[int, ...]] = SHAPES
) -> list[dict[str, float]]:
    """Root mean square of the change of each weight, by step."""
    parameters = {name: nn.Parameter(weight) for name, weight in start(given).items()}
    optimizer, found = build(parameters), []
    for grads in gradients(given):
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.grad = grads[name].clone()
        optimizer.step()
        changes = {name: parameter.detach() - before[name] for name, parameter in parameters.items()}
        found.append({name: float(change.square().mean().sqrt()) for name, change in changes.items()})
    return found


def ours(name: str, options: Mapping[str, Any]) -> Callable[[dict[str, nn.Parameter]], Any]:
    named = BY_NAME["mars" if name == "MARS" else name.lower()]
    further = {"rule": "sketch"} if named.optimizer.__name__ == "MKOR" else {}
    keywords = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return lambda parameters: named.optimizer(list(parameters.items()), **{**further, **named.preset, **keywords})


def compare(
    theirs: list[dict[str, float]],
    found: list[dict[str, float]],
    factor: Callable[[str], float] = lambda _: 1.0,
    tolerance: float = 0.05,
) -> None:
    for step, (expected, actual) in enumerate(zip(theirs, found, strict=True)):
        for name, size in actual.items():
            if name in expected:
                ratio = size / expected[name] / factor(name)
                assert abs(ratio - 1) < tolerance, f"step {step}, {name}: {ratio:.3f} times theirs"


# --- theirs, from their papers ---------------------------------------------------------------------------------------


class Oracle:
    """An optimizer of a few lines: the direction of every weight, to be subtracted."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], direction: Callable[[str, Tensor, Tensor, dict[str, Any]], Tensor]
    ) -> None:
        self._parameters, self._direction = parameters, direction
        self._state: dict[str, dict[str, Any]] = {name: {"step": 0} for name in parameters}

    @torch.no_grad()
    def step(self) -> None:
        for name, parameter in self._parameters.items():
            self._state[name]["step"] += 1
            assert parameter.grad is not None
            parameter -= self._direction(name, parameter, parameter.grad, self._state[name])


def adam(grad: Tensor, state: dict[str, Any], betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> Tensor:
    """Kingma and Ba, Algorithm 1."""
    first, second = state.get("m", torch.zeros_like(grad)), state.get("v", torch.zeros_like(grad))
    state["m"] = first = betas[0] * first + (1 - betas[0]) * grad
    state["v"] = second = betas[1] * second + (1 - betas[1]) * grad**2
    t = state["step"]
    return (first / (1 - betas[0] ** t)) / ((second / (1 - betas[1] ** t)).sqrt() + eps)


def orthogonal(matrix: Tensor) -> Tensor:
    """Jordan et al., Muon: five quintic iterations."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / matrix.norm()
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if turned else x


def muon(lr: float, momentum: float, decay: float, scale: Callable[[int, int], float]) -> Callable[..., Tensor]:
    def direction(name: str, weight: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        state["m"] = momentum * state.get("m", torch.zeros_like(grad)) + (1 - momentum) * grad
        return lr * (scale(*grad.shape) * orthogonal((1 - momentum) * grad + momentum * state["m"]) + decay * weight)

    return direction


def matrices(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in parameters.items() if parameter.ndim == 2}


# --- AdamW -----------------------------------------------------------------------------------------------------------


def test_from_adamw_to_mkor() -> None:
    theirs, mine = map(settings, diffs("AdamW")[0])
    assert theirs[0] == "adamw"
    compare(sizes(lambda own: torch.optim.AdamW(own.values(), **theirs[1])), sizes(ours(*mine)))


def test_from_adamw_to_ldadam_by_the_page_s_factor() -> None:
    """The fallback by the ratio of the rates, matrices by the root that the page gives."""
    theirs, mine = map(settings, diffs("AdamW")[1])
    assert theirs[0] == "torch.optim.AdamW"
    assert "√(rank / short side) times the root mean square of AdamW's at the same rate" in PAGE
    rank, rates = mine[1]["rank"] // 8, mine[1]["lr"] / theirs[1]["lr"]  # the page's rank, of narrower matrices
    mine[1]["rank"] = rank
    assert (
        rates * math.sqrt(rank / (4 * rank)) == 1.0
        and "a quarter of the width\ntwice the rate is the same size" in PAGE
    )
    shapes = {"square.weight": (4 * rank, 4 * rank), "wide.weight": (4 * rank, 8 * rank), "norm.weight": (64,)}
    expected = sizes(lambda own: torch.optim.AdamW(own.values(), **theirs[1]), shapes)[:1]
    found = sizes(ours(*mine), shapes)[:1]
    compare(expected, found, lambda name: rates * (math.sqrt(rank / min(shapes[name])) if "norm" not in name else 1.0))


# --- Muon ------------------------------------------------------------------------------------------------------------


def _deepspeed_muon(options: dict[str, Any]) -> Callable[[dict[str, nn.Parameter]], Any]:
    original = pytest.importorskip("deepspeed.runtime.zero.muon.original_muon")
    # As they are written: what torch compiles of them for AVX2 alone returns NaN.
    for name in ("zeropower_via_newtonschulz5", "zeropower_via_gram_newtonschulz", "muon_update"):
        function = getattr(original, name)
        setattr(original, name, getattr(function, "_torchdynamo_orig_callable", function))

    def build(own: dict[str, nn.Parameter]) -> Any:
        some = list(matrices(own).values())
        rest = [parameter for parameter in own.values() if parameter.ndim < 2]
        decay = options["weight_decay"]
        return original.SingleDeviceMuonWithAuxAdam(
            [
                {
                    "params": some,
                    "use_muon": True,
                    "lr": options["muon_lr"],
                    "momentum": options["momentum"],
                    "weight_decay": decay,
                },
                {"params": rest, "use_muon": False, "lr": options["adam_lr"], "weight_decay": decay},
            ]
        )

    return build


def test_from_deepspeed_s_muon_at_the_same_rates() -> None:
    theirs, mine = map(settings, diffs("Muon")[0])
    assert theirs[0] == "muon" and mine[1]["lr"] == theirs[1]["muon_lr"] and mine[1]["lr_1d"] == theirs[1]["adam_lr"]
    compare(sizes(_deepspeed_muon(theirs[1])), sizes(ours(*mine)))


def _page_s_factor(rows: int, columns: int) -> float:
    assert "0.2 √max(rows, columns) / √max(1, rows / columns) times as large" in PAGE
    return 0.2 * math.sqrt(max(rows, columns)) / math.sqrt(max(1, rows / columns))


def test_from_deepspeed_s_muon_to_the_other_scale_by_the_page_s_factor() -> None:
    theirs, mine = map(settings, diffs("Muon")[1])
    assert mine[0] == "mars-m" and 4 <= mine[1]["lr"] / theirs[1]["adam_lr"] <= 5
    rates = mine[1]["lr"] / theirs[1]["muon_lr"]
    factors = {name: rates * _page_s_factor(*shape) for name, shape in SHAPES.items() if len(shape) == 2}
    compare(sizes(_deepspeed_muon(theirs[1])), sizes(ours(*mine)), lambda name: factors.get(name, 1.0))
    for said, width in re.findall(r"([\d.]+) times (?:at a width of|at) ([\d,]+)", PAGE.replace("\n", " ")):
        assert float(said) == round(
            _page_s_factor(int(width.strip(",").replace(",", "")), int(width.strip(",").replace(",", ""))), 1
        )


@pytest.mark.parametrize("which", [2, 3])
def test_from_torch_s_muon(which: int) -> None:
    theirs, mine = map(settings, diffs("Muon")[which])
    assert theirs[0] == "torch.optim.Muon" and mine[1]["lr"] == theirs[1]["lr"]
    expected = sizes(lambda own: torch.optim.Muon(matrices(own).values(), **theirs[1]), _matrices_alone())
    compare(expected, sizes(ours(*mine), _matrices_alone()))


def _matrices_alone() -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in SHAPES.items() if len(shape) == 2}


def test_from_dion_s_muon() -> None:
    theirs, mine = map(settings, diffs("Muon")[4])
    assert theirs[0] == "dion.Muon" and theirs[1]["adjust_lr"] == "spectral_norm"
    rule = muon(
        theirs[1]["lr"], theirs[1]["mu"], theirs[1]["weight_decay"], lambda rows, columns: math.sqrt(rows / columns)
    )
    compare(sizes(lambda own: Oracle(own, rule), _matrices_alone()), sizes(ours(*mine), _matrices_alone()))


def test_from_megatron_s_muon() -> None:
    theirs, mine = map(settings, diffs("Muon")[5])
    assert theirs[1]["muon_scale_mode"] == "spectral"
    extra = theirs[1]["muon_extra_scale_factor"]
    rule = muon(
        theirs[1]["lr"], theirs[1]["muon_momentum"], 0.0, lambda rows, columns: extra * math.sqrt(max(rows, columns))
    )
    compare(sizes(lambda own: Oracle(own, rule), _matrices_alone()), sizes(ours(*mine), _matrices_alone()))


# --- the rest --------------------------------------------------------------------------------------------------------


def test_from_shampoo_with_adam_s_graft() -> None:
    """Gupta et al.: L and R are sums of GG' and G'G, and the step is L^-1/4 G R^-1/4 with the norm of Adam's."""
    theirs, mine = map(settings, (diffs("Shampoo")[0].theirs, diffs("Shampoo")[0].ours.splitlines()[0]))
    assert theirs[0] == "DistributedShampoo"

    def root(matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.T

    def direction(name: str, weight: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        graft = adam(grad, state)
        if grad.ndim < 2:
            return theirs[1]["lr"] * graft
        state["L"] = state.get("L", 1e-12 * torch.eye(grad.shape[0])) + grad @ grad.T
        state["R"] = state.get("R", 1e-12 * torch.eye(grad.shape[1])) + grad.T @ grad
        step = root(state["L"]) @ grad @ root(state["R"])
        return theirs[1]["lr"] * step * graft.norm() / step.norm()

    compare(sizes(lambda own: Oracle(own, direction)), sizes(ours(*mine)))


def test_from_galore() -> None:
    """Zhao et al., Algorithm 2: Adam in the span of the leading singular vectors, times the scale."""
    theirs, mine = map(settings, diffs("GaLore")[0])
    rank, lr, scale = (theirs[1][key] for key in ("rank", "lr", "scale"))
    assert theirs[0] == "GaLoreAdamW" and mine[1]["lr"] == lr * scale and mine[1]["rank"] == rank
    rank = mine[1]["rank"] = rank // 8  # of narrower matrices
    shapes = {"square.weight": (4 * rank, 4 * rank), "wide.weight": (3 * rank, 8 * rank)}

    def direction(name: str, weight: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if "basis" not in state:
            state["basis"] = torch.linalg.svd(grad, full_matrices=False).U[:, :rank]
        return lr * scale * state["basis"] @ adam(state["basis"].T @ grad, state)

    compare(sizes(lambda own: Oracle(own, direction), shapes)[:1], sizes(ours(*mine), shapes)[:1])


def test_from_lamb() -> None:
    """You et al., Algorithm 2."""
    theirs, mine = map(settings, diffs("LAMB")[0])
    options = theirs[1]

    def direction(name: str, weight: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        step = adam(grad, state, tuple(options["betas"])) + options["weight_decay"] * weight
        return options["lr"] * weight.norm() / step.norm() * step

    compare(sizes(lambda own: Oracle(own, direction)), sizes(ours(*mine)))


def test_from_lion() -> None:
    """Chen et al., Algorithm 2."""
    theirs, mine = map(settings, diffs("Lion")[0])
    options = theirs[1]

    def direction(name: str, weight: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        momentum, (one, two) = state.get("m", torch.zeros_like(grad)), options["betas"]
        step = (one * momentum + (1 - one) * grad).sign()
        state["m"] = two * momentum + (1 - two) * grad
        return options["lr"] * (step + options["weight_decay"] * weight)

    compare(sizes(lambda own: Oracle(own, direction)), sizes(ours(*mine)))


def test_every_diff_of_the_page_is_run() -> None:
    """A new one belongs into the tests above."""
    counts = {section: len(diffs(section)) for section in re.findall(r"\n## Coming from (.+)\n", PAGE)}
    assert counts == {"AdamW": 2, "Muon": 6, "Shampoo": 1, "GaLore": 1, "LAMB": 1, "Lion": 1}
