"""A step does not depend on what surrounds it: the same bits as without, or a refusal before anything changes."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable, Container, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ranks import run_ranks
from surrounded_runs import FORMS, TYPES, Run, bits, network, plain_run, propagate, run, same_bits
from surrounding_kinds import FORBIDDEN, SURROUNDINGS
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import rankwise
from rankwise.kernels.native.arrays import address, addresses
from rankwise.names import CLASSES
from rankwise.statistics.hooks import Capture
from rankwise.statistics.module_hooks import ModuleHook
from rankwise.step.optimizer import ShardedOptimizer

_SLOW = ("profiled",)
"""What takes long, and is tried with the compiled form alone."""
_USUAL = {
    "compiled": tuple(TYPES),
    "lists": ("LDAdam", "MKOR, sketch"),
    "int8 states": ("LDAdam",),
    "remainders": ("MARS-AdamW",),
}
"""Types of each form that are tried by default; the others of it, and the other forms, are exhaustive."""


def usual(kinds: Iterable[str], chosen: Container[str]) -> list[Any]:
    """Types for a test, those that are not chosen with its mark."""
    return [kind if kind in chosen else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in kinds]


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        pytest.param(kind, form, marks=() if kind in _USUAL.get(form, ()) else pytest.mark.exhaustive)
        for form in FORMS
        for kind in TYPES
    ],
)
def test_every_surrounding_leaves_the_same_bits(kind: str, form: str) -> None:
    """Constructor, capture, steps, saving, loading, reports: all are called inside it."""
    wanted, wrong = plain_run(kind, form), {}
    assert any(isinstance(value, Tensor) for value in wanted.values())
    for name, around in SURROUNDINGS.items():
        if name not in _SLOW or form == "compiled":
            found = same_bits(run(TYPES[kind], FORMS[form], around), wanted)
            wrong |= {name: found} if found else {}
    assert not wrong, wrong


@pytest.mark.parametrize("surrounding", FORBIDDEN)
@pytest.mark.parametrize("kind", TYPES)
def test_stand_ins_are_refused_before_anything_changes(kind: str, surrounding: str) -> None:
    live = Run(TYPES[kind], FORMS["compiled"], nullcontext)
    saved = live.optimizer.state_dict()
    for index in range(2):
        live.step(index)
        before = kept(live)
        calls: list[Callable[[], Any]] = [
            live.optimizer.step,
            live.optimizer.state_dict,
            live.optimizer.read_health,
            lambda: live.optimizer.load_state_dict(saved),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match=rf"\(\) is called in a {surrounding}"):
                FORBIDDEN[surrounding](call)
        assert same_bits(kept(live), before) == []


def kept(live: Run) -> dict[str, Any]:
    """What a run leaves but for what a reading starts afresh."""
    return {name: value for name, value in live.left().items() if not name.startswith("/health")}


def among_fake_tensors(live: Run) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        live.model(torch.ones(8, 64)).sum().backward()
    live.model.zero_grad()


IMAGINED: dict[str, Callable[[Run], Any]] = {
    "fake tensors": among_fake_tensors,
    "make_fx": lambda live: make_fx(live.model)(torch.ones(8, 64)),
    "jit": lambda live: torch.jit.trace(live.model, torch.ones(8, 64), check_trace=False),
    "torch.func": lambda live: torch.func.vmap(live.model)(torch.ones(3, 8, 64)),
    "exported": lambda live: torch.export.export(live.model, (torch.ones(8, 64),), strict=False),
}
"""Passes of the model that leave nothing, and are made without values."""


@pytest.mark.parametrize("resets", [False, True], ids=["going on", "after a reset"])
@pytest.mark.parametrize("imagined", IMAGINED)
@pytest.mark.parametrize("kind", ["MKOR-H"])
def test_statistics_learn_nothing_from_stand_ins(kind: str, imagined: str, resets: bool) -> None:
    """A model that is propagated with fake tensors, as planners of memory do, goes on being trained."""

    def trained(imagines: bool) -> Any:
        live = Run(TYPES[kind], FORMS["compiled"], nullcontext)
        for index in range(3):
            live.step(index)
            if index == 1 and resets:
                live.optimizer.state.clear()
            if imagines:
                IMAGINED[imagined](live)
        return live.left()

    assert same_bits(trained(True), trained(False)) == []


def test_a_hook_of_a_module_hears_of_no_stand_in() -> None:
    """As losses are heard that a model computes."""
    heard: list[Any] = []
    model = nn.Linear(4, 4)
    model.register_forward_hook(ModuleHook(model, heard.append))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.ones(2, 4))
    assert heard == []
    found = model(torch.ones(2, 4))
    assert len(heard) == 1 and heard[0] is found


# --- the model's passes, too -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("surrounding", ["autocast to bfloat16", "device as a context", "default type bfloat16"])
@pytest.mark.parametrize("kind", ["MKOR", "MKOR-H", "MKOR, sketch", "LDAdam", "MARS-M, float32"])
def test_steps_inside_are_those_outside_of_the_same_passes(kind: str, surrounding: str) -> None:
    """Whole loops run inside; the statistics are those of what the layers computed there."""
    around = SURROUNDINGS[surrounding]

    def trained(inside: bool) -> Any:
        live = Run(TYPES[kind], FORMS["compiled"], around if inside else nullcontext)
        for index in range(4):
            live.optimizer.zero_grad()
            values = torch.randn(8, 64, generator=torch.Generator().manual_seed(index), dtype=torch.float32)
            with around():
                loss = (live.model(values).float() - 1.0).square().mean()
                loss.backward()
                if inside:
                    live.optimizer.record_loss(loss.detach())
                    live.optimizer.step()
            if not inside:
                live.optimizer.record_loss(loss.detach())
                live.optimizer.step()
        return live.left()

    assert same_bits(trained(True), trained(False)) == []


@pytest.mark.parametrize("surrounding", ["autocast to bfloat16", "autocast elsewhere", "device as a context"])
def test_statistics_are_float32_sums_of_what_layers_got(surrounding: str) -> None:
    """In bfloat16 a sum of a thousand tokens has eight bits."""
    layer, gradients = nn.Linear(16, 8), []
    capture = Capture(layer)
    values = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float32) + 3.0
    with SURROUNDINGS[surrounding]():
        found = layer(values)
        found.register_hook(gradients.append)
        found.float().square().sum().backward()
    inputs, count, outputs = capture.take(layer.weight)
    assert count == 1000 and inputs.dtype == outputs.dtype == torch.float32
    assert torch.equal(inputs, values.sum(0)) and torch.equal(outputs, gradients[0].sum(0, dtype=torch.float32))
    assert gradients[0].dtype == (torch.bfloat16 if surrounding == "autocast to bfloat16" else torch.float32)


def test_a_closure_runs_in_what_surrounds_the_step() -> None:
    """It is the model's, and recorded for a backward pass."""
    seen = []

    def closure() -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.ones(1).device.type))
        return propagate(model, 0)

    model = network()
    optimizer = rankwise.SONew(model.named_parameters(), lr=1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"), torch.no_grad():
        loss = optimizer.step(closure)
    assert seen == [(True, True, "meta")] and loss.isfinite()


def test_what_surrounds_is_as_before_a_step_that_raises() -> None:
    optimizer = rankwise.SONew(network().named_parameters(), lr=1e-2)
    device = torch.device("meta")
    with torch.autocast("cpu", dtype=torch.bfloat16), device, torch.inference_mode():
        with pytest.raises(ValueError):
            optimizer.load_state_dict({"state": {}, "param_groups": []})
        assert torch.is_autocast_enabled("cpu") and torch.is_inference_mode_enabled()
        assert torch.ones(1).device.type == "meta"
    assert torch.ones(1).device.type == "cpu" and not torch._C._len_torch_function_stack()


# --- the other ways out and in ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("kind", usual(["MARS-AdamW", "MARS-M", "SONew", "LDAdam", "MKOR, sketch"], ("MKOR, sketch",)))
def test_going_on_from_adamw_and_to_it(kind: str, surrounding: str) -> None:
    def trained(around: Any) -> Any:
        model = network()
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for index in range(2):
            model.zero_grad()
            propagate(model, index)
            adamw.step()
        options = {"lr": 1e-2, **TYPES[kind].options}
        with around():
            optimizer = TYPES[kind].cls(model.named_parameters(), **options)
            optimizer.continue_from(adamw.state_dict())
        for index in range(2):
            model.zero_grad()
            propagate(model, index)
            with around():
                optimizer.step()
        with around():
            optimizer.hand_over(adamw)
        return bits({"weights": dict(model.named_parameters()), "adamw": adamw.state_dict()})

    wanted, found = trained(nullcontext), trained(SURROUNDINGS[surrounding])
    assert same_bits(found, wanted) == []
    assert not any(value.is_inference() for value in found.values() if isinstance(value, Tensor))


@pytest.mark.parametrize("kind", [kind for kind in TYPES if "exact" not in TYPES[kind].options])
def test_dictionaries_and_gradients_of_inference_mode(kind: str) -> None:
    """A checkpoint read there has tensors that torch forbids to change; a gradient set there, too."""

    def trained(made: Any) -> Any:
        live = Run(TYPES[kind], FORMS["compiled"], nullcontext)
        live.step(0)
        with made():
            saved = live.optimizer.state_dict()
            saved["state"] = {
                key: {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
                for key, state in saved["state"].items()
            }
        live.optimizer.load_state_dict(saved)
        for index in range(2):
            live.optimizer.zero_grad()
            propagate(live.model, index)
            with made():
                for parameter in live.model.parameters():
                    parameter.grad = None if parameter.grad is None else parameter.grad.clone()
            live.optimizer.record_loss(1.0)
            live.optimizer.step()
        return live.left()

    assert same_bits(trained(torch.inference_mode), trained(nullcontext)) == []


@pytest.mark.parametrize("made", ["built", "moved"])
def test_weights_of_inference_mode_are_refused_by_name(made: str) -> None:
    with torch.inference_mode():
        model = nn.Linear(8, 8) if made == "built" else None
    if model is None:
        model = nn.Linear(8, 8)
        with torch.inference_mode():
            model.to(torch.float64)
    optimizer = rankwise.LDAdam(model.named_parameters(), lr=1e-2, rank=2)

    def gradients(of: nn.Module) -> None:
        for parameter in of.parameters():
            parameter.grad = torch.ones_like(parameter)

    gradients(model)
    before = bits(dict(model.named_parameters()))
    with pytest.raises(RuntimeError, match=r"'\w+' was made or moved in inference mode.*copy.deepcopy\(model\)"):
        optimizer.step()
    assert same_bits(bits(dict(model.named_parameters())), before) == []
    assert not any("step" in state for state in optimizer.state.values())
    # What the message advises.
    copied = copy.deepcopy(model)
    gradients(copied)
    rankwise.LDAdam(copied.named_parameters(), lr=1e-2, rank=2).step()
    assert not torch.equal(copied.weight, before["/weight"])


def test_frozen_weights_of_inference_mode_are_left_alone() -> None:
    """The base of an adapter, read there."""
    with torch.inference_mode():
        base = nn.Linear(8, 8).requires_grad_(False)
    adapter = nn.Linear(8, 8)
    named = [
        (f"{number}.{name}", p) for number, part in enumerate((base, adapter)) for name, p in part.named_parameters()
    ]
    optimizer = rankwise.SONew(named, lr=1e-2)
    adapter(torch.ones(2, 8)).sum().backward()
    before = adapter.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(adapter.weight, before)


# --- compilers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    gc.collect()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "kind", usual(TYPES, ("MARS-AdamW, exact", "MARS-M", "SONew", "LDAdam", "MKOR, sketch", "MKOR-H"))
)
def test_a_compiled_step_is_the_step(kind: str) -> None:
    found = run(TYPES[kind], FORMS["compiled"], take=lambda live: torch.compile(live.optimizer.step, backend="eager"))
    assert same_bits(found, plain_run(kind, "compiled")) == []


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "kind", usual(["MARS-M", "SONew", "LDAdam", "MKOR", "MKOR-H", "MKOR, sketch"], ("LDAdam", "MKOR-H"))
)
def test_a_step_in_a_compiled_function(kind: str) -> None:
    """With all that a loop calls besides; also where the compiler has given up compiling the function again."""

    def trained(compiled: bool, limit: int) -> Any:
        live = Run(TYPES[kind], FORMS["compiled"], nullcontext)

        def train(values: Tensor) -> Tensor:
            live.optimizer.zero_grad()
            loss = (live.model(values) - 1.0).square().mean()
            loss.backward()
            live.optimizer.record_loss(loss.detach())
            live.optimizer.step()
            return loss

        torch.compiler.reset()
        called = torch.compile(train, backend="eager", dynamic=False) if compiled else train
        with torch._dynamo.config.patch(recompile_limit=limit):
            for index in range(5):
                generator = torch.Generator().manual_seed(index)
                called(torch.randn(8 + index, 64, generator=generator, dtype=torch.float32))
        return live.left()

    wanted = trained(False, 8)
    assert same_bits(trained(True, 8), wanted) == []
    assert same_bits(trained(True, 1), wanted) == []


def _compiled_whole(rank: int, world: int) -> str:
    live = Run(TYPES["SONew"], FORMS["compiled"], nullcontext)
    live.step(0)
    before = kept(live)
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        torch.compile(lambda: live.optimizer.step(), backend="eager", fullgraph=True)()
    assert same_bits(kept(live), before) == []
    return str(error.value)


def test_a_function_that_must_not_be_cut_is_told_what_to_do() -> None:
    """In another process: a compiler that has refused goes on watching every call, which keep tensors longer then."""
    (message,) = run_ranks(1, _compiled_whole)
    assert "outside of what fullgraph=True compiles" in message


# --- what the above rests on -----------------------------------------------------------------------------------------

COMPUTE_NOTHING = {
    "add_param_group": "routes parameters",
    "attach": "keeps a reference",
    "capture_paused": "switches hooks off, and on again",
    "explain": "counts",
    "extra_state": "host numbers",
    "follow_resets": "looks which states there are, and puts counts back as they were; what drops states is guarded",
    "gradients_unscaled": "keeps a reference",
    "imagine": "plans without tensors",
    "load_extra_state": "host numbers",
    "owners": "counts",
    "plan": "called in a step",
    "kept_states": "types",
    "release": "takes hooks off",
    "reroute": "routes parameters",
    "settle": "adds whole numbers in place",
    "state_bytes": "counts",
    "step": "runs the closure in what surrounds it; what follows is guarded",
    "step_costs": "counts",
    "stored_states": "views",
    "summary": "counts",
}
"""Public methods that need no guard, and why."""


@pytest.mark.parametrize("cls", [ShardedOptimizer, *CLASSES])
def test_every_public_method_is_guarded_or_computes_nothing(cls: type) -> None:
    public = {name: value for name, value in vars(cls).items() if inspect.isfunction(value) and name[0] != "_"}
    open_ones = {
        name
        for name, value in public.items()
        if not getattr(inspect.unwrap(value, stop=_guards), "is_undisturbed", False)
    }
    allowed = COMPUTE_NOTHING.keys() | ({"capture", "record_loss"} if cls is ShardedOptimizer else set())
    assert open_ones <= allowed, "decorate it with @undisturbed, or say why it needs no guard"


def _guards(function: Any) -> bool:
    return hasattr(function, "is_undisturbed")


def test_compiled_functions_get_no_address_of_another_device() -> None:
    here, elsewhere = torch.empty(3, device="cpu"), torch.empty(3, device="meta")
    assert address(here) == here.data_ptr() and len(addresses([here, here])) == 2
    for call in (lambda: address(elsewhere), lambda: addresses([here, elsewhere])):
        with pytest.raises(ValueError, match="on meta; keep weights, gradients and states on one device"):
            call()
