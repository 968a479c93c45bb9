"""Ulysses (ALST): ranks share each sequence as accelerate and the Trainer set it up; every type follows one process."""

from __future__ import annotations

from typing import Any

import autotp_runs as tp
import deepspeed
import numpy as np
import pytest
import torch
from autotp_runs import Cell, Outcome
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from ds_harness import REFERENCE, TYPES, error, run_ranks
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

LENGTH = 8
NAMED = [name for name in TYPES if name != "MARS"]
WORST = 10.0


def _samples(steps: int) -> Tensor:
    """(steps * micro-batches, samples, tokens)."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 60, (steps * tp.ACCUMULATION, tp.BATCH, LENGTH), generator=generator)


def _loss(model: nn.Module, logits: Tensor, shifted: Tensor, group: Any) -> Tensor:
    """As the Trainer and DeepSpeed's guide have it: the mean over the tokens of all ranks."""
    own = model.loss_function(logits=logits, labels=None, shift_labels=shifted, vocab_size=model.config.vocab_size)
    counted = (shifted != -100).sum().to(logits.dtype)
    counts, losses = all_gather(counted, group=group), all_gather(own, group=group)
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def _shared(rank: int, world: int, cells: list[Cell]) -> list[Outcome]:
    found = []
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=tp.model_of(cells[0]),
        core_attn_implementation="sdpa",
        sequence_parallel_size=world,
        micro_batch_size=tp.BATCH,
        seq_length_is_variable=True,
    )
    for cell in cells:
        model = tp.model_of(cell)
        config = {**cell.config_on(1), "sequence_parallel_size": world}
        engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
        group = mpu.get_sequence_parallel_group()
        places = torch.arange(LENGTH).expand(tp.BATCH, -1)
        loader = [{"input_ids": x, "labels": x, "position_ids": places} for x in _samples(cell.steps)[rank::world]]
        shards = UlyssesSPDataLoaderAdapter(loader, rank, group, world, torch.device("cpu"))
        norms, losses = [], []
        for number, shard in enumerate(shards):
            shifted = shard.pop("shift_labels").contiguous()
            loss = _loss(model, engine(**shard).logits, shifted, group)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            if number % tp.ACCUMULATION == tp.ACCUMULATION - 1:
                norms.append(float(engine.get_global_grad_norm() or 0.0))
        found.append(Outcome(tp.whole_weights(engine), losses, norms))
        engine.destroy()
    return found


def _check(cells: list[Cell], world: int) -> None:
    results = run_ranks(world, _shared, cells, timeout=900.0)
    adamw = 0.0
    for cell, *ranks in zip(cells, *results, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tp, "tokens", lambda steps: _samples(steps).unflatten(0, (steps, tp.ACCUMULATION)))
            # DeepSpeed divides by the ranks that share no sequence; such a loss has a rank's gradient `world` times.
            first, expected = tp.one_process(cell, factor=world)
            own = error(tp.one_process(cell, world, 1e-7)[1].whole, expected.whole, first)
        for rank in ranks:
            assert all(np.array_equal(rank.whole[name], ranks[0].whole[name]) for name in rank.whole), cell
        distance = error(ranks[0].whole, expected.whole, first)
        adamw = adamw or distance
        print(cell.name, cell.stage, f"{distance:.1e}, AdamW's {adamw:.1e}, rounding's {own:.1e}")
        assert np.allclose(ranks[0].norms, expected.norms, rtol=5e-3), (cell, ranks[0].norms, expected.norms)
        assert distance <= WORST * max(adamw, own), (cell, distance, adamw, own)


@pytest.mark.slow
def test_ranks_that_share_a_sequence_follow_one_process() -> None:
    _check([Cell(name, "llama", 2, cut=1, steps=4) for name in (REFERENCE, "MKOR", "LDAdam")], 2)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_type(stage: int) -> None:
    # Not SONew: see test_ds_autotp.py.
    _check([Cell(name, "llama", stage, cut=1) for name in (REFERENCE, *NAMED) if name != "SONew"], 2)
