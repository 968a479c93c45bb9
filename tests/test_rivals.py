"""The optimizers that ours are compared with, against what their papers say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import rankwise
from benchmarks.convergence.optimizers import make_optimizer
from benchmarks.convergence.rivals import APOLLO, KFAC, SOAP, Eva, GaLore, GradientFactors, Lion
from benchmarks.convergence.rivals.low_rank import equal_rank


def gradients(model: nn.Module, steps: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(p.shape, generator=generator) for p in model.parameters()] for _ in range(steps)]


def stepped(model: nn.Module, optimizer: Any, found: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    for grads in found:
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def matrix() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 10, bias=False)


def test_lion_is_mars_lion_with_its_constants_translated() -> None:
    one, other = matrix(), matrix()
    found = gradients(one, 5)
    lion = stepped(one, Lion(one.parameters(), 1e-2, betas=(0.9, 0.98), weight_decay=0.1), found)
    mars = rankwise.MARS(
        list(other.named_parameters()),
        1e-2,
        variant="lion",
        betas=(0.98, 0.99),
        gamma=0.08 / 0.98,
        clip=None,
        weight_decay=0.1,
    )
    torch.testing.assert_close(lion, stepped(other, mars, found), rtol=1e-6, atol=1e-7)


def fitted() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return model.double(), torch.randn(16, 3, dtype=torch.float64)


@pytest.mark.parametrize("kind", [KFAC, Eva])
def test_dense_relatives_solve_with_their_damped_curvature(kind: Any) -> None:
    """Against one dense system per layer, made of per-sample quantities."""
    model, rows = fitted()
    rival = kind(model, lr=1.0, momentum=0.0, interval=1, damping=0.3)
    model(rows).square().sum(1).mean().backward()
    (first, _) = rival.layers
    inputs = torch.cat([rows, torch.ones(16, 1, dtype=torch.float64)], 1)
    samples = 16 * first.output_grads
    if kind is KFAC:
        right, left = inputs.T @ inputs / 16, samples.T @ samples / 16
        share = (right.trace() / 4 / (left.trace() / 4)).sqrt()
        eye = torch.eye(4, dtype=torch.float64)
        curvature = torch.kron(left + 0.3**0.5 / share * eye, right + 0.3**0.5 * share * eye)
    else:
        vector = torch.kron(samples.mean(0), inputs.mean(0))
        curvature = torch.outer(vector, vector) + 0.3 * torch.eye(16, dtype=torch.float64)
    grad, before = first.grad, [parameter.detach().clone() for parameter in first.module.parameters()]
    expected = torch.linalg.solve(curvature, grad.flatten()).view_as(grad)
    expected *= grad.norm() / expected.norm()
    rival.step()
    moved = torch.cat([before[0] - first.module.weight, (before[1] - first.module.bias)[:, None]], 1)
    torch.testing.assert_close(moved.detach(), expected)


def test_the_published_scale_bounds_the_step() -> None:
    model, rows = fitted()
    rival = KFAC(model, lr=1.0, momentum=0.0, interval=1, damping=1e-3, scale="kl")
    model(rows).square().sum(1).mean().backward()
    grads, before = (
        [layer.grad for layer in rival.layers],
        [layer.module.weight.detach().clone() for layer in rival.layers],
    )
    biases = [layer.module.bias.detach().clone() for layer in rival.layers]
    rival.step()
    size = 0.0
    for layer, grad, weight, bias in zip(rival.layers, grads, before, biases, strict=True):
        moved = torch.cat([weight - layer.module.weight, (bias - layer.module.bias)[:, None]], 1)
        size += float((moved.detach() * grad).sum())
    # With directions d = sqrt(kappa / s) D and s = sum <D, G>: sum <d, G> is sqrt(kappa s).
    assert 0.0 < size
    directions = [rival.direction(layer, grad) for layer, grad in zip(rival.layers, grads, strict=True)]
    total = float(sum((direction * grad).sum() for direction, grad in zip(directions, grads, strict=True)))
    assert size == pytest.approx(math.sqrt(1e-3 * total))


def test_galore_steps_in_the_leading_directions() -> None:
    model = matrix()
    (grads,) = gradients(model, 1)
    before = model.weight.detach().clone()
    (after,) = stepped(model, GaLore(model.parameters(), 1e-2, rank=2), [grads])
    values = torch.linalg.svd(after - before).S
    assert values[1] > 1e-3 and values[2] < 1e-6
    right = torch.linalg.svd(grads[0], full_matrices=False).Vh[:2]
    torch.testing.assert_close((after - before) @ right.T @ right, after - before, rtol=1e-4, atol=1e-7)
    # Adam's first step is the sign, of each of 2 x 10 coordinates.
    assert float((after - before).norm()) == pytest.approx(1e-2 * math.sqrt(20), rel=1e-4)


def test_apollo_scales_channels_as_adam_scales_their_projections() -> None:
    model = matrix()
    (grads,) = gradients(model, 1)
    before = model.weight.detach().clone()
    (after,) = stepped(model, APOLLO(model.parameters(), 1e-2, rank=3), [grads])
    ratios = (before - after) / grads[0]
    torch.testing.assert_close(ratios, ratios[:, :1].expand_as(ratios), rtol=1e-3, atol=1e-6)
    assert float(ratios.min()) > 0.0


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (192, 64)])
@pytest.mark.parametrize("rank", [4, 16])
def test_equal_bytes_are_equal(shape: tuple[int, int], rank: int) -> None:
    def held(optimizer: Any, model: nn.Module) -> int:
        stepped(model, optimizer, gradients(model, 1))
        if isinstance(optimizer, rankwise.LDAdam):
            return sum(optimizer.state_bytes().values())
        (state,) = optimizer.state.values()
        return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))

    one, other = (nn.Linear(*shape, bias=False) for _ in range(2))
    ours = held(rankwise.LDAdam(list(one.named_parameters()), rank=rank), one)
    theirs = held(GaLore(other.parameters(), 1e-3, rank=rank, buffer_bytes=4.0), other)
    assert abs(ours - theirs) <= 4 * (min(shape) + 2 * max(shape)) / 2 + 64
    assert equal_rank(shape, rank, 0.0) == rank
    assert make_optimizer("adam", one, 1e-3, {}).defaults["lr"] == 1e-3


def test_soap_of_diagonal_gradients_is_adam() -> None:
    """Their eigenvectors are the axes, so that nothing turns; the first gradient begins the statistics alone."""
    torch.manual_seed(0)
    weight, other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.zeros(4))
    start = weight.detach().clone()
    soap = SOAP([weight], 1e-2, betas=(0.9, 0.95), weight_decay=0.0, interval=2)
    adam = torch.optim.Adam([other], 1e-2, betas=(0.9, 0.95))
    for step in range(6):
        values = torch.tensor([8.0, 4.0, -2.0, 1.0]) * (1.0 + 0.1 * step)
        weight.grad = torch.diag(values)
        soap.step()
        if step:
            other.grad = values
            adam.step()
        else:
            assert torch.equal(weight.detach(), start)
    torch.testing.assert_close(weight.detach() - start, torch.diag(other.detach()), rtol=1e-4, atol=1e-6)


def test_muon_behind_mkor_gets_what_mkor_moves() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))

    joined, alone = model(), model()
    both = make_optimizer("mkor and muon", joined, 1e-2, {"momentum": 0.9, "mkor_update_interval": 2})
    mkor = make_optimizer(
        "mkor", alone, 1.0, {"backend": "sgd", "momentum": 0.0, "weight_decay": 0.0, "update_interval": 2}
    )
    inputs = torch.randn(3, 8, 6)
    for step in range(3):
        for network in (joined, alone):
            network.zero_grad()
            network(inputs[step]).square().mean().backward()
        before = [parameter.detach().clone() for parameter in alone.parameters()]
        biases = [parameter.grad.clone() for parameter in list(joined.parameters())[1::2]]
        both.step()
        mkor.step()
        moved = [old - new.detach() for old, new in zip(before, alone.parameters(), strict=True)]
        for parameter, direction in zip(list(joined.parameters())[::2], moved[::2], strict=True):
            torch.testing.assert_close(parameter.grad, direction, rtol=1e-4, atol=1e-6)
        assert all(torch.equal(a, b.grad) for a, b in zip(biases, list(joined.parameters())[1::2], strict=True))
        with torch.no_grad():  # both see the same model in the next step
            for ours, theirs in zip(joined.parameters(), alone.parameters(), strict=True):
                theirs.copy_(ours)


def test_factors_of_the_gradient_are_inverses_of_what_they_have_seen() -> None:
    """Against sums in float64, inverted at every update; the gradient keeps its norm."""
    layer = matrix()
    found = GradientFactors([layer.weight], vectors=2, interval=2, decay=0.9, gain=3.0)
    signs = torch.Generator().manual_seed(0)
    expected = [torch.eye(side, dtype=torch.float64) for side in layer.weight.shape]
    sizes = [0.0, 0.0]
    for step, (grad,) in enumerate(gradients(layer, 4)):
        layer.weight.grad = grad.clone()
        found.precondition()
        for side, rows in enumerate((grad.double(), grad.double().T)):
            if step % 2 == 0:
                vectors = rows @ (torch.randint(0, 2, (rows.shape[1], 2), generator=signs).double() * 2 - 1)
                size = float(vectors.square().sum())
                sizes[side] = 0.9 * sizes[side] + 0.1 * size if sizes[side] else size
                kept = torch.linalg.inv(0.9 * expected[side] + 0.1 * torch.eye(len(rows), dtype=torch.float64))
                expected[side] = torch.linalg.inv(kept + 3.0 * len(rows) / sizes[side] * vectors @ vectors.T)
        torch.testing.assert_close([each.double() for each in found.inverses[0]], expected, rtol=1e-4, atol=1e-5)
        direction = expected[0] @ grad.double() @ expected[1]
        direction *= grad.double().norm() / direction.norm()
        torch.testing.assert_close(layer.weight.grad.double(), direction, rtol=1e-4, atol=1e-4)


def test_combinations_of_rows_have_the_second_moment_of_the_gradient() -> None:
    layer = matrix()
    layer.weight.grad = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
    whole = GradientFactors([layer.weight], vectors=40_000, decay=0.999, gain=1.0)
    grad = layer.weight.grad.double()
    whole.precondition()
    moment = torch.linalg.inv(whole.inverses[0][0].double()) - torch.eye(10)
    expected = 10 * grad @ grad.T / grad.square().sum()
    torch.testing.assert_close(moment, expected, rtol=0.1, atol=0.05)
