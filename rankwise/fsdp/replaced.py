"""Parameters that ``fully_shard`` has replaced since the optimizer was built: nobody would train the model then."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping

from torch import Tensor, nn

from rankwise.options.validation import OptionError
from rankwise.sharding.shards import is_sharded

__all__ = ["refuse_replaced"]


def refuse_replaced(owner: str, idle: Mapping[str, Tensor]) -> None:
    """Look through all living modules; asked once, where a step finds parameters without gradients.

    Args:
        owner: Of the message: the optimizer.
        idle: Parameters without gradients, by the names that they were given.

    Raises:
        OptionError: No module has one of them any more, and a sharded module has another of its name.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    owned = {id(parameter) for module in modules for parameter in module._parameters.values()}
    lost = {name: parameter for name, parameter in idle.items() if id(parameter) not in owned}
    for module in modules if lost else ():
        if issubclass(type(module), FSDPModule):
            _refuse(owner, lost, dict(module.named_parameters()))


def _refuse(owner: str, lost: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> None:
    for name, parameter in lost.items():
        # A part that is gathered at the moment is no module's either.
        if name in present and present[name].shape == parameter.shape and not is_sharded(parameter):
            raise OptionError(
                f"{owner}: the parameter '{name}' is invalid, being no longer the model's: it must be the one that "
                "fully_shard has put in its place; build the optimizer after the model is sharded"
            )
