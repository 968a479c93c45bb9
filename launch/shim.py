"""This module runs an unedited DeepSpeed script with our optimizers registered.

It is for launchers that start modules: ``deepspeed --module rankwise.launch.shim train.py ...``,
``torchrun -m rankwise.launch.shim train.py ...``, ``accelerate launch -m rankwise.launch.shim train.py ...``.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from rankwise.launch.environment import prepare_shm_build

__all__ = ["main", "register", "run_script"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def register() -> None:
    """Register our optimizer types with DeepSpeed, and avoid its compile at start-up where it cannot succeed."""
    prepare_shm_build()
    importlib.import_module("deepspeed_plugin")


def run_script(script: Path, arguments: list[str], local_rank: int | None = None) -> None:
    """Run a script as ``python script arguments...`` would, after registering our optimizer types.

    Args:
        script: Path of the user's script.
        arguments: Arguments of the script.
        local_rank: Number that a launcher put before the script's name; it moves behind it, where scripts look for it.
    """
    register()
    inserted = [] if local_rank is None else [f"--local_rank={local_rank}"]
    sys.argv = [str(script), *inserted, *arguments]
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def main(
    script: Annotated[Path, typer.Argument(help="Your training script.", exists=True, dir_okay=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.", show_default=False)] = None,
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", "--local-rank", help="Set by the launcher.", hidden=True)
    ] = None,
) -> None:
    """Run a DeepSpeed training script with rankwise's optimizer types registered."""
    run_script(script, arguments or [], local_rank)


if __name__ == "__main__":
    app()
