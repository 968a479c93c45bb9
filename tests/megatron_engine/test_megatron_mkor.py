"""MKOR's statistics, and what it makes of them, in every parallel layout of real Megatron."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import megatron_harness
import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from megatron_cells import BIASED, DISTRIBUTED, GLOBAL_BATCH, LENGTH, MOE, OVERLAPPED, Cell
from megatron_harness import OTHER_CUTS, Trainer, move, opened, run_cells, worst
from megatron_statistics import Seen, inner_optimizers, watch
from megatron_weights import bare
from ranks import once, run_ranks
from torch import Tensor, nn

from megatron_patches.cpu import cpu_megatron
from megatron_patches.registry import RankwiseConfig, get_megatron_optimizer
from megatron_patches.support import SupportError

TOKENS = GLOBAL_BATCH * LENGTH


@dataclass(frozen=True)
class Adjusted(Cell):
    """A cell whose gradients are divided by the number of tokens."""

    per_token: bool = False

    def transformer_config(self) -> TransformerConfig:
        config = super().transformer_config()
        config.calculate_per_token_loss = self.per_token
        return config


def _build(bundled: bool, options: Mapping[str, Any], config: dict[str, Any], chunks: list[nn.Module]) -> Any:
    given = {"update_interval": 1, "factor_dtype": "float32", **options}
    ours = RankwiseConfig(**{**config, "optimizer": "mkor"}, rankwise=given)
    # Without overrides, biases decay as weights do and share a param group with them.
    return get_megatron_optimizer(ours, chunks, {} if bundled else None)


def mkor(bundled: bool = False, **options: Any) -> Callable[[dict[str, Any], list[nn.Module]], MegatronOptimizer]:
    return functools.partial(_build, bundled, options)


# --- statistics -------------------------------------------------------------------------------------------------------


def _watched(rank: int, world: int, cells: list[Cell]) -> list[list[Seen]]:
    found = []
    with cpu_megatron():
        for cell in cells:
            with opened(cell, mkor()) as trainer:
                found.append([watch(trainer) for _ in range(2)])
    return found


def alone(cell: Cell) -> Cell:
    """The cell that trains the same model in one process."""
    kept = ("swiglu", "gqa", "tied", "layers", "moe")
    return Cell(**{name: getattr(cell, name) for name in kept})


VECTORS: dict[str, Cell] = {
    "DP2": Cell(microbatches=4, **OVERLAPPED),
    "DP2 with biases": Cell(**BIASED),
    "TP2": Cell(tp=2),
    "TP2 with biases": Cell(tp=2, **BIASED, **DISTRIBUTED),
    "TP2 SP": Cell(tp=2, sp=True, microbatches=4, **DISTRIBUTED),
    "TP2 SP with biases": Cell(tp=2, sp=True, **BIASED),
    "TP2 SP recomputed": Cell(tp=2, sp=True, recompute=True),
    "PP2": Cell(pp=2, tied=True, microbatches=4),
    "PP2 with biases": Cell(pp=2, **BIASED),
    "PP2 interleaved": Cell(pp=2, vpp=2, layers=4, microbatches=4, **OVERLAPPED),
    "EP2": Cell(ep=2, **MOE, **DISTRIBUTED),
    "CP2 with biases": Cell(cp=2, **BIASED, **DISTRIBUTED),
    "CP2 EP2": Cell(cp=2, ep=2, **MOE),
}


@once
def vectors() -> tuple[dict[str, list[Seen]], dict[str, list[Seen]]]:
    models = {str(alone(cell)): alone(cell) for cell in VECTORS.values()}
    one = dict(zip(models, run_ranks(1, _watched, list(models.values()))[0], strict=True))
    two = dict(zip(VECTORS, run_ranks(2, _watched, list(VECTORS.values()))[0], strict=True))
    return two, {label: one[str(alone(cell))] for label, cell in VECTORS.items()}


def gap(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("label", VECTORS)
def test_vectors_are_those_of_one_process(label: str) -> None:
    found, references = vectors()
    # From the second step on the weights differ by rounding.
    for seen, reference, allowed in zip(found[label], references[label], (2e-5, 1e-3), strict=True):
        assert seen.vectors.keys() == reference.vectors.keys() and seen.vectors
        for key, (a, g, count) in reference.vectors.items():
            assert seen.vectors[key][2] == count, key
            assert gap(seen.vectors[key][0], a) < allowed, key
            assert gap(seen.vectors[key][1], g) < allowed, key


def test_every_linear_layer_is_seen_with_all_its_tokens() -> None:
    found, _ = vectors()
    linear = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    names = {f"decoder.layers.{layer}." for layer in range(4)}
    keys = found["PP2 interleaved"][0].vectors
    assert {key.rpartition(".")[0].rpartition(".")[2] for key in keys} == set(linear)
    assert {next(name for name in names if key.startswith(name)) for key in keys} == names and len(keys) == 16
    for label, (first, second) in found.items():
        for seen in (first, second):
            experts = {key: count for key, (_, _, count) in seen.vectors.items() if "experts" in key}
            assert {count for key, (_, _, count) in seen.vectors.items() if key not in experts} == {float(TOKENS)}
            for layer in ("0", "1") if "EP2" in label else ():
                counts = [n for key, n in experts.items() if key.startswith(f"decoder.layers.{layer}") and "fc1" in key]
                assert len(counts) == 4 and sum(counts) == 2 * TOKENS


@pytest.mark.parametrize("label", [label for label in VECTORS if "biases" in label])
def test_output_vectors_are_the_gradients_of_biases(label: str) -> None:
    """As Megatron itself reduces them in the same layout."""
    for seen in vectors()[0][label]:
        for key, (_, g, _) in seen.vectors.items():
            assert gap(g, seen.gradients[key.removesuffix("weight") + "bias"]) < 2e-5, key


def _mean_inputs(rank: int, world: int) -> float:
    """Largest gap between MKOR's input vectors and the inputs themselves, kept by hooks of this test."""
    kept: dict[str, list[Tensor]] = {}
    with cpu_megatron(), opened(Cell(**BIASED), mkor()) as trainer:
        for name, module in bare(trainer.chunks[0]).named_modules():
            if type(module).__name__ in ("ColumnParallelLinear", "RowParallelLinear"):
                module.register_forward_pre_hook(
                    lambda _, args, name=name: kept.setdefault(f"{name}.weight", []).append(args[0].flatten(0, 1))
                )
        seen = watch(trainer)
        return max(gap(a, torch.cat(kept[key]).mean(0)) for key, (a, _, _) in seen.vectors.items())


def test_input_vectors_are_means_over_all_tokens() -> None:
    assert run_ranks(1, _mean_inputs)[0] < 1e-5


# --- what gradients are divided by ------------------------------------------------------------------------------------


def _overflow(trainer: Trainer) -> None:
    next(p for p in trainer.chunks[0].parameters() if p.requires_grad).main_grad.fill_(torch.inf)


def _scaled_run(rank: int, world: int) -> list[Seen]:
    cell = Cell(precision="fp16", optimizer={"loss_scale_window": 1}, **BIASED)
    with cpu_megatron(), opened(cell, mkor()) as trainer:
        found = [watch(trainer), watch(trainer), watch(trainer, _overflow), watch(trainer)]
        assert float(trainer.optimizer.get_loss_scale()) != 2.0**10
        return found


def test_the_loss_scale_is_divided_out_and_a_skipped_step_leaves_nothing() -> None:
    """The scale changes after every step, and before the inner optimizer is called."""
    found = run_ranks(2, _scaled_run)[0]
    assert [seen.done for seen in found] == [True, True, False, True] and not found[2].vectors
    for seen in (found[0], found[1], found[3]):
        for key, (_, g, count) in seen.vectors.items():
            assert count == TOKENS
            assert gap(g, seen.gradients[key.removesuffix("weight") + "bias"]) < 1e-2, key


def _summed_loss(per_token: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, count = per_token.float().sum(), torch.tensor(per_token.numel(), dtype=torch.int)
    return total, count, {"loss": (total / count).detach().clone()}


def _per_token(rank: int, world: int, cells: list[Cell]) -> list[tuple[Seen, list[float], list[float]]]:
    """Per cell the second step, the losses it was told, and the losses themselves."""
    megatron_harness._loss = _summed_loss  # type: ignore[assignment]
    found = []
    with cpu_megatron():
        for cell in cells:
            with opened(cell, mkor(hybrid=True)) as trainer:
                told = _told(trainer)
                losses = [trainer.train_step()[0]]
                found.append((watch(trainer), told[:1], _mean_over_ranks(losses)))
    return found


def test_gradients_divided_by_the_number_of_tokens() -> None:
    cells = [Adjusted(per_token=True, **BIASED), Adjusted(per_token=True, pp=2, microbatches=4, **BIASED)]
    for seen, told, losses in run_ranks(2, _per_token, cells)[0]:
        assert told == pytest.approx(losses, rel=1e-5)
        for key, (_, g, _) in seen.vectors.items():
            assert gap(g, seen.gradients[key.removesuffix("weight") + "bias"]) < 2e-5, key


# --- biases as columns; test_megatron_parity.py has the weights of every layout without -------------------------------

STEPS = 4


def test_weights_follow_one_process_with_biases_as_columns() -> None:
    """Cut by rows or alike on both ranks; the measure is what rounding does to this rule on this processor."""
    # SGD's steps are linear in gradients.
    make, cut = mkor(bundled=True, update_interval=2, backend="sgd"), Cell(clip=0.0, tp=2, **BIASED)
    one = replace(alone(cut), clip=0.0)
    (start,) = run_cells(1, [one], make, 0)
    otherwise_cut = [replace(one, microbatches=count) for count in (2, *OTHER_CUTS)]
    end, *others = (run.weights for run in run_cells(1, otherwise_cut, make, STEPS))
    (result,) = run_cells(2, [cut], make, STEPS)
    response = worst(move(other, end, start.weights) for other in others)
    assert result.replica_gap == 0.0
    assert move(result.weights, end, start.weights).largest <= 10.0 * response.largest


def _bundles(rank: int, world: int) -> list[tuple[str, ...]]:
    with cpu_megatron(), opened(Cell(tp=2, **BIASED), mkor(bundled=True)) as trainer:
        trainer.train_step()
        (unit,) = inner_optimizers(trainer)[0].planner.units.values()
        return [task.parts for batch in unit.exchange.plan.batches for task in batch.tasks]


def test_biases_are_columns_if_they_share_the_group() -> None:
    assert all(len(parts) == 2 for parts in run_ranks(2, _bundles)[0])


# --- MKOR-H -----------------------------------------------------------------------------------------------------------


def _told(trainer: Trainer) -> list[float]:
    """Losses the detectors of this rank get."""
    told: list[float] = []
    for inner in inner_optimizers(trainer):
        update = inner.switch.detector.update
        inner.switch.detector.update = lambda loss, update=update: (told.append(loss), update(loss))[1]  # type: ignore[method-assign]
    return told


def _mean_over_ranks(losses: list[float | None]) -> list[float]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, losses)
    known = [theirs for theirs in everyone if None not in theirs]
    return [sum(column) / len(column) for column in zip(*known, strict=True)]


def _hybrid(rank: int, world: int, cells: list[tuple[Cell, str]]) -> list[Any]:
    found = []
    with cpu_megatron():
        for cell, rule in cells:
            make = mkor(rule=rule, hybrid=True, hybrid_min_steps=2, hybrid_patience=2, hybrid_beta=1e3)
            with opened(cell, make) as trainer:
                told, losses, switched = _told(trainer), [], []
                for _ in range(5):
                    losses.append(trainer.train_step()[0])
                    switched.append([inner.switched for inner in inner_optimizers(trainer)])
                empty = not any(inner.matrix_states.everything() for inner in inner_optimizers(trainer))
                everyone: list[Any] = [None] * world
                dist.all_gather_object(everyone, (told, switched, empty))
                found.append((everyone, _mean_over_ranks(losses)))
    return found


HYBRID = {
    "DP2": (Cell(**DISTRIBUTED), "official"),
    "TP2": (Cell(tp=2), "official"),
    "PP2": (Cell(pp=2, microbatches=4), "official"),
    "PP2 interleaved": (Cell(pp=2, vpp=2, layers=4, microbatches=4), "official"),
    "EP2": (Cell(ep=2, **MOE), "official"),
    "PP2, sketches": (Cell(pp=2, microbatches=4), "sketch"),
}


@once
def hybrid() -> dict[str, Any]:
    return dict(zip(HYBRID, run_ranks(2, _hybrid, list(HYBRID.values()))[0], strict=True))


@pytest.mark.parametrize("label", HYBRID)
def test_every_rank_switches_on_the_mean_loss(label: str) -> None:
    ranks, losses = hybrid()[label]
    optimizers = 2 if label == "EP2" else 1
    for told, switched, empty in ranks:
        assert told == ranks[0][0] and len(told) == 3 * optimizers
        assert told[::optimizers] == pytest.approx(losses[:3], rel=1e-6)
        assert switched == [[False] * optimizers] * 2 + [[True] * optimizers] * 3
        assert empty


def _without_losses(rank: int, world: int) -> list[str]:
    said: list[str] = []
    with cpu_megatron(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_patches.wrappers.print_on_first_rank", said.append)
        with opened(Cell(), mkor(hybrid=True)) as trainer:
            trainer.config.grad_scale_func = lambda loss: loss
            trainer.train_step()
            trainer.train_step()
            assert not any(inner.switched for inner in inner_optimizers(trainer))
    return said


def test_a_loop_that_hides_its_losses_is_told() -> None:
    (warning,) = [text for text in run_ranks(1, _without_losses)[0] if "MKOR-H" in text]
    assert "grad_scale_func" in warning


# --- settings ---------------------------------------------------------------------------------------------------------


def _blocks(rank: int, world: int) -> tuple[list[tuple[int, ...]], str]:
    with cpu_megatron():
        with opened(Cell(tp=2), mkor(tp_mode="block")) as trainer:
            seen = watch(trainer)
            shapes = sorted({(len(a), len(g)) for a, g, _ in seen.vectors.values()})
        with pytest.raises(SupportError) as refusal, opened(Cell(tp=2, sp=True), mkor(tp_mode="block")):
            pass
    return shapes, str(refusal.value)


def test_blocks() -> None:
    """Every shard has statistics of its own; with sequence parallelism a rank would see some of its tokens only."""
    shapes, refusal = run_ranks(2, _blocks)[0]
    assert shapes == [(32, 64), (64, 64), (64, 128)]
    assert "tp_mode='block'" in refusal and "sequence" in refusal
