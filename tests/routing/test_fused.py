"""Where the rows of a block lie."""

from collections.abc import Callable

import pytest
import torch
from fused_rows import runs_of
from torch import nn

from rankwise import MARS, annotate
from rankwise.routing.fused_shape import FusedShape


@pytest.mark.parametrize(
    ("fused", "length", "runs"),
    [
        (FusedShape((("q", 6), ("k", 2), ("v", 2))), 10, {"q": [(0, 6)], "k": [(6, 8)], "v": [(8, 10)]}),
        (
            FusedShape((("q", 4), ("k", 2), ("v", 2)), groups=2),
            16,
            {"q": [(0, 4), (8, 12)], "k": [(4, 6), (12, 14)], "v": [(6, 8), (14, 16)]},
        ),
        (FusedShape((("gate", 1), ("up", 1)), dim=-1, groups=3), 6, {"gate": [(0, 1), (2, 3), (4, 5)]}),
    ],
)
def test_runs_of_blocks(fused: FusedShape, length: int, runs: dict[str, list[tuple[int, int]]]) -> None:
    assert fused.length == length
    for name, expected in runs.items():
        assert list(runs_of(fused, name)) == expected


@pytest.mark.parametrize(
    ("parts", "heads", "words"),
    [
        ((("q", 6), ("k", 2)), (3,), "1 numbers of heads for 2 parts"),
        ((("q", 6), ("k", 2)), (3, 3), "the 2 rows of 'k' are not 3 heads"),
    ],
)
def test_heads_fill_their_part(parts: tuple[tuple[str, int], ...], heads: tuple[int, ...], words: str) -> None:
    FusedShape((("q", 6), ("gate", 5)), heads=(3, 0))
    with pytest.raises(ValueError, match=words):
        FusedShape(parts, heads=heads)


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 24, "n_head": 3, "vocab_size": 31, "n_positions": 8, "add_cross_attention": True}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 3, 48, batch_first=True), 1, enable_nested_tensor=False)


@pytest.mark.parametrize("build", [_gpt2, _encoder])
def test_names_that_leave_no_doubt_tell_what_modules_tell(build: Callable[[], nn.Module]) -> None:
    """A run in plain PyTorch that nobody annotates takes the matrices that an engine takes."""
    named, shown = build(), build()
    annotate(shown)
    blocks = [MARS(model.named_parameters(), variant="muon").table.blocks for model in (named, shown)]
    assert blocks[0] == blocks[1] and blocks[0]
    assert all([block.name for block in parts] in (list("qkv"), list("kv")) for parts in blocks[0].values())


def test_names_alone_are_not_enough_where_shapes_disagree() -> None:
    known = {"attn.in_proj_weight": (48, 24), "h.0.attn.c_attn.weight": (72, 24), "a.qkv.weight": (72, 24)}
    for name, shape in known.items():
        optimizer = MARS([(name, nn.Parameter(torch.zeros(shape)))], variant="muon")
        assert not optimizer.table.blocks
