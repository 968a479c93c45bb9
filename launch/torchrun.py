"""torchrun, but that a signal ends it without a traceback: with 128 plus the signal's number, its ranks ended."""

from __future__ import annotations

import importlib
import logging
import sys

__all__ = ["main"]


def main() -> None:
    """Runs torchrun with this process's arguments."""
    run = importlib.import_module("torch.distributed.run")
    signalled = importlib.import_module("torch.distributed.elastic.multiprocessing.api").SignalException
    # That it ends its ranks; that one of them has failed is an error.
    logging.disable(logging.WARNING)
    try:
        run.main()
    except signalled as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
