"""STAND-IN: random states and checkpointed activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint


class CudaRNGStatesTracker:
    """Random states by name; all are the CPU's generator here."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Any]:
        """A copy."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        """Replace all."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """A state that begins with a seed."""
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """A scope that draws from a state."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Any = None,
    tp_group: Any = None,
    **kwargs: Any,
) -> Any:
    """Recompute in the backward pass, within the scopes of the forward one."""
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def activation_recompute_forward(*args: Any, **kwargs: Any) -> Any:
    """A scope that tells 8-bit modules of a recomputation."""
    return torch.autograd.profiler.record_function("recompute")


def is_fp8_activation_recompute_enabled() -> bool:
    """Never, here."""
    return False


def get_all_rng_states() -> dict[str, Any]:
    """None are known to the layers."""
    return {}
