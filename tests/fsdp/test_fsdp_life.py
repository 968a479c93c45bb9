"""What happens to sharded models besides plain steps: wrong orders, other policies, accumulation, ranks that differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from shard_settings import MIXED, SETTINGS
from sharded_models import Network, Run, batch, whole
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from rankwise import MARS, MKOR, LDAdam
from rankwise.options.validation import OptionError


def _loss(model: nn.Module, step: int = 0) -> Tensor:
    tokens, classes = batch(step)
    return nn.functional.cross_entropy(model(tokens), classes)


def _sharded(world: int, **how: Any) -> Network:
    model = Network()
    SETTINGS["rows-2"].shard(model, world, **how)  # type: ignore[call-arg]
    return model


def _train(model: nn.Module, optimizer: Any, steps: int = 4) -> dict[str, Tensor]:
    for step in range(steps):
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(value) for name, value in model.named_parameters()}


def _mkor(model: nn.Module) -> MKOR:
    optimizer = MKOR(model.named_parameters(), lr=1e-2, update_interval=1, factor_dtype="float32")
    optimizer.capture(model)
    return optimizer


def _close(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 2e-6) -> bool:
    names = ("._checkpoint_wrapped_module", "_orig_mod.")
    plain = {name.replace(names[0], "").replace(names[1], ""): value for name, value in found.items()}
    return max(float((plain[name] - value).abs().max()) for name, value in expected.items()) <= bound


def _refusal(rank: int, world: int, attempt: Callable[[int], Any]) -> str:
    with pytest.raises((OptionError, RuntimeError)) as refused:
        attempt(world)
    return str(refused.value)


# --- wrong orders -----------------------------------------------------------------------------------------------------


def _sharded_too_late(world: int) -> None:
    model = Network()
    optimizer = MARS(model.named_parameters(), lr=1e-2)
    SETTINGS["rows-2"].shard(model, world)
    _train(model, optimizer, 1)


def _sharded_between_steps(world: int) -> None:
    model = Network()
    optimizer = MARS(model.named_parameters(), lr=1e-2)
    _train(model, optimizer, 1)
    SETTINGS["rows-2"].shard(model, world)
    _train(model, optimizer, 1)


def _cut_otherwise(world: int) -> None:
    model = _sharded(world)
    optimizer = MARS(model.named_parameters(), lr=1e-2)
    _train(model, optimizer, 1)
    weight: Any = model.layers[0].up.weight
    other = nn.Parameter(weight.detach().redistribute(weight.device_mesh, [Shard(1)]))
    other.grad = torch.ones_like(other)
    torch.utils.swap_tensors(weight, other)
    optimizer.step()


def _partial(world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    MARS([("w", nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])))], lr=1e-2)


def _flattened(world: int) -> None:
    model = FullyShardedDataParallel(Network(), device_id=torch.device("cpu"))
    MARS(model.named_parameters(), lr=1e-2)


def _other_options(world: int) -> None:
    model = _sharded(world)
    rank = torch.distributed.get_rank()
    _train(model, LDAdam(model.named_parameters(), lr=1e-2, rank=2 + rank), 1)


def _other_parameters(world: int) -> None:
    model = _sharded(world)
    named = list(model.named_parameters())
    _loss(model).backward()
    MARS(named[: len(named) - torch.distributed.get_rank()], lr=1e-2).step()


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (_sharded_too_late, "MARS: the parameter 'embed.weight' is invalid, .* build the optimizer after"),
        (_sharded_between_steps, "'embed.weight' is invalid, .* build the optimizer after the model is sharded"),
        (_cut_otherwise, "'layers.0.up.weight' was cut over ranks in another way .* build a new optimizer"),
        (_partial, "the parameter 'w' is invalid, with the placements .*Partial.* must be Shard or Replicate"),
        (_flattened, "FSDP has flattened: .*fully_shard .FSDP2"),
        (_other_options, "ranks planned different steps .* rank is 2 on ranks .0., 3 on ranks .1."),
        (
            _other_parameters,
            "the optimizers of ranks .1. have no 'head.bias', .* from the same parameters on all ranks",
        ),
    ],
)
def test_is_refused_on_all_ranks(attempt: Callable[[int], Any], message: str) -> None:
    for text in run_ranks(2, _refusal, attempt):
        assert re.search(message, text), text


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def _from_meta(rank: int, world: int, early: bool) -> dict[str, Tensor]:
    """The optimizer before or after the parameters have got memory."""
    with torch.device("meta"):
        model = Two()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = LDAdam(model.named_parameters(), lr=1e-2, rank=3) if early else None
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.ones_like(parameter) / 7)  # type: ignore[arg-type]
    optimizer = optimizer or LDAdam(model.named_parameters(), lr=1e-2, rank=3)
    for step in range(3):
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(step + 10 * rank))
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(value) for name, value in model.named_parameters()}


def test_parameters_may_get_their_memory_later() -> None:
    late, early = (run_ranks(2, _from_meta, early)[0] for early in (False, True))
    assert all(torch.equal(early[name], late[name]) for name in late)


# --- policies ---------------------------------------------------------------------------------------------------------


def _checkpointed(rank: int, world: int) -> bool:
    plain, model = _sharded(world), Network()
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == "Layer")
    SETTINGS["rows-2"].shard(model, world)
    return _close(_train(model, _mkor(model)), _train(plain, _mkor(plain)))


def _compiled(rank: int, world: int) -> bool:
    plain, model = _sharded(world), _sharded(world)
    optimizer = _mkor(model)
    return _close(_train(torch.compile(model, backend="eager"), optimizer), _train(plain, _mkor(plain)))  # type: ignore[arg-type]


def _accumulated(rank: int, world: int) -> bool:
    """Two micro-batches, of which the last alone is reduced, are one batch of both."""
    plain, model = Run("mkor", "rows-2"), Run("mkor", "rows-2")
    for _ in range(4):
        plain.step()
        tokens, classes = (part[model.part :: 2] for part in batch(model.count))
        tokens, classes = (part[24 * model.part : 24 * (model.part + 1)] for part in batch(model.count))
        for half in (0, 1):
            model.model.set_requires_gradient_sync(half == 1)  # type: ignore[operator]
            mine = slice(12 * half, 12 * (half + 1))
            rare = model.count % 3 == 2
            (nn.functional.cross_entropy(model.model(tokens[mine], rare=rare), classes[mine]) / 2).backward()
            if half == 0:
                model.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
        del model.optimizer.zero_grad
        model.optimizer.step()
        model.optimizer.zero_grad()
        model.count += 1
    return _close(model.weights(), plain.weights(), 1e-5)


def _zeroed_between(rank: int, world: int) -> dict[str, float]:
    """How far weights are apart with and without a ``zero_grad()`` after a pass whose gradients are not reduced yet."""

    def trained(kind: Callable[[nn.Module], Any], zeroed: bool) -> dict[str, Tensor]:
        model = _sharded(world)
        optimizer = kind(model)
        for step in range(4):
            for half in (0, 1):
                model.set_requires_gradient_sync(half == 1)  # type: ignore[operator]
                _loss(model, 2 * step + half).backward()
                if zeroed and half == 0:
                    optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        return {name: whole(value) for name, value in model.named_parameters()}

    kinds = {"adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), "mkor": _mkor}
    apart = {}
    for name, kind in kinds.items():
        kept, zeroed = (trained(kind, each) for each in (False, True))
        apart[name] = max(float((kept[key] - zeroed[key]).abs().max()) for key in kept)
    return apart


def test_gradients_that_are_not_reduced_yet_outlast_zero_grad() -> None:
    """Torch keeps them where ``zero_grad()`` does not look, and the next pass adds to them."""
    for apart in run_ranks(2, _zeroed_between):
        assert set(apart.values()) == {0.0}, apart


def _in_bf16(rank: int, world: int) -> bool:
    """The rounding of the computation is there, and no more: AdamW in the same setting is as far from fp32."""

    def trained(kind: Callable[[nn.Module], Any], **how: Any) -> dict[str, Tensor]:
        model = _sharded(world, **how)
        optimizer = kind(model)
        found = _train(model, optimizer)
        assert all(
            value.dtype == torch.float32
            for state in optimizer.state.values()
            for value in state.values()
            if value is not None and isinstance(value, Tensor)
        )
        return found

    def distance(kind: Callable[[nn.Module], Any]) -> float:
        rounded, full = trained(kind, mp_policy=MIXED), trained(kind)
        return max(float((rounded[name] - full[name]).abs().max()) for name in full)

    control = distance(lambda model: torch.optim.AdamW(model.named_parameters(), lr=1e-2))
    return all(
        distance(kind) <= 10 * control for kind in (_mkor, lambda m: LDAdam(m.named_parameters(), lr=1e-2, rank=3))
    )


def _skips(rank: int, world: int) -> bool:
    """A NaN in one rank's part undoes the step on all."""
    model = _sharded(world)
    optimizer = LDAdam(model.named_parameters(), lr=1e-2, rank=3, skip_nonfinite=True)
    before = _train(model, optimizer, 2)
    _loss(model).backward()
    if rank == 1:
        next(iter(model.parameters())).grad._local_tensor.view(-1)[0] = torch.nan  # type: ignore[union-attr]
    optimizer.step()
    return all(torch.equal(before[name], whole(value)) for name, value in model.named_parameters())


def _unsharded_beside(rank: int, world: int) -> bool:
    """A parameter that is no DTensor, of which every rank has a copy."""
    model = Network()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params={model.head.weight})
    weights = _train(model, MARS(model.named_parameters(), lr=1e-2, variant="muon", ns_dtype="float32"))
    alone = Network()
    expected = _train(alone, MARS(alone.named_parameters(), lr=1e-2, variant="muon", ns_dtype="float32"))
    return _close(weights, expected, 2e-5)


@pytest.mark.parametrize(
    "check",
    [_checkpointed, _compiled, _accumulated, _in_bf16, _skips, _unsharded_beside],
    ids=lambda check: check.__name__,
)
def test_holds_on_all_ranks(check: Callable[[int, int], bool]) -> None:
    assert all(run_ranks(2, check))


# --- several meshes ---------------------------------------------------------------------------------------------------


def _stages(rank: int, world: int, together: bool) -> list[dict[str, Tensor]]:
    """Pipeline stages of two ranks each, all of whose model parts have one optimizer, or one each."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(mesh.get_local_rank("pp"))
    parts = [Two(), Two()]
    for part in parts:
        fully_shard(part, mesh=mesh["dp"])
    names = [[(f"{at}.{name}", p) for name, p in part.named_parameters()] for at, part in enumerate(parts)]
    chosen = [[*names[0], *names[1]]] if together else names
    optimizers = [LDAdam(named, lr=1e-2, rank=3) for named in chosen]
    for step in range(3):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        (parts[1](parts[0](x)) - x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [{name: whole(value) for name, value in part.named_parameters()} for part in parts]


def _pipeline(rank: int, world: int, alone: bool) -> dict[str, Tensor]:
    """Two stages under torch's schedule, which finds out shapes by a pass of its own, or all of it in one process."""
    torch.manual_seed(0)
    parts = [Two().double(), Two().double()]
    model = nn.Sequential(*parts) if alone else parts[rank]
    optimizer = MKOR(model.named_parameters(), lr=1e-2, update_interval=1, factor_dtype="float64")
    optimizer.capture(model)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().sum() / 96

    stage = None if alone else PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = stage and Schedule1F1B(stage, 4, loss, scale_grads=False)
    for step in range(3):
        x = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        if schedule is None:
            loss(model(x), x).backward()
        else:
            schedule.step(target=x) if rank else schedule.step(x)
        optimizer.step()
        optimizer.zero_grad()
    prefix = "" if alone else f"{rank}."
    return {f"{prefix}{name}": value.detach() for name, value in model.named_parameters()}


def test_statistics_are_those_of_the_batches_alone_in_a_pipeline() -> None:
    expected = _pipeline(0, 1, True)
    found = {name: value for weights in run_ranks(2, _pipeline, False) for name, value in weights.items()}
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-12


def test_stages_have_groups_of_their_own() -> None:
    together, apart = (run_ranks(4, _stages, together) for together in (True, False))
    for rank in range(4):
        for one, other in zip(together[rank], apart[rank], strict=True):
            assert all(float((one[name] - other[name]).abs().max()) <= 1e-6 for name in one)
    assert not torch.equal(together[0][0]["a.weight"], together[2][0]["a.weight"])


# --- ranks that differ ------------------------------------------------------------------------------------------------


class WithExperts(nn.Module):
    """A layer, and experts of which each rank has some."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.stack = nn.Parameter(torch.arange(4 * 12 * 8).view(4, 12, 8) % 7 / 7.0 - 0.4)


def _gradients(model: WithExperts, step: int) -> dict[str, Tensor]:
    """No token has reached the last two experts at the second step."""
    generator = torch.Generator().manual_seed(step)
    found = {name: torch.randn(value.shape, generator=generator) for name, value in model.named_parameters()}
    if step == 1:
        found["stack"][2:] = 0.0
    return found


MATRIX_RULES: dict[str, Callable[[Any], Any]] = {
    "mars-m": lambda named: MARS(named, lr=1e-2, variant="muon", ns_dtype="float32"),
    "ldadam": lambda named: LDAdam(named, lr=1e-2, rank=3),
}


def _experts(rank: int, world: int, kind: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = WithExperts()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        model.stack = nn.Parameter(distribute_tensor(model.stack.detach(), mesh, [Shard(0)]))
        fully_shard(model, mesh=mesh, ignored_params={model.stack})
    optimizer = MATRIX_RULES[kind](list(model.named_parameters()))
    for step in range(4):
        for name, grad in _gradients(model, step).items():
            parameter: Any = model.get_parameter(name)
            cut = isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements) if cut else grad
        if world > 1 and step == 1 and rank == 1:
            model.stack.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(value) for name, value in model.named_parameters()}


@pytest.mark.parametrize("kind", MATRIX_RULES)
def test_a_gradient_that_one_rank_alone_has_not_is_one_of_zeros(kind: str) -> None:
    expected = _experts(0, 1, kind)
    for found in run_ranks(2, _experts, kind):
        assert _close(found, expected, 2e-6)


def _experts_of_their_own(world: int) -> None:
    torch.manual_seed(torch.distributed.get_rank())
    model = Two()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params={model.b.weight})
    (model(torch.ones(3, 12))).square().mean().backward()
    LDAdam(model.named_parameters(), lr=1e-2, rank=3).step()


def test_plain_parameters_that_are_no_copies_are_refused_on_all_ranks() -> None:
    for text in run_ranks(2, _refusal, _experts_of_their_own):
        assert re.search(r"'b.weight' is no DTensor, and its values on ranks \[1\] .* Shard\(0\)", text), text
