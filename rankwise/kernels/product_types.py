"""This module says whether a device multiplies matrices fast in bfloat16.

Processors without instructions for bfloat16 take 15 to 70 times as long for its products as for those of float32.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import torch

__all__ = ["multiplies_bfloat16"]

_CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that keep torch's library of products from wider instructions; the first that is set counts."""
_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
_X86 = ("x86_64", "amd64")
_FIRST_CUDA = (8, 0)


@cache
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether torch's products in bfloat16 are faster than those in float32, by what the device says of itself.

    Flags decide, not a stop-watch: ranks on machines of one kind must come to one answer. A process asks once.
    """
    if device.type == "cpu":
        return _cpu_multiplies_bfloat16()
    if device.type == "cuda":
        # AMD's GPUs are "cuda", too; all that have matrix units multiply bfloat16.
        return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= _FIRST_CUDA
    # A device that says nothing, such as the meta device, is taken for one that runs the published type, bfloat16.
    asked = getattr(getattr(torch, device.type, None), "is_bf16_supported", None)
    supported: bool = asked is None or asked()
    return supported


def _cpu_multiplies_bfloat16() -> bool:
    """Whether oneDNN, to which torch leaves such products, finds instructions that make them fast."""
    mkldnn = torch.backends.mkldnn
    if not (mkldnn.is_available() and getattr(mkldnn, "enabled", True)):
        return False
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in _X86:
        return True  # here oneDNN has looked for the instructions
    # On x86 oneDNN also says yes for AVX-512 alone, and converts, which is slow. A user who keeps torch from AVX-512
    # wants the results of a machine without it.
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not _is_capped() and _has_instructions()


def _is_capped() -> bool:
    wish = next((os.environ[name] for name in _CAPS if os.environ.get(name)), "")
    return wish.upper() in _WITHOUT_BFLOAT16


def _has_instructions() -> bool:
    """Whether an x86 processor multiplies bfloat16: AVX512-BF16 or AMX-BF16."""
    names = ("avx512_bf16", "amx_bf16")
    capabilities_of = getattr(torch.cpu, "get_capabilities", None)
    if capabilities_of is not None:
        capabilities = capabilities_of()
        return any(capabilities.get(name, False) for name in names)
    info = Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.exists() else []
    return any(name in flags for name in names)
