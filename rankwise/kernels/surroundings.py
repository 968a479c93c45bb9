"""This module keeps what surrounds a call of a method from changing what the method computes.

Training loops run inside ``torch.autocast``, under another default device than the weights', in inference mode, in a
compiled function. These are meant to change a model, not a basis or an inverse that is followed from step to step. What
is off already is read, and not switched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

from rankwise.kernels.full_precision import full_precision

__all__ = ["is_imagined", "stand_ins", "undisturbed", "undisturbed_anywhere"]

Function = TypeVar("Function", bound=Callable[..., Any])

_STAND_INS = ("FAKE", "FUNCTIONAL", "PROXY")
"""Modes of torch's dispatcher in which tensors stand for others; other modes only watch what is computed."""


def undisturbed(function: Function) -> Function:
    """Make a method compute one result whatever surrounds its calls.

    While it runs there is no autocast on any device, no default device nor other mode of torch's functions, no
    inference mode, no recording of gradients, no reduced precision of products, and no compiler. Modes that watch what
    is dispatched, such as counters of operations, stay.

    Raises:
        RuntimeError: The method is called where tensors are but stand-ins; nothing has changed then.
    """
    return _guarded(function, True)


def undisturbed_anywhere(function: Function) -> Function:
    """Do what :func:`undisturbed` does, for methods that leave weights and states alone and so allow stand-ins."""
    return _guarded(function, False)


def _guarded(function: Function, among_real: bool) -> Function:
    def inside(self: Any, *args: Any, **kwargs: Any) -> Any:
        if among_real:
            _refuse_stand_ins(self, function.__name__)
        with full_precision(), torch.no_grad():
            if not _is_disturbed():
                return function(self, *args, **kwargs)
            with _switched_off():
                return function(self, *args, **kwargs)

    @wraps(function)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The first answer is a constant to a compiler that traces this; the second says that one watches this thread.
        if torch.compiler.is_compiling() or _watcher() is not None:
            # Only a compiler acts on this: it cuts the function in two, or repeats the message where it may not.
            torch._dynamo.graph_break(
                msg="call step() outside of what fullgraph=True compiles; nothing is gained inside"
            )
            return _uncompiled(inside)(self, *args, **kwargs)
        return inside(self, *args, **kwargs)

    guarded.is_undisturbed = True  # type: ignore[attr-defined]
    return guarded  # type: ignore[return-value]


# Some releases lack this function. Then the question above it notices only what the compiler traces itself.
_watcher: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


def _uncompiled(function: Any) -> Callable[..., Any]:
    uncompiled: Callable[..., Any] | None = getattr(function, "uncompiled", None)
    if uncompiled is None:
        # Only a first call wraps the function, because the compiler takes as long to import as torch.
        uncompiled = function.uncompiled = torch.compiler.disable(function)
    return uncompiled


def _is_disturbed() -> bool:
    modes = torch._C._len_torch_function_stack() > 0
    return modes or torch._C._is_any_autocast_enabled() or torch.is_inference_mode_enabled()


@contextmanager
def _switched_off() -> Iterator[None]:
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            # Inference mode was what kept gradients from being recorded.
            stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())
        while torch._C._len_torch_function_stack():
            stack.callback(torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack())
        yield


def stand_ins() -> str | None:
    """Return the name of what makes tensors stand-ins here, such as ``FakeTensorMode``; None where they are real."""
    if torch._C._functorch.maybe_current_level() is not None:
        return "transform of torch.func"
    if torch._C._is_tracing():
        return "trace of torch.jit"
    if not torch._C._len_torch_dispatch_stack():
        return None
    keys = [getattr(torch._C._TorchDispatchModeKey, name, None) for name in _STAND_INS]
    modes = [torch._C._get_dispatch_mode(key) for key in keys if key is not None]
    return next((type(mode).__name__ for mode in modes if mode is not None), None)


def is_imagined() -> bool:
    """Whether a pass of a model runs on stand-ins; one that a compiler traces does not count, as it will be real."""
    return not torch.compiler.is_compiling() and stand_ins() is not None


def _refuse_stand_ins(owner: Any, method: str) -> None:
    mode = stand_ins()
    if mode is not None:
        raise RuntimeError(
            f"{type(owner).__name__}.{method.strip('_')}() is called in a {mode}, where tensors are but stand-ins: "
            "it works on real weights and states; call it outside, and leave it out of what is traced"
        )
