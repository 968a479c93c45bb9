"""``load_checkpoint``: find the checkpoint, decide, and do what was decided, one step after the other.

DeepSpeed itself loads a checkpoint of the same layout, ours included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_plugin.checkpoints.engine_facts import present_of
from deepspeed_plugin.checkpoints.engine_state import (
    refuse_other_model,
    restore_engine,
    restore_module,
    without_record,
)
from deepspeed_plugin.checkpoints.errors import own_error, read_together
from deepspeed_plugin.checkpoints.files import SavedCheckpoint
from deepspeed_plugin.checkpoints.finding import Checkpoint, find
from deepspeed_plugin.checkpoints.load_plan import Plan, Wanted, Way, decide
from deepspeed_plugin.checkpoints.other_layouts import NamedStates, fill, laid_down
from deepspeed_plugin.checkpoints.universal import UniversalCheckpoint, fill_weights
from deepspeed_plugin.checkpoints.zero_file_form import zero_form
from rankwise.planning.param_remainders import forget_remainders
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.step.reports import print_on_first_rank

__all__ = ["load_checkpoint"]

_Original = Callable[..., tuple[str | None, Any]]


def load_checkpoint(
    original: _Original, engine: DeepSpeedEngine, load_dir: str, tag: str | None = None, **options: Any
) -> tuple[str | None, Any]:
    """DeepSpeed's ``load_checkpoint``, which also continues on another world size, stage or optimizer.

    Args:
        original: DeepSpeed's method.
        engine: The engine that loads.
        load_dir: As for DeepSpeed, like the following.
        tag: Which checkpoint; the latest by default.
        options: See :class:`deepspeed_plugin.checkpoints.load_plan.Wanted`.

    Raises:
        CheckpointError: A move that is not supported, with what to do instead, or a damaged checkpoint.
    """
    wanted, present = Wanted(**options), present_of(engine)
    found, known = find(engine, load_dir, tag, wanted.states, present)
    plan = decide(known, present, wanted)
    if plan.note is not None:
        print_on_first_rank(plan.note)
    if plan.way is Way.DEEPSPEED or found is None:
        return _by_deepspeed(original, engine, load_dir, tag, found, plan)
    return _by_name(engine, found, plan)


def _by_deepspeed(
    original: _Original,
    engine: DeepSpeedEngine,
    load_dir: str,
    tag: str | None,
    found: Checkpoint | None,
    plan: Plan,
) -> tuple[str | None, Any]:
    if plan.judge and isinstance(found, SavedCheckpoint):
        _refuse_foreign_states(engine, found)
    with zero_form(engine):
        path, client_state = original(engine, load_dir, tag=tag, **vars(plan.wanted))
    if isinstance(engine.basic_optimizer, ShardedOptimizer) and not plan.wanted.states:
        forget_remainders(engine.basic_optimizer.state.values())
    if plan.refresh:
        # DeepSpeed copies the loaded weights to this wrapper's fp32 masters only when nothing else is loaded.
        engine.optimizer.refresh_fp32_params()
    return path, client_state if path is None else without_record(client_state)


def _refuse_foreign_states(engine: DeepSpeedEngine, saved: SavedCheckpoint) -> None:
    """Refuse on all ranks what the optimizer of any would refuse of its file, when the others have taken theirs."""
    group: dist.ProcessGroup = engine.seq_data_parallel_group
    rank = dist.get_rank(group)
    read_together(group, lambda: engine.basic_optimizer.saved.fit.refuse_foreign(saved.optimizer(rank)[0]))


def _by_name(engine: DeepSpeedEngine, found: Checkpoint, plan: Plan) -> tuple[str, dict[str, Any]]:
    """Collective: weights and states from where they lie by name, then what else the model file holds."""
    wanted, states, strict = plan.wanted, plan.wanted.states, plan.wanted.strict
    if strict:
        refuse_other_model(engine, found.content)
    with own_error(), _named_states(engine, found, plan.way, states) as named:
        restore_module(engine, found.content, wanted)
        if named is not None:
            fill(engine, named, states, strict)
        elif isinstance(found, UniversalCheckpoint):
            fill_weights(engine, found, strict)
    scaler = found.scaler_state() if states else {}
    return str(found.model_file), restore_engine(engine, found.content, scaler, wanted)


@contextmanager
def _named_states(engine: DeepSpeedEngine, found: Checkpoint, way: Way, states: bool) -> Iterator[NamedStates | None]:
    """Weights and states by name; None where a universal checkpoint's weights alone are to be loaded."""
    if isinstance(found, UniversalCheckpoint) and way is not Way.MOVE:
        yield found.states
        return
    saved = found.source if isinstance(found, UniversalCheckpoint) else found
    assert saved is not None
    with laid_down(engine, saved, states) as named:
        yield named
