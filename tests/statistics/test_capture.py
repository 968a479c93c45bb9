"""MKOR's statistics from module hooks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Conv1D
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from rankwise import MKOR
from rankwise.statistics.hooks import Capture, has_compiled
from rankwise.statistics.linear_views import LinearShape, describe_linear

Sums = tuple[Tensor, int, Tensor]
quick = settings(max_examples=15, deadline=None)


class TupleLinear(nn.Module):
    """A layer that hands its bias on, unadded, as Megatron's do."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.weight = Parameter(torch.randn(output_size, input_size))
        self.bias = Parameter(torch.zeros(output_size))

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor]:
        return input_ @ self.weight.T, self.bias


def mlp(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5, bias=False), nn.Tanh(), Conv1D(3, 5), nn.Tanh(), nn.Linear(3, 2)
    ).to(dtype)


def data(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_of(output: Tensor) -> Tensor:
    return (output.square() + output).sum()


def take_all(capture: Capture) -> list[Sums]:
    return [capture.take(parameter) for parameter in capture.records]


def assert_same(actual: list[Sums], expected: list[Sums]) -> None:
    """Bit for bit."""
    assert len(actual) == len(expected) > 0
    for (x, n, g), (x2, n2, g2) in zip(actual, expected, strict=True):
        assert n == n2 > 0
        assert torch.equal(x, x2)
        assert torch.equal(g, g2)


def assert_close(actual: list[Sums], expected: list[Sums], rtol: float = 1e-12) -> None:
    assert len(actual) == len(expected) > 0
    for (x, n, g), (x2, n2, g2) in zip(actual, expected, strict=True):
        assert n == n2 > 0
        assert float((x - x2).abs().max()) <= rtol * float(x2.abs().max())
        assert float((g - g2).abs().max()) <= rtol * float(g2.abs().max())


def assert_empty(capture: Capture) -> None:
    for x, n, g in take_all(capture):
        assert n == 0
        assert not x.any()
        assert not g.any()


# What is measured


@quick
@given(st.lists(st.integers(1, 4), max_size=3), st.integers(1, 3), st.sampled_from([1.0, 2.0**10, 2.0**-3]))
def test_statistics_are_mean_input_and_bias_gradient(lead: list[int], micro_batches: int, scale: float) -> None:
    """With and without accumulation, and for any loss scale once it is divided out."""
    model = mlp()
    capture = Capture(model)
    inputs: dict[nn.Module, list[Tensor]] = {}
    for module in model:
        module.register_forward_pre_hook(lambda m, args: inputs.setdefault(m, []).append(args[0].detach()))
    for k in range(micro_batches):
        (scale * loss_of(model(data(*lead, 4, seed=k)))).backward()
    layers = [m for m in model if not isinstance(m, nn.Tanh)]
    assert [r.parameter for r in capture.records.values()] == [m.weight for m in layers]
    for module in layers:
        record = capture.records[module.weight]
        x = torch.cat([x.reshape(-1, x.shape[-1]) for x in inputs[module]])
        sum_x, count, sum_dy = capture.take(module.weight)
        assert count == len(x)
        assert torch.allclose(sum_x / count, x.mean(0), rtol=1e-12, atol=1e-15)
        assert record.bias is module.bias
        assert (record.bias is None) == (module.bias is None)
        if module.bias is not None:
            assert torch.allclose(sum_dy / scale, module.bias.grad / scale, rtol=1e-12, atol=1e-12)


def test_virtual_bias_of_a_layer_without_one() -> None:
    """Its statistic is the gradient of a zero added to its output."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh()).double()
    capture = Capture(model)
    virtual = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    loss_of(model[1](model[0](data(5, 4)) + virtual)).backward()
    assert torch.allclose(capture.take(model[0].weight)[2], virtual.grad, rtol=1e-13)


@quick
@given(st.integers(1, 9), st.integers(1, 9))
def test_unequal_parts_make_the_whole(first: int, second: int) -> None:
    model, x = mlp(), data(first + second, 4)
    capture = Capture(model)
    loss_of(model(x)).backward()
    whole = take_all(capture)
    for part in (x[:first], x[first:]):
        loss_of(model(part)).backward()
    assert_close(take_all(capture), whole)
    assert whole[0][1] == first + second


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    layer = nn.Linear(2, 3).to(dtype)
    capture = Capture(layer)
    # Column sums of 96 000 (input) and 128 000 (gradient): float16 ends at 65 504, bfloat16 has no 96 000.
    (layer(torch.full((4000, 2), 24.0, dtype=dtype)) * 32.0).sum(dtype=torch.float32).backward()
    x, count, g = capture.take(layer.weight)
    assert x.dtype == g.dtype == torch.float32
    assert (x.tolist(), count, g.tolist()) == ([96000.0] * 2, 4000, [128000.0] * 3)


def test_a_second_gradient_for_the_same_forward_counts_the_input_once() -> None:
    model, x = mlp(), data(3, 4)
    capture = Capture(model)
    output = model(x)
    (output.sum() + output.square().sum()).backward()
    expected = take_all(capture)
    output = model(x)
    output.sum().backward(retain_graph=True)
    output.square().sum().backward(retain_graph=True)
    assert_close(take_all(capture), expected)
    # In a new window it is a forward of its own again.
    (output.sum() + output.square().sum()).backward()
    assert_close(take_all(capture), expected)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_sums_carry_no_graph() -> None:
    model = mlp()
    capture = Capture(model)
    loss_of(model(data(3, 4))).backward(create_graph=True)
    assert not any(t.requires_grad for x, _, g in take_all(capture) for t in (x, g))


def set_where_positive(output: Tensor) -> Tensor:
    output[output > 0] = output.new_tensor(0.5)
    return output


class ViewedConv1D(Conv1D):
    """As GPT-2's multiplies: the rows together, then reshaped."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


@pytest.mark.parametrize("change", [lambda y: y.mul_(3.0).relu_(), nn.ReLU(inplace=True), set_where_positive])
@pytest.mark.parametrize("lead", [[5], [2, 5], [2, 1, 5]])
@pytest.mark.parametrize("kind", [lambda: nn.Linear(4, 3), lambda: Conv1D(3, 4), lambda: ViewedConv1D(3, 4)])
def test_output_changed_in_place_afterwards(
    kind: Callable[[], nn.Module], lead: list[int], change: Callable[[Tensor], Tensor]
) -> None:
    """Autograd goes around a view that is changed in place, and most outputs are views."""
    layer = kind().double()
    capture = Capture(layer)
    loss_of(change(layer(data(*lead, 4)))).backward()
    assert isinstance(layer.bias, Parameter) and isinstance(layer.weight, Parameter)
    assert torch.allclose(capture.take(layer.weight)[2], layer.bias.grad, rtol=1e-13)


# When it is measured


def checkpointed(model: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
    for start in range(0, len(model), 2):
        x = checkpoint(model[start : start + 2], x, use_reentrant=reentrant)
    return x


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_checkpointing_changes_no_bit(reentrant: bool, micro_batches: int) -> None:
    model = mlp()
    capture = Capture(model)
    batches = [data(2, 3, 4, seed=k).requires_grad_() for k in range(micro_batches)]
    for x in batches:
        loss_of(model(x)).backward()
    expected = take_all(capture)
    for x in batches:
        loss_of(checkpointed(model, x, reentrant)).backward()
    assert_same(take_all(capture), expected)
    whole = [checkpoint(model, x, use_reentrant=reentrant) for x in batches]
    for output in whole:
        loss_of(output).backward()
    assert_same(take_all(capture), expected)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_micro_batches_in_flight(order: tuple[int, ...]) -> None:
    model, batches = mlp(), [data(2 + k, 4, seed=k) for k in range(3)]
    capture = Capture(model)
    for k in order:
        loss_of(model(batches[k])).backward()
    expected = take_all(capture)
    outputs = [model(x) for x in batches]
    for k in order:
        loss_of(outputs[k]).backward()
    assert_same(take_all(capture), expected)


def test_forwards_without_backward_leave_nothing() -> None:
    model, x = mlp(), data(3, 4)
    capture = Capture(model)
    model(x)
    with torch.no_grad():
        model(100 * x)
    with torch.inference_mode():
        model(100 * x)
    assert_empty(capture)
    loss_of(model(x)).backward()
    expected = take_all(capture)
    model.eval()
    model(100 * x)
    model.train()
    loss_of(model(x)).backward()
    assert_same(take_all(capture), expected)


def test_a_layer_off_the_loss_has_count_zero() -> None:
    used, unused = nn.Linear(4, 3), nn.Linear(4, 3)
    capture = Capture([used, unused])
    x = torch.ones(2, 4)
    unused(x)
    used(x).sum().backward()
    assert capture.take(unused.weight)[1] == 0
    assert capture.take(used.weight)[1] == 2


def test_a_layer_called_several_times_sums_its_calls() -> None:
    layer = nn.Linear(4, 4).double()
    capture = Capture(layer)
    x = data(3, 4)
    middle = torch.tanh(layer(x))
    loss_of(layer(middle)).backward()
    total, count, g = capture.take(layer.weight)
    assert count == 6
    assert torch.allclose(total, (x + middle).sum(0), rtol=1e-13)
    assert torch.allclose(g, layer.bias.grad, rtol=1e-13)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_sequences_of_several_lengths_in_one_nested_tensor(layout: torch.layout) -> None:
    lengths = 3, 1, 4
    found: list[list[Sums]] = []
    for nested in (True, False):
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5, bias=False)).double()
        for index, parameter in enumerate(model.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
        capture = Capture(model)
        tokens = [data(length, 4, seed=length) for length in lengths]
        if nested:
            output = model(torch.nested.nested_tensor(tokens, layout=layout))
            sum(map(loss_of, output.unbind())).backward()
        else:
            loss_of(model(torch.cat(tokens))).backward()
        found.append(take_all(capture))
    assert_close(found[0], found[1])


def test_enabled_switch() -> None:
    model, x = mlp(), data(3, 4)
    capture = Capture(model)
    capture.enabled = False
    output = model(x)
    capture.enabled = True
    loss_of(output).backward()
    assert_empty(capture)
    output = model(x)
    capture.enabled = False
    loss_of(output).backward()
    assert_empty(capture)
    capture.enabled = True
    loss_of(model(x)).backward()
    assert all(n == 3 for _, n, _ in take_all(capture))


def test_disabled_capture_hooks_no_output() -> None:
    layer = nn.Linear(2, 2)
    capture = Capture(layer)
    assert layer(torch.ones(1, 2))._backward_hooks
    capture.enabled = False
    assert not layer(torch.ones(1, 2))._backward_hooks


def test_remove_and_attach() -> None:
    model, x = mlp(), data(3, 4)
    capture = Capture(model)
    loss_of(model(x)).backward()
    expected = take_all(capture)
    loss_of(model(x)).backward()
    pending = model(x)
    capture.remove()
    assert not any(module._forward_hooks for module in model.modules())
    loss_of(pending).backward()
    assert_empty(capture)
    capture.attach()
    capture.attach()
    loss_of(model(x)).backward()
    assert_same(take_all(capture), expected)


# Windows


def test_untaken_window_is_dropped() -> None:
    model, x = mlp(), data(3, 4)
    capture = Capture(model)
    loss_of(model(x)).backward()
    expected = take_all(capture)
    capture.begin_window(0)
    loss_of(model(float("inf") * x)).backward()
    capture.begin_window(1)
    assert_empty(capture)
    loss_of(model(x)).backward()
    capture.begin_window(1)
    assert_same(take_all(capture), expected)


def test_window_callable_is_followed_at_each_commit() -> None:
    model, x, engine = mlp(), data(3, 4), {"step": 0}
    capture = Capture(model, window=lambda: engine["step"])
    loss_of(model(x)).backward()
    loss_of(model(x)).backward()
    expected = take_all(capture)
    assert expected[0][1] == 6
    engine["step"] = 1
    loss_of(model(5 * x)).backward()
    engine["step"] = 2
    for _ in range(2):
        loss_of(model(x)).backward()
    assert_same(take_all(capture), expected)


def test_take_gives_sums_away() -> None:
    layer = nn.Linear(2, 2)
    capture = Capture(layer)
    layer(torch.ones(3, 2)).sum().backward()
    x, count, g = capture.take(layer.weight)
    layer(5 * torch.ones(3, 2)).sum().backward()
    assert (x.tolist(), count, g.tolist()) == ([3.0, 3.0], 3, [3.0, 3.0])
    assert capture.take(layer.weight)[0].tolist() == [15.0, 15.0]
    with pytest.raises(KeyError):
        capture.take(layer.bias)


# Which layers


def test_shapes_come_from_the_module() -> None:
    """Partitioned weights are empty between uses."""
    linear, conv = nn.Linear(4, 6), Conv1D(3, 5)
    for module in (linear, conv):
        module.weight.data = torch.empty(0)
    capture = Capture([linear, conv])
    shapes = [(len(r.sum_input), len(r.sum_output_grad), r.transposed) for r in capture.records.values()]
    assert shapes == [(4, 6, False), (5, 3, True)]


def test_tied_weights_share_a_record() -> None:
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second)
    capture = Capture(model)
    (record,) = capture.records.values()
    assert (record.name, record.bias) == ("0", None)
    x = data(3, 4)
    loss_of(model(x)).backward()
    total, count, g = capture.take(first.weight)
    assert count == 6
    assert torch.allclose(total, (x + torch.tanh(first(x))).sum(0), rtol=1e-12)
    assert torch.allclose(g, first.bias.grad + second.bias.grad, rtol=1e-12)
    second.bias = first.bias
    assert Capture(model).records[first.weight].bias is first.bias


def test_tied_weights_of_different_shape_are_refused() -> None:
    linear, conv = nn.Linear(4, 4), Conv1D(4, 4)
    conv.weight = linear.weight
    with pytest.raises(ValueError, match="share a weight but use it as .* exclude its weight .MKOR's option"):
        Capture([linear, conv])


def unless_shared(model: nn.Module) -> Callable[[nn.Module, Parameter], bool]:
    """For `Capture`'s ``select``: turns down weights that an embedding of the model shares."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return lambda module, parameter: id(parameter) not in embeddings


def test_predicate_and_tied_embedding() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "body": nn.Linear(4, 4), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["embed"].weight
    capture = Capture(model, select=unless_shared(model))
    assert [record.name for record in capture.records.values()] == ["body"]
    assert not model["head"]._forward_hooks
    seen: list[tuple[nn.Module, Parameter]] = []
    assert not Capture(model, select=lambda m, p: bool(seen.append((m, p)))).records
    assert seen == [(model["body"], model["body"].weight), (model["head"], model["embed"].weight)]


def test_frozen_parametrized_and_foreign_layers_are_left_out() -> None:
    frozen, parametrized, plain = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    frozen.weight.requires_grad_(False)
    nn.utils.parametrizations.weight_norm(parametrized)
    model = nn.Sequential(frozen, parametrized, nn.LayerNorm(2), nn.Conv2d(2, 2, 1), plain)
    assert list(Capture(model).records) == [plain.weight]
    assert describe_linear(nn.Conv1d(2, 2, 1)) is None


def test_layers_frozen_after_the_hooks_are_passed_over() -> None:
    layer = nn.Linear(2, 2)
    capture = Capture(layer)
    layer.requires_grad_(False)
    layer(torch.ones(1, 2))
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert capture.take(layer.weight)[1] == 0
    layer.requires_grad_(True)
    layer(torch.ones(3, 2)).sum().backward()
    assert capture.take(layer.weight)[1] == 3


def test_custom_layers_with_tuple_output_and_keyword_input() -> None:
    def describe(module: nn.Module) -> LinearShape | None:
        is_ours = isinstance(module, TupleLinear)
        return LinearShape(module.input_size, module.output_size) if is_ours else None

    layer = TupleLinear(4, 3).double()
    capture = Capture(nn.Sequential(layer, nn.Linear(2, 2)), describe=describe)
    x = data(5, 4)
    for call in (lambda: layer(x), lambda: layer(input_=x)):
        layer.zero_grad()
        output, bias = call()
        loss_of(output + bias).backward()
        total, count, g = capture.take(layer.weight)
        assert count == 5
        assert torch.allclose(total, x.sum(0), rtol=1e-13)
        assert torch.allclose(g, layer.bias.grad, rtol=1e-13)


def test_layers_that_cannot_be_captured_say_so() -> None:
    with pytest.raises(ValueError, match="module '0' is lazy and has no shape yet; run one forward pass"):
        Capture([nn.LazyLinear(3)])
    layer = nn.Linear(4, 3)
    Capture([layer])
    layer.forward = lambda x: x[:, :4] * layer.weight[0]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="module '0' got an input with 5 features, but its in_features is 4; exclude"):
        layer(torch.ones(2, 5))


def test_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=8, n_head=2, vocab_size=11, n_positions=8, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0
    )
    model = transformers.GPT2LMHeadModel(config)
    capture = Capture(model, select=unless_shared(model))
    assert len(capture.records) == 8
    assert all(record.transposed for record in capture.records.values())
    tokens = torch.arange(10).reshape(2, 5)
    model(tokens, labels=tokens).loss.backward()
    for record in list(capture.records.values()):
        _, count, g = capture.take(record.parameter)
        assert count == 10
        assert record.bias is not None
        assert torch.allclose(g, record.bias.grad, rtol=1e-4, atol=1e-7)


# Life with other tools


def test_statistics_follow_the_device_of_the_computation() -> None:
    layer = nn.Linear(2, 3)
    capture = Capture(layer)
    record = capture.records[layer.weight]
    # As if the weight had been on another device when the hooks were made.
    record.sum_input, record.sum_output_grad = torch.zeros(2, device="meta"), torch.zeros(3, device="meta")
    layer(torch.ones(4, 2)).sum().backward()
    x, count, g = capture.take(layer.weight)
    assert (x.tolist(), count, g.tolist()) == ([4.0, 4.0], 4, [4.0, 4.0, 4.0])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_the_model_are_not_captured(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, x = nn.Sequential(nn.Linear(4, 3)).double(), data(2, 4)
    capture = Capture(model, window=lambda: 0)
    twin = duplicate(model)
    loss_of(twin(x)).backward()
    assert_empty(capture)
    loss_of(model(x)).backward()
    assert capture.take(model[0].weight)[1] == 2


def test_compiled_model() -> None:
    model, x = mlp(), data(3, 4)
    capture = Capture(model)
    loss_of(model(x)).backward()
    expected = take_all(capture)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        loss_of(compiled(x)).backward()
        assert_same(take_all(capture), expected)
    capture.enabled = False
    loss_of(compiled(x)).backward()
    assert_empty(capture)


@pytest.mark.parametrize("same", [True, False])
def test_hooks_count_in_what_was_compiled_before(same: bool) -> None:
    """Also of another model of these classes."""
    model, before, x = mlp(), mlp(), data(3, 4)
    loss_of(torch.compile(model if same else before, backend="eager")(x))
    assert has_compiled()
    capture = Capture(model)
    loss_of(torch.compile(model, backend="eager")(x)).backward()
    found = take_all(capture)
    loss_of(model(x)).backward()
    assert_same(found, take_all(capture))


def test_transforms_of_a_captured_model() -> None:
    """Their tensors belong to them: sums that took some up would end in an error, or in numbers of another batch."""
    model, x = mlp(), data(3, 4)
    plain, parameters = mlp(), dict(model.named_parameters())
    expected = torch.func.jacrev(plain)(x)
    capture = Capture(model)

    def loss(chosen: dict[str, Tensor], sample: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, chosen, (sample,)))

    assert torch.equal(torch.func.jacrev(model)(x), expected)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    assert_empty(capture)
    loss_of(model(x)).backward()
    assert torch.allclose(each["0.weight"].sum(0), model[0].weight.grad, rtol=1e-13)
    assert all(count == 3 for _, count, _ in take_all(capture))


def test_repr() -> None:
    assert repr(Capture(mlp())) == "Capture(4 weights of 4 modules, enabled)"


def test_a_named_window_outlasts_gradients_that_are_moved_away() -> None:
    """A loop that adds micro-batches up elsewhere, with ``zero_grad()`` in between, has the sums of all of them."""

    def trained(moves: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, now = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), {"step": 0}
        optimizer = MKOR(model.named_parameters(), lr=1e-2, update_interval=1)
        optimizer.capture(model, window=(lambda: now["step"]) if moves else None)
        for now["step"] in range(3):
            sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
            for micro in range(2):
                if moves:
                    model.zero_grad()
                x = torch.randn(5, 4, generator=torch.Generator().manual_seed(2 * now["step"] + micro))
                model(x).square().mean().backward()
                if moves:
                    sums = [total + parameter.grad for total, parameter in zip(sums, model.parameters(), strict=True)]
            for parameter, total in zip(model.parameters(), sums, strict=True):
                parameter.grad = total if moves else parameter.grad
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    for moved, kept in zip(trained(True), trained(False), strict=True):
        assert torch.equal(moved, kept)
