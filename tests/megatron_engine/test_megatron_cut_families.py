"""Weights of all model families, cut by tensor parallelism: every size follows one process, and checkpoints move."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import megatron.core
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron_families import (
    CUTS,
    Families,
    InADictionary,
    give_gradients,
    named_cuts,
    opened_families,
    values,
    wrapped,
)
from megatron_types import TYPES, maker
from megatron_weights import gathered, main_weight
from ranks import once, run_ranks
from torch import Tensor, nn

from megatron_patches import copies
from megatron_patches.cpu import cpu_megatron
from megatron_patches.groups import ParallelGroups
from megatron_patches.parameter_names import describe_model
from megatron_patches.parameters import describe_chunks
from rankwise.layout.layout import LayoutError
from rankwise.routing.roles import Role

OPTIONS: dict[str, dict[str, Any]] = {
    "ldadam": {"rank": 2},
    "ldadam-narrow": {"rank": 2},
    "mars-m": {"ns_dtype": "float32"},
}
BEFORE, AFTER = 2, 2
# Of the largest change of a weight; matrices of a few rows make the most of how sums are ordered.
LARGEST = 1e-5


class Job(NamedTuple):
    """A run: of an optimizer, on ``tp`` tensor-parallel ranks and as many copies as there are further ranks."""

    name: str
    tp: int
    bf16: bool
    distributed: bool

    def __str__(self) -> str:
        return f"{self.name}-tp{self.tp}{'-bf16' * self.bf16}{'-distributed' * self.distributed}"


def _sharded(model: Families, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    weights = model.sharded_state_dict(metadata=metadata)
    state = optimizer.sharded_state_dict({"model": weights}, is_loading=is_loading, metadata={**metadata})
    return {"model": weights, "optimizer": state}


def _run(job: Job, saved: Path | None, loaded: Path | None) -> dict[str, Tensor]:
    config = {"lr": 0.01, "min_lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0, "bf16": job.bf16}
    config |= {"use_distributed_optimizer": job.distributed, "optimizer": "adam"}
    config["params_dtype"] = torch.bfloat16 if job.bf16 else torch.float32
    with opened_families(job.tp, job.bf16) as model:
        chunk = wrapped(model, job.bf16, job.distributed)
        optimizer = maker(job.name, **OPTIONS.get(job.name, {}))(config, [chunk])
        first = 0
        if loaded is not None:
            state = dist_checkpointing.load(_sharded(model, optimizer, True), str(loaded))
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first = BEFORE
        for step in range(first, BEFORE + AFTER):
            if step == BEFORE and saved is not None:
                dist_checkpointing.save(_sharded(model, optimizer, False), str(saved))
            give_gradients(model, step)
            optimizer.step()
        chained = getattr(optimizer, "chained_optimizers", [optimizer])
        weights, gap = gathered([(cut, main_weight(parameter, chained)) for parameter, cut in named_cuts(model)])
        assert gap == 0.0, job
        return weights


def _all(
    rank: int, world: int, jobs: list[tuple[Job, Path | None, Path | None]]
) -> dict[tuple[Job, Path | None], dict[str, Tensor]]:
    with cpu_megatron():
        return {(job, loaded): _run(job, saved, loaded) for job, saved, loaded in jobs}


def _kinds(tp: int, names: tuple[str, ...]) -> list[Job]:
    """Fp32 weights and the main weights of bf16 ones, in one wrapper or the other, in turns."""
    wrappers = [(True, True), (False, True), (True, False), (False, False)]
    return [Job(name, tp, *wrappers[index % 4]) for index, name in enumerate(names)]


# Ranks and tensor-parallel ways.
SIZES = {"one": (1, 1), "two": (2, 2), "four": (4, 4), "two of four": (4, 2)}
MOVES = [("one", "two"), ("two", "one"), ("four", "two"), ("two of four", "one"), ("one", "four")]
USUAL_MOVE = ("two", "one")


@once
def _saved(folder: Path, size: str, names: tuple[str, ...]) -> dict[Job, dict[str, Tensor]]:
    world, tp = SIZES[size]
    jobs = [(job, folder / size / str(job), None) for job in _kinds(tp, names)]
    for _, target, _ in jobs:
        target.mkdir(parents=True, exist_ok=True)
    return {job: weights for (job, _), weights in run_ranks(world, _all, jobs)[0].items()}


def _gap(found: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    """The largest, with the weight that has it, by how far any weight went."""
    assert {key: value.shape for key, value in found.items()} == {k: v.shape for k, v in reference.items()}
    gaps = {key: (found[key] - reference[key]).abs().max().item() for key in reference}
    moved = max((reference[key] - values(key, tuple(reference[key].shape))).abs().max().item() for key in reference)
    name = max(gaps, key=lambda key: gaps[key])
    return gaps[name] / moved, name


USUAL = ("mars-adamw", "sonew", "ldadam", "mars-m", "mkor-sketch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def _follows(folder: Path, size: str, names: tuple[str, ...]) -> None:
    alone = _saved(folder, "one", names)
    for job, weights in _saved(folder, size, names).items():
        gap, name = _gap(weights, alone[job._replace(tp=1)])
        assert gap <= LARGEST, (str(job), name)


def _moves(folder: Path, start: str, end: str, names: tuple[str, ...]) -> None:
    alone, _ = _saved(folder, "one", names), _saved(folder, start, names)
    world, tp = SIZES[end]
    sources = {job: folder / start / str(job) for job in _kinds(SIZES[start][1], names)}
    jobs = [(job._replace(tp=tp), None, source) for job, source in sources.items()]
    for (job, _), weights in run_ranks(world, _all, jobs)[0].items():
        gap, name = _gap(weights, alone[job._replace(tp=1)])
        assert gap <= LARGEST, (str(job), name)


@pytest.mark.parametrize(
    "size", ["two", *(pytest.param(size, marks=pytest.mark.exhaustive) for size in ("four", "two of four"))]
)
def test_every_size_follows_one_process(folder: Path, size: str) -> None:
    _follows(folder, size, USUAL)


@pytest.mark.parametrize(
    ("start", "end"),
    [pytest.param(*move, marks=() if move == USUAL_MOVE else pytest.mark.exhaustive) for move in MOVES],
)
def test_checkpoints_go_to_every_size(folder: Path, start: str, end: str) -> None:
    _moves(folder, start, end, USUAL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in (*TYPES, "ldadam-narrow", "sonew-narrow") if name != "mkor-h"])
def test_all_types_go_to_every_size(folder: Path, name: str) -> None:
    names = ("mkor-sketch" if name == "mkor" else name,) * 4
    for size in ("two", "four", "two of four"):
        _follows(folder, size, names)
    for start, end in MOVES:
        _moves(folder, start, end, names)


# --- how each is cut -------------------------------------------------------------------------------------------------


def _described(rank: int, world: int) -> None:
    with cpu_megatron():
        for kind in (Families, InADictionary):
            with opened_families(world, False, kind) as model:
                found = describe_chunks([model], ParallelGroups())
                for parameter, cut in named_cuts(model):
                    known = found[parameter]
                    assert (known.info.shape, known.dim) == (cut.shape, cut.dim), (kind, cut.name)
                    assert known.info.name == cut.name
                    assert (known.info.role is Role.CONV) == ("conv1d" in cut.name), cut.name
                    if cut.dim != 0:
                        continue
                    width = parameter[0].numel()
                    rows = [
                        row
                        for part in known.slices(0, parameter.numel(), 0)
                        for row in range(part.start // width, part.end // width)
                    ]
                    assert cut.index is not None and rows == cut.index.tolist(), (kind, cut.name)


def test_cuts_are_those_that_the_layers_forward_passes_make() -> None:
    run_ranks(2, _described)


# Parameters that Megatron's modules make, by file: every one of them is in the model above or said here.
FOUND_ELSEWHERE = {
    "extensions/transformer_engine.py": "biases of Transformer Engine's layers: test_transformer_engine.py",
    "models/vision/radio.py": "tokens and positions, whole on every rank",
    "models/vision/clip_vit_model.py": "a token, whole on every rank",
    "models/vision/vit_model.py": "tokens and positions, whole on every rank",
    "models/audio/nemo_transformer_encoder.py": "scales and a frame, whole on every rank",
    "transformer/hyper_connection.py": "scales of streams, whole on every rank",
    "transformer/moe/experts.py": "GroupedMLP is refused; what an operation of Transformer Engine takes from a layer",
    "fusions/fused_layer_norm.py": "apex's norms, whole on every rank",
    "tensor_parallel/layers.py": "embeddings and linear layers: weight, bias",
}
IN_THE_MODEL = {
    "transformer/dot_product_attention.py": {"softmax_offset"},
    "transformer/moe/router.py": {"weight", "bias"},
    "transformer/moe/shared_experts.py": {"gate_weight"},
    "ssm/mamba_mixer.py": {"conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D"},
    "ssm/gated_delta_net.py": {"dt_bias", "A_log"},
    "ssm/gated_delta_net/common.py": {"dt_bias", "A_log"},
    "ssm/gated_delta_product.py": {"dt_bias", "A_log"},
}


def _parameters_made(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target, made = node.targets[0], ast.unparse(node.value.func)
            if made.rpartition(".")[2] == "Parameter" and isinstance(target, ast.Attribute):
                yield target.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("register_parameter"):
            if ast.unparse(node.args[-1]) != "None":
                yield str(getattr(node.args[0], "value", ast.unparse(node.args[0])))


def test_no_module_of_megatron_makes_a_parameter_of_which_nothing_is_known() -> None:
    """A new one is to be looked at: how does its forward pass cut it, and what does it declare?"""
    root = Path(megatron.core.__path__[0])
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root).as_posix()
        if "fsdp" in place or place.startswith(("inference/", "quantization/")) or place in FOUND_ELSEWHERE:
            continue
        assert set(_parameters_made(ast.parse(path.read_text()))) <= IN_THE_MODEL.get(place, set()), place
    assert CUTS


# --- what ranks are said to hold alike -------------------------------------------------------------------------------


class _Scales(nn.Module):
    """A user's: a value for every local head, of which nothing is said."""

    def __init__(self, marked: dict[str, Any], shape: tuple[int, ...] = (4,), alike: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape, 1.0 if alike else 1.0 + dist.get_rank()))
        for name, value in marked.items():
            setattr(self.scale, name, value)


def _told(rank: int, world: int, initialised: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cut = {"tensor_model_parallel": True}
    cases = {
        "apart": _Scales({}),
        "alike": _Scales({}, alike=True),
        "marked": _Scales({**cut, "partition_dim": 0}),
        "marked, of one dimension": _Scales(cut),
        "marked, of two": _Scales(cut, (4, 4)),
        "in sections": _Scales({**cut, "partition_dim": 0, "partition_sizes": [3, 1]}),
        "in wrong sections": _Scales({**cut, "partition_dim": 0, "partition_sizes": [3, 2]}),
    }
    with cpu_megatron():
        mpu.initialize_model_parallel(tensor_model_parallel_size=2)
        for name, module in cases.items():
            module.config = SimpleNamespace(perform_initialization=initialised)
            try:
                (known,) = describe_model([module], ParallelGroups()).values()
                found[name] = (known.info.shape, known.sections)
            except LayoutError as error:
                found[name] = str(error)
        mpu.destroy_model_parallel()
    return found


def test_weights_that_are_said_to_be_alike_are_compared() -> None:
    """Four ranks, of which each is asked, and all are told the same."""
    ranks = run_ranks(4, _told, True)
    assert all(found == ranks[0] for found in ranks)
    found = ranks[0]
    assert "different values of 'scale'" in found["apart"] and "partition_dim" in found["apart"]
    assert found["alike"] == ((4,), ())
    assert found["marked"] == found["marked, of one dimension"] == ((8,), ())
    assert "nothing tells" in found["marked, of two"] and "'scale'" in found["marked, of two"]
    assert found["in sections"] == ((8,), (3, 1)) and "partition_sizes" in found["in wrong sections"]


def test_what_was_not_initialised_is_not_compared() -> None:
    assert run_ranks(2, _told, False)[0]["apart"] == ((4,), ())


def _drifted(rank: int, world: int) -> list[list[str]]:
    """What is said of a user's weight, alike at first, when all that is known of it is saved."""
    found = []
    with cpu_megatron():
        mpu.initialize_model_parallel(tensor_model_parallel_size=2)
        for gap in (0.0, 1e-3, 0.5):
            module = _Scales({}, alike=True)
            parameters = describe_model([module], ParallelGroups())
            module.scale.data += gap * rank
            with pytest.MonkeyPatch.context() as patch:
                said: list[str] = []
                patch.setattr(copies.logger, "warning", lambda text, *parts, said=said: said.append(text % parts))
                copies.warn_of_drift(parameters, ParallelGroups(), False)
            found.append(said)
        mpu.destroy_model_parallel()
    return found


def test_weights_that_have_come_apart_are_named_when_they_are_saved() -> None:
    (same, rounded, apart), second = run_ranks(2, _drifted)
    assert same == rounded == [] and second == [[], [], []]
    assert len(apart) == 1 and "'scale'" in apart[0] and "the first rank's alone" in apart[0]
