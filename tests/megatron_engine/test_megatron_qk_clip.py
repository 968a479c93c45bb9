"""QK-clip beside our optimizers: full-precision copies follow the model's weights, whoever holds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.optimizer import qk_clip
from megatron_cells import DISTRIBUTED, OVERLAPPED, Cell
from megatron_harness import MakeOptimizer, Trainer, opened
from megatron_latent import LatentTrainer, any_megatron
from megatron_types import maker
from megatron_weights import model_weight
from ranks import once, run_ranks
from torch import Tensor

from megatron_patches.patches import PATCHES

# All heads' logits are above it at every step.
THRESHOLD = 1.0
STEPS = 2
STOCK = qk_clip.clip_qk
OURS = next(patch for patch in PATCHES if patch.name == "clip_qk").replace(STOCK)
LATENT = Cell(precision="bf16", latent=True)
CELLS: dict[str, Cell] = {
    "distributed": Cell(precision="bf16", **DISTRIBUTED),
    "latent TP2": replace(LATENT, tp=2),
}
FURTHER: dict[str, Cell] = {
    "plain": Cell(precision="bf16"),
    "TP2": Cell(precision="bf16", tp=2),
    "TP2 distributed": Cell(precision="bf16", tp=2, **DISTRIBUTED),
    "overlapped": Cell(precision="bf16", **OVERLAPPED),
    "latent": replace(LATENT, **DISTRIBUTED),
    "latent TP2 distributed": replace(LATENT, tp=2, **DISTRIBUTED),
    "layer-wise": Cell(precision="bf16", optimizer={"rankwise_layer_wise": True}),
}
# Whole copies on every rank are what Megatron's own function is made for.
WHOLE = {False: Cell(precision="bf16"), True: LATENT}


class Run(NamedTuple):
    """What rank 0 saw: main weights, the model's own, before the last clip too, and the largest logit of each step."""

    main: dict[str, Tensor]
    model: dict[str, Tensor]
    unclipped: dict[str, Tensor]
    logits: list[float]


def _watch(layer: Any) -> None:
    """The largest logit of each head over a step's micro-batches, which only Transformer Engine's attention tells."""
    forward = layer.core_attention.forward
    layer.core_attention.current_max_attn_logits = None

    def watched(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        keys = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
        logits = torch.einsum("qbhd,kbhd->hbqk", query.float(), keys.float()).flatten(1).amax(1).detach()
        seen = layer.core_attention.current_max_attn_logits
        layer.core_attention.current_max_attn_logits = logits if seen is None else torch.max(seen, logits)
        return forward(query, key, *args, **kwargs)

    layer.core_attention.forward = watched


def _watch_all(trainer: Trainer) -> None:
    for chunk in trainer.chunks:
        for layer in chunk.modules():
            if hasattr(layer, "clip_qk"):
                _watch(layer)


def _clipped(cell: Cell, make: MakeOptimizer, clip: Callable[..., float]) -> Run:
    with opened(cell, make, LatentTrainer if cell.latent else None) as trainer:
        trainer.config.qk_clip, trainer.config.qk_clip_threshold = True, THRESHOLD
        _watch_all(trainer)
        logits = []
        for _ in range(STEPS):
            trainer.train_step()
            unclipped = trainer.weights()[0]
            logits.append(clip(trainer.chunks))
        trainer.gather_params()
        main, gap = trainer.weights()
        model, model_gap = trainer.weights(model_weight)
        assert max(gap, model_gap) == 0
        return Run(main, model, unclipped, logits)


def _all(rank: int, world: int, names: tuple[str, ...], cells: dict[str, Cell]) -> dict[str, Run]:
    with any_megatron("bf16"):
        found = {}
        for name in names:
            for latent in {cell.latent for cell in cells.values()}:
                found[f"{name} whole {latent}"] = _clipped(WHOLE[latent], maker(name), STOCK)
            for label, cell in cells.items():
                found[f"{name} {label}"] = _clipped(cell, maker(name), OURS)
        return found


@once
def _runs(names: tuple[str, ...], further: bool) -> dict[str, Run]:
    return run_ranks(2, _all, names, FURTHER if further else CELLS)[0]


def _check(cell: Cell, run: Run, whole: Run) -> None:
    rows = [name for name in run.main if "linear_qkv" in name or "linear_q_proj" in name or "kv_up" in name]
    assert rows and all(logit > THRESHOLD for logit in run.logits)
    for name, main in run.main.items():
        factors = (main / run.unclipped[name]).nan_to_num(1.0)
        assert bool((factors < 0.999).any()) == (name in rows), name
        if name in rows:
            # Every element of a row by the same factor, and values, whose rows are among them, by none.
            torch.testing.assert_close(factors, factors[:, :1].expand_as(factors), rtol=1e-5, atol=0)
            assert "linear_q_proj" in name or bool((factors == 1.0).all(1).any())
        # The model's weights were rounded before they were scaled, and after.
        torch.testing.assert_close(run.model[name], main, rtol=2**-7, atol=1e-6)
        assert (main - whole.main[name]).abs().mean() < 0.06 * whole.main[name].abs().mean(), name
    # Megatron takes the largest of one tensor-parallel rank's heads.
    assert run.logits == pytest.approx(whole.logits, rel=0.05) or cell.tp > 1


@pytest.mark.parametrize("label", CELLS)
def test_full_precision_weights_follow(label: str) -> None:
    runs = _runs(("mars-m",), further=False)
    _check(CELLS[label], runs[f"mars-m {label}"], runs[f"mars-m whole {CELLS[label].latent}"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["mars-m", "mars-shampoo", "ldadam", "mkor"])
@pytest.mark.parametrize("label", FURTHER)
def test_further_wrappers_and_types(name: str, label: str) -> None:
    runs = _runs((name,), further=True)
    _check(FURTHER[label], runs[f"{name} {label}"], runs[f"{name} whole {FURTHER[label].latent}"])


def _log(rank: int, world: int) -> tuple[float, bool]:
    with any_megatron("bf16"), opened(CELLS["distributed"], maker("mars-m")) as trainer:
        _watch_all(trainer)
        trainer.train_step()
        before = [weight.detach().clone() for weight in trainer.chunks[0].parameters()]
        largest = OURS(trainer.chunks, log_max_only=True)
        return largest, all(map(torch.equal, before, trainer.chunks[0].parameters()))


def test_logging_alone_changes_nothing() -> None:
    largest, is_unchanged = run_ranks(1, _log)[0]
    assert largest > 1 and is_unchanged
