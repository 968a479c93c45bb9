"""The version of the library, on which all ranks of a run must agree."""

__all__ = ["__version__"]

__version__ = "0.2.0"
