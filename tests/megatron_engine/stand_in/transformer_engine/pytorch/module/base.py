"""STAND-IN: what all of Transformer Engine's layers share: 8-bit state, initial values, the tensor-parallel group."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager


class TransformerEngineBaseModule(nn.Module):
    """Its extra state is empty unless a recipe with state was used: then histories of largest values and scales."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = self.primary_weights_in_fp8 = self.fp8_initialized = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None, "num_gemms": 1}
        self.tp_group: Any = None
        self.tp_size = 1
        self.sequence_parallel = False
        self.param_init_meta: dict[str, tuple[Callable[[Tensor], Any] | None, Any]] = {}

    def register_parameter(  # type: ignore[override]
        self, name: str, param: Parameter | None, init_fn: Any = None, get_rng_state_tracker: Any = None, **_: Any
    ) -> None:
        """As PyTorch's, with what gives the parameter its first values."""
        super().register_parameter(name, param)
        if init_fn is not None:
            self.param_init_meta.setdefault(name, (init_fn, get_rng_state_tracker))

    def reset_parameters(self, defer_init: bool = False) -> None:
        """First values, from the tracker's random states where one was given."""
        for name, parameter in self.named_parameters(recurse=False):
            init, tracker = self.param_init_meta[name]
            with torch.no_grad():
                if tracker is None:
                    init(parameter)
                    continue
                names = [self.rng_tracker_name] if getattr(self, "rng_tracker_name", None) else []
                with tracker().fork(*names):
                    init(parameter)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """After construction, where the group was not known."""
        self.tp_group = tp_group

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Look whether an 8-bit scope is open; with delayed scaling begin histories."""
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        if not self.fp8 or "scaling_fwd" in self.fp8_meta:
            return
        self.fp8_meta["recipe"] = FP8GlobalStateManager.get_fp8_recipe()
        self.fp8_meta["fp8_checkpoint"] = True
        self._begin_histories(num_gemms)

    def _begin_histories(self, num_gemms: int) -> None:
        recipe = self.fp8_meta["recipe"]
        self.fp8_meta["num_gemms"] = num_gemms
        if recipe.delayed():
            for key, kinds in (("scaling_fwd", 3), ("scaling_bwd", 2)):
                history = torch.zeros(recipe.amax_history_len, kinds * num_gemms)
                self.fp8_meta[key] = {"scale": torch.ones(kinds * num_gemms), "amax_history": history}

    def keep_amax(self, key: str, place: int, tensor: Tensor) -> None:
        """Into the histories, and scales from them."""
        meta = self.fp8_meta.get(key) if self.fp8 else None
        if meta is not None:
            meta["amax_history"][:, place] = meta["amax_history"][:, place].roll(1)
            meta["amax_history"][0, place] = tensor.detach().abs().max().float() if tensor.numel() else 0.0
            meta["scale"][place] = 448.0 / meta["amax_history"][:, place].max().clamp_min(1e-9)

    def get_extra_state(self) -> Tensor:
        """Bytes of a pickle; none without 8 bits, or with a recipe that has no state."""
        if not (self.fp8_meta["fp8_checkpoint"] or self.fp8) or "scaling_fwd" not in self.fp8_meta:
            return torch.empty(0, dtype=torch.uint8)
        state = {"recipe": self.fp8_meta["recipe"]}
        for side in ("fwd", "bwd"):
            for name, value in self.fp8_meta[f"scaling_{side}"].items():
                state[f"{name}_{side}"] = value.clone()
        state["extra_fp8_variables"] = {
            key: value for key, value in self.fp8_meta.items() if isinstance(value, bool | int | float | str)
        }
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """The way back."""
        if state is None or state.numel() == 0:
            return
        found = pickle.loads(state.detach().cpu().numpy().tobytes())
        self.fp8_meta |= found["extra_fp8_variables"] | {"recipe": found["recipe"]}
        self._begin_histories(self.fp8_meta["num_gemms"])
        for side in ("fwd", "bwd"):
            for name, value in self.fp8_meta[f"scaling_{side}"].items():
                value.copy_(found[f"{name}_{side}"])

    def check_types(self, inp: Tensor) -> None:
        """Parameters and inputs must be of one type."""
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dtype != inp.dtype:
                raise TypeError(f"Found input dtype: {inp.dtype} and {name!r} dtype: {parameter.dtype}")


def mark(tensor: Tensor, dim: int) -> None:
    """Say that tensor parallelism cuts a parameter."""
    tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = True, dim, 1  # type: ignore[attr-defined]


def constant(value: float) -> Callable[[Tensor], Any]:
    """An initial value."""
    return lambda tensor: nn.init.constant_(tensor, value)
