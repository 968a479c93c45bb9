"""Checkpoints that are named only when complete, and can be resumed on other ranks, stages and with other optimizers.

DeepSpeed itself loads a checkpoint of the same stage and world size, ours included. For the rest, the ranks' files are
read as named vectors, laid down once by torch.distributed.checkpoint, and loaded from there in the new layout.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import log_dist
from torch import Tensor

from deepspeed_plugin.layouts import DeepSpeedLayout
from rankwise.optimizers.base import ShardedOptimizer
from rankwise.optimizers.portable import merge_vectors, restore, saved_vectors
from rankwise.sharding.state import save_vectors

__all__ = ["CheckpointError", "SavedCheckpoint", "load_checkpoint", "save_checkpoint"]

_ZERO_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be continued as asked."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """What a checkpoint folder of DeepSpeed contains, as far as its optimizer is concerned.

    Attributes:
        folder: The tag's folder.
        zero_files: ZeRO's files in rank order; empty at stage 0.
        model_file: The file with the module's state and the engine's counters.
    """

    folder: Path
    zero_files: tuple[Path, ...]
    model_file: Path

    @classmethod
    def find(cls, load_dir: str | Path, tag: str | None) -> SavedCheckpoint | None:
        """Locate the files of a tag, or of the latest one; None if there are none."""
        root = Path(load_dir)
        if tag is None:
            latest = root / "latest"
            if not latest.is_file():
                return None
            tag = latest.read_text().strip()
        folder = root / str(tag)
        # A tag may be written again by a run of another stage or size, whose files replace only some of the old ones:
        # what belongs to the checkpoint is for the newest model file to say.
        models = sorted(folder.glob("*mp_rank_00_model_states.pt"), key=lambda path: path.stat().st_mtime)
        if not models:
            return None
        matches = {int(match[1]): path for path in folder.glob("*.pt") if (match := _ZERO_FILE.search(path.name))}
        content = _read(models[-1])
        ranks = 0 if content.get("optimizer") is not None else int(content.get("dp_world_size", len(matches)))
        return cls(folder, tuple(matches[rank] for rank in range(ranks) if rank in matches), models[-1])

    @property
    def world_size(self) -> int | None:
        """Ranks that wrote it; None at stage 0, whose file any number of ranks can read."""
        return len(self.zero_files) or None

    def optimizer(self, rank: int) -> tuple[dict[str, Any], list[Tensor]]:
        """The base optimizer's dictionary saved by one rank, and the flat weights of its param groups."""
        if not self.zero_files:
            return self._unpartitioned()
        content = _read(self.zero_files[rank])["optimizer_state_dict"]
        if "fp32_flat_groups" in content:
            return content["optimizer_state_dict"], list(content["fp32_flat_groups"])
        return content["base_optimizer_state"], list(content["single_partition_of_fp32_groups"])

    def _unpartitioned(self) -> tuple[dict[str, Any], list[Tensor]]:
        content = _read(self.model_file)
        saved = content["optimizer"]
        if "fp32_groups" in saved:
            return saved["optimizer_state_dict"], [tensor for group in saved["fp32_groups"] for tensor in group]
        names = [record["runs"][0][0] if record["runs"] else None for record in saved.get("layout", [])]
        return saved, [content["module"][name] if name is not None else torch.empty(0) for name in names]

    @cached_property
    def author(self) -> str | None:
        """Which of our optimizers wrote it; None for anybody else's, whatever the format."""
        try:
            # Not the weights: pipeline engines keep them in files of their own, by layer.
            saved = None if self.zero_files else _read(self.model_file)["optimizer"]
            state = self.optimizer(0)[0] if saved is None else saved.get("optimizer_state_dict", saved)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError):
            return None
        return state.get("rankwise") if isinstance(state, dict) else None

    @cached_property
    def stage(self) -> int:
        """ZeRO stage that wrote it."""
        if not self.zero_files:
            return 0
        content = _read(self.zero_files[0])["optimizer_state_dict"]
        stage = content.get("zero_stage", 1)
        return int(getattr(stage, "value", stage))


def save_checkpoint(
    original: Callable[..., bool],
    engine: DeepSpeedEngine,
    save_dir: str,
    tag: str | None = None,
    save_latest: bool = True,
    **options: Any,
) -> bool:
    """DeepSpeed's ``save_checkpoint``, with ``latest`` written only when every rank's files are complete.

    DeepSpeed's rank 0 names the new checkpoint before the other ranks have finished theirs: a rank that dies in between
    leaves ``latest`` pointing at a checkpoint that cannot be loaded.

    Args:
        original: DeepSpeed's method, which ends in a barrier.
        engine: The engine that saves.
        save_dir: As for DeepSpeed, like the following.
        tag: Name of the checkpoint.
        save_latest: Whether ``latest`` is to name it.
        options: Passed on.
    """
    ours = isinstance(engine.basic_optimizer, ShardedOptimizer) and not engine.checkpoint_engine.is_decoupled()
    done = original(engine, save_dir, tag=tag, save_latest=save_latest and not ours, **options)
    if ours and save_latest:
        if engine.global_rank == 0:
            scratch = Path(save_dir) / ".latest"
            scratch.write_text(f"global_step{engine.global_steps}" if tag is None else str(tag))
            scratch.replace(Path(save_dir) / "latest")
        dist.barrier()
    return done


def load_checkpoint(
    original: Callable[..., tuple[str | None, Any]],
    engine: DeepSpeedEngine,
    load_dir: str,
    tag: str | None = None,
    load_optimizer_states: bool = True,
    load_module_only: bool = False,
    **options: Any,
) -> tuple[str | None, Any]:
    """DeepSpeed's ``load_checkpoint``, which also continues on another world size, stage or optimizer.

    Args:
        original: DeepSpeed's method.
        engine: The engine that loads.
        load_dir: As for DeepSpeed, like the following.
        tag: Which checkpoint; the latest by default.
        load_optimizer_states: False keeps weights only.
        load_module_only: Likewise.
        options: Passed on.

    Raises:
        CheckpointError: A move that is not supported, with what to do instead.
    """
    saved = SavedCheckpoint.find(load_dir, tag)
    wanted = load_optimizer_states and not load_module_only and not engine.load_universal_checkpoint()
    if saved is not None and wanted:
        _refuse_other_stages(engine, saved)
        theirs, ours = saved.author, _identity(engine.basic_optimizer)
        if theirs is not None and theirs == ours and (saved.world_size, saved.stage) != _present(engine):
            return _reshard(engine, saved, options.get("load_lr_scheduler_states", True))
        if theirs != ours and (theirs is not None or ours is not None):
            log_dist(
                f"rankwise: {saved.folder.name} was written by {theirs or 'another optimizer'}; its weights are kept, "
                f"the state of {ours or type(engine.basic_optimizer).__name__} starts fresh.",
                ranks=[0],
            )
            _refuse_wrong_weights(engine, saved)
            load_optimizer_states = False
    result = original(
        engine,
        load_dir,
        tag=tag,
        load_optimizer_states=load_optimizer_states,
        load_module_only=load_module_only,
        **options,
    )
    if wanted and not load_optimizer_states and isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        # DeepSpeed copies the loaded weights to this wrapper's fp32 masters only when nothing else is loaded.
        engine.optimizer.refresh_fp32_params()
    return result


def _refuse_other_stages(engine: DeepSpeedEngine, saved: SavedCheckpoint) -> None:
    """Refuse to move between pipelines: the states of the other stages' layers are in other files."""
    theirs = int(_read(saved.model_file).get("mp_world_size", 1))
    ours = int(engine.mp_world_size)
    moved = max(theirs, ours) > 1 and (saved.world_size, saved.stage) != _present(engine)
    if theirs != ours or (moved and saved.author is not None):
        raise CheckpointError(
            f"{saved.folder.name} was written by {theirs} pipeline stages at ZeRO stage {saved.stage} with "
            f"{saved.world_size or 'any number of'} data-parallel ranks each, this run has {ours} pipeline stages; "
            "continue a pipeline on the same stages, ranks and ZeRO stage, or load the weights alone "
            "(load_module_only=True)."
        )


def _refuse_wrong_weights(engine: DeepSpeedEngine, saved: SavedCheckpoint) -> None:
    """Refuse what DeepSpeed cannot load without optimizer states: other stages' weights, and at ZeRO-3 other tags."""
    partitioned = saved.model_file.name.startswith("zero_pp_rank")
    if partitioned != engine.zero_optimization_partition_weights():
        raise CheckpointError(
            f"{saved.folder.name}: changing the optimizer and moving to or from ZeRO-3 at once is not supported; move "
            "with the optimizer that wrote it, save, and change the optimizer then."
        )
    latest = saved.folder.parent / "latest"
    named = latest.read_text().strip() if latest.is_file() else None
    if partitioned and named != saved.folder.name:
        raise CheckpointError(
            f"at ZeRO-3 DeepSpeed reads the weights of the tag in '{latest.name}' ({named}), not of "
            f"{saved.folder.name}, when the optimizer changes; write {saved.folder.name} into it first."
        )


def _identity(optimizer: Any) -> str | None:
    return optimizer.identity if isinstance(optimizer, ShardedOptimizer) else None


def _present(engine: DeepSpeedEngine) -> tuple[int | None, int]:
    if engine.optimizer is engine.basic_optimizer or not engine.zero_optimization():
        return None, 0
    return dist.get_world_size(engine.seq_data_parallel_group), int(engine.zero_optimization_stage())


def _reshard(engine: DeepSpeedEngine, saved: SavedCheckpoint, load_scheduler: bool) -> tuple[str, dict[str, Any]]:
    """Collective: lay the saved state down by name, load it in this engine's layout, restore the engine's counters."""
    optimizer: ShardedOptimizer = engine.basic_optimizer
    layout = optimizer.layout_source
    assert isinstance(layout, DeepSpeedLayout)
    group: dist.ProcessGroup = engine.seq_data_parallel_group
    content = _read(saved.model_file)
    if saved.world_size not in (None, content["dp_world_size"]):
        raise CheckpointError(
            f"{saved.folder} holds the files of {saved.world_size} of {content['dp_world_size']} ranks: it was not "
            "written to the end. Load an earlier tag."
        )
    _refuse_frozen(engine, content)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    log_dist(
        f"rankwise: moving {saved.folder.name} from stage {saved.stage} on {saved.world_size or 'any'} ranks to stage "
        f"{engine.zero_optimization_stage()} on {world}.",
        ranks=[0],
    )
    scratch = saved.folder / f".resharding-{world}"
    if rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
    dist.barrier(group)
    mine = range(rank, saved.world_size or 1, world)
    save_vectors(merge_vectors([saved_vectors(*saved.optimizer(index)) for index in mine]), scratch, group)
    state, _ = saved.optimizer(0)
    # As around DeepSpeed's own loading: ZeRO-3 lets go of gathered weights before and fetches the new ones after.
    if engine._optimizer_has_ckpt_event_prologue():
        engine.optimizer.checkpoint_event_prologue()
    optimizer.plan_ahead(layout.units())
    restore(optimizer, scratch, group, state["param_groups"])
    optimizer.load_extra_state(state)
    layout.publish_weights()
    if engine._optimizer_has_ckpt_event_epilogue():
        engine.optimizer.checkpoint_event_epilogue()
    dist.barrier(group)
    if rank == 0:
        shutil.rmtree(scratch)
    return str(saved.model_file), _restore_engine(engine, content, load_scheduler)


def _refuse_frozen(engine: DeepSpeedEngine, content: dict[str, Any]) -> None:
    frozen = [name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad]
    partitioned = engine.zero_optimization_stage() == 3 or content.get("frozen_param_fragments")
    if frozen and partitioned:
        raise CheckpointError(
            f"frozen parameters ({frozen[0]}, …) cannot be moved between ZeRO-3 and another layout; resume on the "
            "stage and world size that wrote the checkpoint, or convert it with zero_to_fp32 and load the weights."
        )


# Keys of DeepSpeed's model file that are not the user's client state.
_ENGINE_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments "
    "lr_scheduler data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size "
    "ds_config ds_version checkpoint_parallel_dimensions".split()
)


def _restore_engine(engine: DeepSpeedEngine, content: dict[str, Any], load_scheduler: bool) -> dict[str, Any]:
    """Counters, scheduler and buffers; returns the client state."""
    buffers = set(content.get("buffer_names") or ())
    parameters = engine.module.named_parameters(remove_duplicate=False)
    trained = {name for name, parameter in parameters if parameter.requires_grad}
    kept = {
        name: value
        for name, value in content["module"].items()
        if name in buffers or (name not in trained and value.numel())
    }
    engine.module.load_state_dict(kept, strict=False)
    engine.global_steps = content["global_steps"]
    engine.global_samples = content.get("global_samples", engine.global_steps * engine.train_batch_size())
    engine.skipped_steps = content["skipped_steps"]
    if load_scheduler and engine.lr_scheduler is not None and content.get("lr_scheduler") is not None:
        engine.lr_scheduler.load_state_dict(content["lr_scheduler"])
    return {key: value for key, value in content.items() if key not in _ENGINE_KEYS}


def _read(path: Path) -> dict[str, Any]:
    # DeepSpeed's files hold its own classes; mapped, so that a rank reads only the bytes it needs, unless they are in
    # the old format, which cannot be.
    mapped = zipfile.is_zipfile(path)
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False, mmap=mapped)
    return content
