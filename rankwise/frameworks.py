"""This module alone names the frameworks that have an adapter.

The adapters are packages of their own. A program that forgot to call one has imported nothing that could say so, hence
the advice stands here.
"""

from __future__ import annotations

from rankwise.layout.front_ends import advise

__all__ = ["ADAPTERS"]

ADAPTERS = {
    "deepspeed": "import deepspeed_plugin before deepspeed.initialize",
    "megatron.core": "let Megatron build the optimizer after megatron_patches.apply()",
}
"""What a program has to call, by the module of the framework that it has imported."""

for _module, _advice in ADAPTERS.items():
    advise(_module, _advice)
