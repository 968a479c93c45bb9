"""Commands that look and tell, and start no training."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

__all__ = ["doctor"]

console = Console()


def doctor(
    self_test: Annotated[
        bool, typer.Option(help="Two ranks on the CPU follow recorded trajectories; takes about half a minute.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds the self-test may take.")] = 300.0,
) -> None:
    """Check this environment: versions, devices, compiler, kernels, frameworks, locks, and two ranks at work.

    Ends with status 1 if anything would keep rankwise from working: a line marked FAIL, with what to do.
    """
    from rankwise.launch.doctor import as_json as written
    from rankwise.launch.doctor import examine
    from rankwise.launch.findings import findings_table

    findings = list(examine(self_test, timeout))
    if as_json:
        typer.echo(written(findings))
    else:
        console.print(findings_table(findings))
    failed = [finding for finding in findings if finding.status == "fail"]
    if failed:
        raise typer.Exit(1)
