"""What ``rankwise doctor`` finds: one line each, with what to do where something is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table

__all__ = ["Finding", "Status", "findings_table"]

Status = Literal["ok", "note", "fail"]
_MARKS: dict[str, str] = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fail": "[red]FAIL[/]"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        topic: What it belongs to: ``"packages"``, ``"machine"``, ``"kernels"``, ``"frameworks"``, ``"locks"``,
            ``"self-test"``.
        name: Name of the thing.
        value: What was found.
        status: ``"note"`` does not keep anything from working; ``"fail"`` does.
        advice: What to do; empty if nothing.
    """

    topic: str
    name: str
    value: str
    status: Status = "ok"
    advice: str = ""


def findings_table(findings: Sequence[Finding]) -> Table:
    """A row for each finding, by topic.

    Args:
        findings: In the order in which they are to be shown.
    """
    from rich.markup import escape

    table = Table(title="rankwise doctor")
    for heading in ("", "what", "found"):
        table.add_column(heading, overflow="fold")
    table.add_column("what to do", overflow="fold")
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            table.add_section()
            table.add_row("", f"[bold]{escape(topic)}[/]", "", "")
        table.add_row(_MARKS[finding.status], escape(finding.name), escape(finding.value), escape(finding.advice))
    return table
