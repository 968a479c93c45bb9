"""Makes the interpreter of Triton kernels a fixture of this folder."""

import pytest
from triton_interpreter import interpreter, launches

__all__ = ["interpreter", "launches"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Compile first: the interpreter leaves changes in Triton, after which nothing compiles any more."""
    items.sort(key=lambda item: item.path.name != "test_triton_compiles.py")
