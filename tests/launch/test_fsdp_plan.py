"""``rankwise plan --engine fsdp`` is what real ranks plan, hold and send; and against sums written out by hand."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from ranks import once, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from typer.testing import CliRunner

from rankwise.estimate import RankEstimate, estimate
from rankwise.launch.cli import app
from rankwise.launch.planning.cluster import Cluster, Mesh
from rankwise.launch.planning.fsdp import contents_on_mesh, tensor_parallel_dims
from rankwise.launch.planning.optimizers import Chosen, built
from rankwise.launch.planning.rank_figures import deepspeed_figures, fsdp_figures

OPTIONS: dict[str, dict[str, Any]] = {
    "mars-adamw": {},
    "mars-shampoo": {},
    "mars-m": {"comm_dtype": "bfloat16"},
    "sonew": {"band": 2},
    "ldadam": {"rank": 3},
    "mkor": {"update_interval": 2, "max_factor_dim": 64},
}
WIDTH, INNER, IDS = 12, 24, 18


class Block(nn.Module):
    """Llama's names, biases here and there, and a layer that tensor parallelism leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.router = nn.Linear(WIDTH, 5)
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.o_proj(self.q_proj(y) * self.k_proj(y).sigmoid())
        return x + self.down_proj(self.gate_proj(x).sigmoid() * self.up_proj(x)) * self.router(x).mean(-1, True)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(IDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, IDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def sharded(mesh: Mesh) -> Decoder:
    """A model as a user shards it."""
    torch.manual_seed(0)
    model, ranks = Decoder(), init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    if mesh.tp > 1:
        _cut(model, ranks["tp"])
    data = tuple(name for name in mesh.names if name != "tp")
    for module in (*model.layers, model):
        fully_shard(module, mesh=ranks[data])
    return model


def _cut(model: Decoder, mesh: DeviceMesh) -> None:
    """As torchtitan does, but that sequences are not cut."""
    column, row = ColwiseParallel, RowwiseParallel
    ends = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    for layer in model.layers:
        inner = {name: column() for name in ("q_proj", "k_proj", "gate_proj", "up_proj")}
        parallelize_module(layer, mesh, {**inner, "o_proj": row(), "down_proj": row()})


Answer = tuple[list[RankEstimate], dict[str, int], dict[str, int], dict[str, float], dict[str, tuple[int, ...]]]


def _real(rank: int, world: int, text: str, names: tuple[str, ...]) -> dict[str, Answer]:
    mesh = Mesh.read(text)
    found = {}
    for name in names:
        model = sharded(mesh)
        optimizer = built(Chosen(name, OPTIONS[name]), model)
        for step in range(3):
            if step == 1:  # the first one plans
                optimizer.read_health()
            generator = torch.Generator().manual_seed(world * step + rank // mesh.tp)
            tokens = torch.randint(0, IDS, (8, 5), generator=generator)
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        shards = {key: tuple(value.to_local().shape) for key, value in model.named_parameters()}
        assert all(isinstance(value, DTensor) for value in model.parameters())
        found[name] = (
            *(estimate(optimizer), dict(optimizer.owners()), optimizer.state_bytes(), optimizer.read_health()),
            shards,
        )
    return found


@once
def real(text: str, names: tuple[str, ...] = tuple(OPTIONS)) -> list[dict[str, Answer]]:
    return run_ranks(Mesh.read(text).ranks, _real, text, names)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("text", ["dp=2", "dp=5", "rep=2,shard=2", "dp=2,tp=2"])
def test_real_ranks_hold_and_send_what_is_planned(text: str, name: str) -> None:
    compare(text, name, real(text))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ldadam", "mkor"])
def test_real_ranks_in_three_dimensions(name: str) -> None:
    text = "rep=2,shard=2,tp=2"
    compare(text, name, real(text, ("ldadam", "mkor")))


def compare(text: str, name: str, answers: list[dict[str, Answer]]) -> None:
    mesh = Mesh.read(text)
    with torch.device("meta"):
        model = Decoder()
    planned = fsdp_figures(Chosen(name, OPTIONS[name]), model, Cluster(mesh.ranks, None, precision="fp32", mesh=mesh))
    for rank, answer in enumerate(answers):
        estimated, owners, held, health, _ = answer[name]
        assert owners == planned.owners
        assert estimated == planned.ranks
        assert held == {
            "element": planned.ranks[rank].element_state_bytes,
            "matrix": planned.ranks[rank].matrix_state_bytes,
        }
        # All ranks' together, of a step that moves factors and one that does not.
        sent = sum(one.bytes_sent + one.periodic_bytes / one.period for one in planned.ranks)
        assert health["bytes_sent"] == sent
        calls = sum(one.collectives + one.periodic_collectives / one.period for one in planned.ranks)
        assert health["collectives"] == calls


@pytest.mark.parametrize("text", ["dp=5", "rep=2,shard=2", "dp=2,tp=2"])
def test_shards_are_as_large_as_planned(text: str) -> None:
    mesh = Mesh.read(text)
    with torch.device("meta"):
        model = Decoder()
    parameters = dict(model.named_parameters())
    cuts = tensor_parallel_dims(model) if mesh.tp > 1 else {}
    planned = contents_on_mesh(parameters, dict.fromkeys(parameters, 0), cuts, mesh)
    for contents, answer in zip(planned, real(text), strict=True):
        shapes = answer["sonew"][-1]
        sizes = [sum(part.end - part.start for part in content.slices) for content in contents]
        assert dict(zip(parameters, sizes, strict=True)) == {key: torch.Size(s).numel() for key, s in shapes.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "dp=4,pp=2"], "'pp' is none of dp, .* pipeline stages are planned one by one"),
        (["--mesh", "tp=2,dp=4"], "in this order"),
        (["--mesh", "dp=0"], "with sizes of at least 1"),
        (["--mesh", "dp=99999999999"], "at most 131,072 ranks, and has 99,999,999,999"),
        (["--mesh", ""], "'' is none of dp"),
        (["--mesh", "dp=two"], "it must be dp=64, dp=8,tp=8"),
        (["--mesh", "dp=4", "--ranks", "8"], "ranks is 8 and mesh is 'dp=4', which has 4: leave ranks out"),
        (["--mesh", "dp=4", "--stage", "3"], "stage is 3, which is ZeRO's; under FSDP2 leave it out"),
        (["--mesh", "dp=4", "--engine", "deepspeed"], "mesh is 'dp=4' and engine is 'deepspeed'"),
        (["--engine", "fsdp", "--tp", "2"], "engine is 'fsdp' and tp is 2, which is Megatron's: write tp into --mesh"),
        (["--engine", "fsdp2"], "engine is 'fsdp2': it must be one of deepspeed, megatron, fsdp"),
        (["--mesh", "dp=2,tp=5"], "tp must divide dimension 0 of .*embed_tokens.weight, which is 128256"),
        (["--mesh", "dp=2,tp=2", "--model", "gpt2-small"], "no layer of this model is known to be cut by it"),
    ],
)
def test_what_no_mesh_can_be_is_refused_with_a_way_out(arguments: list[str], message: str) -> None:
    given = ["plan", "--optimizer", "ldadam", "--model", "llama-1b", *arguments]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert re.search(message, " ".join(result.output.split())), result.output


def test_the_command_plans_a_mesh() -> None:
    asked = ["plan", "--optimizer", "sonew", "--model", "llama-1b", "--mesh", "rep=2,shard=4", "--json"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["ranks"], len(found["per_rank"])) == (8, 8)
    assert found["layout"] == "8 ranks, fully_shard on rep=2,shard=4, fp32 shards"
    # Two copies, each cut over four ranks.
    for what, width in (("weight_bytes", 4), ("gradient_bytes", 4), ("adamw_bytes", 8)):
        assert sum(rank[what] for rank in found["per_rank"]) == 2 * width * found["parameters"]


def test_ranks_send_no_more_than_under_zero_3() -> None:
    for name in OPTIONS:
        with torch.device("meta"):
            model = Decoder()
        picked = Chosen(name, OPTIONS[name])
        mesh = fsdp_figures(picked, model, Cluster(4, None, precision="fp32", mesh=Mesh.read("dp=4")))
        zero = deepspeed_figures(picked, model, Cluster(4, 3, precision="fp32"))
        assert sum(rank.bytes_sent for rank in mesh.ranks) <= sum(rank.bytes_sent for rank in zero.ranks), name
