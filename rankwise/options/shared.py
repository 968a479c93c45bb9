"""Options that several papers have; each paper passes its own defaults."""

from __future__ import annotations

from typing import Any

from rankwise.options.by_pattern import BlockLayouts, RateScales, StateDtypes
from rankwise.options.checks import Betas, Choice, Flag, FloatType, Integer, Number, OrNone, Patterns
from rankwise.options.fields import option

__all__ = [
    "betas",
    "blocks",
    "capturable",
    "comm_dtype",
    "eps",
    "exclude",
    "lr",
    "lr_scale",
    "ns_dtype",
    "ns_steps",
    "offload_compute",
    "skip_nonfinite",
    "split_heads",
    "state_dtype",
    "state_rounding",
    "store_param_remainders",
    "transition_steps",
    "weight_decay",
    "weight_decay_method",
]

_MOST_ITERATIONS = 100


def lr(default: float) -> Any:
    """Declare the rate, which schedules change."""
    return option(default, Number(), "Learning rate.", per_group=True)


def betas(default: tuple[float, float], text: str) -> Any:
    """Declare the decay rates of two averages."""
    return option(default, Betas(), text, per_group=True)


def eps(text: str) -> Any:
    """Declare the number that keeps a quotient finite."""
    return option(1e-8, Number(), text, per_group=True)


def weight_decay(text: str) -> Any:
    """Declare the decay of weights, which is zero by default as in torch.optim's older classes."""
    return option(0.0, Number(), text, per_group=True)


def weight_decay_method() -> Any:
    """Declare what decoupled decay is a share of, and which elements decay."""
    return option(
        "decoupled",
        Choice("decoupled", "independent", "cautious"),
        'How weights decay. "decoupled": by lr weight_decay. "independent": by weight_decay lr / lr_max (arXiv '
        "1711.05101, Algorithm 2, whose schedule multiplies both): lr_max is a group's max_lr where a scheduler sets "
        'one (OneCycleLR does), else the lr it was built with. "cautious": as "decoupled", but elements that step '
        "away from zero do not decay (arXiv 2510.12402).",
    )


def lr_scale() -> Any:
    """Declare multipliers of the rate of some parameters."""
    return option(
        None,
        RateScales(),
        'Multipliers of lr by patterns of whole names, as {"*embed*": 0.1}; where several match, the last one counts. '
        "They are applied in the step: param groups, schedulers and logs keep lr.",
    )


def comm_dtype(which: str = "straddling matrices") -> Any:
    """Declare the type of the exchange's messages."""
    return option(
        None,
        OrNone(FloatType(quantized=True)),
        f'Type in which {which} travel to their owners and back. None: their own, which rounds nothing; "bfloat16" '
        'halves the bytes; "int8" leaves about a quarter: codes of a byte with an exponent for every 64 elements, '
        "rounded stochastically; factors, and results of which several ranks get a copy, are in bfloat16 then.",
    )


def state_dtype(*states: str, text: str = "") -> Any:
    """Declare the types in which element states are kept."""
    return option(
        None,
        StateDtypes(*states),
        'Type in which element states are kept; steps compute in their own. None: that of the computation. "bfloat16" '
        'halves their memory, "int8" leaves about a quarter: codes of a byte with an exponent for every 64 elements, '
        "second moments through their roots. Tensors of fewer than 4,096 elements stay as they are under it. A "
        "dictionary names types by state." + text,
    )


def state_rounding() -> Any:
    """Declare how narrow states are rounded."""
    return option(
        "auto",
        Choice("auto", "nearest", "stochastic"),
        'How narrow states are rounded. "auto": second moments and covariances stochastically, which decay by less '
        "than half a digit a step, and others to the nearest. Noise is a function of parameter, place and step: the "
        "same on every layout.",
    )


def exclude(become: str = "sent to the fallback") -> Any:
    """Declare parameters that take the first-order rule."""
    return option((), Patterns(), f'Patterns of whole names, with shell wildcards ("*gate*"), that are {become}.')


def blocks() -> Any:
    """Declare how logical matrices lie in fused weights."""
    return option(
        None,
        BlockLayouts(),
        "How fused weights are made of logical matrices, each of which is orthogonalised, projected or preconditioned "
        "for itself, by patterns of whole names; where several match, the last one counts. None: as the modules and "
        'the configuration of the model say. "none": one matrix. "qkv": three equal parts of the outputs. "heads": '
        'one matrix for each attention head, where they are known. "groups": one for each group, with all that it has '
        "(keys and values of a head in DeepSeek's kv_b_proj). "
        '{"q": 4096, "k": 1024, "v": 1024}, or a list: outputs of each part in their order; with "groups" those '
        'within each of as many repetitions, with "heads" the heads of each part within one of them, of which each '
        "becomes a matrix.",
    )


def split_heads() -> Any:
    """Declare whether attention heads are matrices of their own."""
    return option(
        False,
        Flag(),
        "Each attention head is a matrix of its own, in fused weights and in layers of queries, keys or values alone, "
        "where heads are known and not too small; an error where none is.",
    )


def skip_nonfinite() -> Any:
    """Declare whether a step with gradients that are not finite is undone."""
    return option(
        False,
        Flag(),
        "Leave every weight and state as it was where a gradient of the step is infinite or NaN on any rank, and count "
        "it in 'health'. Costs a copy of weights and states while a step runs.",
    )


def store_param_remainders() -> Any:
    """Declare whether bf16 weights are stepped as fp32 ones."""
    return option(
        False,
        Flag(),
        "Keep of each weight in bfloat16 the 16 bits by which it falls short of float32, in int16: steps are those of "
        "float32 weights, bit for bit, at 4 bytes for weight and master weight together.",
    )


def capturable() -> Any:
    """Declare whether steps can be captured in a CUDA graph."""
    return option(
        False,
        Flag(),
        "Make step() fit for capture in a CUDA graph, as in torch.optim: step counts lie on the device, and whatever "
        "depends on them is computed there. The first step must be taken before the capture.",
    )


def offload_compute() -> Any:
    """Declare where matrices of offloaded weights are multiplied."""
    return option(
        "auto",
        Choice("auto", "host", "device"),
        "Where matrices are multiplied if the framework keeps weights and states on the host (ZeRO-Offload, "
        'CPUOffloadPolicy, --optimizer-cpu-offload). "device": on the model\'s device; they and their matrix states '
        'come and go batch by batch, and what is element-wise stays on the host. "host": on the host\'s cores. "auto": '
        "on the device from 10 operations for each byte that travels. Where nothing is offloaded it has no effect.",
    )


def transition_steps() -> Any:
    """Declare how long the first steps after another optimizer are shorter."""
    return option(
        20,
        Integer(0),
        "Steps over which updates grow to their size, in proportion, where a run goes on from another optimizer and "
        "the states behind them start afresh. 0: full size at once.",
    )


def ns_steps() -> Any:
    """Declare the number of Newton-Schulz iterations."""
    return option(
        5,
        Integer(1, _MOST_ITERATIONS, "a handful already reaches an orthogonal matrix"),
        "Newton-Schulz iterations.",
        per_group=True,
    )


def ns_dtype() -> Any:
    """Declare the type of the Newton-Schulz products."""
    return option(
        "auto",
        FloatType(auto=True),
        'Type of the products. "auto": "bfloat16", as published, where that is the fastest of the machine (Nvidia GPUs '
        'from sm_80 and AMD\'s; CPUs with AVX512-BF16, AMX or Arm\'s instructions for it), else "float32"; "float64" '
        'for float64 parameters. On these GPUs matrices 1.5 times as long as wide take "float16", and their Gram '
        "matrices. A machine without bfloat16 products takes 15 to 70 times as long for them; "
        "data-parallel ranks of both kinds must name a type.",
    )
