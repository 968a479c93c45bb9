"""This module runs an unedited Megatron-LM script whose ``--optimizer`` takes our optimizers.

It is for launchers that start modules: ``torchrun -m rankwise.launch.megatron_shim pretrain_gpt.py ...``. In a user's
own script, ``import megatron_patches; megatron_patches.apply(command_line=True)`` has the same effect.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import runpy
import sys
import typing
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["main", "require_training", "run_script", "wants_one_connection"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def run_script(script: Path, arguments: list[str], cpu: bool = False) -> None:
    """Run a script as ``python script arguments...`` would, after patching Megatron.

    Args:
        script: Path of the user's script, whose folder is searched for ``megatron.training`` first.
        arguments: Arguments of the script.
        cpu: Whether to run on CPU tensors and gloo, for trials, with flags that spare ``pretrain_gpt.py`` a GPU.

    Raises:
        megatron_patches.PatchError: Megatron is untested.
    """
    sys.path[0] = str(script.resolve().parent)
    sys.argv = [str(script), *arguments]
    if wants_one_connection(arguments):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with ExitStack() as stack:
        if cpu:
            trial = importlib.import_module("megatron_patches.cpu")
            stack.enter_context(trial.cpu_pretraining())
            sys.argv += trial.PRETRAIN_FLAGS
        importlib.import_module("megatron_patches").apply(command_line=True)
        runpy.run_path(str(script), run_name="__main__")


def require_training(script: Path) -> None:
    """Refuse to start a script that would not find ``megatron.training``.

    Args:
        script: Script of the user, whose folder Python searches first.

    Raises:
        ValueError: The module is neither in the script's folder nor installed, or needs a newer Python.
    """
    training = script.resolve().parent / "megatron" / "training"
    if training.is_dir():
        # From 0.18 on; under an older Python every rank would end in an ImportError.
        sources = [] if hasattr(typing, "override") else [path.read_bytes() for path in training.glob("models/*.py")]
        if any(re.search(rb"^from typing import .*\boverride\b", source, re.MULTILINE) for source in sources):
            raise ValueError(
                f"script is {str(script)!r}, and Python is {platform.python_version()}: this version of Megatron-LM "
                "needs 3.12 or later (typing.override); install rankwise for such a Python, or take Megatron-LM 0.16"
            )
        return
    try:
        spec = importlib.util.find_spec("megatron.training")
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise ValueError(
            f"script is {str(script)!r}, and there is no megatron.training beside it or installed: pip's megatron-core "
            "does not have it; name pretrain_gpt.py of a checkout of Megatron-LM, or set PYTHONPATH to the checkout"
        )


def wants_one_connection(arguments: list[str]) -> bool:
    """Whether Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1, as it does with tensor or context parallelism.

    Under FSDP it asserts another value or none; elsewhere it asserts nothing, and the value slows some backends.

    Args:
        arguments: Arguments of Megatron's script.
    """
    words = [word for argument in arguments for word in argument.split("=", 1)]
    if any(word in ("--use-megatron-fsdp", "--use-torch-fsdp2", "--use-custom-fsdp") for word in words):
        return False
    sizes = ("--tensor-model-parallel-size", "--context-parallel-size")
    cut = any(word in sizes and value.strip() != "1" for word, value in zip(words, words[1:], strict=False))
    # Sizes that a file has are not read yet.
    return cut or "--yaml-cfg" in words or "--use-mp-args-from-checkpoint-args" in words


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def main(
    script: Annotated[Path, typer.Argument(help="A script of a Megatron-LM checkout.", exists=True, dir_okay=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.", show_default=False)] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run on CPU tensors and gloo, for trials.")] = False,
) -> None:
    """Run a Megatron-LM training script with rankwise's optimizers known to --optimizer."""
    run_script(script, arguments or [], cpu)


if __name__ == "__main__":
    app()
