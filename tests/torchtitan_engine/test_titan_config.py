"""What torchtitan's configurations may say of our optimizers, and how our names come and go; in one process."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fused_rows import runs_of
from titan_runs import MODELS
from torch import Tensor, nn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer
from torchtitan.trainer import Trainer

import rankwise
import rankwise.torchtitan as plugin
from rankwise import MKOR, LDAdam
from rankwise.names import BY_SPELLING
from rankwise.options.validation import OptionError
from rankwise.step.optimizer import ShardedOptimizer

METHODS = {(OptimizersContainer, "__init__"), (OptimizersContainer, "_resolve_optimizer_factory")}
METHODS |= {(Trainer, "forward_backward_step")}
Group = tuple[str, str, dict[str, Any]]


def network(model: str = "llama") -> nn.Module:
    """A small model, in one process."""
    built = MODELS[model]().model_spec.model.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return built


def container(model: nn.Module, *groups: Group, **config: Any) -> OptimizersContainer:
    found = [ParamGroupConfig(pattern=p, optimizer_name=name, optimizer_kwargs=given) for p, name, given in groups]
    config = {"implementation": "for-loop", **config}
    return OptimizersContainer.Config(param_groups=found, **config).build(model_parts=[model])


def step(model: nn.Module, optimizers: OptimizersContainer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizers.step()
    optimizers.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# --- names ------------------------------------------------------------------------------------------------------------


def _methods() -> dict[tuple[type, str], Any]:
    return {(owner, name): vars(owner)[name] for owner, name in METHODS}


def test_registration_is_idempotent_and_reversible() -> None:
    assert plugin.is_registered()
    registered = _methods()
    plugin.register()
    assert _methods() == registered
    try:
        plugin.unregister()
        plugin.unregister()
        assert not plugin.is_registered()
        assert all(method.__module__.startswith("torchtitan.") for method in _methods().values())
        with pytest.raises(NotImplementedError):
            container(nn.Linear(4, 4), (".*", "LDAdam", {}))
    finally:
        plugin.register()
    assert _methods() == registered


@pytest.mark.parametrize("name", plugin.OPTIMIZER_NAMES)
def test_every_name_builds_what_it_stands_for(name: str) -> None:
    named = BY_SPELLING[plugin.OPTIMIZER_NAMES[name]]
    (built,) = container(network(), (".*", name, {"lr": 2e-3}), implementation="fused")
    assert type(built) is named.optimizer
    assert all(getattr(built.options, key) == value for key, value in named.preset.items())
    assert built.param_groups[0]["lr"] == 2e-3 and "fused" not in built.param_groups[0]


REFUSED: list[tuple[str, list[Group], str]] = [
    ("name", [(".*", "LDAdan", {})], "did you mean 'LDAdam'"),
    ("their name", [(".*", "AdmW", {})], "did you mean 'AdamW'"),
    ("unlike any", [(".*", "Zyx", {})], "rankwise adds MARS"),
    ("keyword", [(".*", "LDAdam", {"rnak": 4})], "'rnak': did you mean 'rank'"),
    ("word of others", [(".*", "MARS", {"wd": 0.1})], "did you mean 'weight_decay'"),
    ("value", [(".*", "LDAdam", {"rank": 0})], "rank=0 is invalid"),
    ("what the name says", [(".*", "MARS-M", {"variant": "lion"})], "'variant', which the name fixes"),
    ("unread", [(".*", "MKOR", {"momentum": 0.8})], "momentum=0.8 is invalid"),
    ("second gradient", [(".*", "MARS", {"exact": True})], "exact=True is invalid under torchtitan"),
    ("pattern of an option", [(".*", "MARS", {"exclude": ["*wz*"]})], r"exclude='\*wz\*' is invalid"),
    ("no matrices", [("norm", "LDAdam", {}), (".*", "AdamW", {})], "would update none"),
    ("two", [("wo", "SONew", {"band": 1}), (".*", "SONew", {"band": 4})], "band is invalid, because it is 1 and 4"),
    (
        "one and none",
        [("wo", "SONew", {"band": 4}), (".*", "SONew", {})],
        "band is invalid, because it is 4 and nothing",
    ),
]


@pytest.mark.parametrize(("groups", "message"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED])
def test_is_refused(groups: list[Group], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        container(network(), *groups)


def test_a_pattern_without_parameters_is_refused_by_torchtitan() -> None:
    with pytest.raises(ValueError, match="matched no parameters"):
        container(network(), ("nothing", "LDAdam", {}), (".*", "AdamW", {}))


# --- groups -----------------------------------------------------------------------------------------------------------


def test_groups_have_their_own_options_and_share_the_rest() -> None:
    groups: list[Group] = [("w1", "LDAdam", {"lr": 1e-3, "rank": 4}), (".*", "LDAdam", {"weight_decay": 0.1})]
    shared = {"lr": 0.1, "comm_dtype": "bfloat16"}
    (built,) = container(network(), *groups, optimizer_factory_kwargs_by_name={"LDAdam": shared})
    first, second = built.param_groups
    assert built.options.comm_dtype == "bfloat16"
    assert (first["lr"], first["rank"], first["weight_decay"]) == (1e-3, 4, 0.0)
    assert (second["lr"], second["rank"], second["weight_decay"]) == (0.1, LDAdam.options_type().rank, 0.1)


@pytest.mark.parametrize("name", ["ldadam", "LDAdamm", "MKOR"])
def test_shared_options_of_no_group_are_refused(name: str) -> None:
    """torchtitan looks them up by the very spelling of the groups, and would pass over them."""
    with pytest.raises(OptionError, match=rf"'{name}' is invalid: no group .* in the groups, 'LDAdam'"):
        container(network(), (".*", "LDAdam", {}), optimizer_factory_kwargs_by_name={name: {"rank": 3}})


def test_a_module_that_is_loaded_again_wraps_nothing_twice() -> None:
    importlib.reload(plugin)
    (built,) = container(network(), (".*", "LDAdam", {"rank": 3}))
    assert built.param_groups[0]["rank"] == 3
    plugin.unregister()
    assert not plugin.is_registered() and OptimizersContainer.__init__.__module__.startswith("torchtitan")
    plugin.register()


def test_two_types_by_pattern_step_as_they_do_alone() -> None:
    """Matrices to MARS-M, the rest to torch's AdamW, rates to torchtitan's schedule."""
    model, alone = network(), network()
    matrices = r"(attention|feed_forward)\..*weight"
    options = {"lr": 1e-2, "ns_dtype": "float32"}
    optimizers = container(model, (matrices, "MARS-M", options), (".*", "AdamW", {"lr": 1e-3}))
    assert [type(each).__name__ for each in optimizers] == ["MARS", "AdamW"]
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=4)
    named = [(n, p) for n, p in alone.named_parameters() if "attention." in n or "feed_forward." in n]
    others = [(n, p) for n, p in alone.named_parameters() if n not in dict(named)]
    rankwise.annotate(alone)
    both = [BY_SPELLING["MARS-M"].optimizer(named, variant="muon", **options), torch.optim.AdamW(others, lr=1e-3)]
    for number in range(3):
        scale = (0.5, 1.0, 1.0)[number]
        for group, rate in ((both[0].param_groups[0], 1e-2), (both[1].param_groups[0], 1e-3)):
            group["lr"] = rate * scale
        step(model, optimizers, number)
        step(alone, SimpleNamespace(step=lambda: [o.step() for o in both], zero_grad=lambda: None), number)  # type: ignore[arg-type]
        schedule.step()
        assert optimizers.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * (0.5, 1.0, 1.0, 0.5)[number + 1])
    found, expected = weights(model), weights(alone)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- fused weights ----------------------------------------------------------------------------------------------------


def _rows(optimizer: ShardedOptimizer, name: str) -> dict[str, list[int]]:
    fused = optimizer.table.catalog[name][0].fused
    assert fused is not None
    parts = [part for part, _ in fused.parts]
    return {part: [row for first, last in runs_of(fused, part) for row in range(first, last)] for part in parts}


def test_joined_projections_are_known_as_torchtitan_splits_them() -> None:
    model = network()
    linear = model.get_submodule("layers.0.attention.qkv_linear")
    with torch.no_grad():
        weight = linear.wqkv.weight  # type: ignore[union-attr]
        weight.copy_(torch.arange(len(weight)).unsqueeze(1).expand_as(weight))  # type: ignore[arg-type]
    (built,) = container(model, (".*", "MARS-M", {}))
    found = _rows(built, "layers.0.attention.qkv_linear.wqkv.weight")
    # A checkpoint has the three apart.
    saved = {name: value[:, 0].int().tolist() for name, value in linear.state_dict().items()}
    assert found == {part: saved[f"w{part}.weight"] for part in "qkv"}


def test_latent_attention_is_known_as_torchtitan_splits_it() -> None:
    (built,) = container(network("deepseek"), (".*", "MARS-M", {}))
    down, up = (_rows(built, f"layers.0.attention.wkv_{at}.weight") for at in "ab")
    assert down == {"kv": list(range(32)), "k_rope": list(range(32, 40))}
    heads = torch.arange(4 * 28).view(4, 28)
    assert up == {"k": heads[:, :16].flatten().tolist(), "v": heads[:, 16:].flatten().tolist()}


def test_names_are_torchtitans_whatever_wraps_a_layer() -> None:
    model = network()
    FullAC.Config().build(dump_folder="").apply(model)
    assert "layers.0._checkpoint_wrapped_module.attention.wo.weight" in dict(model.named_parameters())
    (built,) = container(model, (".*", "LDAdam", {"exclude": ["layers.0.attention.wo.weight"]}))
    assert list(built.table.catalog) == built.param_groups[0]["param_names"]
    assert built.table.routes["layers.0.attention.wo.weight"].rule == "fallback"


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MARS-M", "SONew", "LDAdam"])
def test_flat_keys_carry_every_state(name: str) -> None:
    """torchtitan's dictionary, taken before the first step and after some, goes on with the same bits."""
    model, other = network(), network()
    optimizers, again = container(model, (".*", name, {})), container(other, (".*", name, {}))
    first = optimizers.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    matrix = [key for key in first if key.startswith("state.layers.0.attention.wo.weight.matrix.")]
    assert bool(matrix) == (name == "LDAdam")
    for number in range(3):
        step(model, optimizers, number)
    saved = {k: v.clone() if isinstance(v, Tensor) else v for k, v in optimizers.state_dict().items()}
    assert saved.keys() == first.keys() == again.state_dict().keys()
    other.load_state_dict(model.state_dict())
    again.load_state_dict(saved)
    for number in range(3, 6):
        step(model, optimizers, number)
        step(other, again, number)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("theirs", "ours"), [("MARS-AdamW", "MARS-Lion"), ("MARS-M", "LDAdam"), ("AdamW", "MARS-M")])
def test_another_types_states_are_refused_before_anything_changes(theirs: str, ours: str) -> None:
    model = network()
    optimizers = container(model, (".*", ours, {}))
    step(model, optimizers, 0)
    before = {k: v.clone() if isinstance(v, Tensor) else v for k, v in optimizers.state_dict().items()}
    saved = container(network(), (".*", theirs, {"lr": 0.5})).state_dict()
    with pytest.raises((ValueError, KeyError), match="not found in checkpoint|names the optimizer that wrote it"):
        optimizers.load_state_dict(saved)
    after = optimizers.state_dict()
    assert all(torch.equal(v, after[k]) if isinstance(v, Tensor) else v == after[k] for k, v in before.items())


# --- MKOR -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "what"), [("MKOR", {}, "statistics of layers"), ("MKOR-H", {"rule": "sketch"}, "losses")]
)
def test_what_replicas_would_not_share_is_refused(name: str, options: dict[str, Any], what: str) -> None:
    config = TorchFTOptimizersContainer.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs={"lr": 1e-3, **options})],
        implementation="for-loop",
    )
    with pytest.raises(OptionError, match=f"{name} is invalid under torchft: .* but not {what}.* rule='sketch'"):
        config.build(model_parts=[network()], ft_manager=SimpleNamespace(manager=None, use_async_quorum=True))


def test_mkor_is_refused_where_graphs_would_run_no_hooks() -> None:
    (built,) = optimizers = container(network(), (".*", "MKOR", {}))
    assert type(built) is MKOR and built.statistics.records
    trainer = SimpleNamespace(
        optimizers=optimizers, config=SimpleNamespace(training=SimpleNamespace(disable_cuda_graphs=False))
    )
    with pytest.raises(OptionError, match="disable_cuda_graphs=False is invalid with MKOR"):
        Trainer.forward_backward_step(trainer)  # type: ignore[arg-type]
