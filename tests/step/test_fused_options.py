"""The option ``blocks``: heads, stacks of fused weights, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise import MARS, MKOR, LDAdam
from rankwise.options.validation import OptionError
from rankwise.routing.fused_shape import FusedShape
from rankwise.routing.roles import ParameterInfo, Role, attach_info

INPUTS = 10


def weight(*shape: int, fused: FusedShape | None = None, name: str = "w") -> nn.Parameter:
    values = 0.1 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parameter = nn.Parameter(values)
    attach_info(parameter, ParameterInfo(name, tuple(shape), Role.LINEAR, fused=fused))
    return parameter


def stepped(kind: Any, parameters: list[nn.Parameter], grads: list[Tensor], **options: Any) -> Any:
    optimizer = kind(parameters, lr=0.1, **options)
    for scale in (1.0, -0.5):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = scale * grad
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [MARS, LDAdam])
@pytest.mark.parametrize("said", ["found", "option", "word"])
def test_each_head_is_a_matrix(kind: Any, said: str) -> None:
    """Two groups of two query heads, a key and a value of four rows each."""
    options: dict[str, Any] = {"variant": "muon", "ns_dtype": "float64"} if kind is MARS else {"rank": 1}
    fused = FusedShape((("q", 8), ("k", 4), ("v", 4)), -2, 2, (2, 1, 1))
    whole = weight(32, INPUTS, fused=None if said == "option" else fused)
    grad = torch.randn(32, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    heads = [nn.Parameter(part.clone()) for part in whole.detach().split(4)]
    layout = {"q": 8, "k": 4, "v": 4, "groups": 2, "heads": [2, 1, 1]}
    own = {"found": {"split_heads": True}, "option": {"blocks": {"w": layout}}, "word": {"blocks": {"*": "heads"}}}
    optimizer = stepped(kind, [whole], [grad], **options, **own[said])
    stepped(kind, heads, list(grad.split(4)), **options)
    torch.testing.assert_close(whole.detach(), torch.cat([head.detach() for head in heads]), rtol=0, atol=1e-12)
    names = [line.name for line in optimizer.explain()]
    assert names == ["w[q.0]", "w[q.1]", "w[q.2]", "w[q.3]", "w[k.0]", "w[k.1]", "w[v.0]", "w[v.1]"]


@pytest.mark.parametrize("kind", [MARS, LDAdam])
@pytest.mark.parametrize("dim", [-2, -1])
def test_a_stack_of_fused_weights(kind: Any, dim: int) -> None:
    """Experts whose gate and other projection alternate, by rows or by columns."""
    options: dict[str, Any] = {"variant": "shampoo", "ns_dtype": "float64"} if kind is MARS else {"rank": 1}
    fused = FusedShape((("gate", 1), ("up", 1)), dim, 6)
    shape = (3, 12, INPUTS) if dim == -2 else (3, INPUTS, 12)
    stack = weight(*shape, fused=fused)
    grad = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def parts(values: Tensor) -> list[Tensor]:
        halves = [values[:, first::2] if dim == -2 else values[..., first::2] for first in (0, 1)]
        return [half[index].contiguous() for half in halves for index in range(3)]

    apart = [nn.Parameter(part.clone()) for part in parts(stack.detach())]
    optimizer = stepped(kind, [stack], [grad], **options)
    stepped(kind, apart, parts(grad), **options)
    for found, expected in zip(parts(stack.detach()), apart, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-12)
    assert set(optimizer.owners()) == {f"w[{index}][{part}]" for index in range(3) for part in ("gate", "up")}
    assert [line.name for line in optimizer.explain()] == ["w[gate]", "w[up]"]


BAD = [
    ({"w": "qkv"}, "the 32 outputs of 'w' must be three equal parts; write their sizes"),
    ({"w": "heads"}, "the attention heads in 'w' must be known, but are not; write the parts"),
    ({"w": [16, 8]}, "the sizes must add up to the 32 outputs of 'w', but add up to 24; count the rows"),
    ({"w": {"q": 8, "groups": 2}}, "the sizes must add up to the 32 outputs of 'w', but add up to 2 times 8"),
    ({"w": {"q": 16, "k": 16, "heads": 3}}, "the 16 rows of 'q' are not 3 heads; count the heads"),
    ({"x*": "none"}, "it must match the whole name of a parameter"),
]


@pytest.mark.parametrize(("blocks", "message"), BAD, ids=[str(blocks) for blocks, _ in BAD])
def test_what_does_not_fit_is_refused(blocks: Any, message: str) -> None:
    with pytest.raises(OptionError, match="^MARS: blocks=.* is invalid: " + message):
        MARS([("w", nn.Parameter(torch.ones(32, INPUTS)))], variant="muon", blocks=blocks)


def test_a_weight_stays_whole_where_a_block_would_not_take_the_rule() -> None:
    """A rank of four saves nothing of a part of four rows: the weight is projected as it is stored."""
    optimizer = LDAdam([weight(40, 40, fused=FusedShape((("q", 36), ("k", 4))))], rank=4)
    assert not optimizer.table.blocks and optimizer.table.routes["w"].rule == "matrix"
    assert MARS([weight(40, 40, fused=FusedShape((("q", 36), ("k", 4))))], variant="muon").table.blocks
    assert MKOR([weight(40, 40, fused=FusedShape((("q", 36), ("k", 4))))]).table.blocks
    assert not MARS([weight(40, 40, fused=FusedShape((("q", 36), ("k", 4))))]).table.blocks  # element by element
