"""Loops of several optimizers and losses: when a step is taken, a layer's statistics are its bias's gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from heard_passes import WIDTH, batch
from torch import Tensor, nn

from rankwise import MKOR


class Watched:
    """MKOR that captures some modules and compares its statistics with gradients before each step."""

    def __init__(self, *modules: nn.Module) -> None:
        self.model = nn.ModuleList(modules)
        self.optimizer = MKOR(self.model.named_parameters(), lr=1e-2, update_interval=1)
        self.optimizer.capture(self.model)
        self.steps = 0

    def step(self, tokens: dict[str, int] | None = None) -> None:
        biases = dict(self.model.named_parameters())
        for name, record in self.optimizer.statistics.records.items():
            bias = biases[name.replace("weight", "bias")]
            expected = torch.zeros_like(bias) if bias.grad is None else bias.grad
            assert torch.allclose(record.sum_output_grad, expected, rtol=1e-4, atol=1e-6), name
            if tokens is not None:
                assert record.count == tokens[name], name
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1


def layers(*widths: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        parts += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def trained(module: nn.Module, yes: bool) -> None:
    module.requires_grad_(yes)


@pytest.mark.parametrize("freezes", [True, False])
def test_wasserstein_gan_with_gradient_penalty(freezes: bool) -> None:
    """The generator's loss passes through the critic, frozen or not; the penalty is differentiated twice."""
    torch.manual_seed(0)
    make, judge = layers(WIDTH, 8, WIDTH), layers(WIDTH, 8, 1)
    generator, critic = Watched(make), Watched(judge)
    for number in range(4):
        for inner in range(2):
            real, noise = batch(10 * number + inner), batch(50 + number + inner)
            fake = make(noise).detach()
            mixed = (0.3 * real + 0.7 * fake).requires_grad_()
            (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
            (judge(fake).mean() - judge(real).mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
            critic.step()
        if freezes:
            trained(judge, False)
        (-judge(make(batch(90 + number))).mean()).backward()
        generator.step({"0.0.weight": 4, "0.2.weight": 4})
        if freezes:
            trained(judge, True)
        else:
            judge.zero_grad()
    assert critic.steps == 8


@pytest.mark.parametrize("clears", ["optimizer", "module"])
def test_actor_and_critic_share_a_trunk(clears: str) -> None:
    """Both optimizers have the trunk; each steps on its own loss, and throws away what the other's has left there."""
    torch.manual_seed(0)
    trunk, actor, critic = layers(WIDTH, 8, 8), layers(8, 3), layers(8, 1)
    of_actor, of_critic = Watched(trunk, actor), Watched(trunk, critic)

    def clear() -> None:
        for own in (of_actor, of_critic):
            own.optimizer.zero_grad() if clears == "optimizer" else own.model.zero_grad()

    for number in range(5):
        x = batch(number)
        clear()
        critic(torch.tanh(trunk(x))).square().mean().backward()
        of_critic.step()
        clear()
        advantage = critic(torch.tanh(trunk(x))).detach()
        (actor(torch.tanh(trunk(x))).log_softmax(-1)[:, 0:1] * advantage).mean().backward()
        of_actor.step({"0.0.weight": 4, "0.2.weight": 4, "1.0.weight": 4})
        # A batch without use, of both losses.
        (critic(trunk(x)).sum() + actor(trunk(x)).sum()).mul(torch.inf).backward()
    assert of_actor.steps == of_critic.steps == 5


def test_policy_and_reference() -> None:
    """A frozen reference is captured too, as a copy of the policy; weights are rolled back in between."""
    torch.manual_seed(0)
    policy, reference = layers(WIDTH, 8, 3), layers(WIDTH, 8, 3)
    reference.load_state_dict(policy.state_dict())
    own = Watched(policy)
    saved: tuple[Any, Any] | None = None
    for number in range(6):
        trained(reference, False)
        x = batch(number)
        divergence = nn.functional.kl_div(policy(x).log_softmax(-1), reference(x).softmax(-1), reduction="batchmean")
        (divergence + policy(x)[:, 0].mean()).backward()
        if number == 2:
            saved = policy.state_dict(), own.optimizer.state_dict()
        if number == 4 and saved is not None:  # a spike: the batch is left out, and all goes back
            policy.load_state_dict(saved[0])
            own.optimizer.load_state_dict(saved[1])
            policy.zero_grad()
            continue
        own.step({"0.0.weight": 8, "0.2.weight": 8})
    assert own.steps == 5


def total(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(losses)).sum()


def test_several_losses_by_several_passes() -> None:
    torch.manual_seed(0)
    model = layers(WIDTH, 8, 3)
    own = Watched(model)
    for number in range(4):
        output = model(batch(number))
        output.square().mean().backward(retain_graph=True)
        torch.autograd.grad(output.abs().mean(), list(model.parameters()), retain_graph=True)
        output.abs().mean().backward()
        total(model(batch(number + micro)).mean() for micro in range(2)).backward()
        own.step({"0.0.weight": 12, "0.2.weight": 12})
