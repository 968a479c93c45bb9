"""This module makes small causal language models in the shapes of GPT-2 and Llama; nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelFamily", "build_model"]

ModelFamily = Literal["gpt2", "llama"]


def build_model(
    family: ModelFamily, *, vocab_size: int, layers: int, hidden: int, heads: int, seq_len: int
) -> nn.Module:
    """Return a randomly initialised Hugging Face causal language model without dropout.

    Args:
        family: ``"gpt2"`` (learned positions, tied head) or ``"llama"`` (rotary positions, SwiGLU, untied head).
        vocab_size: Number of token ids, which is rounded up to a multiple of 64.
        layers: Number of transformer blocks.
        hidden: Width of the residual stream, a multiple of ``heads``.
        heads: Number of attention heads.
        seq_len: Longest sequence.

    Raises:
        ValueError: The family is unknown, or ``hidden`` is not a multiple of ``heads``.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if hidden % heads:
        raise ValueError(f"hidden is {hidden} and heads is {heads}: hidden must be a multiple of heads")
    padded = -(-vocab_size // 64) * 64
    if family == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=padded,
                n_positions=seq_len,
                n_embd=hidden,
                n_layer=layers,
                n_head=heads,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    if family == "llama":
        # 8/3 of the width keeps a SwiGLU block at the parameter count of a plain four-times-wider one.
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=padded,
                hidden_size=hidden,
                intermediate_size=-(-8 * hidden // 3 // 32) * 32,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                max_position_embeddings=seq_len,
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    raise ValueError(f"model is {family!r}: it must be 'gpt2' or 'llama'")
