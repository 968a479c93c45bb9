"""Which parameter takes which rule, and what explain() says of it."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from cases import BY_NAME, advance, cases, net, setup
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Conv1D
from torch import nn

from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.options.validation import OptionError
from rankwise.routing.roles import ParameterInfo, Role, Route, RoutingPolicy, annotate, describe, route
from rankwise.step.reports import Explanation

MATRICES = RoutingPolicy(embeddings=False)
ANY = RoutingPolicy(embeddings=True)


class RMSNorm2d(nn.Module):
    """A norm torch does not know, with a weight of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


class VocabParallelEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, 4))


class Experts(nn.Module):
    """A stack of matrices, as mixture-of-experts layers keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(3, 8, 4))
        self.scales = nn.Parameter(torch.ones(()))


class Model(nn.Module):
    """One of everything; the head shares the embedding's weight."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.places = VocabParallelEmbedding()
        self.up = nn.Linear(4, 8)
        self.down = Conv1D(4, 8)
        self.norm = nn.LayerNorm(4)
        self.rms = nn.RMSNorm(4)
        self.square_norm = RMSNorm2d()
        self.patches = nn.Conv2d(3, 4, 2)
        self.audio = nn.Conv1d(3, 4, 2)
        self.experts = Experts()
        self.temperature = nn.Parameter(torch.ones(4, 4))
        self.output = nn.Linear(4, 9, bias=False)
        if tied:
            self.output.weight = self.tokens.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.output


def described(model: nn.Module) -> dict[str, ParameterInfo]:
    return {info.name: info for info in describe(model).values()}


# --- roles -----------------------------------------------------------------------------------------------------------


def test_roles_follow_module_types() -> None:
    roles = {name: info.role for name, info in described(Model(tied=False)).items()}
    assert roles == {
        "tokens.weight": Role.EMBEDDING,
        "places.weight": Role.EMBEDDING,
        "up.weight": Role.LINEAR,
        "up.bias": Role.LINEAR,
        "down.weight": Role.LINEAR,
        "down.bias": Role.LINEAR,
        "norm.weight": Role.NORM,
        "norm.bias": Role.NORM,
        "rms.weight": Role.NORM,
        "square_norm.weight": Role.NORM,
        "patches.weight": Role.CONV,
        "patches.bias": Role.CONV,
        "audio.weight": Role.CONV,
        "audio.bias": Role.CONV,
        "experts.gate_up": Role.UNKNOWN,
        "experts.scales": Role.UNKNOWN,
        "temperature": Role.UNKNOWN,
        "output.weight": Role.HEAD,
    }


def test_orientation_and_bias() -> None:
    infos = described(Model())
    assert [name for name, info in infos.items() if info.transposed] == ["down.weight"]
    assert infos["down.weight"].logical_matrix_shape == (4, 8) and infos["down.weight"].matrix_shape == (8, 4)
    assert infos["up.weight"].logical_matrix_shape == (8, 4)
    assert {name: info.bias for name, info in infos.items() if info.bias} == {
        "up.weight": "up.bias",
        "down.weight": "down.bias",
        "norm.weight": "norm.bias",
        "patches.weight": "patches.bias",
        "audio.weight": "audio.bias",
    }
    assert infos["experts.gate_up"].matrix_shape == (8, 4)


def test_a_tied_head_is_one_parameter_and_keeps_a_special_role() -> None:
    infos = described(Model(tied=True))
    assert "output.weight" not in infos
    assert infos["tokens.weight"].role in (Role.EMBEDDING, Role.HEAD)

    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.reader = nn.Linear(4, 9, bias=False)  # neither its name nor the model says it is a head
            self.reader.weight = self.embed.weight

    (info,) = described(Projected()).values()
    assert info.role is Role.EMBEDDING


@pytest.mark.parametrize("name", ["lm_head", "embed_out", "output_layer", "score"])
def test_heads_by_module_name(name: str) -> None:
    model = nn.ModuleDict({"body": nn.ModuleDict({name: nn.Linear(4, 9)}), f"x{name}x": nn.Linear(4, 4)})
    roles = {name: info.role for name, info in described(model).items()}
    assert roles[f"body.{name}.weight"] is Role.HEAD
    assert roles[f"x{name}x.weight"] is Role.LINEAR


@pytest.mark.parametrize("name", ["head", "output", "decoder"])
def test_names_that_are_heads_at_the_end_of_a_model_only(name: str) -> None:
    def linear() -> nn.Linear:
        return nn.Linear(4, 9, bias=False)

    layer = nn.ModuleDict({name: linear(), "attention": nn.ModuleDict({name: linear()})})
    model = nn.ModuleDict(
        {
            name: linear(),
            "wrapped": nn.ModuleDict({name: linear()}),
            "layers": nn.ModuleList([layer]),
            "self_attn": nn.ModuleDict({name: linear()}),
            "mlp": nn.ModuleDict({name: linear()}),
            f"score_{name}": linear(),
            f"{name}s": linear(),
        }
    )
    expected = {
        f"{name}.weight": Role.HEAD,
        f"wrapped.{name}.weight": Role.HEAD,
        f"layers.0.{name}.weight": Role.LINEAR,
        f"layers.0.attention.{name}.weight": Role.LINEAR,
        f"self_attn.{name}.weight": Role.LINEAR,
        f"mlp.{name}.weight": Role.LINEAR,
        f"score_{name}.weight": Role.LINEAR,
        f"{name}s.weight": Role.LINEAR,
    }
    assert {name: info.role for name, info in described(model).items()} == expected
    for parameter, role in expected.items():
        chosen = route(ParameterInfo(parameter, (9, 4)), MATRICES)
        assert chosen == (Route("fallback", "head") if role is Role.HEAD else Route("matrix", "unknown"))


def test_a_stack_called_decoder_is_no_head() -> None:
    model = nn.ModuleDict(
        {"decoder": nn.ModuleDict({"fc": nn.Linear(4, 4), "layers": nn.ModuleList([nn.Linear(4, 4)])})}
    )
    assert {info.role for info in described(model).values()} == {Role.LINEAR}
    for name in ("model.decoder.layers.0.fc1.weight", "decoder.fc.weight", "decoder"):
        assert route(ParameterInfo(name, (4, 4)), MATRICES).rule == "matrix"


class SavedWhole(nn.Module):
    """As PEFT wraps a module that is to be trained whole: the original beside copies by adapter."""

    def __init__(self, module: nn.Linear | nn.Embedding) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})


class Adapted(nn.Module):
    """As PEFT wraps a linear layer that gets a low-rank addition."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})


class Wrapped(nn.Module):
    def __init__(self, named: str, wrap: type[nn.Module], getter: bool) -> None:
        super().__init__()
        self.q_proj = wrap(nn.Linear(6, 6))
        self.embed_tokens = SavedWhole(nn.Embedding(20, 6))
        self.add_module(named, wrap(nn.Linear(6, 20)))
        if getter:  # gives the wrapper, which has no weight
            self.get_output_embeddings = lambda: getattr(self, named)


@pytest.mark.parametrize("wrap", [SavedWhole, Adapted])
@pytest.mark.parametrize(
    ("named", "annotated"), [("lm_head", False), ("score", True), ("head", False), ("words", True)]
)
def test_a_wrapped_head_is_a_head(named: str, annotated: bool, wrap: type[nn.Module]) -> None:
    model = Wrapped(named, wrap, getter=named == "words")
    if annotated:
        annotate(model)
    rules = {row.name: (row.rule, row.reason) for row in MARS(model.named_parameters(), variant="muon").explain()}
    for name, (rule, reason) in rules.items():
        if not name.endswith("weight"):
            continue
        module, inner, *_ = name.split(".")
        if module == "q_proj" or (annotated and inner.startswith("lora_")):
            assert rule == "matrix", name
        elif not inner.startswith("lora_"):
            assert (rule, reason) == ("fallback", "head" if module == named else "embedding"), name


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("transformer.wte.weight", "embedding"),
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("lm_head.dense.weight", "head"),
        ("module.head.weight", "head"),
        ("cls.predictions.decoder.weight", "head"),
        ("attention.score_proj.weight", "unknown"),
        ("reclassifiers.3.weight", "unknown"),
        ("model.layers.0.input_layernorm.weight", "norm"),
        ("transformer.ln_f.weight", "norm"),
        ("model.layers.0.mlp.up_proj.weight", "unknown"),
    ],
)
def test_names_stand_in_for_module_types(name: str, role: str) -> None:
    """Of plain (name, parameter) pairs."""
    info = ParameterInfo(name, (8, 8))
    assert route(info, MATRICES) == Route("matrix" if role == "unknown" else "fallback", role)
    assert route(info, ANY) == Route("fallback" if role == "norm" else "matrix", role)


@pytest.mark.parametrize(
    ("name", "shape", "role"),
    [
        ("layers.0.router_weights", (8, 64), "router"),
        ("layers.0.moe.router_mlp.0.weight", (64, 64), "router"),
        ("layers.0.moe.gating.weight", (8, 64), "router"),
        ("layers.0.experts.0.gate_logits", (8, 64), "router"),
        ("position_encoding", (512, 64), "embedding"),
        ("pos_emb", (2, 512, 64), "embedding"),
        ("tok_emb.weight", (512, 64), "embedding"),
        ("layers.0.relative_position.table", (32, 8), "embedding"),
        ("layers.0.attn.rel_pos_h", (27, 64), "embedding"),
        ("position_encoder.positions.weight", (512, 64), "embedding"),
        ("register_tokens", (4, 64), "embedding"),
        ("layers.0.scale_shift_table", (6, 64), "embedding"),
        ("layers.0.mixer.D", (64, 8), "vector"),
        ("layers.0.s4.log_A_real", (64, 32), "vector"),
    ],
)
@pytest.mark.parametrize("annotated", [False, True])
def test_tables_and_routers_by_the_words_of_their_names(
    name: str, shape: tuple[int, ...], role: str, annotated: bool
) -> None:
    """Also where the module that keeps them is of a type that nobody knows."""
    info = ParameterInfo(name, shape)
    if annotated:
        model = nn.Module()
        *path, local = name.split(".")
        holder = model
        for part in path:
            holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.register_parameter(local, nn.Parameter(torch.empty(shape)))
        (info,) = describe(model).values()
    assert route(info, MATRICES) == Route("fallback", role)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.0.mlp.gate_proj.weight", (256, 64)),
        ("layers.0.mlp.gate_up_proj.weight", (512, 64)),
        ("layers.0.experts.gate_up_proj", (4, 128, 64)),
        ("layers.0.mlp.gate", (64, 256)),
        ("layers.0.gating.linear_in.weight", (32, 64)),
        ("layers.0.gating.weight", (64, 64)),
        ("layers.0.per_layer_input_gate.weight", (32, 64)),
        ("layers.0.attn.linear_pos.weight", (64, 64)),
        ("layers.0.attn.pos_key_proj.weight", (64, 64)),
        ("layers.0.attn.pos_proj", (64, 64)),
        ("layers.0.pos_ffn.w_1.weight", (256, 64)),
        ("layers.0.image_encoding.weight", (64, 64)),
        ("layers.0.time_emb_proj.weight", (64, 64)),
        ("layers.0.attn.in_proj_weight", (192, 64)),
        ("layers.0.lora.d", (64, 8)),
    ],
)
def test_matrices_whose_names_resemble_tables_and_routers(name: str, shape: tuple[int, ...]) -> None:
    assert route(ParameterInfo(name, shape), MATRICES).rule == "matrix"


def test_the_module_type_goes_before_the_name() -> None:
    """A Linear in a module called 'embedder' is still a Linear."""
    model = nn.ModuleDict({"embedder_norm": nn.Linear(8, 8)})
    (info, _) = describe(model).values()
    assert route(info, MATRICES) == Route("matrix", "linear")


# --- routes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "policy", "expected"),
    [
        (ParameterInfo("w", (8, 8)), MATRICES, Route("matrix", "unknown")),
        (ParameterInfo("w", (8, 8), Role.LINEAR), MATRICES, Route("matrix", "linear")),
        (ParameterInfo("w", (3, 8, 8)), MATRICES, Route("matrix", "stack of matrices")),
        (ParameterInfo("w", (8,)), MATRICES, Route("fallback", "vector")),
        (ParameterInfo("w", ()), MATRICES, Route("fallback", "vector")),
        (ParameterInfo("w", (8,)), RoutingPolicy(False, vectors=True), Route("matrix", "vector")),
        (ParameterInfo("w", (2, 3, 4, 5)), MATRICES, Route("fallback", "4-D tensor")),
        (ParameterInfo("w", (2, 3, 4), Role.CONV), MATRICES, Route("fallback", "convolution")),
        (ParameterInfo("w", (8, 8), Role.NORM), ANY, Route("fallback", "norm")),
        (ParameterInfo("w", (8, 8), Role.EMBEDDING), MATRICES, Route("fallback", "embedding")),
        (ParameterInfo("w", (8, 8), Role.EMBEDDING), ANY, Route("matrix", "embedding")),
        (ParameterInfo("w", (8, 8), Role.HEAD), MATRICES, Route("fallback", "head")),
        (ParameterInfo("w", (8, 9)), RoutingPolicy(False, max_dim=8), Route("fallback", "side above 8")),
        (ParameterInfo("w", (8, 8)), RoutingPolicy(False, max_dim=8), Route("matrix", "unknown")),
        (
            ParameterInfo("a.gate.weight", (8, 8)),
            RoutingPolicy(True, exclude=("b*", "*gate*")),
            Route("fallback", "excluded by '*gate*'"),
        ),
    ],
)
def test_routes(info: ParameterInfo, policy: RoutingPolicy, expected: Route) -> None:
    assert route(info, policy) == expected


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), max_size=4).map(tuple), role=st.sampled_from(list(Role)), embeddings=st.booleans()
)
def test_a_groups_key_decides_alone(shape: tuple[int, ...], role: Role, embeddings: bool) -> None:
    info, policy = ParameterInfo("norm", shape, role), RoutingPolicy(embeddings, exclude=("*",), max_dim=1)
    assert route(info, policy, True) == Route("fallback", "param group")
    assert route(info, policy, False) == Route("matrix", "param group")


PUBLISHED = {
    # what takes the optimizer's own rule, of an annotated model
    "mars-adamw": {"tokens.weight", "places.weight", "up.weight", "down.weight", "experts.gate_up", "temperature"},
    "mars-lion": {"tokens.weight", "places.weight", "up.weight", "down.weight", "experts.gate_up", "temperature"},
    "sonew-tridiagonal": {
        "tokens.weight",
        "places.weight",
        "up.weight",
        "down.weight",
        "experts.gate_up",
        "temperature",
    },
    "mars-shampoo": {"up.weight", "down.weight", "experts.gate_up", "temperature"},
    "mars-m": {"up.weight", "down.weight", "experts.gate_up", "temperature"},
    "ldadam": {"up.weight", "down.weight", "experts.gate_up", "temperature"},
    "mkor-adamw": {"up.weight", "down.weight"},
}


@pytest.mark.parametrize("annotated", [True, False])
@pytest.mark.parametrize("name", PUBLISHED)
def test_what_each_optimizer_takes(name: str, annotated: bool) -> None:
    model = Model()
    if annotated:
        annotate(model)
    optimizer = BY_NAME[name].build(model.named_parameters(), model, **({"rank": 1} if name == "ldadam" else {}))
    rules = {row.name: row.rule for row in optimizer.explain()}
    chosen = {name for name, rule in rules.items() if rule == "matrix"}
    expected = set(PUBLISHED[name])
    if not annotated and name != "mkor-adamw":
        # Names and shapes are all there is; MKOR learns the module types when it is given the model.
        expected |= {"tokens.weight", "places.weight"}
        expected |= {"audio.weight"} if name != "ldadam" else set()  # too small for a rank of 1
    assert chosen == expected


def test_optimize_1d_takes_vectors_and_still_no_norm_of_two_dimensions() -> None:
    model = Model()
    annotate(model)
    rules = {row.name: row.rule for row in MARS(model.parameters(), optimize_1d=True).explain()}
    assert rules["norm.weight"] == rules["up.bias"] == rules["experts.scales"] == "matrix"
    assert rules["square_norm.weight"] == rules["patches.weight"] == "fallback"


@cases()
def test_excluded_parameters_take_the_fallback(case) -> None:
    model = net()
    optimizer = case.build(model.named_parameters(), model, exclude=["2.*"])
    rows = {row.name: row for row in optimizer.explain()}
    assert (rows["2.weight"].rule, rows["2.weight"].reason) == ("fallback", "excluded by '2.*'")
    assert rows["0.weight"].rule == "matrix"
    advance(model, optimizer, range(2))
    assert "2.weight" not in optimizer.matrix_states and "2.weight" not in optimizer.owners()


def test_exclude_sees_annotated_names() -> None:
    model = Model()
    annotate(model)
    rows = {row.name: row for row in SONew(model.parameters(), exclude=["tokens.*"]).explain()}
    assert rows["tokens.weight"].reason == "excluded by 'tokens.*'"


def test_ldadam_leaves_matrices_it_cannot_shrink() -> None:
    model = nn.ModuleDict({"small": nn.Linear(6, 6), "large": nn.Linear(60, 60)})
    rows = {row.name: row for row in LDAdam(model.named_parameters(), rank=4).explain()}
    assert (rows["small.weight"].rule, rows["small.weight"].reason) == ("fallback", "rank 4 saves nothing")
    assert rows["large.weight"].rule == "matrix"
    # Without the error buffer the bound is twice as high.
    rows = {row.name: row for row in LDAdam(model.named_parameters(), rank=1, error_feedback=False).explain()}
    assert rows["small.weight"].rule == "matrix"


@pytest.mark.parametrize(
    ("limit", "sides"),
    [
        (16384, {"0.weight": {"left": 10, "right": 7}, "2.weight": {"left": 10, "right": 10}}),
        (10, {"0.weight": {"left": 10, "right": 7}, "5.weight": {"left": 4, "right": 11}}),
        (9, {"0.weight": {"right": 7}, "2.weight": None}),
        (5, {"0.weight": None, "2.weight": None, "5.weight": {"left": 4}}),
    ],
)
def test_mkor_factor_sides(limit: int, sides: dict[str, dict[str, int] | None]) -> None:
    """One-sided where one side is too long, the backend where both are; the bias column does not count."""
    model, optimizer = setup(BY_NAME["mkor-adamw"], max_factor_dim=limit)
    rows = {row.name: row for row in optimizer.explain()}
    advance(model, optimizer, range(4))
    for name, expected in sides.items():
        if expected is None:
            assert (rows[name].rule, rows[name].reason) == ("fallback", f"both sides above {limit}")
            assert name not in optimizer.matrix_states
        else:
            state = optimizer.matrix_states[name]
            kept = {side: state[f"{side}_vectors"] for side in ("left", "right") if f"{side}_vectors" in state}
            assert {side: vectors.shape[1] for side, vectors in kept.items()} == expected
            assert all(vectors.any() for vectors in kept.values())


def test_mkor_says_why_a_matrix_has_no_statistics() -> None:
    model = Model()
    optimizer = MKOR(model.named_parameters())
    optimizer.capture(model)
    rows = {row.name: row for row in optimizer.explain()}
    assert rows["temperature"].reason == "no linear module uses it"
    assert rows["experts.gate_up"].reason == "only 2-D weights have factors"


# --- explain ---------------------------------------------------------------------------------------------------------


@cases()
def test_explain_accounts_for_every_parameter_and_byte(case) -> None:
    model, optimizer = setup(case)
    before = optimizer.explain()
    assert [row.name for row in before] == [name for name, _ in model.named_parameters()]
    assert all(row.state_bytes == 0 and row.owner is None for row in before)
    advance(model, optimizer, range(2))
    rows = optimizer.explain()
    assert [(row.name, row.rule, row.reason) for row in rows] == [(row.name, row.rule, row.reason) for row in before]
    assert sum(row.state_bytes for row in rows) == sum(optimizer.state_bytes().values()) > 0
    assert {row.name for row in rows if row.owner == 0} == set(optimizer.owners())
    assert all(tuple(model.get_parameter(row.name).shape) == row.shape for row in rows)


@pytest.mark.parametrize(
    ("name", "per_element"),
    [
        ("mars-adamw", 3),
        ("mars-adamw-exact", 4),
        ("mars-lion", 1),  # without a clip
        ("mars-shampoo", 2),
        ("mars-m", 2),
        ("sonew-diagonal", 2),
        ("sonew-tridiagonal", 3),
        ("sonew-band4", 7),
        ("ldadam-no-feedback", None),
        ("mkor-lamb", None),
        ("mkor-sgd", None),
    ],
)
def test_state_is_what_the_rule_needs(name: str, per_element: int | None) -> None:
    """Elements of state per weight, fp64; the fallback has two."""
    model, optimizer = setup(BY_NAME[name])
    advance(model, optimizer, range(2))
    held = {row.name: row.state_bytes // 8 for row in optimizer.explain()}
    if per_element is not None:
        assert held["2.weight"] == 100 * per_element
        assert held["0.bias"] == 20
    elif name == "ldadam-no-feedback":
        assert held["2.weight"] == 2 * 10 + 2 * 2 * 10 + 2  # basis, moments, count, beta1
    else:
        moments = 1 if name == "mkor-sgd" else 2
        K = optimizer.options.window  # type: ignore[attr-defined]
        # Vectors and weights of either side, or square factors under another rule; and a 32-bit count of failures.
        assert held["0.weight"] == 60 * moments + (K * (10 + 7 + 2) if K else 10 * 10 + 7 * 7)


def test_rows_read_well() -> None:
    row = Explanation("body.weight", (3, 8, 4), "matrix", "stack of matrices", 2, 1536)
    assert str(row) == "body.weight  3x8x4  matrix (stack of matrices)  owner 2  1536 B"
    row = Explanation("scale", (), "fallback", "vector", None, 8)
    assert str(row) == "scale  scalar  fallback (vector)  owner -  8 B"


def test_the_summary_is_announced_once() -> None:
    model, optimizer = setup(BY_NAME["ldadam"])
    lines: list[str] = []
    optimizer.reports.announce = lines.append
    advance(model, optimizer, range(4))
    assert lines == [optimizer.summary()]
    assert re.match(r"rankwise LDAdam: \d+\.\d% of [\d,]+ weights \(2 of 7 tensors\) take its rule, the rest", lines[0])
    assert "MiB by element" in lines[0] and "sent to owners per step" in lines[0]


def test_the_summary_counts_weights_and_says_why() -> None:
    """Most tensors of a model of experts take the rule, and most of its weights do not."""
    model = nn.Sequential(nn.Embedding(100, 10), nn.Linear(10, 20), nn.Linear(20, 10, bias=False), nn.Linear(10, 10))
    annotate(model)
    optimizer = SONew(model.named_parameters(), exclude=["2.*", "0.*"])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert (
        "19.6% of 1,530 weights (2 of 6 tensors) take its rule, the rest the first-order fallback (65.4% excluded by "
        "'0.*', 13.1% excluded by '2.*', 2.0% vector)"
    ) in optimizer.summary()


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("weight", r"it must match the whole name .* \(0.weight, 0.bias, 1.weight, ...\); '\*weight\*' would match 2"),
        ("0.wieght", "did you mean '0.weight'?"),
        ("*wieght*", r"did you mean '\*weight\*'\?"),
        ("*lm_head*", "; leave it out"),
    ],
)
@pytest.mark.parametrize("cls", [MARS, SONew, LDAdam, MKOR])
def test_patterns_that_exclude_nothing_are_refused(cls: type, pattern: str, words: str) -> None:
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))
    with pytest.raises(OptionError, match=f"{cls.__name__}: exclude=.* is invalid: .*{words}"):
        cls(model.named_parameters(), exclude=["0.weight", pattern])
    cls(model.named_parameters(), exclude=["0.weight"])


def test_patterns_cannot_be_judged_without_names(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = SONew(model.parameters(), exclude=["1.*"])
    assert "exclude=['1.*'] has no effect on parameters without names; pass model.named_parameters()" in caplog.text
    annotate(model)
    optimizer.reroute()
    assert [row.rule for row in optimizer.explain()] == ["matrix", "fallback", "fallback", "fallback"]
    other = SONew(nn.Linear(8, 8).parameters(), exclude=["group0.param1"])
    assert other.table.is_idle is False
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = SONew(model.parameters(), exclude=["1.*"])
    annotate(model)
    with pytest.raises(OptionError, match="exclude='1.*' is invalid"):
        optimizer.reroute()


@pytest.mark.parametrize("cls", [MARS, LDAdam])
def test_equal_names_of_two_models_take_equal_rules(cls: type) -> None:
    """A generator and a discriminator: what tells their parameters apart is no part of their names."""
    names = ("head.weight", "blocks.0.router.weight", "tower.weight", "layers.0.mlp.weight")
    named = [(name, nn.Parameter(torch.ones(40, 40))) for _ in range(2) for name in names]
    options = {"variant": "muon"} if cls is MARS else {"rank": 2}
    optimizer = cls(named, exclude=["tower*"], **options)
    rows = list(optimizer.explain())
    first, second = rows[: len(names)], rows[len(names) :]
    assert [(row.rule, row.reason) for row in first] == [(row.rule, row.reason) for row in second]
    assert [row.rule for row in first] == ["fallback", "fallback", "fallback", "matrix"]


def test_two_parameters_of_one_name_stay_apart() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    for model in (first, second):
        annotate(model)
    optimizer = SONew([first.weight, second.weight])
    assert [row.name for row in optimizer.explain()] == ["weight", "weight@group0.param1"]
    first.weight.grad, second.weight.grad = torch.ones(8, 8), -torch.ones(8, 8)
    before = second.weight.detach().clone()
    optimizer.step()
    assert (second.weight > before).all()
