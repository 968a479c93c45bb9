"""The command line of rankwise and its reference training script, installed as ``rankwise.launch``."""

from __future__ import annotations

if __name__ == "launch":
    # In a checkout that is not installed, the two mapped packages get the names that they are installed under.
    import sys

    import configs
    import rankwise  # noqa: F401  (the parent of the names below)

    sys.modules.setdefault("rankwise.launch", sys.modules[__name__])
    sys.modules.setdefault("rankwise.configs", configs)
