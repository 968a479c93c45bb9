"""``rankwise doctor`` shows a line for each finding, with what to do if something is wrong."""

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
    """One thing that was looked at.

    Attributes:
        topic: Its topic: ``"packages"``, ``"machine"``, ``"kernels"``, ``"frameworks"``, ``"locks"`` or
            ``"self-test"``.
        name: Name of the thing.
        value: State of the thing.
        status: ``"note"`` does not keep anything from working; ``"fail"`` does.
        advice: What to do; empty if nothing.
    """

    topic: str
    name: str
    value: str
    status: Status = "ok"
    advice: str = ""


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return a table with a row for each finding, by topic.

    Args:
        findings: Findings in the order of their rows.
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
