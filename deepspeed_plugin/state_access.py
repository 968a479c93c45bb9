"""``deepspeed.utils.safe_get_*_optimizer_state`` and ``safe_set_*`` work here if only some parameters keep a state.

DeepSpeed looks a state up by the parameter's offset in the flat partition. Our states are stored without gaps if only
some of a partition's parameters keep them, and a rank may hold no part of a parameter. By offset one would read and
write another weight's state, or a rank would raise while others wait for it. DeepSpeed attaches to each parameter the
functions that its accessors call; those of our optimizers' parameters ask the optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import get_full_hp_param, set_full_hp_param
from torch import Tensor

from deepspeed_plugin.affine_maps import shape_here
from deepspeed_plugin.layouts import DeepSpeedLayout
from rankwise.states.param_remainders import NARROW, REMAINDER
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.updates.remainders import join, split

__all__ = ["StateAccess"]

_LINK = "_link_all_hp_params"


class StateAccess:
    """Serves DeepSpeed's accessors for one engine's partitioned parameters.

    Args:
        engine: The engine, whose wrapper is built.
        optimizer: The engine's basic optimizer, attached to ``layout``.
        layout: Layout of the wrapper.
    """

    def __init__(self, engine: DeepSpeedEngine, optimizer: ShardedOptimizer, layout: DeepSpeedLayout) -> None:
        self._wrapper, self._optimizer, self._layout = engine.optimizer, optimizer, layout
        self._names = {id(parameter): name for name, parameter in optimizer.table.parameters.items()}
        self._link = getattr(self._wrapper, _LINK, None)
        if self._link is not None:  # stage 0 has nothing to link
            setattr(self._wrapper, _LINK, self._link_all)
            self._install()

    def remove(self) -> None:
        """Leave the parameters as DeepSpeed had them."""
        if self._link is not None:
            self._wrapper.__dict__.pop(_LINK, None)
            for parameter in self._optimizer.table.parameters.values():
                if isinstance(getattr(parameter, "_z3_optimizer", None), _StageThree):
                    parameter._z3_optimizer = self._wrapper  # type: ignore[attr-defined]
                for stock in (get_full_hp_param, set_full_hp_param):
                    if isinstance(getattr(parameter, stock.__name__, None), functools.partial):
                        setattr(parameter, stock.__name__, stock.__get__(parameter))
            self._link = None

    def _link_all(self) -> None:
        # DeepSpeed links again when it has loaded a checkpoint or moved buffers.
        assert self._link is not None
        self._link()
        self._install()

    def _install(self) -> None:
        for parameter in self._optimizer.table.parameters.values():
            if hasattr(parameter, "_z3_optimizer"):
                parameter._z3_optimizer = _StageThree(self._wrapper, self)
            elif hasattr(parameter, "_hp_mapping"):
                parameter.get_full_hp_param = functools.partial(self._get_full_or_weight, parameter)  # type: ignore[attr-defined]
                parameter.set_full_hp_param = functools.partial(self._set_full_or_weight, parameter)  # type: ignore[attr-defined]

    def serves(self, parameter: Tensor, state: str | None) -> bool:
        """Whether a call asks for a state of one of the optimizer's parameters, not for a weight or a frozen one."""
        return state is not None and id(parameter) in self._names

    def get_full(self, parameter: Tensor, state: str) -> Tensor | None:
        """Return a state of a whole parameter, fp32; None on every rank if the parameter has none; a collective."""
        if self._tensor(parameter, state) is None:
            return None
        whole = torch.zeros(_numel(parameter), dtype=torch.float32, device=parameter.device)
        for start, values in self._pieces(parameter, state):
            whole[start : start + values.numel()] = values
        dist.all_reduce(whole, group=_group(parameter))
        return whole.view(tuple(shape_here(parameter)))

    def set_full(self, parameter: Tensor, value: Tensor, state: str) -> None:
        """Write this rank's part of a whole parameter's state.

        Raises:
            ValueError: On every rank: the parameter keeps no such state, or has another size.
        """
        self._require(parameter, state, value.numel(), _numel(parameter))
        flat = value.detach().reshape(-1)
        for start, values in self._pieces(parameter, state):
            values.copy_(flat[start : start + values.numel()])

    def get_local(self, parameter: Any, state: str) -> Tensor | None:
        """Return this rank's piece of a state under ZeRO-3, fp32, padded to equal pieces; None if there is none."""
        if self._tensor(parameter, state) is None:
            return None
        pieces, size = self._pieces(parameter, state), parameter.ds_tensor.numel()
        first = size * dist.get_rank(_group(parameter))
        if len(pieces) == 1 and pieces[0][1].numel() == size:
            return pieces[0][1].to(parameter.device, torch.float32)
        piece = torch.zeros(size, dtype=torch.float32, device=parameter.device)
        for start, values in pieces:
            piece[start - first : start - first + values.numel()] = values
        return piece

    def set_local(self, parameter: Any, value: Tensor, state: str) -> None:
        """Write this rank's piece of a state under ZeRO-3.

        Raises:
            ValueError: On every rank: the parameter keeps no such state, or its piece has another size.
        """
        size = parameter.ds_tensor.numel()
        self._require(parameter, state, value.numel(), size)
        first, flat = size * dist.get_rank(_group(parameter)), value.detach().reshape(-1)
        for start, values in self._pieces(parameter, state):
            values.copy_(flat[start - first : start - first + values.numel()])

    def _require(self, parameter: Tensor, state: str, given: int, wanted: int) -> None:
        name = self._names[id(parameter)]
        kept = self._optimizer.kept_states(name)
        if state not in kept:
            raise ValueError(
                f"'{name}' keeps no state '{state}' under {self._optimizer.spec.name}: its rule keeps "
                f"{', '.join(kept) or 'none'}; nothing was set"
            )
        if self._tensor(parameter, state) is None:
            raise ValueError(f"'{name}' has no state '{state}' before its first step; set it after engine.step()")
        if given != wanted:
            raise ValueError(f"'{state}' of '{name}' has {wanted} elements, the value {given}; nothing was set")

    def _tensor(self, parameter: Tensor, state: str) -> Tensor | None:
        """Return the tensor with the state; None, on every rank, if the parameter has no such state."""
        if state not in self._optimizer.kept_states(self._names[id(parameter)]):
            states = sorted({key for name in self._names.values() for key in self._optimizer.kept_states(name)})
            if state not in states:
                raise ValueError(
                    f"'{state}' is no element state of {self._optimizer.spec.name}; it keeps {', '.join(states)}"
                )
            return None
        tensor = self._layout.tensor_of(parameter)
        return tensor if tensor is not None and "step" in self._optimizer.state.get(tensor, {}) else None

    def _pieces(self, parameter: Tensor, state: str) -> list[tuple[int, Tensor]]:
        tensor = self._tensor(parameter, state)
        assert tensor is not None
        stored = self._optimizer.stored_states(tensor, self._names[id(parameter)], state)
        return [(self._layout.local(parameter, start), values) for start, values in stored]

    def _get_full_or_weight(self, parameter: Tensor, optim_state_key: str | None = None) -> Tensor | None:
        if optim_state_key is not None:
            return self.get_full(parameter, optim_state_key)
        return self.with_rest(parameter, get_full_hp_param(parameter), self.get_full)

    def _set_full_or_weight(self, parameter: Tensor, value: Tensor, optim_state_key: str | None = None) -> None:
        if optim_state_key is not None:
            self.set_full(parameter, value, optim_state_key)
        else:
            self._layout.note_set(parameter)
            set_full_hp_param(parameter, self.without_rest(parameter, value, self.set_full))

    def with_rest(self, parameter: Tensor, weight: Tensor, rest_of: Callable[[Tensor, str], Tensor | None]) -> Tensor:
        """Return a weight with the bits that its master in bf16 lacks.

        Args:
            parameter: Parameter of the model.
            weight: Weight, or a piece of it, that DeepSpeed returns.
            rest_of: Returns a state, or the same piece of it.
        """
        if not self._has_rest(parameter):
            return weight
        remainder = rest_of(parameter, REMAINDER)
        assert remainder is not None
        return join(weight.to(NARROW), remainder.short())

    def note_set(self, parameter: Tensor) -> None:
        """Tell the layout that a weight is set, if it is one of the optimizer's parameters."""
        if id(parameter) in self._names:
            self._layout.note_set(parameter)

    def without_rest(self, parameter: Tensor, value: Tensor, set_rest: Callable[[Tensor, Tensor, str], None]) -> Tensor:
        """Set the bits of a weight that its master in bf16 lacks, and return what DeepSpeed is to set.

        Args:
            parameter: Parameter of the model.
            value: Value of the weight, or of a piece of it.
            set_rest: Sets a state, or the same piece of it.
        """
        if not self._has_rest(parameter):
            return value
        rounded, remainder = torch.empty_like(value, dtype=NARROW), torch.empty_like(value, dtype=torch.int16)
        split(value.float(), rounded, remainder)
        set_rest(parameter, remainder, REMAINDER)
        return rounded.to(value.dtype)

    def _has_rest(self, parameter: Tensor) -> bool:
        name = self._names.get(id(parameter))
        kept = {} if name is None else self._optimizer.kept_states(name)
        return REMAINDER in kept and self._tensor(parameter, REMAINDER) is not None


class _StageThree:
    """Stands for ZeRO-3's wrapper at its parameters, and passes on all calls but those for our states."""

    def __init__(self, wrapper: Any, access: StateAccess) -> None:
        self._wrapper, self._access = wrapper, access

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)

    def get_full_hp_param(self, param: Tensor, optim_state_key: str | None = None) -> Any:
        if not self._access.serves(param, optim_state_key):
            weight = self._wrapper.get_full_hp_param(param, optim_state_key)
            return self._access.with_rest(param, weight, self._access.get_full)
        return self._access.get_full(param, str(optim_state_key))

    def set_full_hp_param(self, value: Tensor, param: Tensor, optim_state_key: str | None = None) -> None:
        if not self._access.serves(param, optim_state_key):
            self._access.note_set(param)
            value = self._access.without_rest(param, value, self._access.set_full)
            self._wrapper.set_full_hp_param(value, param, optim_state_key)
        else:
            self._access.set_full(param, value, str(optim_state_key))

    def get_local_fp32_param(self, param: Tensor, optim_state_key: str | None = None) -> Any:
        if not self._access.serves(param, optim_state_key):
            weight = self._wrapper.get_local_fp32_param(param, optim_state_key)
            return self._access.with_rest(param, weight, self._access.get_local)
        return self._access.get_local(param, str(optim_state_key))

    def set_local_hp_param(self, value: Tensor, param: Tensor, optim_state_key: str | None = None) -> None:
        if not self._access.serves(param, optim_state_key):
            self._access.note_set(param)
            value = self._access.without_rest(param, value, self._access.set_local)
            self._wrapper.set_local_hp_param(value, param, optim_state_key)
        else:
            self._access.set_local(param, value, str(optim_state_key))


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _group(parameter: Any) -> dist.ProcessGroup:
    """Return the ranks over which the parameter is cut."""
    group: dist.ProcessGroup = parameter.ds_process_group if hasattr(parameter, "ds_id") else parameter._dp_group
    return group
