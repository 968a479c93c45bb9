"""The frameworks that have an adapter: the one place in this package where they are named.

Their adapters are packages of their own. A program that forgot to call one has imported nothing that could say so,
hence what to call stands here.
"""

from __future__ import annotations

from rankwise.layout.layout_source import advise

__all__ = ["ADAPTERS"]

ADAPTERS = {
    "deepspeed": "import deepspeed_plugin before deepspeed.initialize",
    "megatron.core": "let Megatron build the optimizer after megatron_patches.apply()",
}
"""By the module that a program using the framework has imported: what to call."""

for _module, _advice in ADAPTERS.items():
    advise(_module, _advice)
