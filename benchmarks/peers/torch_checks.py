"""What torch's tests ask of every optimizer that has a record: steps, gradients, rates and groups."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from benchmarks.peers.torch_problem import Problem, Trial, close
from benchmarks.peers.torch_records import OptimizerErrorEnum, OptimizerInfo
from benchmarks.peers.torch_states import CHECKS as STATE_CHECKS

__all__ = ["CHECKS", "check_errors", "failures"]

Check = Callable[[Trial], None]
_STEPS = 60


def right_direction(trial: Trial) -> None:
    """The loss falls, with a closure, of weights of any layout."""
    for contiguous in (True, False):
        problem = Problem(trial, contiguous=contiguous)
        first = problem.train(1)
        last = problem.train(_STEPS)
        assert math.isfinite(last) and last < first, f"contiguous {contiguous}: {first} -> {last}"


def right_direction_with_schedulers(trial: Trial) -> None:
    """The same where schedulers change the rate."""
    for constructors in (trial.info.scheduler_inputs or ())[:4]:
        problem = Problem(trial)
        schedulers = [constructor(problem.optimizer) for constructor in constructors]
        first = problem.train(1)
        for _ in range(_STEPS):
            loss = problem.train(1)
            for scheduler in schedulers:
                plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(loss) if plateau else scheduler.step()
        last = problem.train(1)
        assert last < first, f"{[type(scheduler).__name__ for scheduler in schedulers]}: {first} -> {last}"


def tensor_rate(trial: Trial) -> None:
    """A rate in a tensor, of no dimension or of one, steps as the number does, and is the caller's own."""
    rate = float(trial.options.get("lr", 1e-3))
    plain = Problem(trial, options={"lr": rate})
    for shape in ((), (1,)):
        tensor = torch.full(shape, rate)
        problem = Problem(trial, options={"lr": tensor})
        twin = plain.twin()
        for _ in range(5):
            problem.train(1), twin.train(1)
        torch.testing.assert_close(problem.weights(), twin.weights(), rtol=1e-5, atol=1e-7)
        assert isinstance(problem.optimizer.param_groups[0]["lr"], torch.Tensor)


def rates_by_group(trial: Trial) -> None:
    """A group of rate zero stays where it is while the other steps; a default fills what a group leaves out."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [model.layer.weight]}, {"params": [model.layer.bias], "lr": 0.0}]  # type: ignore[union-attr]

    problem = Problem(trial, groups=groups)
    before = problem.weights()
    problem.train(3)
    weight, bias = problem.weights()
    assert not torch.equal(weight, before[0])
    close(bias, before[1], "the group of rate zero")
    group = problem.optimizer.param_groups[0]
    assert all(key in group for key in problem.optimizer.defaults)


def decay_by_group(trial: Trial) -> None:
    """Decay of one group shrinks its weights alone, where gradients are zero."""
    if "weight_decay" not in trial.build([nn.Parameter(torch.ones(16, 12))]).defaults:
        return

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        layer: Any = model.layer
        return [{"params": [layer.weight], "weight_decay": 0.5}, {"params": [layer.bias], "weight_decay": 0.0}]

    problem = Problem(trial, groups=groups, options={"lr": 0.01})
    with torch.no_grad():
        problem.model.layer.bias.fill_(1.0)
    before = problem.weights()
    for parameter in problem.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    problem.optimizer.step()
    weight, bias = problem.weights()
    assert weight.norm() < before[0].norm(), "no decay"
    close(bias, before[1], "the group without decay")


def complex_parameters(trial: Trial) -> None:
    """A complex parameter steps as its pair of real ones, by the first-order rule; a real one beside it by its own."""
    torch.manual_seed(0)
    wave = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))
    real = nn.Parameter(torch.view_as_real(wave).detach().clone())
    beside = [nn.Parameter(torch.randn(12, 16))]
    beside += [copy.deepcopy(beside[0])]
    first_order = {"fallback": True} if hasattr(trial.info.optim_cls, "options_type") else {}
    both = [trial.build([wave, beside[0]]), trial.build([{"params": [real], **first_order}, {"params": [beside[1]]}])]
    for _ in range(3):
        wave.grad = torch.randn_like(wave)
        real.grad = torch.view_as_real(wave.grad).clone()
        beside[0].grad = torch.randn_like(beside[0])
        beside[1].grad = beside[0].grad.clone()
        for optimizer in both:
            optimizer.step()
    torch.testing.assert_close(torch.view_as_real(wave), real)
    torch.testing.assert_close(*beside)


def several_types(trial: Trial) -> None:
    """Parameters of two types in one group keep their types, and both step."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(16, 12, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    before = [parameter.detach().clone() for parameter in params]
    optimizer = trial.build(params)
    for _ in range(3):
        for parameter in params:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    for parameter, old in zip(params, before, strict=True):
        assert parameter.dtype == old.dtype and not torch.equal(parameter, old) and parameter.isfinite().all()


def nothing_without_gradients(trial: Trial) -> None:
    """A parameter without a gradient keeps its value and gets no state."""
    problem = Problem(trial)
    problem.optimizer.zero_grad(set_to_none=True)
    before = problem.weights()
    problem.optimizer.step()
    close(problem.weights(), before, "weights without gradients")
    assert not any(problem.optimizer.state.get(p) for p in problem.model.parameters()), "a state without a gradient"


def nothing_with_zero_gradients(trial: Trial) -> None:
    """Zero gradients and no decay leave weights where they are."""
    problem = Problem(trial, options={"weight_decay": 0.0})
    before = problem.weights()
    for parameter in problem.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    problem.optimizer.step()
    close(problem.weights(), before, "weights with zero gradients")


def nothing_with_empty_parameters(trial: Trial) -> None:
    """A parameter without elements steps without an error, beside one with some."""
    empty, full = nn.Parameter(torch.randn(5, 0)), nn.Parameter(torch.randn(12, 16))
    optimizer = trial.build([empty, full])
    for _ in range(2):
        empty.grad, full.grad = torch.rand_like(empty), torch.rand_like(full)
        optimizer.step()
    assert full.isfinite().all()


def scalars(trial: Trial) -> None:
    """Parameters of no dimension step, beside a matrix."""
    params = [nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.randn(12, 16))]
    optimizer = trial.build(params)
    for _ in range(3):
        optimizer.zero_grad()
        sum(parameter.square().sum() for parameter in params).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert 0.0 < float(params[0]) < 2.0


def sparse_gradients(trial: Trial) -> None:
    """Where a record says that sparse gradients are not supported, they are refused, and nothing has changed."""
    parameter = nn.Parameter(torch.ones(16, 12))
    optimizer = trial.build([parameter])
    parameter.grad = torch.ones(16, 12).to_sparse()
    try:
        optimizer.step()
    except RuntimeError as error:
        assert "sparse" in str(error), error
    else:
        raise AssertionError("a sparse gradient was taken in silence")
    close(parameter.detach(), torch.ones(16, 12), "the weight")


def closure_runs_once(trial: Trial) -> None:
    """A closure runs once, with gradients enabled, and step() returns its loss; none without one."""
    problem, calls = Problem(trial), []

    def closure() -> Any:
        calls.append(torch.is_grad_enabled())
        return problem.closure()

    with torch.no_grad():
        loss = problem.optimizer.step(closure)
    assert calls == [True] and isinstance(loss, torch.Tensor)
    problem.closure()
    assert problem.optimizer.step() is None


def hooks_of_steps(trial: Trial) -> None:
    """Hooks of this optimizer and of all run in torch's order, and no more once they are removed."""
    problem, calls = Problem(trial), []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before, all")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after, all")),
        problem.optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
        problem.optimizer.register_step_post_hook(lambda *_: calls.append("after")),
    ]
    problem.train(1)
    for handle in handles:
        handle.remove()
    problem.train(1)
    assert calls == ["before, all", "before", "after", "after, all"], calls


def profiled(trial: Trial) -> None:
    """Torch's profiler shows a step by the optimizer's name."""
    problem = Problem(trial)
    with torch.profiler.profile() as profile:
        problem.train(1)
    name = f"Optimizer.step#{type(problem.optimizer).__name__}.step"
    assert name in {event.key for event in profile.key_averages()}, name


def gradients_are_zeroed(trial: Trial) -> None:
    """zero_grad() drops gradients, or writes zeros into them."""
    problem = Problem(trial)
    problem.closure()
    problem.optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in problem.model.parameters())
    problem.optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in problem.model.parameters())


def printed(trial: Trial) -> None:
    """An optimizer can be printed, each group by its number, and its rate."""
    text = repr(Problem(trial).optimizer)
    assert "Parameter Group 0" in text and "lr: " in text


def unknown_keyword(trial: Trial) -> None:
    """A keyword that the class does not have is refused by its name, ``maximize`` and ``foreach`` as any other."""
    known = trial.build([nn.Parameter(torch.ones(16, 12))]).defaults
    for key in ("maximize", "foreach", "differentiable", "amsgrad", "learning_rate"):
        if key not in known:
            try:
                trial.build([nn.Parameter(torch.ones(16, 12))], **{key: True})
            except (TypeError, ValueError) as error:
                assert key in str(error), error
            else:
                raise AssertionError(f"{key} was taken in silence")


def check_errors(info: OptimizerInfo) -> Iterator[tuple[str, str]]:
    """The record's wrong inputs.

    Args:
        info: The record.

    Yields:
        What was tried, and what came of it in place of what the record says; nothing where that was raised.
    """
    assert info.optim_error_inputs_func is not None
    for error in info.optim_error_inputs_func("cpu", torch.float32):
        given = error.optimizer_error_input
        params = [nn.Parameter(torch.randn(1, 1))] if given.params is None else given.params
        problem = "nothing was raised"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                optimizer = info.optim_cls(params, **given.kwargs)
                if error.error_on == OptimizerErrorEnum.STEP_ERROR:
                    optimizer.step()
        except error.error_type as found:
            problem = "" if re.search(error.error_regex, str(found)) else f"{type(found).__name__}: {found}"
        except Exception as found:
            problem = f"{type(found).__name__} in place of {error.error_type.__name__}: {found}"
        yield given.desc, problem


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        right_direction,
        right_direction_with_schedulers,
        tensor_rate,
        rates_by_group,
        decay_by_group,
        complex_parameters,
        several_types,
        nothing_without_gradients,
        nothing_with_zero_gradients,
        nothing_with_empty_parameters,
        scalars,
        sparse_gradients,
        closure_runs_once,
        hooks_of_steps,
        profiled,
        gradients_are_zeroed,
        printed,
        unknown_keyword,
        *STATE_CHECKS,
    )
}


def failures(info: OptimizerInfo, check: Check) -> Iterator[tuple[str, str]]:
    """The inputs of a record with which a check fails.

    Args:
        info: The record.
        check: One of :data:`CHECKS`.

    Yields:
        The input, and what was raised.
    """
    for given in info.optim_inputs_func("cpu"):
        if given.kwargs.get("maximize"):
            continue  # torch's own, which climbs
        try:
            check(Trial(info, copy.deepcopy(given.kwargs)))
        except Exception as error:
            yield given.desc, f"{type(error).__name__}: {error}"
