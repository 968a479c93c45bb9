"""This module runs Megatron on CPU processes over gloo, for debugging and tests, inside the scopes below.

Megatron asks for CUDA in tensor factories (``device="cuda"``), in host calls (streams, random states, memory figures),
by ``Tensor.cuda()`` and by comparing ``Tensor.type()`` with a CUDA name. Inside :func:`cpu_megatron` the CPU answers
each of these; leaving the scope puts every replaced attribute back. No file of Megatron is touched. The scope says
nothing about speed, as streams and events do nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["PRETRAIN_FLAGS", "cpu_megatron", "cpu_pretraining", "import_megatron"]

PRETRAIN_FLAGS: tuple[str, ...] = (
    "--distributed-backend=gloo",
    "--transformer-impl=local",
    "--attention-backend=unfused",
    "--use-cpu-initialization",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
)
"""Options that keep ``pretrain_gpt.py`` from asking for CUDA kernels."""

_MISSING: Any = object()
_CPU = torch.device("cpu")
_RNG_WARNING = "CPU RNG state changed within GPU RNG context"


@contextmanager
def cpu_megatron() -> Iterator[None]:
    """Let megatron-core of this process run on CPU tensors and gloo groups; leaving the scope undoes everything.

    It covers tensor, sequence, pipeline (also interleaved), expert and data parallelism, the distributed optimizer with
    both overlaps, recomputation, fp32, bf16 and fp16, and ``dist_checkpointing``. Context parallelism needs an
    attention that is not Megatron's own; Transformer Engine, fp8 and CUDA graphs do not run. The scope belongs to the
    thread that enters it; scopes may be nested.

    Raises:
        ModuleNotFoundError: megatron-core is not installed.
    """
    # The compiler lists all of torch.cuda when it is imported, which therefore comes before any replacement.
    trace_rules = importlib.import_module("torch._dynamo.trace_rules")
    rules = trace_rules.get_torch_obj_rule_map()
    import_megatron("megatron.core.models.gpt")
    with ExitStack() as stack:
        # New process groups make the compiler list torch.cuda once more.
        _set(stack, trace_rules, "get_torch_obj_rule_map", functools.cache(lambda: rules))
        _replace_cuda_calls(stack)
        _replace_core_functions(stack)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        mode = _CpuForCuda()
        # A mode is off inside a function that it intercepts, and so would be in all of torch.autograd.backward.
        _set(stack, torch.autograd, "_engine_run_backward", _under(mode, torch.autograd._engine_run_backward))
        stack.enter_context(mode)
        yield


@contextmanager
def cpu_pretraining() -> Iterator[None]:
    """Enter :func:`cpu_megatron`, and let ``megatron.training`` and ``pretrain_gpt.py`` of a checkout run.

    They refuse to start without a CUDA device, and compile CUDA kernels and a C++ helper at start-up. If the checkout
    has no helper, that of the installed wheel is used. Run the script with :data:`PRETRAIN_FLAGS` added.

    Raises:
        ModuleNotFoundError: megatron-core or megatron.training is not importable.
    """
    import_megatron("megatron.core")
    with ExitStack() as stack:
        _lend_dataset_helpers(stack)
        initialize = import_megatron("megatron.training.initialize")
        stack.enter_context(cpu_megatron())
        _set(stack, torch.cuda, "is_available", lambda: True)
        _set(stack, initialize, "_compile_dependencies", lambda: None)
        yield


class _CpuForCuda(TorchFunctionMode):
    """Turns requests for the CUDA device into requests for the CPU, and reports CPU tensors' types as CUDA ones."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not kwargs and func not in _ASKING:  # nearly all calls
            return func(*args)
        kwargs = kwargs or {}
        if func is Tensor.cuda or func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return f"torch.cuda.{func(*args).rsplit('.', 1)[1]}"
        if func is Tensor.to:
            args = (args[0], *(_CPU if _names_cuda(value) else value for value in args[1:]))
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


_ASKING = frozenset((Tensor.cuda, Tensor.pin_memory, Tensor.type, Tensor.to))
"""What asks for the CUDA device, or names it, without arguments by name."""


def _under(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return run


def _names_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value.split(":")[0] == "cuda"
    if type(value) is int:  # the number of a CUDA device
        return True
    return isinstance(value, torch.device) and value.type == "cuda"


class _Event:
    """Stands for a stream and for an event: on the CPU everything recorded has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Event:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    device = _CPU

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 0.0

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _seed(seed: int) -> None:
    # torch.manual_seed would also seed torch.cuda, which calls this function.
    torch.default_generator.manual_seed(int(seed))


def _cuda_attributes() -> dict[str, Any]:
    """Return attributes for ``torch.cuda`` with one device, the CPU, on which nothing is pending or allocated."""
    stream = _Event()
    no_op = ("synchronize", "set_device", "set_stream", "empty_cache", "reset_peak_memory_stats", "init", "_lazy_init")
    no_memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return {
        **dict.fromkeys(no_op, _nothing),
        **dict.fromkeys((*no_memory, "device_memory_used"), _zero),
        "memory_stats": lambda *args, **kwargs: {},
        "current_device": _zero,  # a number, because Megatron's FSDP writes it behind "cuda:"
        "device_count": lambda: 1,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *args: (8, 0),
        "get_device_properties": lambda *args: SimpleNamespace(major=8, minor=0, name="cpu", total_memory=0),
        "Stream": _Event,
        "Event": _Event,
        "device": _Event,
        "stream": lambda stream: stream or _Event(),
        "current_stream": lambda *args: stream,
        "default_stream": lambda *args: stream,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": _seed,
        "manual_seed_all": _seed,
    }


def _replace_cuda_calls(stack: ExitStack) -> None:
    for name, value in _cuda_attributes().items():
        _set(stack, torch.cuda, name, value)
    for name in ("get_rng_state", "set_rng_state"):
        _set(stack, torch.cuda.random, name, getattr(torch.cuda, name))
    for name in ("range_push", "range_pop", "mark"):
        _set(stack, torch.cuda.nvtx, name, _nothing)
    # A torch built for CUDA would pin the memory of batches for the one device that is counted.
    _set(stack, torch.accelerator, "is_available", lambda: False)


def _replace_core_functions(stack: ExitStack) -> None:
    """Replace functions of megatron-core that cannot run on a CPU, or not without Transformer Engine."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import torch_fully_sharded_data_parallel
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # Torch without CUDA has no options for NCCL.
    _set(stack, parallel_state, "get_nccl_options", _nothing)
    for module in (torch_fully_sharded_data_parallel, mcore_fsdp_adapter):
        _set(stack, module, "DeviceMesh", _CpuMesh)
    if hasattr(mcore_fsdp_adapter, "FullyShardedDataParallelV2"):
        _replace_buffers(stack)
    _set(stack, random, "_get_cuda_rng_state", _get_rng_state)
    _set(stack, random, "_set_cuda_rng_state", _set_rng_state)
    _set(stack, torch_norm.WrappedTorchNorm, "__new__", staticmethod(_norm(torch_norm.WrappedTorchNorm.__new__)))
    for module in (moe_utils, token_dispatcher):
        _set(stack, module, "maybe_move_tensor_to_cpu", _as_on_the_host)
    if not hasattr(moe_utils, "te_general_gemm"):
        # Without Transformer Engine this name is not bound, but it is read in any case.
        _set(stack, moe_utils, "te_general_gemm", None)
    queue = "get_write_results_queue"  # up to 0.16 the name has an underscore in front
    _set(stack, filesystem_async, queue if hasattr(filesystem_async, queue) else f"_{queue}", _forked_queue(stack))

    # The CPU's generator stands for the GPU's, and may change within the scope of the GPU's.
    logger = logging.getLogger(random.__name__)
    quiet = _without(_RNG_WARNING)
    logger.addFilter(quiet)
    stack.callback(logger.removeFilter, quiet)


def _replace_buffers(stack: ExitStack) -> None:
    """Give the buffers of version 2 of Megatron's FSDP the stream that stands for all, of which a CPU has none."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer import DBuffer

    build = DBuffer.__init__

    def with_stream(buffer: Any, *args: Any, **kwargs: Any) -> None:
        build(buffer, *args, **kwargs)
        buffer.allocation_stream = torch.cuda.current_stream()

    _set(stack, DBuffer, "__init__", with_stream)


class _CpuMesh:
    """Stands for ``DeviceMesh`` where Megatron asks for a mesh of CUDA devices."""

    @staticmethod
    def from_group(group: Any, device_type: str, **more: Any) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(group, "cpu", **more)


def _norm(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Mark the weights of torch's norms under sequence parallelism, so that Megatron sums their gradients."""

    def build(cls: type, config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        config.sequence_parallel = False
        try:
            norm = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = True
        for parameter in norm.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return norm

    return build


def _as_on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    # Collectives need split sizes as numbers, and Megatron converts them only while it moves them off a GPU.
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _forked_queue(stack: ExitStack) -> Callable[[], Any]:
    """Return what makes the queue of checkpoint writers, in a forked process: a spawned one would import the script."""
    queues: list[Any] = []

    def get(mp_mode: str = "fork") -> Any:
        if not queues:
            manager = multiprocessing.get_context("fork").Manager()
            stack.callback(manager.shutdown)
            queues.append(manager.Queue())
        return queues[0]

    return get


def _without(message: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: message not in record.getMessage()


def _lend_dataset_helpers(stack: ExitStack) -> None:
    """Lend the compiled index builder of the installed wheel to a checkout that has not compiled its own."""
    name = "megatron.core.datasets.helpers_cpp"
    if importlib.util.find_spec(name) is not None:
        return
    for file in importlib.metadata.files("megatron-core") or ():
        if file.name.startswith("helpers_cpp") and file.suffix in (".so", ".pyd"):
            spec = importlib.util.spec_from_file_location(name, str(file.locate()))
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[name] = module
            stack.callback(sys.modules.pop, name, None)
            return


def import_megatron(name: str) -> ModuleType:
    """Import a module of Megatron; recent ones name Triton kernels, which never run here, without asking first."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
    # This module of torch looks for Triton when it is imported, and must not find the stand-in.
    importlib.import_module("torch._inductor.compile_fx")
    with ExitStack() as stack:
        for stub in ("triton", "triton.language"):
            sys.modules[stub] = _Triton(stub)
            stack.callback(sys.modules.pop, stub)
        return importlib.import_module(name)


class _Triton(ModuleType):
    """Stands for Triton, so that files that decorate functions with it can be imported; it has every name."""

    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> _Triton:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


def _set(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replace an attribute until the stack closes; an attribute that did not exist is removed then."""
    previous = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    if previous is _MISSING:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, previous)
