r"""Triton kernels do the shared updates on CUDA, on many tensors per launch and without host syncs.

Importing this package needs no Triton. All is fp32 where no other type is named; the plain functions take other types.
*Runs* are lists of contiguous 1-D tensors, one per shard, of any lengths (0 too) and alignments; the number of
launches does not depend on how many there are. Norms are fp64, summed in a fixed order and without atomics, so that a
second call gives the same bits. ``lr`` is a float or a 0-d tensor.

============================ ==================================================== ======================== ============
function                     does                                                 bytes per element        launches
                                                                                  (read + written)
============================ ==================================================== ======================== ============
``run`` of "step"            decay and a step times one factor per run            8 + 4                    1
``run`` of "momentum"        momentum                                             8 + 4                    1
``run`` of "nesterov"        momentum, and its mean with the gradient             8 + 8                    1
``run`` of "lion"            momentum, a step along its sign                      12 + 8                   1
``run`` of "adamw"           AdamW                                                16 + 12                  1
\.\.\. with a reference       the corrected gradient in its place                  4 more (advancing: 4 + 4)
``squared_norms``            runs -> (n,) fp64; with a reference                  4 + 0; 8 + 0             2
``symmetric_product``        (B, m, n) -> X X^T (B, m, m), fp32, fp16 or bf16     half the operations      1
``symmetric_step``           (B, m, m) -> a O + c L R; one L serves several R     half the operations      1
``newton_schulz``            (..., m, n), as ``updates.newton_schulz``            3 m^2 n + m^3 per step   2 per step
============================ ==================================================== ======================== ============

The last three lie in :mod:`.symmetric_newton_schulz`; ``newton_schulz`` has one library product per step besides.
Papers' rooms have kernels of their own, in modules or packages named ``cuda``. All kernels compile with Triton 3.2 and
later. The addresses of tensors are uploaded once (:mod:`.tables`); steps on the same memory upload nothing. A graph can
capture all kernels but MKOR's ``update_factors_``; there the number of a step is a tensor on the device, with an entry
per run or matrix.
"""

from rankwise.kernels.triton.launched_passes import STEPS_ON_DEVICE, is_available, run, squared_norms

__all__ = ["STEPS_ON_DEVICE", "is_available", "run", "squared_norms"]
