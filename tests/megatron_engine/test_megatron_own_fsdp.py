"""Megatron's own FSDP on gloo ranks: each strategy follows one process and resumes, or is refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron_cells import BIASED, Cell
from megatron_harness import OTHER_CUTS, Result, Trainer, move, opened, rms_move, run_cells, trained
from megatron_types import CAPTURING, ELEMENT_WISE, TYPES, maker
from megatron_weights import reduced_gradient
from ranks import once, run_ranks
from torch import Tensor

import megatron_patches
from megatron_patches.cpu import cpu_megatron
from megatron_patches.formats import refuse_format
from megatron_patches.megatron_fsdp import _REDUCES_TWICE, run_of
from megatron_patches.registry import NAMES, RankwiseConfig, get_megatron_optimizer
from megatron_patches.support import SupportError

STEPS = 3
STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
OURS = (*TYPES, "mkor-sketch")
# Of the gradients of one process, Megatron's FSDP has those, but for rounding.
ROUNDED = 1e-4
# What rounding does to the rule in one process, times this; one unlucky weight does not decide a root mean square.
ALLOWED = 10.0
# Where rounding can flip a sign or an edge, which is a whole step: the mean, of a dozen such elements.
DISCONTINUOUS, BESIDE_AN_EDGE = ("mars-lion", "sonew"), 2e-4
SECOND: dict[str, Any] = {"megatron_fsdp": "optim_grads_params", "version": 2}
HAS_SECOND = hasattr(mcore_fsdp_adapter, "FullyShardedDataParallelV2")
# Ranks, and what cuts the model over them.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{strategy: (2, {"megatron_fsdp": strategy, "overlap_grad_reduce": True}) for strategy in STRATEGIES},
    # Before 0.20 Megatron reduced these gradients twice.
    **({} if _REDUCES_TWICE else {"optim, at the end": (2, {"megatron_fsdp": "optim"})}),
    **({"version 2": (4, SECOND)} if HAS_SECOND else {}),
    "TP2": (4, {"megatron_fsdp": "optim_grads_params", "tp": 2}),
    "HSDP": (4, {"megatron_fsdp": "optim_grads_params", "instances": 2}),
    "HSDP, optim": (4, {"megatron_fsdp": "optim", "instances": 2, "overlap_grad_reduce": True}),
    "HSDP, optim_grads": (4, {"megatron_fsdp": "optim_grads", "instances": 2}),
}
USUAL = ("mars-m", "ldadam", "mkor")
FULL_SHARDS = {"megatron_fsdp": "optim_grads_params"}
FULL = Cell(megatron_fsdp="optim_grads_params")
ALONE = Cell(clip=0.0)

Gradients = list[dict[str, Tensor]]


class Reference(NamedTuple):
    """One process: weights before and after, its gradients, and how far other micro-batches move it (mean, rms)."""

    start: Result
    end: Result
    gradients: Gradients
    response: tuple[float, float]


def _run(cell: Cell, name: str, steps: int = STEPS, before: Any = None) -> Result:
    with opened(cell, maker(name)) as trainer:
        for _ in range(steps):
            trainer.train_step(before)
        return trained(trainer, 0)


def _away(found: Result, reference: Result, start: Result) -> tuple[float, float]:
    given = found.weights, reference.weights, start.weights
    return move(*given).mean, rms_move(*given)


def _references(rank: int, world: int, names: tuple[str, ...]) -> dict[str, Reference]:
    found = {}
    with cpu_megatron():
        start = _run(ALONE, "adam", 0)
        for name in names:
            gradients: Gradients = []
            end = _run(ALONE, name, before=functools.partial(_record, gradients))
            others = [_run(replace(ALONE, microbatches=count), name) for count in OTHER_CUTS]
            away = [_away(other, end, start) for other in others]
            found[name] = Reference(start, end, gradients, tuple(map(max, zip(*away, strict=True))))
    return found


def _record(gradients: Gradients, trainer: Trainer) -> None:
    gradients.append(trainer.weights(reduced_gradient)[0])


def _replay(gradients: Gradients, trainer: Trainer) -> None:
    """Put recorded gradients where Megatron's reduction has left its own, which differ by rounding."""
    wrapper = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])[0]
    for chunk in trainer.chunks:
        for parameter, cut in trainer.cuts(chunk):
            start, end = run_of(wrapper, parameter)
            if start < end:
                own, whole = parameter.grad._local_tensor, cut.of(gradients[trainer.step][cut.name])
                given = whole.reshape(-1)[start:end].view(own.shape)
                assert (own - given).abs().max() <= ROUNDED * whole.abs().max(), cut.name
                own.copy_(given)


def _followed(rank: int, world: int, cell: Cell, known: dict[str, Reference]) -> dict[str, tuple[Result, Result]]:
    """Each type on its own gradients, and on those of one process."""
    with cpu_megatron():
        return {
            name: (_run(cell, name), _run(cell, name, before=functools.partial(_replay, reference.gradients)))
            for name, reference in known.items()
        }


@once
def _known(names: tuple[str, ...]) -> dict[str, Reference]:
    return run_ranks(1, _references, names)[0]


def _check(label: str, names: tuple[str, ...]) -> None:
    """How far each type ends from one process: on its gradients, and on gradients that the ranks compute."""
    world, layout = LAYOUTS[label]
    known = _known(("adam", *names))
    found = run_ranks(world, _followed, Cell(clip=0.0, **layout), known)[0]
    for name, (start, end, _, response) in known.items():
        own, same = found[name]
        fed = move(same.weights, end.weights, start.weights).largest
        mean, rms = _away(own, end, start)
        print(f"{label}: {name} {fed:.1e} {mean:.1e} {rms:.1e}, by rounding alone {response[0]:.1e} {response[1]:.1e}")
        assert own.replica_gap == same.replica_gap == 0
        if name not in CAPTURING:  # their statistics are of their own passes
            assert fed <= (1e-6 if name in ("adam", *ELEMENT_WISE) else 1e-5), name
        if name in DISCONTINUOUS:
            assert mean <= BESIDE_AN_EDGE, name
        else:
            assert rms <= ALLOWED * response[1], name


@pytest.mark.slow
def test_follows_one_process() -> None:
    _check("optim_grads_params", USUAL)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("label", LAYOUTS)
def test_every_type_follows_one_process(label: str) -> None:
    _check(label, OURS)


def _resumed(rank: int, world: int, folder: Path, jobs: list[tuple[str, Cell]]) -> list[tuple[Result, ...]]:
    """What comes after the checkpoint: in the run that wrote it, in the same one, rolled back, and in a fresh one."""
    found = []
    megatron_patches.apply()
    with cpu_megatron():
        for index, (name, cell) in enumerate(jobs):
            place = folder / str(index)
            with opened(cell, maker(name)) as trainer:
                trainer.advance(2)
                trainer.save(place)
                trainer.optimizer.offload_to_cpu()
                trainer.optimizer.restore_from_cpu()
                whole = trained(trainer, 2)
                trainer.load(place)
                rolled_back = trained(trainer, 2)
            with opened(cell, maker(name)) as trainer:
                trainer.load(place)
                found.append((whole, rolled_back, trained(trainer, 2)))
    return found


HALF = {"precision": "bf16", **BIASED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jobs", "world"),
    [
        ([("ldadam", FULL), ("mkor", Cell(**FULL_SHARDS, **HALF))], 2),
        *(
            pytest.param(
                [(name, Cell(**LAYOUTS[strategy][1], **kind)) for kind in ({}, HALF) for name in OURS],
                2,
                marks=pytest.mark.exhaustive,
            )
            for strategy in STRATEGIES
        ),
        pytest.param(
            [(name, Cell(**LAYOUTS[label][1], **HALF)) for label in ("HSDP", "TP2") for name in USUAL],
            4,
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["usual", *STRATEGIES, "HSDP and TP2"],
)
def test_resumes_bitwise(jobs: list[tuple[str, Cell]], world: int, tmp_path: Path) -> None:
    for job, (whole, *others) in zip(jobs, run_ranks(world, _resumed, tmp_path, jobs)[0], strict=True):
        for again in others:
            assert again.losses == whole.losses, job
            assert all(torch.equal(again.weights[key], whole.weights[key]) for key in whole.weights), job


class _FrozenNorms(Trainer):
    def _model(self, stage: int, vp_stage: int | None) -> Any:
        model = super()._model(stage, vp_stage)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" not in name)
        return model


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SECOND, reason="this Megatron has version 1 alone")
def test_version_2_follows_one_process() -> None:
    _check("version 2", USUAL)


def _norms(rank: int, world: int, cell: Cell) -> tuple[Any, list[int]]:
    with cpu_megatron(), opened(cell, maker("ldadam")) as trainer:
        result = trained(trainer, 2)
        shards = [parameter._local_tensor.numel() for parameter in trainer.optimizer.get_parameters()]
        return result and result.norms, shards


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SECOND, reason="this Megatron has version 1 alone")
def test_version_2_clips_by_the_norm_of_one_process() -> None:
    sharded = run_ranks(4, _norms, Cell(**SECOND))
    assert sharded[0][0] == pytest.approx(run_cells(1, [Cell()], maker("ldadam"), 2)[0].norms, rel=1e-6)
    # Transformer Engine's kernels for norms stop at an empty tensor.
    assert all(all(shards) for _, shards in sharded)


def _refused(rank: int, world: int, given: list[tuple[Cell, dict[str, Any]]]) -> list[str]:
    messages = []
    with cpu_megatron():
        for cell, fields in given:
            with opened(cell, maker("adam"), _FrozenNorms if cell.version == 2 else None) as trainer:
                config = RankwiseConfig(**{**cell.optimizer_config(), "optimizer": "mars-m", **fields})
                with pytest.raises(SupportError) as caught:
                    get_megatron_optimizer(config, trainer.chunks)
                messages.append(str(caught.value))
    return messages


def test_what_does_not_work_is_refused_by_name() -> None:
    sharded = Cell(precision="bf16", **FULL_SHARDS)
    given: dict[str, tuple[Cell, dict[str, Any]]] = {
        "--expert-model-parallel-size is invalid with --use-megatron-fsdp": (
            Cell(megatron_fsdp="optim_grads", moe=4, ep=2),
            {},
        ),
        "--use-precision-aware-optimizer is invalid with --use-megatron-fsdp": (
            sharded,
            {"use_precision_aware_optimizer": True},
        ),
        "--data-parallel-sharding-strategy no_shard is invalid with --use-megatron-fsdp": (
            Cell(megatron_fsdp="no_shard"),
            {},
        ),
        "--data-parallel-sharding-strategy optim is invalid with --use-megatron-fsdp": (
            Cell(megatron_fsdp="optim", instances=2),
            {},
        ),
        "--outer-dp-sharding-strategy is invalid with --use-megatron-fsdp": (
            Cell(instances=2, outer="optim", **FULL_SHARDS),
            {},
        ),
    }
    for messages in run_ranks(2, _refused, list(given.values())):
        for text, message in zip(given, messages, strict=True):
            assert text in message and "--optimizer mars-m" in message


def _refused_by_second(rank: int, world: int) -> list[str]:
    messages = _refused(rank, world, [(Cell(**SECOND), {})])
    with cpu_megatron(), opened(Cell(**SECOND), maker("mars-m")) as trainer:
        for give in (trainer.optimizer.state_dict, trainer.optimizer.sharded_state_dict):
            with pytest.raises(SupportError) as caught:
                give()
            messages.append(str(caught.value))
    return messages


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SECOND, reason="this Megatron has version 1 alone")
def test_version_2_refuses_what_megatron_cannot_do() -> None:
    frozen, *unsaved = run_ranks(2, _refused_by_second)[0]
    assert "a frozen parameter ('module.decoder.layers.0.input_layernorm.weight') is invalid with" in frozen
    assert all("cannot be saved" in message and "--no-save-optim" in message for message in unsaved)
    given = SimpleNamespace(save="folder", use_megatron_fsdp=True, ckpt_format="fsdp_dtensor", megatron_fsdp_version=2)
    with pytest.raises(SupportError, match="--save is invalid with --megatron-fsdp-version 2"):
        refuse_format(given, "mars-m", NAMES["mars-m"][0])
    given.no_save_optim = True
    refuse_format(given, "mars-m", NAMES["mars-m"][0])
