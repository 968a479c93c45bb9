"""What tests of the launchers share."""

from __future__ import annotations

import pytest

from rankwise import abandoned_locks


@pytest.fixture
def brief_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long for a compiler's lock."""
    monkeypatch.setattr(abandoned_locks, "_RELEASING", 0.5)
    monkeypatch.setattr(abandoned_locks, "_SAYING", 0.5)
