"""Parameters that ``fully_shard`` has replaced since the optimizer was built: nobody would train the model then.

And others that were put in their place, but are not those of these names.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rankwise.options.validation import OptionError
from rankwise.sharding.dtensors import is_sharded

__all__ = ["refuse_replaced"]


def refuse_replaced(owner: str, named: Mapping[str, Tensor]) -> None:
    """Look through all living modules; asked once, where a step finds parameters without gradients, or others.

    Args:
        owner: Owner of the message: the optimizer.
        named: Parameters, by the names that they were given.

    Raises:
        OptionError: No module has one of them any more, and a sharded module has another of its name; or a sharded
            module has one under another name.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    owned = {id(parameter) for module in modules for parameter in module._parameters.values()}
    lost = {name: parameter for name, parameter in named.items() if id(parameter) not in owned}
    for module in modules:
        if issubclass(type(module), FSDPModule):
            present = {_plain(name): own for name, own in module.named_parameters(remove_duplicate=False)}
            _refuse_gathered(owner, lost, module)
            _refuse(owner, lost, present)
            _refuse_misplaced(owner, named, present)
        elif lost and issubclass(type(module), FullyShardedDataParallel):
            _refuse_flattened(owner, lost, module)


def _refuse_flattened(owner: str, lost: Mapping[str, Tensor], module: Any) -> None:
    """FSDP1 has put one flat parameter in the place of several, of which it knows the shapes."""
    shapes = set() if module._flat_param is None else set(module._flat_param._shapes)
    for name, parameter in lost.items():
        if parameter.shape in shapes:
            raise OptionError(
                f"{owner}: the parameter '{name}' is invalid, because FSDP has flattened it since: it must be the "
                "model's; shard the model with torch.distributed.fsdp.fully_shard (FSDP2) instead of "
                "FullyShardedDataParallel (accelerate: fsdp_version 2)"
            )


def _refuse_gathered(owner: str, lost: Mapping[str, Tensor], module: Any) -> None:
    """The optimizer was built on what fully_shard gathers for a forward pass, and frees or keeps after it."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or filter(None, [getattr(state, "_fsdp_param_group", None)])
    gathered = {id(getattr(each, "_unsharded_param", None)) for group in groups for each in group.fsdp_params}
    for name, parameter in lost.items():
        if id(parameter) in gathered:
            raise OptionError(
                f"{owner}: the parameter '{name}' is invalid: it is a copy that fully_shard had gathered for a forward "
                "pass when the optimizer was built, and must be the sharded one; call model.reshard() before the "
                "optimizer is built, or build it before the first forward pass"
            )


def _plain(name: str) -> str:
    """Without what activation checkpointing and ``torch.compile`` put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def _refuse(owner: str, lost: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> None:
    for name, parameter in lost.items():
        # A part that is gathered at the moment is no module's either.
        if name in present and present[name].shape == parameter.shape and not is_sharded(parameter):
            raise OptionError(
                f"{owner}: the parameter '{name}' is invalid, because it is no longer the model's: it must be the one "
                "that fully_shard has put in its place; build the optimizer after the model is sharded"
            )


def _refuse_misplaced(owner: str, named: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in present.items():
        names.setdefault(id(parameter), []).append(name)
    for name, parameter in named.items():
        own = names.get(id(parameter), [name])
        if name in present and name not in own:
            raise OptionError(
                f"{owner}: the parameter '{name}' is invalid: the param groups have '{own[0]}' of the sharded model "
                "in its place; build the optimizer after the model is sharded"
            )
