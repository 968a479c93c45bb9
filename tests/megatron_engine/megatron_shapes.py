"""Models of today's shapes, with real forward and backward passes: those of gpt-oss and of Qwen3-Next, tiny.

Gpt-oss: attention sinks, sliding windows, biases everywhere, of routers and experts, too. Qwen3-Next: gated delta nets
and gated attention in turns, experts beside a shared one with a gate.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron_cells import HIDDEN, Cell
from megatron_families import COLUMNS, ROWS, WHOLE, parts
from megatron_harness import Trainer
from megatron_weights import Cut, bare, tensor_rank, unsharded_name
from torch import Tensor, nn

KEY_HEADS, VALUE_HEADS, LINEAR_SIZE = 2, 4, 16
_KEYS, _VALUES = KEY_HEADS * LINEAR_SIZE, VALUE_HEADS * LINEAR_SIZE

# By the layers' forward passes, not by what they declare: the first that matches counts.
CUTS: tuple[tuple[str, tuple[int | None, tuple[int, ...]]], ...] = (
    (r"softmax_offset$", ROWS),
    (r"(word_embeddings|output_layer)\.weight$", ROWS),
    (r"linear_qkv\.(weight|bias)$", ROWS),
    (r"(linear_proj|linear_fc2|out_proj)\.weight\d*$", COLUMNS),
    (r"linear_fc1\.(weight|bias)\d*$", parts(HIDDEN, HIDDEN)),
    (r"in_proj\.weight$", parts(_KEYS, _KEYS, _VALUES, _VALUES, VALUE_HEADS, VALUE_HEADS)),
    (r"conv1d\.weight$", parts(_KEYS, _KEYS, _VALUES)),
    (r"\.(A_log|dt_bias)$", ROWS),
    (r"(linear_proj|linear_fc2)\.bias\d*$|norm\.weight$|router\.(weight|bias)$|gate_weight$", WHOLE),
)


def _l2norm(values: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    return values * torch.rsqrt(values.square().sum(dim, keepdim=True) + eps)


class _Kernels(types.ModuleType):
    """A package of kernels of which one thing is called: in Megatron's deterministic mode it does the rest itself."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _l2norm if name == "l2norm" else None


_KERNELS = """
fla fla.modules fla.modules.l2norm fla.modules.convolution fla.ops fla.ops.gated_delta_rule fla.ops.cp fla.ops.gdn2
fla.ops.gdn2.chunk
""".split()


def _delta_net() -> Any:
    """Megatron's module, with what it takes of a package of kernels that is not there; for this process."""
    name = "megatron.core.ssm.gated_delta_net"
    if "fla" not in sys.modules:
        sys.modules.update({kernel: _Kernels(kernel) for kernel in _KERNELS})
        for found in [found for found in sys.modules if found.startswith(name)]:
            del sys.modules[found]
    return importlib.import_module(name)


EXPERTS: dict[str, Any] = {"moe": 4}
GPT_OSS: dict[str, Any] = {
    **EXPERTS,
    "transformer": {
        **{"add_bias_linear": True, "softmax_type": "learnable", "window_size": (7, 0), "window_attn_skip_freq": 2},
        **{"activation_func": quick_gelu, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0},
    },
}
QWEN3_NEXT: dict[str, Any] = {
    **EXPERTS,
    "transformer": {
        **{"attention_output_gate": True, "qk_layernorm": True, "deterministic_mode": True},
        **{"moe_shared_expert_intermediate_size": HIDDEN, "moe_shared_expert_gate": True},
        **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": LINEAR_SIZE, "linear_value_head_dim": LINEAR_SIZE},
        **{"linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": VALUE_HEADS},
    },
}
SHAPES = {"gpt-oss": GPT_OSS, "qwen3-next": QWEN3_NEXT}


def shaped(name: str, **changed: Any) -> Cell:
    """A cell of one of these shapes."""
    return Cell(**{**SHAPES[name], **changed})


class ShapedTrainer(Trainer):
    """Of a cell of :func:`shaped`."""

    marks_biases = False
    """Whether biases of experts keep a mark of Megatron's, for which gradients of several experts are added up."""

    def _model(self, stage: int, vp_stage: int | None) -> nn.Module:
        model = super()._model(stage, vp_stage)
        for name, module in model.named_modules():
            if "local_experts" in name and name.endswith("linear_fc2"):
                # Megatron adds the bias in place to what autograd takes for a view of the layer's input.
                module.register_forward_hook(lambda module, given, output: (output[0].clone(), *output[1:]))
                if module.bias is not None and not self.marks_biases:
                    module.bias.sequence_parallel = False
        return model

    def _local_layers(self, vp_stage: int | None) -> Any:
        qk = bool(self.config.qk_layernorm)
        attention = get_gpt_layer_local_spec(num_experts=self.cell.moe, qk_layernorm=qk, normalization="RMSNorm")
        if not self.config.attention_output_gate:
            return attention
        delta = get_gpt_layer_local_spec(num_experts=self.cell.moe, qk_layernorm=qk, normalization="RMSNorm")
        module = _delta_net()
        linear = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear, "out_norm": WrappedTorchNorm}
        delta.submodules.self_attention = ModuleSpec(
            module=module.GatedDeltaNet, submodules=module.GatedDeltaNetSubmodules(**linear)
        )
        return TransformerBlockSubmodules(layer_specs=[delta, attention], layer_norm=WrappedTorchNorm)

    def cuts(self, model: nn.Module) -> Iterator[tuple[nn.Parameter, Cut]]:
        """See the base class."""
        model = bare(model)
        for name, parameter in model.named_parameters():
            rank, ways = tensor_rank(not getattr(parameter, "allreduce", True))
            dim, sections = next(cut for pattern, cut in CUTS if re.search(pattern, name))
            name, shape = unsharded_name(model, name, self.cell.tied), tuple(parameter.shape)
            if dim is None or ways == 1:
                yield parameter, Cut(name, shape, None, None)
                continue
            whole = tuple(size * ways if index == dim else size for index, size in enumerate(shape))
            pieces = torch.arange(whole[dim]).split(list(sections) if sections else [whole[dim]])
            yield parameter, Cut(name, whole, dim, torch.cat([piece.chunk(ways)[rank] for piece in pieces]))
