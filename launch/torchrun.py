"""This is torchrun, but a signal ends it and its ranks without a traceback, with 128 plus the signal's number."""

from __future__ import annotations

import importlib
import logging
import sys

__all__ = ["main"]


def main() -> None:
    """Run torchrun with this process's arguments."""
    run = importlib.import_module("torch.distributed.run")
    signalled = importlib.import_module("torch.distributed.elastic.multiprocessing.api").SignalException
    # Its warnings say that it ends its ranks; the failure of a rank is an error.
    logging.disable(logging.WARNING)
    try:
        run.main()
    except signalled as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
