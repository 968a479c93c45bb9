"""Refuses parameters that are not the model's any more since ``fully_shard``: a step would not train the model.

It also refuses others that were put in their place, but belong to other names.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from rankwise.fsdp.living_modules import living_modules
from rankwise.layout.dtensors import is_sharded
from rankwise.options.validation import OptionError

__all__ = ["refuse_replaced"]


def refuse_replaced(owner: str, named: Mapping[str, Tensor]) -> None:
    """Compare parameters with those of all sharded modules; called once, for parameters without gradients or new ones.

    Raises:
        OptionError: No module has one of them any more, and a sharded module has another of its name; or a sharded
            module has one under another name.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    reasons: dict[str, str] = {}
    # FSDP1 cannot wrap a module without a process group.
    classes = [FSDPModule, FullyShardedDataParallel] if dist.is_initialized() else [FSDPModule]
    for module in living_modules(classes):
        if issubclass(type(module), FSDPModule):
            present = {_plain(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)}
            _refuse_misplaced(owner, named, present)
            reasons |= _replaced(named, present) | _gathered(named, module)
        else:
            reasons |= _flattened(named, module)
    owned = _owned(named[name] for name in reasons) if reasons else set()
    for name, reason in reasons.items():
        if id(named[name]) not in owned:
            raise OptionError(f"{owner}: the parameter '{name}' is invalid{reason}")


def _owned(parameters: Iterable[Tensor]) -> set[int]:
    """Identities of the parameters that modules have: they may be those of another model, which is not sharded."""
    wanted = {id(parameter): parameter for parameter in parameters}
    holders = [referrer for referrer in gc.get_referrers(*wanted.values()) if type(referrer) is dict]
    of_modules: set[int] = set()
    for referrer in gc.get_referrers(*holders):
        # A referrer of the dictionary is a module or the dictionary of its attributes.
        attributes = vars(referrer) if isinstance(referrer, nn.Module) else referrer
        if type(attributes) is dict:
            of_modules.add(id(attributes.get("_parameters")))
    return {
        id(value) for holder in holders if id(holder) in of_modules for value in holder.values() if id(value) in wanted
    }


def _replaced(named: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> dict[str, str]:
    """Reasons for parameters whose name another one has in a sharded module; they are invalid if no module has them."""
    # A part that is gathered at the moment is no module's either.
    return {
        name: ", because it is no longer the model's: it must be the one that fully_shard has put in its place; build "
        "the optimizer after the model is sharded"
        for name, parameter in named.items()
        if name in present
        and present[name] is not parameter
        and present[name].shape == parameter.shape
        and not is_sharded(parameter)
    }


def _gathered(named: Mapping[str, Tensor], module: Any) -> dict[str, str]:
    """Reasons for parameters that ``fully_shard`` gathered for a forward pass, and frees or keeps after it."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or filter(None, [getattr(state, "_fsdp_param_group", None)])
    gathered = {id(getattr(sharded, "_unsharded_param", None)) for group in groups for sharded in group.fsdp_params}
    return {
        name: ": it is a copy that fully_shard had gathered for a forward pass when the optimizer was built, and must "
        "be the sharded one; call model.reshard() before the optimizer is built, or build it before the first forward "
        "pass"
        for name, parameter in named.items()
        if id(parameter) in gathered
    }


def _flattened(named: Mapping[str, Tensor], module: Any) -> dict[str, str]:
    """Reasons for parameters of whose shapes FSDP1 has put one flat parameter in the place of several."""
    shapes = set() if module._flat_param is None else set(module._flat_param._shapes)
    return {
        name: ", because FSDP has flattened it since: it must be the model's; shard the model with "
        "torch.distributed.fsdp.fully_shard (FSDP2) instead of FullyShardedDataParallel (accelerate: fsdp_version 2)"
        for name, parameter in named.items()
        if parameter.shape in shapes
    }


def _plain(name: str) -> str:
    """Remove what activation checkpointing and ``torch.compile`` put into a name."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


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
