"""A rank of an unedited script of a Megatron-LM checkout on CPUs, with the stand-in for Transformer Engine.

Megatron's own attention knows no context parallelism. All that is changed of ``rankwise megatron --cpu`` is the flag by
which it takes Megatron's own layers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_patches import cpu
from rankwise.launch.megatron_shim import run_script

if __name__ == "__main__":
    cpu.PRETRAIN_FLAGS = tuple(flag.replace("impl=local", "impl=transformer_engine") for flag in cpu.PRETRAIN_FLAGS)
    run_script(Path(sys.argv[1]), sys.argv[2:], cpu=True)
