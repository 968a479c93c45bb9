"""``python -m rankwise`` is the command ``rankwise``."""

from __future__ import annotations

import importlib

if __name__ == "__main__":
    importlib.import_module("rankwise.launch.cli").app(prog_name="rankwise")
