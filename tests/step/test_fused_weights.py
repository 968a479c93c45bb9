"""A network with fused weights follows its twin with a weight for each matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_networks import CASES, LAYERS, Network, build, distance, train, with_a_row_moved

from rankwise import MARS, LDAdam
from rankwise.options.validation import OptionError
from rankwise.routing.fused_shape import FusedShape
from rankwise.routing.roles import ParameterInfo, attach_info
from rankwise.step.optimizer import ShardedOptimizer

STEPS = 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("case", CASES)
def test_fused_is_apart(case: str, dtype: torch.dtype) -> None:
    network = Network(dtype, True)
    optimizer = build(case, network)
    found = distance(train(network, optimizer, STEPS), case, dtype, STEPS)
    assert max(found.values()) < (1e-10 if dtype is torch.float64 else 1e-6), found


@pytest.mark.parametrize("coefficients", ["polar_express", "cans"])
def test_polynomials_for_each_step_see_the_blocks(coefficients: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"variant": "muon", "ns_dtype": "float64", "clip": 0.5, "ns_coefficients": coefficients}
    monkeypatch.setitem(CASES, coefficients, (MARS, options))
    network = Network(torch.float64, True)
    moved = train(network, build(coefficients, network), STEPS)
    found = distance(moved, coefficients, torch.float64, STEPS)
    assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_another_table_is_noticed(case: str, turn: int) -> None:
    """In every other layer a row has gone to another part: those layers leave the twin's trajectory, others do not."""
    changed = [*LAYERS][turn::2]
    tables = {name: with_a_row_moved(name) if name in changed else layer.fused for name, layer in LAYERS.items()}
    network = Network(torch.float64, True, tables)
    found = distance(train(network, build(case, network), STEPS), case, torch.float64, STEPS)
    if case.startswith("mkor"):
        changed = [name for name in changed if not LAYERS[name].experts]  # a stack's rule is element-wise
    assert all(found[f"{name}.weight"] > 1e-5 for name in changed), found
    assert max(value for name, value in found.items() if name.partition(".")[0] not in changed) < 1e-10, found


class Experts(torch.nn.Module):
    """Two experts in a stack, gate and up fused, beside a projection whose keys are small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_up = torch.nn.Parameter(torch.randn(2, 24, 12))
        self.qkv = torch.nn.Parameter(torch.randn(22, 12))
        parts = FusedShape((("q", 16), ("k", 3), ("v", 3)), heads=(2, 1, 1))
        attach_info(self.gate_up, ParameterInfo("gate_up", (2, 24, 12), fused=FusedShape((("gate", 12), ("up", 12)))))
        attach_info(self.qkv, ParameterInfo("qkv", (22, 12), fused=parts))

    def step(self, optimizer: ShardedOptimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def _optimizers(model: Experts) -> dict[str, ShardedOptimizer]:
    return {
        "ldadam": LDAdam(model.parameters(), rank=2, error_feedback=False),
        "muon": MARS(model.parameters(), variant="muon", ns_dtype="float32"),
    }


@pytest.mark.parametrize("case", ["ldadam", "muon"])
def test_stacks_of_fused_weights_resume_before_the_first_step(case: str) -> None:
    model, other = Experts(), Experts()
    optimizer, resumed = _optimizers(model)[case], _optimizers(other)[case]
    model.step(optimizer, 1)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    model.step(optimizer, 2)
    other.step(resumed, 2)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_states_of_another_block_are_refused() -> None:
    model = Experts()
    optimizer = _optimizers(model)["ldadam"]
    model.step(optimizer, 1)
    saved = optimizer.state_dict()
    saved["matrix_states"]["gate_up[1][up]"]["basis"] = torch.zeros(11, 2)
    with pytest.raises(ValueError, match=r"'basis' of 'gate_up\[1\]\[up\]' has the shape \(11, 2\)"):
        _optimizers(Experts())["ldadam"].load_state_dict(saved)


def test_what_is_too_small_to_be_divided_says_so() -> None:
    """A rank that saves nothing on keys: the weight is one matrix; nothing on heads: its parts are."""
    model = Experts()

    def reasons(rank: int, **options: Any) -> dict[str, str]:
        optimizer = LDAdam(model.parameters(), rank=rank, error_feedback=False, **options)
        return {each.name: each.reason for each in optimizer.explain() if each.name.startswith("qkv")}

    assert set(reasons(1, split_heads=True)) == {"qkv[q.0]", "qkv[q.1]", "qkv[k.0]", "qkv[v.0]"}
    assert list(reasons(3)) == ["qkv"] and "undivided: k: rank 3 saves nothing" in reasons(3)["qkv"]
    wide = torch.nn.Parameter(torch.randn(36, 12))
    attach_info(
        wide, ParameterInfo("wide", (36, 12), fused=FusedShape((("q", 12), ("k", 12), ("v", 12)), heads=(6, 6, 6)))
    )
    sizes = {"q": 12, "k": 12, "v": 12, "heads": [6, 6, 6]}
    with pytest.raises(OptionError, match=r"'wide' do not \(unknown, heads together: q\.0: rank 2 saves nothing"):
        LDAdam([("wide", wide)], rank=2, error_feedback=False, split_heads=True)
    for heads in ({"blocks": {"wide": "heads"}}, {"blocks": {"wide": sizes}}):
        optimizer = LDAdam([("wide", wide)], rank=2, error_feedback=False, **heads)
        assert {each.name for each in optimizer.explain()} == {"wide[q]", "wide[k]", "wide[v]"}, heads
    alone = LDAdam([("wide", wide)], rank=2, error_feedback=False, blocks={"wide": {"q": 36, "heads": [18]}})
    (line,) = alone.explain()
    assert line.name == "wide" and "undivided: q.0: rank 2 saves nothing" in line.reason
