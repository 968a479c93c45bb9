"""This module decides how a checkpoint is loaded, once, from facts of it and of this run, before anything changes.

Nothing here reads a file, asks an engine or talks to other ranks. :mod:`deepspeed_plugin.checkpoints.files` and
:mod:`deepspeed_plugin.checkpoints.universal` say what is known of a checkpoint,
:mod:`deepspeed_plugin.checkpoints.loading` of this run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rankwise.layout.chunked_vectors import CheckpointError

__all__ = ["Order", "Plan", "Present", "Saved", "Universal", "Wanted", "decide"]


Order = tuple[tuple[str, ...], tuple[int, ...]]
"""Names in the model, and the number of parameters in each param group."""


@dataclass(frozen=True)
class Wanted:
    """The arguments of ``load_checkpoint``, under DeepSpeed's names.

    Attributes:
        load_module_strict: Whether model and checkpoint must have the same parameters and buffers.
        load_optimizer_states: Whether states are loaded beside the weights.
        load_lr_scheduler_states: Whether the scheduler is restored.
        load_module_only: Whether counters, schedulers and states are left alone.
        custom_load_fn: Function that loads ``src``, the saved state dictionary, into ``dst``, the module.
    """

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: Callable[..., Any] | None = None

    @property
    def states(self) -> bool:
        """Whether optimizer states are to be loaded."""
        return self.load_optimizer_states and not self.load_module_only

    @property
    def strict(self) -> bool:
        """Whether every parameter must be in the checkpoint."""
        return self.load_module_strict and self.custom_load_fn is None


@dataclass(frozen=True)
class Saved:
    """The facts of a checkpoint in the files that DeepSpeed writes.

    Attributes:
        name: Tag of the checkpoint.
        latest: Tag that the file ``latest`` names; None if there is no such file.
        author: Identity of our optimizer that wrote it; None for other optimizers.
        stage: ZeRO stage.
        ranks: Number of data-parallel ranks that wrote it; None at stage 0, whose file any number of ranks can read.
        stages: Number of pipeline stages, or of tensor-parallel ranks, that wrote it.
        tensor: Number of ranks over which AutoTP had cut every weight.
        partitioned: Whether no rank had whole weights, as at ZeRO-3.
        config: Configuration of the engine that wrote it.
        sub_groups: At ZeRO-3, the first rank's elements of each sub-group: they depend on more than their setting.
        groups: Number of param groups of ours.
        moments: Whether another optimizer has left AdamW's moments or Muon's, and where those of each parameter are.
        order: What they are told apart by where there are no names.
    """

    name: str
    latest: str | None
    author: str | None
    stage: int
    ranks: int | None
    stages: int = 1
    tensor: int = 1
    partitioned: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    sub_groups: tuple[int, ...] = ()
    groups: int = 0
    moments: bool = False
    order: Order | None = None


@dataclass(frozen=True)
class Universal:
    """The facts of a universal checkpoint.

    Attributes:
        name: Name of the folder, for messages.
        author: Identity of our optimizer that wrote it; None for other optimizers.
        holds_states: Whether it has our states.
        has_source: Whether the checkpoint that it was made of still exists.
        source: Folder of that checkpoint.
        partitioned: Whether no rank had whole weights, as at ZeRO-3.
        groups: Number of param groups of the states, in it or in its source.
    """

    name: str
    author: str | None
    holds_states: bool = False
    has_source: bool = False
    source: str = ""
    partitioned: bool = False
    groups: int = 0


@dataclass(frozen=True)
class Present:
    """The facts of the run that loads.

    Attributes:
        identity: Identity of our optimizer; None for anybody else's.
        optimizer: Its name for messages.
        stage: As of :class:`Saved`, like the next two, ``partitioned``, ``sub_groups`` and ``groups``.
        ranks: None where no wrapper partitions anything.
        stages: Stages of the pipeline, or tensor-parallel ranks.
        tensor: Ranks that AutoTP cuts every weight over.
        pipeline: Whether the model is one, of one stage perhaps.
        experts: Whether it has expert layers whose names count the experts of one rank.
        stacks: Whether it has stacks of experts that AutoEP has shared out.
        partitioned: Whether no rank has whole weights.
        config: Configuration of this run's engine.
        sub_groups: Of this run's engine.
        groups: Groups of this run's optimizer.
        frozen: The first parameter that is not trained.
        frozen_stack: The first stack of experts that is not trained.
        alone: Whether the data-parallel ranks are all ranks.
        copies: Whether DeepSpeed's wrapper leaves its fp32 copies as they were if weights alone are loaded.
        order: Order of parameters where no wrapper cuts or joins them; else None.
    """

    identity: str | None
    optimizer: str
    stage: int
    ranks: int | None
    stages: int = 1
    tensor: int = 1
    pipeline: bool = False
    experts: bool = False
    stacks: bool = False
    partitioned: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    sub_groups: tuple[int, ...] = ()
    groups: int = 0
    frozen: str | None = None
    frozen_stack: str | None = None
    alone: bool = True
    copies: bool = False
    order: Order | None = None

    @property
    def is_divided(self) -> bool:
        """Whether other ranks have other parameters than this one, or other parts beyond data parallelism."""
        return self.pipeline or self.experts or self.tensor > 1


@dataclass(frozen=True)
class Plan:
    """The decision how to load a checkpoint.

    Attributes:
        by_name: Whether we load, by name; else DeepSpeed does, by position in the ranks' files.
        wanted: What is to be loaded: what was asked for, without states that are of no use here.
        note: What rank 0 says before.
        judge: Whether every rank's optimizer judges its file before any rank takes its own.
        refresh: Whether DeepSpeed's fp32 copies are to follow the weights it has loaded.
        inherit: Whether moments of AdamW or Muon are taken over in place of states of ours.
    """

    by_name: bool
    wanted: Wanted
    note: str | None = None
    judge: bool = False
    refresh: bool = False
    inherit: bool = False


def decide(saved: Saved | Universal | None, present: Present, wanted: Wanted) -> Plan:
    """Decide what to do with a checkpoint.

    Args:
        saved: Facts of the checkpoint; None if DeepSpeed alone loads it or reports that there is none.
        present: Facts of this run.
        wanted: The arguments of the call.

    Raises:
        CheckpointError: It cannot be continued as asked; the message says what to do instead.
    """
    if saved is None:
        return Plan(False, wanted)
    if isinstance(saved, Universal):
        return _of_universal(saved, present, wanted)
    _refuse_other_shards(saved, present)
    fresh = wanted.states and saved.author != present.identity
    if fresh and _inherits(saved, present, wanted):
        return Plan(True, wanted, inherit=True)
    by_name = present.identity is not None and saved.author is not None and _moves(saved, present, wanted, fresh)
    in_place = by_name and (fresh or not wanted.states) and _is_for_deepspeed_alone(saved, present)
    chosen = replace(wanted, load_optimizer_states=False) if fresh or in_place else wanted
    note = _fresh_note(saved.name, saved.author, present) if fresh else None
    by_name = by_name and not in_place
    if wanted.states:
        _refuse_other_stages(saved, present, by_name and not fresh)
        if by_name and not fresh:
            _refuse_moved_experts(saved, present)
    if by_name and not present.is_divided:
        _refuse_unmovable(saved, present, chosen)
        return Plan(True, chosen, note)
    if fresh:
        _refuse_wrong_weights(saved, present)
        return Plan(False, chosen, note, refresh=present.copies)
    judge = present.identity is not None and wanted.states and saved.ranks is not None and present.alone
    return Plan(False, chosen, judge=judge)


def _of_universal(saved: Universal, present: Present, wanted: Wanted) -> Plan:
    if present.identity is None:
        note = _fresh_note(f"the universal checkpoint in {saved.name}", saved.author, present)
        return Plan(False, wanted, note if saved.author is not None and wanted.states else None)
    if present.is_divided:
        raise CheckpointError(
            "universal checkpoints of pipelines, of AutoTP and of expert layers cannot be loaded with a rankwise "
            "optimizer; continue from the original checkpoint on the same ranks, and remove checkpoint.load_universal."
        )
    is_own = wanted.states and saved.author == present.identity
    with_states = is_own and (saved.holds_states or saved.has_source)
    _refuse_unmovable(saved, present, wanted if with_states else replace(wanted, load_optimizer_states=False))
    if with_states and not saved.holds_states:
        return Plan(True, wanted, f"rankwise: {saved.name} holds weights; states are read from {saved.source}.")
    return Plan(True, wanted, _why_fresh(saved, present) if wanted.states and not with_states else None)


def _moves(saved: Saved, present: Present, wanted: Wanted, fresh: bool) -> bool:
    """Whether a checkpoint of ours cannot be left to DeepSpeed, which loads by position in the ranks' files."""
    if fresh:
        return True
    if not wanted.states:
        # Without optimizer states DeepSpeed loads another tag's weights at ZeRO-3, or none.
        return saved.partitioned or present.partitioned
    return _cut(saved) != _cut(present)


def _cut(known: Saved | Present) -> tuple[Any, ...]:
    """What decides what lies where in ZeRO's files, its type, their names."""
    config = known.config
    block = config.get("zero_optimization") or {}
    sizes = ("round_robin_gradients", "parameter_alignment", "sub_group_size")
    types = [(config.get(key) or {}).get("enabled") or False for key in ("bf16", "bfloat16", "fp16")]
    narrow = [
        bool((config.get(key) or {}).get(f"{name}_master_weights_and_grads"))
        for key, name in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"))
    ]
    settings = (*(block.get(key) for key in sizes), *types, *narrow, config.get("data_types"))
    shared_out = config.get("expert_parallel") or {}
    experts = shared_out.get("autoep_size") or 1 if shared_out.get("enabled") else None
    order = config.get("use_data_before_expert_parallelism") or False
    return known.ranks, known.stage, settings, known.sub_groups, experts, order


def _inherits(saved: Saved, present: Present, wanted: Wanted) -> bool:
    """Whether another optimizer's moments can be found by name, and all weights with them."""
    named = saved.moments and saved.order in (None, present.order) and saved.stages == present.stages == 1
    whole = not (saved.partitioned or present.partitioned)
    movable = whole or (present.frozen is None and wanted.custom_load_fn is None)
    ours = present.identity is not None and saved.author is None
    return ours and named and movable and not present.is_divided and _experts_are_known(saved, present)


def _experts_are_known(saved: Saved, present: Present) -> bool:
    """Whether another optimizer's files say which experts of AutoEP a rank has, or there are none."""
    shared_out = bool((saved.config.get("expert_parallel") or {}).get("enabled"))
    in_order = not saved.config.get("use_data_before_expert_parallelism")
    return shared_out == present.stacks and (not shared_out or (in_order and present.frozen_stack is None))


def _is_for_deepspeed_alone(saved: Saved, present: Present) -> bool:
    """Whether only DeepSpeed can load the weights, and will: frozen weights at ZeRO-3 in an unchanged layout.

    It loads trained weights through the model's own in low precision.
    """
    in_place = saved.partitioned and (saved.ranks, saved.stage) == (present.ranks, present.stage)
    return present.frozen is not None and in_place and saved.latest == saved.name


# --- refusals --------------------------------------------------------------------------------------------------------


def _refuse_other_shards(saved: Saved, present: Present) -> None:
    """Refuse weights that are cut over other ranks: DeepSpeed would join files by Megatron's names."""
    if saved.tensor != present.tensor:
        raise CheckpointError(
            f"{saved.name} was written with tensor_parallel.autotp_size {saved.tensor}, this run has {present.tensor}: "
            "it must be the same, for weights too. Resume with it; or write the model out with engine.save_16bit_model "
            "there, load that here before deepspeed.initialize, and begin with fresh states."
        )


def _refuse_other_stages(saved: Saved, present: Present, moved: bool) -> None:
    """Refuse to move between pipelines, because other files have the states of the other stages' layers."""
    if moved and present.tensor > 1:
        raise CheckpointError(
            f"{saved.name} was written at ZeRO stage {saved.stage} with {saved.ranks or 'any number of'} data-parallel "
            f"ranks for each of {saved.tensor} tensor-parallel ones; under AutoTP states continue on the same stage, "
            "ranks and settings only. Resume there, or load the weights alone (load_module_only=True)."
        )
    if saved.stages != present.stages or (moved and (present.stages > 1 or present.pipeline)):
        raise CheckpointError(
            f"{saved.name} was written by {saved.stages} pipeline stages at ZeRO stage {saved.stage} with "
            f"{saved.ranks or 'any number of'} data-parallel ranks each, this run has {present.stages} pipeline "
            "stages; continue a pipeline on the same stages, ranks and ZeRO stage, or load the weights alone "
            "(load_module_only=True)."
        )


def _refuse_moved_experts(saved: Saved, present: Present) -> None:
    """Refuse to move experts, because ranks hold different ones under one name."""
    if present.experts:
        raise CheckpointError(
            f"{saved.name} was written at ZeRO stage {saved.stage} on {saved.ranks or 'any number of'} "
            "ranks; states of expert layers continue on the same stage and ranks only. Resume there, or load the "
            "weights alone (load_module_only=True)."
        )


def _refuse_unmovable(saved: Saved | Universal, present: Present, wanted: Wanted) -> None:
    """Refuse what cannot be loaded by name: frozen or custom weights that no rank has whole, and other param groups."""
    at_three = saved.partitioned or present.partitioned
    if present.frozen_stack is not None:
        raise CheckpointError(
            f"{present.frozen_stack}, which is not trained, lies in a file for each expert that DeepSpeed alone reads; "
            "resume on the stage, ranks and autoep_size that wrote the checkpoint, or load the weights alone "
            "(load_module_only=True) there."
        )
    if present.frozen is not None and at_three:
        raise CheckpointError(
            f"frozen parameters ({present.frozen}, …) cannot be moved to, from or within ZeRO-3; resume on the stage "
            "and world size that wrote the checkpoint, or convert it with zero_to_fp32 and load the weights."
        )
    if wanted.custom_load_fn is not None and at_three:
        raise CheckpointError(
            "custom_load_fn cannot be used to move a checkpoint to, from or within ZeRO-3, where no rank has whole "
            "weights; convert it with zero_to_fp32 and load the weights yourself."
        )
    if wanted.states and saved.groups != present.groups:
        raise CheckpointError(
            f"the checkpoint has {saved.groups} param groups, the engine {present.groups}; build them as they were "
            "when it was saved, or load with load_optimizer_states=False."
        )


def _refuse_wrong_weights(saved: Saved, present: Present) -> None:
    """Refuse what DeepSpeed cannot load without optimizer states: weights of other stages, other tags at ZeRO-3."""
    if saved.partitioned != present.partitioned:
        raise CheckpointError(
            f"{saved.name}: changing the optimizer and moving to or from ZeRO-3 at once is not supported; move "
            "with the optimizer that wrote it, save, and change the optimizer then."
        )
    if saved.partitioned and saved.latest != saved.name:
        raise CheckpointError(
            f"at ZeRO-3 DeepSpeed reads the weights of the tag in 'latest' ({saved.latest}), not of {saved.name}, "
            f"when the optimizer changes; write {saved.name} into it first."
        )


# --- notes -----------------------------------------------------------------------------------------------------------


def _fresh_note(checkpoint: str, author: str | None, present: Present) -> str:
    return (
        f"rankwise: {checkpoint} was written by {author or 'another optimizer'}; its weights are kept, the state of "
        f"{present.optimizer} starts fresh."
    )


def _why_fresh(saved: Universal, present: Present) -> str:
    if saved.author == present.identity:
        reason = (
            f"was converted by DeepSpeed's tool, which leaves the state of {present.identity} behind, and its "
            f"original, {saved.source}, is no longer there ('rankwise universal' converts the state, too)"
        )
    else:
        reason = f"was written by {saved.author or 'another optimizer'}"
    return f"rankwise: {saved.name} {reason}; its weights are kept, the state of {present.identity} starts fresh."
