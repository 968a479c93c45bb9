"""One small model with every kind of weight that Megatron's layers cut, built without what their kernels need.

Its gradients are prescribed, so that no forward pass is: a function of the unsharded weight's name and of the step.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron_weights import Cut
from torch import Tensor, nn

HIDDEN, INNER, HEADS, SIZE, VOCABULARY = 32, 24, 4, 8, 64
STATE, GROUPS, MIXER_HEADS, MIXER_SIZE = 4, 4, 8, 8
KEY_HEADS, VALUE_HEADS, LINEAR_SIZE = 4, 8, 4
HOUSEHOLDER = 3

_MIXER, _BC = MIXER_HEADS * MIXER_SIZE, GROUPS * STATE
_KEYS, _VALUES = KEY_HEADS * LINEAR_SIZE, VALUE_HEADS * LINEAR_SIZE
WHOLE: tuple[None, tuple[int, ...]] = (None, ())
ROWS: tuple[int, tuple[int, ...]] = (0, ())
COLUMNS: tuple[int, tuple[int, ...]] = (1, ())


def parts(*sizes: int) -> tuple[int, tuple[int, ...]]:
    """Rows, cut part by part; the parts' sizes in the whole."""
    return 0, sizes


# By the layers' forward passes, not by what they declare: the first that matches counts.
CUTS: tuple[tuple[str, tuple[int | None, tuple[int, ...]]], ...] = (
    # Learnable attention sinks: a value for every head.
    (r"softmax_offset$", ROWS),
    (r"(embedding\.word_embeddings|output_layer)\.weight$", ROWS),
    (r"linear_qkv\.(weight|bias)$", ROWS),
    (r"(linear_proj|linear_fc2|out_proj)\.weight$", COLUMNS),
    (r"(linear_proj|linear_fc2)\.bias$", WHOLE),
    (
        r"(q_layernorm|k_layernorm|kv_layernorm|input_layernorm|pre_mlp_layernorm|final_layernorm)\.(weight|bias)$",
        WHOLE,
    ),
    (r"router\.(weight|bias)$", WHOLE),
    (r"shared_experts\.gate_weight$", WHOLE),
    (r"shared_experts\.linear_fc1\.(weight|bias)$", parts(INNER, INNER)),
    (r"linear_fc1\.(weight|bias)$", parts(INNER, INNER)),
    # Latent attention.
    (r"linear_(q|kv)_(down|up)_proj\.weight$", ROWS),
    # State-space layers: z, x, B, C, dt; their convolution x, B, C.
    (r"mamba\.in_proj\.weight$", parts(_MIXER, _MIXER, _BC, _BC, MIXER_HEADS)),
    (r"mamba\.conv1d.(weight|bias)$", parts(_MIXER, _BC, _BC)),
    # Gated delta nets: q, k, v, gate, beta, alpha; their convolution q, k, v.
    (r"delta\.in_proj\.weight$", parts(_KEYS, _KEYS, _VALUES, _VALUES, VALUE_HEADS, VALUE_HEADS)),
    (r"delta\.conv1d\.weight$", parts(_KEYS, _KEYS, _VALUES)),
    # Of the second kind: q, k, v, gate, an erasing and a decaying part for each key, one for each value.
    (r"delta2\.in_proj\.weight$", parts(_KEYS, _KEYS, _VALUES, _VALUES, _KEYS, _KEYS, _VALUES)),
    (r"delta2\.conv1d\.weight$", parts(_KEYS, _KEYS, _VALUES)),
    (r"(delta|delta2)\.out_norm\.weight$", WHOLE),
    # Gated delta products: z, v and k of each reflection, q, betas of each, a.
    (
        r"product\.in_proj\.weight$",
        parts(*[_MIXER] * (1 + HOUSEHOLDER), *[_BC] * (HOUSEHOLDER + 1), *[MIXER_HEADS] * (HOUSEHOLDER + 1)),
    ),
    (r"product\.conv1d\.weight$", parts(*[_MIXER] * HOUSEHOLDER, *[_BC] * (HOUSEHOLDER + 1))),
    (r"(mamba|product)\.norm\.weight$", ROWS),
    (r"\.(A_log|D|dt_bias)$", ROWS),
)


def cut_of(name: str, shape: tuple[int, ...], rank: int, ways: int) -> Cut:
    """The part of an unsharded weight that a rank holds.

    Args:
        name: The weight's.
        shape: Of the part.
        rank: Of the tensor-parallel ranks.
        ways: Their number.
    """
    dim, sections = next(cut for pattern, cut in CUTS if re.search(pattern, name))
    if dim is None or ways == 1:
        return Cut(name, shape, None, None)
    whole = tuple(size * ways if index == dim else size for index, size in enumerate(shape))
    pieces = torch.arange(whole[dim]).split(list(sections) if sections else [whole[dim]])
    return Cut(name, whole, dim, torch.cat([piece.chunk(ways)[rank] for piece in pieces]))


def values(name: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers for an unsharded tensor."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class GatedNorm(nn.Module):
    """In the place of a kernel's, of which Megatron's state-space layers make their norm."""

    def __init__(self, size: int, **given: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class _Kernels(types.ModuleType):
    """A package of kernels that nothing calls."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return GatedNorm if name == "RMSNorm" else lambda *args, **kwargs: None


_KERNELS = """
mamba_ssm mamba_ssm.ops mamba_ssm.ops.triton mamba_ssm.ops.triton.layernorm_gated mamba_ssm.ops.triton.ssd_combined
mamba_ssm.ops.triton.selective_state_update causal_conv1d causal_conv1d.causal_conv1d_varlen fla fla.modules
fla.modules.l2norm fla.modules.convolution fla.ops fla.ops.gated_delta_rule fla.ops.gated_delta_product fla.ops.gdn2
fla.ops.gdn2.chunk
""".split()


def _with_kernels() -> None:
    """For this process: it ends after a test."""
    if "mamba_ssm" not in sys.modules:
        sys.modules.update({name: _Kernels(name) for name in _KERNELS})
        for name in [name for name in sys.modules if name.startswith("megatron.core.ssm")]:
            del sys.modules[name]


class _NoCore(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()


class Families(MegatronModule):
    """All of them side by side."""

    def __init__(self, config: TransformerConfig, members: dict[str, nn.Module]) -> None:
        super().__init__(config)
        for name, member in members.items():
            setattr(self, name, member)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        found: dict[str, Any] = {}
        for name, child in self.named_children():
            found |= sharded_state_dict_default(child, f"{prefix}{name}.", sharded_offsets, metadata)
        return found


class InADictionary(Families):
    """As a user may write it, with layers in a dictionary, of which Megatron's default declares all weights whole."""

    def __init__(self, config: TransformerConfig, members: dict[str, nn.Module]) -> None:
        super().__init__(config, {})
        self.members = nn.ModuleDict(members)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)


def settings(tp: int, bf16: bool, **changed: Any) -> dict[str, Any]:
    """Fields of a transformer's config."""
    fused = ("bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion", "apply_rope_fusion")
    return {
        **dict.fromkeys((*fused, "gradient_accumulation_fusion"), False),
        **{"num_layers": 1, "hidden_size": HIDDEN, "ffn_hidden_size": INNER, "num_attention_heads": HEADS},
        **{"num_query_groups": HEADS, "kv_channels": SIZE, "gated_linear_unit": True, "activation_func": F.silu},
        **{"add_bias_linear": False, "normalization": "RMSNorm", "hidden_dropout": 0.0, "attention_dropout": 0.0},
        **{"tensor_model_parallel_size": tp, "bf16": bf16, "params_dtype": torch.bfloat16 if bf16 else torch.float32},
        **changed,
    }


def _gpt(config: TransformerConfig, **given: Any) -> GPTModel:
    latent = isinstance(config, MLATransformerConfig)
    spec = get_gpt_layer_local_spec(multi_latent_attention=latent, normalization="RMSNorm", **given)
    if latent:
        spec.submodules.self_attention.submodules.core_attention = _NoCore
        multi_latent_attention.TELinear = _NoCore
    return GPTModel(
        config, spec, VOCABULARY, 8, position_embedding_type="rope", share_embeddings_and_output_weights=False
    )


def members(tp: int, bf16: bool) -> dict[str, nn.Module]:
    """A model of every family that this version of Megatron has."""
    _with_kernels()
    experts = {"num_moe_experts": 2, "moe_ffn_hidden_size": INNER, "moe_token_dispatcher_type": "alltoall"}
    shared = {"moe_shared_expert_intermediate_size": INNER, "moe_shared_expert_gate": True}
    oss = settings(tp, bf16, softmax_type="learnable", add_bias_linear=True)
    next_ = settings(tp, bf16, attention_output_gate=True, qk_layernorm=True, **experts, **shared)
    known = TransformerConfig.__dataclass_fields__
    latent = {"multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 12, "rope_type": "rope"}
    latent |= {"qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "qk_layernorm": True}
    found: dict[str, nn.Module] = {
        "sinks": _gpt(TransformerConfig(**oss)),
        "gated": _gpt(
            TransformerConfig(**{key: value for key, value in next_.items() if key in known}),
            num_experts=2,
            qk_layernorm=True,
        ),
        "latent": _gpt(MLATransformerConfig(**settings(tp, bf16, **latent)), qk_layernorm=True),
        **_mixers(TransformerConfig(**settings(tp, bf16, **_mixer_sizes()))),
    }
    return found


def _mixer_sizes() -> dict[str, int]:
    sizes = {"mamba_state_dim": STATE, "mamba_head_dim": MIXER_SIZE, "mamba_num_groups": GROUPS}
    sizes |= {"mamba_num_heads": MIXER_HEADS, "linear_conv_kernel_dim": 4, "gdp_num_householder": HOUSEHOLDER}
    sizes |= {"linear_key_head_dim": LINEAR_SIZE, "linear_value_head_dim": LINEAR_SIZE}
    sizes |= {"linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": VALUE_HEADS}
    return {key: value for key, value in sizes.items() if key in TransformerConfig.__dataclass_fields__}


def _mixers(config: TransformerConfig) -> dict[str, nn.Module]:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    linear: dict[str, Any] = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    mamba = importlib.import_module("megatron.core.ssm.mamba_mixer")
    delta = importlib.import_module("megatron.core.ssm.gated_delta_net")
    found = {"mamba": mamba.MambaMixer(config, mamba.MambaMixerSubmodules(**linear), HIDDEN, pg_collection=groups)}
    for name, kind in (("delta", "GatedDeltaNet"), ("delta2", "GatedDeltaNet2")):
        if hasattr(delta, kind):
            submodules = delta.GatedDeltaNetSubmodules(**linear, out_norm=WrappedTorchNorm)
            found[name] = getattr(delta, kind)(config, submodules, layer_number=1, pg_collection=groups)
    if importlib.util.find_spec("megatron.core.ssm.gated_delta_product"):
        product = importlib.import_module("megatron.core.ssm.gated_delta_product")
        product.check_fla_sequence_packing_support = lambda *args: (True, "")
        submodules = product.GatedDeltaProductMixerSubmodules(**linear)
        found["product"] = product.GatedDeltaProductMixer(config, submodules, HIDDEN, pg_collection=groups)
    return found


@contextmanager
def opened_families(tp: int, bf16: bool, kind: type[Families] = Families) -> Iterator[Families]:
    """The model with its weights, in this process's groups of ``tp`` ranks."""
    mpu.initialize_model_parallel(tensor_model_parallel_size=tp)
    try:
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        model = kind(TransformerConfig(**settings(tp, bf16)), members(tp, bf16))
        for parameter, cut in named_cuts(model):
            parameter.data.copy_(cut.of(values(cut.name, cut.shape)))
        yield model
    finally:
        mpu.destroy_model_parallel()


def named_cuts(model: nn.Module) -> list[tuple[nn.Parameter, Cut]]:
    """Every parameter with its part of the whole."""
    found = []
    for name, parameter in model.named_parameters():
        name = name.replace("conv1d_", "conv1d.").removeprefix("module.")
        rank, ways = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        found.append((parameter, cut_of(name, tuple(parameter.shape), rank, ways)))
    return found


def wrapped(model: Families, bf16: bool, use_distributed_optimizer: bool) -> DistributedDataParallel:
    """In Megatron's wrappers, with gradient buffers."""
    config = model.config
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=use_distributed_optimizer
    )
    return DistributedDataParallel(config, settings, Float16Module(config, model) if bf16 else model)


def give_gradients(model: Families, step: int) -> None:
    """The step's, the same for all data-parallel ranks, as if they had been reduced."""
    for parameter, cut in named_cuts(model):
        parameter.main_grad.copy_(cut.of(values(f"{cut.name}, step {step}", cut.shape)))
