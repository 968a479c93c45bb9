"""These classes describe a checkpoint folder of DeepSpeed, as far as the optimizer is concerned."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from deepspeed_plugin.checkpoints.load_plan import Order, Saved
from deepspeed_plugin.checkpoints.reading import read
from rankwise.layout.chunked_vectors import CheckpointError, NamedVectors
from rankwise.saving.adamw_states import moment_names, moments_of
from rankwise.step.optimizer import ShardedOptimizer

__all__ = [
    "ASIDE",
    "RECORD",
    "REPLACING",
    "CheckpointFolder",
    "NamedStates",
    "SavedCheckpoint",
    "newest_model_file",
    "tag_in",
    "zero_form",
]

RECORD = "rankwise"
"""Key of the model file with the optimizer that wrote the checkpoint, an id of the save, and its folder."""
ASIDE = ".new"
"""Ending of a file that will replace the file without it."""
REPLACING = "rankwise_replacing"
"""Name of a file in a tag's folder while files of a later save replace its files: some may be old, some new."""

_ZERO_FILE = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt$")


def tag_in(load_dir: str | Path, pointer: str = "latest") -> str | None:
    """Return the tag that a pointer file names; None if there is no such file."""
    path = Path(load_dir) / pointer
    return path.read_text().strip() if path.is_file() else None


def newest_model_file(folder: Path) -> Path | None:
    """Return the file with the module's state and the engine's counters; None if there is none.

    A run of another stage or size may write a tag again, and replace only some of the old files: the newest model file
    says which files belong to the checkpoint.
    """
    candidates = folder.glob("*mp_rank_00_model_states.pt")
    models = sorted((path for path in candidates if "_expert_" not in path.name), key=lambda path: path.stat().st_mtime)
    return models[-1] if models else None


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint in any of DeepSpeed's formats.

    Attributes:
        folder: Folder of the checkpoint.
        model_file: File with the module's state and the engine's counters.
    """

    folder: Path
    model_file: Path

    @cached_property
    def content(self) -> dict[str, Any]:
        """Content of the model file."""
        return read(self.model_file)

    @property
    def record(self) -> Mapping[str, Any]:
        """Our record in the model file; empty in other optimizers' checkpoints."""
        return self.content.get(RECORD) or {}

    @property
    def partitioned_weights(self) -> bool:
        """Whether the model file holds placeholders, as ZeRO-3 writes them."""
        return self.model_file.name.startswith("zero_pp_rank")


@dataclass(frozen=True)
class NamedStates:
    """Weights and states by name.

    Attributes:
        vectors: Vectors under the names of :func:`rankwise.checkpoint.named_vectors.saved_vectors`.
        common: ``param_groups`` and extra state, which do not depend on the layout; None if states are not wanted, or
            are another optimizer's.
        inherited: Whether moments of AdamW or Muon become states.
    """

    vectors: NamedVectors
    common: Mapping[str, Any] | None = None
    inherited: bool = False


@dataclass(frozen=True)
class SavedCheckpoint(CheckpointFolder):
    """A checkpoint in the files that DeepSpeed writes.

    Attributes:
        zero_files: ZeRO's files in rank order, of the first pipeline stage; empty at stage 0.
        missing: Names of ZeRO files that should exist and do not.
    """

    zero_files: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()

    @classmethod
    def find(cls, load_dir: str | Path, tag: str | None) -> SavedCheckpoint | None:
        """Find the files of a tag, or of the latest one; None if there are none.

        Raises:
            CheckpointError: The model file cannot be read.
        """
        tag = tag_in(load_dir) if tag is None else str(tag)
        return None if tag is None else cls.at(Path(load_dir) / tag)

    @classmethod
    def at(cls, folder: Path) -> SavedCheckpoint | None:
        """Find the files in a tag's folder; None if there are none."""
        model_file = newest_model_file(folder)
        if model_file is None:
            return None
        content = read(model_file)
        config = _config(content)
        prefixes: tuple[str, ...] = ("bf16_",) if _enabled(config, "bf16") else ("",)
        if not config:
            prefixes = ("", "bf16_")
        names = [path.name for path in sorted(folder.glob("*_optim_states.pt"))]
        matches = {
            int(match[2]): folder / name
            for name in names
            if (match := _ZERO_FILE.match(name)) and (match[1] or "") in prefixes
        }
        partitioned = content.get("optimizer") is None and bool(matches or _stage(config))
        ranks = range(int(content.get("dp_world_size", len(matches))) if partitioned else 0)
        missing = [
            name
            for stage in range(int(content.get("mp_world_size", 1)))
            for rank in ranks
            if not any((name := _file_name(prefix, rank, stage)) in names for prefix in prefixes)
        ]
        if not partitioned or not model_file.name.startswith("zero_pp_rank"):
            missing += [name for name in _shard_names(content) if not (folder / name).is_file()]
        files = tuple(matches[rank] for rank in ranks if rank in matches)
        return cls(folder, model_file, files, tuple(missing))

    def known(self, states: bool) -> Saved:
        """Return the facts by which :func:`deepspeed_plugin.checkpoints.load_plan.decide` decides.

        Args:
            states: Whether optimizer states are wanted; their files need not exist otherwise.

        Raises:
            CheckpointError: A file with these facts cannot be read.
        """
        return Saved(
            name=self.folder.name,
            latest=tag_in(self.folder.parent),
            author=self.author,
            stage=self.stage if states else _stage(self.config),
            ranks=self.world_size,
            stages=int(self.content.get("mp_world_size", 1)),
            tensor=int((self.config.get("tensor_parallel") or {}).get("autotp_size") or 1),
            partitioned=self.partitioned_weights,
            config=self.config,
            sub_groups=self._sub_groups if states and self.author is not None else (),
            groups=len(self.common["param_groups"]) if states and self.author is not None else 0,
            moments=states and self.author is None and self.has_moments,
            order=self._order if states and self.author is None and self.has_moments else None,
        )

    @cached_property
    def common(self) -> dict[str, Any]:
        """Dictionary of the base optimizer that the first rank saved, for what does not depend on the layout."""
        if self.zero_files:
            return self.optimizer(0)[0]
        # The weights may be elsewhere: pipeline engines keep them in files by layer.
        saved: dict[str, Any] = self.content["optimizer"]
        common: dict[str, Any] = saved.get("optimizer_state_dict", saved)
        return common

    @property
    def world_size(self) -> int | None:
        """Number of ranks that wrote it; None at stage 0, whose file any number of ranks can read."""
        return len(self.zero_files) or None

    def require_complete(self) -> None:
        """Refuse a checkpoint whose files are incomplete, or may come from two saves.

        Raises:
            CheckpointError: The message names the first missing file, or the ways out.
        """
        if (self.folder / REPLACING).exists():
            raise CheckpointError(
                f"{self.folder} was being replaced by a later save when that run ended: its files may be of either. "
                f"Load another tag; or, to have the later one, rename every *{ASIDE} in it to the name without that "
                f"ending, and remove {REPLACING}."
            )
        if self.missing:
            raise CheckpointError(
                f"{self.folder} lacks {self.missing[0]} ({len(self.missing)} of the files of "
                f"{self.content.get('dp_world_size')} data-parallel ranks are missing): it was not written to the "
                "end, or files were deleted. Load an earlier tag, or the weights with load_optimizer_states=False."
            )

    def files(self, states: bool) -> list[Path]:
        """Return all model files of the checkpoint and, if wanted, all of optimizers, in one order on all ranks."""
        models = self.folder.glob("*model_states.pt")
        paths = {path for path in models if path.name.startswith("zero_pp_rank") == self.partitioned_weights}
        if states and self.zero_files:
            # Files of all pipeline stages and of experts count, but not those of an earlier run of another size.
            prefix = self.zero_files[0].name.startswith("bf16_")
            for path in self.folder.glob("*_optim_states.pt"):
                match = re.match(r"(?:bf16_)?zero_pp_rank_(\d+)_", path.name)
                if path.name.startswith("bf16_") == prefix and (match is None or int(match[1]) < len(self.zero_files)):
                    paths.add(path)
        return sorted(paths)

    def optimizer(self, rank: int) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the base optimizer's dictionary that a rank saved, and the flat weights of its param groups."""
        if not self.zero_files:
            return self._unpartitioned()
        content = self._wrapper_state(rank)
        if "fp32_flat_groups" in content:
            return _from_stock(content["optimizer_state_dict"]), list(content["fp32_flat_groups"])
        return _from_stock(content["base_optimizer_state"]), list(content["single_partition_of_fp32_groups"])

    def _unpartitioned(self) -> tuple[dict[str, Any], list[Tensor]]:
        saved = self.content["optimizer"]
        if "fp32_groups" in saved:
            return saved["optimizer_state_dict"], [tensor for group in saved["fp32_groups"] for tensor in group]
        names = [record["runs"][0][0] if record["runs"] else None for record in saved.get("layout", [])]
        module = self.content["module"]
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        return saved, [module[name] if name is not None else nothing for name in names]

    @cached_property
    def _expert_layers(self) -> dict[str, Mapping[str, Any]]:
        """What DeepSpeed says of AutoEP's layers, by the names of their stacks."""
        layers = self.content.get("ds_autoep_layers") or ()
        return {f"{layer['expert_key_prefix']}.{weight}": layer for layer in layers for weight in ("w1", "w2", "w3")}

    def sharing(self, name: str) -> int:
        """Return over how many ranks AutoEP had shared out the experts of a stack; 1 for other parameters."""
        layer = self._expert_layers.get(name)
        return 1 if layer is None else int(layer["ep_size"])

    def weight(self, name: str, first: int, last: int) -> Tensor:
        """Return some elements of a parameter out of the model files, where these have whole ones."""
        layer = self._expert_layers.get(name)
        if layer is None:
            elements: Tensor = self.content["module"][name].reshape(-1)[first:last]
            return elements
        size = prod(layer["affine_maps"]["params"][name]["logical_shape"][1:])
        experts = range(first // size, -(-last // size))
        stack = torch.cat([self._expert(layer["moe_layer_id"], e)[f"{name}.{e}"].reshape(-1) for e in experts])
        return stack[first - experts.start * size : last - experts.start * size]

    def _expert(self, layer: int, expert: int) -> Mapping[str, Any]:
        content: Mapping[str, Any] = read(self.folder / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt")
        return content

    def scaler_state(self) -> Mapping[str, Any]:
        """Return what ZeRO's wrapper saved of a loss scale; empty if none was in use, and at stage 0."""
        return self._wrapper_state(0) if self.zero_files and _enabled(self.config, "fp16") else {}

    def _wrapper_state(self, rank: int) -> Mapping[str, Any]:
        if rank not in self._wrapper_states:
            self._wrapper_states[rank] = read(self.zero_files[rank])["optimizer_state_dict"]
        return self._wrapper_states[rank]

    @cached_property
    def _wrapper_states(self) -> dict[int, Mapping[str, Any]]:
        """Contents of ZeRO's files, each of which is read once, and mapped rather than held in memory."""
        return {}

    @cached_property
    def author(self) -> str | None:
        """Identity of our optimizer that wrote it; None for other optimizers, whatever the format.

        Raises:
            CheckpointError: The file with the identity cannot be read.
        """
        if self.record:
            return str(self.record["identity"])
        try:
            state = self.common
        except (AttributeError, ImportError, IndexError, KeyError, TypeError):
            return None
        return state.get("rankwise") if isinstance(state, dict) else None

    def alignment(self, rank: int) -> list[list[int]] | None:
        """Return the gap after each parameter, for each tensor of ZeRO-1's or -2's optimizer; None without gaps."""
        gaps: list[list[int]] | None = self._wrapper_state(rank).get("param_alignment_paddings")
        return gaps

    @property
    def _sub_groups(self) -> tuple[int, ...]:
        flats = self._wrapper_state(0).get("fp32_flat_groups", ()) if self.zero_files else ()
        return tuple(flat.numel() for flat in flats)

    @property
    def _order(self) -> Order | None:
        """Return what says at stage 0 which parameter a state belongs to; with ZeRO names say it."""
        if self.zero_files:
            return None
        return tuple(self.content["module"]), tuple(len(group["params"]) for group in self.common["param_groups"])

    @cached_property
    def has_moments(self) -> bool:
        """Whether the first rank's states are moments of AdamW or Muon, of parameters whose names are known."""
        try:
            named = not self.zero_files or bool(self.content["param_shapes"])
            states, groups = self.common["state"], self.common["param_groups"]
            # At stage 0 a parameter without any gradient so far has no moments.
            complete = [
                set(moment_names(group)) <= moments_of(states[key], group).keys()
                for group in groups
                for key in group["params"]
                if key in states
            ]
            return named and bool(complete) and all(complete)
        except (AttributeError, ImportError, IndexError, KeyError, TypeError):
            return False

    @cached_property
    def stage(self) -> int:
        """ZeRO stage that wrote it; for files in another format, the stage that their configuration has."""
        if not self.zero_files:
            return 0
        if self.partitioned_weights:
            return 3
        if self.author is None:
            return _stage(self.config)
        stage = self._wrapper_state(0).get("zero_stage", 1)
        return int(getattr(stage, "value", stage))

    @property
    def config(self) -> Mapping[str, Any]:
        """Configuration of the engine that wrote it."""
        return _config(self.content)


def _shard_names(content: Mapping[str, Any]) -> list[str]:
    """Return the names of the model files of AutoTP's ranks; pipelines keep their layers elsewhere."""
    ways = int((_config(content).get("tensor_parallel") or {}).get("autotp_size") or 1)
    return [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(ways)] if ways > 1 else []


def _file_name(prefix: str, rank: int, stage: int) -> str:
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_{stage:02d}_optim_states.pt"


def _config(content: Mapping[str, Any]) -> Mapping[str, Any]:
    config = content.get("ds_config")
    return config if isinstance(config, Mapping) else {}


def _enabled(config: Mapping[str, Any], key: str) -> bool:
    block = config.get(key) or config.get("bfloat16" if key == "bf16" else key)
    return isinstance(block, Mapping) and bool(block.get("enabled"))


def _stage(config: Mapping[str, Any]) -> int:
    block = config.get("zero_optimization")
    return int(block.get("stage", 0)) if isinstance(block, Mapping) else 0


# --- the form in which our states lie in ZeRO's files ----------------------------------------------------------------

# ``deepspeed.checkpoint.ds_to_universal`` expects Adam's two moments, laid out as the flat partition, and ``step`` for
# every flat tensor, and hands them and the hyper-parameters to any optimizer that loads the result. Our states are not
# two moments in that layout. They lie beside, and moments of zero, which take no room in the file, and a step of zero
# stand in their place: for Adam, a fresh start.
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATES, _GROUPS = "element_states", "hyperparameters"


def _nothing() -> torch.Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu")


def _from_stock(state_dict: Any) -> Any:
    """Take the true states and hyper-parameters from beside the stand-ins; others are returned as they are."""
    if not isinstance(state_dict, Mapping) or _STATES not in state_dict:
        return state_dict
    restored = dict(state_dict)
    restored["state"], restored["param_groups"] = restored.pop(_STATES), restored.pop(_GROUPS)
    return restored


@contextmanager
def zero_form(engine: DeepSpeedEngine) -> Iterator[None]:
    """Let the optimizer write and read its dictionaries with stand-ins, for the converter, inside the context.

    Stage 0, which DeepSpeed cannot convert, gets no stand-ins.
    """
    optimizer = engine.basic_optimizer
    if not (isinstance(optimizer, ShardedOptimizer) and engine.zero_optimization()):
        yield
        return
    write, load = optimizer.state_dict, optimizer.load_state_dict

    def state_dict() -> dict[str, Any]:
        written = write()
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        stand_ins = {
            index: {"step": _nothing(), **{name: _nothing().expand(tensor.numel()) for name in _MOMENTS}}
            for index, tensor in enumerate(tensors)
        }
        groups = [{"params": group["params"]} for group in written["param_groups"]]
        beside = {_STATES: written["state"], _GROUPS: written["param_groups"]}
        return {**written, **beside, "state": stand_ins, "param_groups": groups}

    optimizer.state_dict = state_dict  # type: ignore[method-assign]
    optimizer.load_state_dict = lambda state_dict: load(_from_stock(state_dict))  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del optimizer.state_dict, optimizer.load_state_dict
