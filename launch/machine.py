"""These functions look at devices, compiler, kernels and frameworks of this machine, as rankwise will meet them."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from rankwise.abandoned_locks import build_locks, is_abandoned
from rankwise.launch.environment import available_cores, missing_build_tools
from rankwise.launch.findings import Finding

__all__ = ["look_at_frameworks", "look_at_kernels", "look_at_locks", "look_at_machine"]

_SWITCHES = ("RANKWISE_NATIVE", "RANKWISE_ISA", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR")


def look_at_machine() -> Iterator[Finding]:
    """Yield findings about the processor, accelerators, backends of messages, and the compiler."""
    yield Finding("machine", "system", f"{platform.system()} {platform.machine()}, {available_cores()} cores")
    yield Finding("machine", "CPU instructions", _instructions())
    yield _accelerators()
    backends = [name for name in ("nccl", "gloo", "mpi") if getattr(dist, f"is_{name}_available")()]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if "nccl" in backends else "none"
    yield Finding("machine", "torch.distributed", f"{', '.join(backends)}; NCCL (RCCL) {nccl}")
    missing = missing_build_tools()
    advice = "install them: without, the CPU takes torch's operations and DeepSpeed's compiled collectives are left out"
    yield Finding("machine", "compiler", _compiler(), "note" if missing else "ok", advice if missing else "")
    if missing:
        yield Finding("machine", "missing build tools", ", ".join(missing), "note")
    switches = [f"{name}={os.environ[name]}" for name in _SWITCHES if name in os.environ]
    yield Finding("machine", "environment", ", ".join(switches) or "nothing set that changes what runs")


def _instructions() -> str:
    # Only instructions are named; other entries are sizes of caches.
    flags: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    of_interest = [name for name in ("avx2", "avx512_bf16", "amx_bf16", "amx_tile", "bf16", "sve") if flags.get(name)]
    return (
        f"torch uses {torch.backends.cpu.get_cpu_capability()}; the processor has {', '.join(of_interest) or 'no bf16'}"
    )


def _accelerators() -> Finding:
    kind = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    if not torch.version.hip and not torch.version.cuda:
        return Finding("machine", "accelerators", "none: this torch is built for CPUs")
    if not torch.cuda.is_available():
        return Finding(
            "machine",
            "accelerators",
            f"torch is built for {kind} and sees none",
            "note",
            "look at nvidia-smi or rocm-smi",
        )
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding(
        "machine", "accelerators", f"{kind}: {', '.join(f'{names.count(n)} x {n}' for n in sorted(set(names)))}"
    )


def _compiler() -> str:
    name = next(
        (name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and shutil.which(name)), None
    )
    if name is None:
        return "none"
    said = subprocess.run([name, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    return said.splitlines()[0] if said else name


def look_at_kernels() -> Iterator[Finding]:
    """Yield which form of the kernels runs on each device, and the type of products; compile what a step would."""
    from rankwise.kernels.dispatch import kernels_for, product_dtype_for

    devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    meaning = {
        "native": "compiled C++",
        "triton": "Triton",
        "lists": "torch._foreach operations",
    }
    for device in devices:
        try:
            form = kernels_for(device, torch.float32).__name__.rpartition(".")[2]
            product = str(product_dtype_for(device, torch.float32)).removeprefix("torch.")
        except (RuntimeError, ValueError) as error:
            yield Finding("kernels", device.type, "cannot be used", "fail", str(error))
            continue
        slow = form == "lists"
        advice = "install a C++ compiler with OpenMP" if device.type == "cpu" else "pip install 'rankwise[triton]'"
        value = f"{meaning.get(form, form)}; products of MARS-M, MARS-Shampoo and MKOR in {product}"
        yield Finding("kernels", device.type, value, "note" if slow else "ok", advice if slow else "")


def look_at_frameworks() -> Iterator[Finding]:
    """Yield whether each framework takes our optimizers here."""
    yield _tried("FSDP2", "torch.distributed.fsdp", "torch", _fsdp)
    yield _tried("torchtitan", "torchtitan", "rankwise[torchtitan]", _torchtitan)
    yield _tried("DeepSpeed", "deepspeed", "rankwise[deepspeed]", _deepspeed)
    yield _tried("Megatron", "megatron.core", "rankwise[megatron]", _megatron)
    yield _tried("megatron.training", "megatron.training", "", _pretraining)
    yield _tried("Transformer Engine", "transformer_engine", "transformer-engine[pytorch]", _transformer_engine)


def _tried(name: str, module: str, package: str, serve: Callable[[], str]) -> Finding:
    try:
        is_installed = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        is_installed = False
    if not is_installed:
        advice = (
            f"pip install '{package}'" if package else "comes with a checkout of Megatron-LM, not with pip's package"
        )
        return Finding("frameworks", name, "not installed", "note", f"{advice}, if you want it")
    try:
        return Finding("frameworks", name, serve())
    except Exception as error:  # a framework may raise any error on a machine that it was not made for
        return Finding("frameworks", name, f"{type(error).__name__} on import", "fail", str(error).strip()[:500])


def _fsdp() -> str:
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import DTensor

    # rankwise.fsdp reads these attributes beside what torch documents.
    read = ((FSDPModule, "_get_fsdp_state"), (DTensor, "_local_tensor"), (DTensor, "_spec"))
    missing = [f"{owner.__name__}.{name}" for owner, name in read if not hasattr(owner, name)]
    if missing:
        raise RuntimeError(f"torch {torch.__version__} has no {', '.join(missing)}")
    return f"{fully_shard.__name__}'s parameters are taken as they come; torch.distributed.checkpoint has all states"


def _torchtitan() -> str:
    ours = importlib.import_module("rankwise.torchtitan")
    if not ours.is_registered():
        raise RuntimeError("rankwise.torchtitan was imported and its names are not registered")
    return f"takes {', '.join(dict.fromkeys(ours.OPTIMIZER_NAMES.values()))} as optimizer_name"


def _deepspeed() -> str:
    # DeepSpeed's command line and compiler checks print on import; what matters is whether our types are registered.
    plugin = importlib.import_module("deepspeed_plugin")
    if not plugin.is_registered():
        raise RuntimeError("deepspeed_plugin was imported and its types are not registered")
    return f"takes {', '.join(plugin.JSON_TYPES)}; ZeRO 0 to 3, BF16_Optimizer, FP16_UnfusedOptimizer, pipelines, MoE"


def _megatron() -> str:
    patches = importlib.import_module("megatron_patches").check(command_line=False)
    return f"{len(patches)} functions to replace, all as expected; distributed, layer-wise, fp32 and bf16 wrappers"


def _transformer_engine() -> str:
    if importlib.util.find_spec("megatron") is None:
        return "used by Megatron alone, which is not installed"
    broken = importlib.import_module("megatron_patches.transformer_engine").broken_contract()
    if broken:
        raise RuntimeError("; ".join(broken))
    return "its layers and Megatron's wrappers of them have the parameters, attributes and calls that are relied on"


def _pretraining() -> str:
    patches = importlib.import_module("megatron_patches").check(command_line=True)
    return f"{len(patches)} functions to replace, all as expected: rankwise megatron pretrain_gpt.py works"


def look_at_locks() -> Iterator[Finding]:
    """Yield findings about locks of torch's just-in-time builds that a killed job has left behind."""
    locks = list(build_locks())
    for lock in locks:
        if is_abandoned(lock):
            advice = f"jobs that compile there wait for ever: rm {lock} (rankwise's commands remove DeepSpeed's own)"
            yield Finding("locks", _short(lock), "its owner is gone", "fail", advice)
        else:
            yield Finding("locks", _short(lock), "held by a process that compiles", "note")
    if not locks:
        yield Finding("locks", "compiled extensions", "no lock is held or left behind")


def _short(lock: Path) -> str:
    return str(Path(*lock.parts[-3:]))
