"""The helpers by which tests run ranks."""

from __future__ import annotations

import pytest
from ranks import once


def test_a_failure_is_kept_as_a_result_is() -> None:
    """A fault of ranks that hang would else be waited for by every test that asks for them."""
    calls = []

    @once
    def halved(number: int) -> int:
        calls.append(number)
        if number % 2:
            pytest.fail("odd")
        return number // 2

    for _ in range(2):
        assert halved(4) == 2
        with pytest.raises(pytest.fail.Exception, match="odd"):
            halved(3)
    assert calls == [4, 3]
