"""``rankwise convert`` makes a checkpoint of one framework a checkpoint of another."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rankwise.checkpoint.named_checkpoint import ConversionError, NamedCheckpoint, renaming
from rankwise.launch.settings import Form
from rankwise.layout.chunked_vectors import CheckpointError

__all__ = ["CONVERSION_ERRORS", "convert_checkpoint", "how_to_load"]

CONVERSION_ERRORS = (ConversionError, CheckpointError, ValueError, OSError, RuntimeError)
"""What a conversion that is not made ends in; nothing has been written then."""
_PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron-core", "torch": "torch"}


class _Format(NamedTuple):
    """Functions of a framework's package for checkpoints by name."""

    holds: Callable[[Path], bool]
    read: Callable[[Path, Path], NamedCheckpoint]
    write: Callable[..., None]


def _format(form: Form) -> _Format:
    """Import a framework's package, and return its functions."""
    if form == "deepspeed":
        from deepspeed_plugin.checkpoints import universal_by_name as universal

        return _Format(universal.is_universal, universal.read_universal, universal.write_universal)
    if form == "megatron":
        from megatron_patches import torch_dist_by_name as torch_dist

        return _Format(torch_dist.is_megatron, torch_dist.read_megatron, torch_dist.write_megatron)
    from rankwise.checkpoint import torch_checkpoints as torch_form

    return _Format(torch_form.is_torch_checkpoint, torch_form.read_torch, torch_form.write_torch)


def convert_checkpoint(
    source: str | Path, target: str | Path, to: Form, names: str | Path | None = None, like: str | Path | None = None
) -> str:
    """Write a checkpoint in another framework's format. The new folder is complete, or does not exist.

    Args:
        source: Folder of the checkpoint, whose format is recognised.
        target: New folder.
        to: ``deepspeed``, ``megatron`` or ``torch``.
        names: JSON file of new names of parameters by old ones; ``*`` stands for anything, on both sides.
        like: For Megatron: a checkpoint of the run that will continue, whose form is taken.

    Returns:
        A text that says what was written.

    Raises:
        ConversionError: It cannot be converted, or not to where it is asked for.
        CheckpointError, OSError: A file is missing, damaged or cannot be written.
    """
    source, target = Path(source), Path(target)
    if to not in get_args(Form):
        raise ConversionError(f"to is {to!r}: it must be one of {', '.join(get_args(Form))}")
    _refuse_target(target)
    _refuse_like(to, like)
    form = _recognised(source)
    if form == to:
        raise ConversionError(f"{source} is a checkpoint of {form!r} already; it is loaded on any ranks as it is")
    with _beside(target) as (folder, scratch), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # true of a single process
        named = _format(form).read(source, scratch)
        named.check(source)
        if names is not None:
            named = _under_new_names(named, Path(names))
        further = (Path(like), scratch) if like is not None else ()
        _format(to).write(named, folder, *further)
        folder.rename(target)
    latest = target.parent / "latest_universal"
    if to == "deepspeed" and not latest.exists():
        latest.write_text(target.name)
    left = f"; left behind: {', '.join(named.left[:3])}{', ...' if named.left[3:] else ''}" if named.left else ""
    return (
        f"written: {target}: {len(named.parameters)} parameters and the states of {named.identity} after "
        f"{named.step} steps{left}"
    )


def how_to_load(target: Path, form: Form) -> str:
    """Return how a run continues from a conversion.

    Args:
        target: Folder of the conversion.
        form: Its format.
    """
    where, tag = str(target.resolve().parent), target.name
    if form == "deepspeed":
        call = f"engine.load_checkpoint({where!r}, tag={tag!r})"
        return f'Set "checkpoint": {{"load_universal": true}} in the JSON and call {call}'
    if form == "megatron":
        number = tag.removeprefix("iter_").lstrip("0") or "0"
        return f"Pass --load {where} --ckpt-step {number}, if the folder is called iter_ and seven digits"
    return (
        f"Call dcp.load(states, checkpoint_id={str(target)!r}) with get_state_dict's dictionaries, and set_state_dict"
    )


def _refuse_target(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise ConversionError(f"target is {str(target)!r}, which exists: name a new folder, or remove it first")


def _refuse_like(to: Form, like: str | Path | None) -> None:
    if to == "megatron" and like is None:
        raise ConversionError(
            "to megatron: like must be a checkpoint of the run that is to go on (its first is enough): only such a "
            "checkpoint says under which keys its modules store their weights; pass --like FOLDER/iter_0000001"
        )
    if to != "megatron" and like is not None:
        raise ConversionError(f"like is for 'megatron', not for {to!r}: leave it out")


def _recognised(folder: Path) -> Form:
    if not folder.is_dir():
        raise ConversionError(f"{folder} is no folder: it must hold a checkpoint")
    # A framework must be installed only if the checkpoint has its format.
    signs: dict[Form, bool] = {
        "deepspeed": (folder / "zero").is_dir(),
        "megatron": (folder / ".metadata").is_file() and (folder / "metadata.json").is_file(),
        "torch": (folder / ".metadata").is_file(),
    }
    for form in get_args(Form):
        if signs[form]:
            try:
                formats = _format(form)
            except ModuleNotFoundError as error:
                raise ConversionError(
                    f"{folder} is of {form}, which is not installed: pip install {_PACKAGES[form]}"
                ) from error
            if formats.holds(folder):
                return form
    raise ConversionError(f"{folder} is in none of the formats that can be converted: {_hint(folder)}")


def _hint(folder: Path) -> str:
    if any(folder.glob("*model_states.pt")):
        return "it is a plain DeepSpeed checkpoint: convert it with 'rankwise universal' first"
    if any(folder.glob("iter_*")) or any(folder.glob("*/zero")):
        return "name the checkpoint in it, such as iter_0000100"
    return (
        "it must be a DeepSpeed universal checkpoint, a Megatron torch_dist one (iter_0000100), or one of "
        'torch.distributed.checkpoint with {"model": ..., "optimizer": ...}'
    )


@contextmanager
def _beside(target: Path) -> Iterator[tuple[Path, Path]]:
    """Make an empty folder to be renamed, and one for what is read; both are removed if an error occurs."""
    target.parent.mkdir(parents=True, exist_ok=True)
    parent = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    folder, scratch = parent / "written", parent / "read"
    try:
        folder.mkdir()
        scratch.mkdir()
        yield folder, scratch
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def _under_new_names(named: NamedCheckpoint, path: Path) -> NamedCheckpoint:
    try:
        patterns: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ConversionError(f"{path} is no JSON: {error}") from error
    if not isinstance(patterns, dict) or not all(isinstance(new, str) for new in patterns.values()):
        raise ConversionError(f'{path} must be JSON of new names by old ones: {{"model.*": "*"}}')
    return named.renamed(renaming(patterns, {**named.parameters, **named.module}))
