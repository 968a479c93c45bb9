"""How verl, Megatron-Bridge, ms-swift and NeMo build, move and checkpoint Megatron's optimizer, with ours in it."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron_cells import MAX_LR, MIN_LR, Cell
from megatron_harness import MakeOptimizer, Result, Trainer, opened, trained
from megatron_types import EPS, TYPES, maker
from ranks import once, run_ranks
from torch import nn

import megatron_patches
from megatron_patches import offloading
from megatron_patches.cpu import cpu_megatron
from megatron_patches.registry import RankwiseConfig
from rankwise.options.validation import OptionError

CELL = Cell(precision="bf16", use_distributed_optimizer=True)


# --- their calls, as far as an optimizer sees them -------------------------------------------------------------------


def verl(config: dict[str, Any], chunks: list[nn.Module]) -> Any:
    """verl 0.7: ``init_megatron_optim_config`` and ``get_megatron_optimizer``, whose class and fields are fixed."""
    fields = {
        "optimizer": "adam",
        "lr": MAX_LR,
        "min_lr": MIN_LR,
        "clip_grad": 1.0,
        "weight_decay": 0.1,
        "use_distributed_optimizer": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
    }
    return get_megatron_optimizer(config=OptimizerConfig(**fields), model_chunks=chunks)


def swift(config: dict[str, Any], chunks: list[nn.Module]) -> Any:
    """ms-swift 4: a config class by the optimizer's name, of a closed list, and two arguments without names."""
    from megatron.core import optimizer

    config_class = getattr(optimizer, "AdamOptimizerConfig", OptimizerConfig)
    known = {field.name for field in dataclasses.fields(config_class)}
    given = {name: value for name, value in config.items() if name in known}
    return get_megatron_optimizer(config_class(**given), chunks)


def bridge(config: dict[str, Any], chunks: list[nn.Module]) -> Any:
    """Megatron-Bridge 0.7: ``setup_optimizer`` asks the config to build; its checks come twice."""
    given = RankwiseConfig(**{**config, "optimizer": NAME, "rankwise": OPTIONS})
    given.__post_init__()
    return given.provide(
        model_chunks=chunks,
        config_overrides=None,
        use_gloo_process_groups=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def nemo(config: dict[str, Any], chunks: list[nn.Module]) -> Any:
    """NeMo 2.6: conditions that Megatron knew before 0.16, and multipliers renamed afterwards."""
    given = RankwiseConfig(**{**config, "optimizer": NAME, "rankwise": OPTIONS})
    return get_megatron_optimizer(
        given,
        chunks,
        no_weight_decay_cond=lambda name, parameter: parameter.dim() == 1,
        scale_lr_cond=None,
        lr_mult=1.0,
        use_gloo_process_groups=True,
    )


NAME, OPTIONS = "mars-m", {"eps": EPS, **TYPES["mars-m"]}
CALLS: dict[str, Callable[..., Any]] = {
    "verl": verl,
    "ms-swift": swift,
    "Megatron-Bridge": bridge,
    "NeMo": nemo,
}


@contextmanager
def prepared(label: str) -> Iterator[None]:
    """What a user of the framework adds, and takes back here."""
    megatron_patches.apply()
    if label in ("verl", "ms-swift"):
        megatron_patches.replace_adam(NAME, OPTIONS)
    bound = megatron_patches.get_megatron_optimizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "get_megatron_optimizer", bound)
        yield
    megatron_patches.replace_adam(None)
    megatron_patches.revert()


def _moved_to_the_host(optimizer: Any) -> set[str]:
    """As verl 0.7 and ms-swift 4 do between a rollout and the next update; which states have left by then."""
    wrappers = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    left = set()
    for wrapper in wrappers:
        for group in wrapper.shard_fp32_from_float16_groups:
            for weight in group:
                weight.data = weight.data.to("cpu", copy=True)
        inner = wrapper.optimizer
        before = {id(value): value for state in _states(inner) for value in state.values()}  # kept alive
        if all(hasattr(inner, name) for name in ("sub_optimizers", "inner_param_to_orig_param", "state")):
            for part in inner.sub_optimizers:
                for parameter, state in part.state.items():
                    for name, value in state.items():
                        inner.state[inner.inner_param_to_orig_param.get(parameter, parameter)][name] = value.to("cpu")
        else:
            for state in inner.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    if name in state:
                        state[name] = state[name].to("cpu", copy=True)
        left |= {name for state in _states(inner) for name, value in state.items() if id(value) not in before}
        # Counts lie on the host already.
        assert not any(id(value) in before and value.dim() for state in _states(inner) for value in state.values())
    return left


def _moved_back(optimizer: Any) -> None:
    wrappers = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for wrapper in wrappers:
        for group in wrapper.shard_fp32_from_float16_groups:
            for weight in group:
                weight.data = weight.data.to("cpu", copy=True)
        if hasattr(wrapper.optimizer, "_move_new_state_to_right_device"):
            wrapper.optimizer._move_new_state_to_right_device()


def _states(inner: Any) -> list[Any]:
    return [*inner.state.values(), *inner.matrix_states.values()]


# --- tests -----------------------------------------------------------------------------------------------------------


def _trained(cell: Cell, make: MakeOptimizer, between: Callable[[Trainer], Any] = lambda trainer: None) -> Result:
    with opened(cell, make) as trainer:
        trainer.advance(1)
        between(trainer)
        result = trained(trainer, 2)
    return result


def _resumed(cell: Cell, make: MakeOptimizer) -> Result:
    """Saved after a step and loaded into a new run, as all four do by ``sharded_state_dict``."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    with opened(cell, make) as trainer:
        trainer.advance(1)
        trainer.save(Path(str(folder[0])))
    with opened(cell, make) as trainer:
        trainer.load(Path(str(folder[0])))
        return trained(trainer, 2)


def _all(rank: int, world: int, labels: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    with cpu_megatron():
        found["plain"] = _trained(CELL, maker(NAME))
        for label in labels:
            with prepared(label):
                found[label] = _resumed(CELL, CALLS[label])
    return found


@once
def runs() -> dict[str, Any]:
    return run_ranks(1, _all, tuple(CALLS))[0]


@pytest.mark.parametrize("label", CALLS)
def test_their_call_builds_ours(label: str) -> None:
    plain, found = runs()["plain"], runs()[label]
    assert found.losses == plain.losses
    assert all(torch.equal(found.weights[name], plain.weights[name]) for name in plain.weights)


def _interlude(rank: int, world: int, names: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    with cpu_megatron(), pytest.MonkeyPatch.context() as patch:
        # Counts, which lie on the host, have no dimension; all else is taken for an accelerator's.
        patch.setattr(offloading, "is_on_device", lambda tensor: tensor.dim() > 0)
        for name in names:
            left: set[str] = set()

            def rollout(trainer: Trainer, left: set[str] = left) -> None:
                left |= _moved_to_the_host(trainer.optimizer)
                _moved_back(trainer.optimizer)

            found[name] = _trained(CELL, maker(name)), _trained(CELL, maker(name), rollout), left
    return found


def _check_rollouts(world: int, names: tuple[str, ...]) -> None:
    for name, (plain, found, left) in run_ranks(world, _interlude, names)[0].items():
        assert found.losses == plain.losses, name
        assert all(torch.equal(found.weights[key], plain.weights[key]) for key in plain.weights), name
        assert left - {"step"} and "step" not in left, name


def test_states_leave_for_rollouts_and_come_back() -> None:
    _check_rollouts(1, ("mkor",))


@pytest.mark.exhaustive
def test_states_of_every_type_leave_for_rollouts_and_come_back() -> None:
    _check_rollouts(2, tuple(TYPES))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("zebra", {}), "replace_adam: name='zebra' is invalid: it must be one of mars, mars-adamw"),
        (("mars-m", {"rank": 4}), "optimizer 'mars-m' has no option 'rank'"),
    ],
)
def test_what_nobody_knows_cannot_replace_adam(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        megatron_patches.replace_adam(*given)


def test_settings_beside_options_are_checked() -> None:
    with pytest.raises(OptionError, match="replace_adam: layer_wise is no setting: those are rankwise_layer_wise"):
        megatron_patches.replace_adam("mars-m", layer_wise=True)
