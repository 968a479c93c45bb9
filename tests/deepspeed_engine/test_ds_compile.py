"""``engine.compile()``: a compiled model trains as the same one that is not, MKOR's hooks included."""

from __future__ import annotations

import ds_harness as ds
import numpy as np
import pytest
from ds_harness import run_ranks


def _trained(rank: int, world: int, name: str, backend: str) -> list[tuple[list[float], dict[str, np.ndarray], int]]:
    found = []
    for compiled in (False, True):
        engine = ds.engine_of(ds.Job(name, ds.TYPES[name], config={"zero_optimization": {"stage": 2}}), world)
        if compiled:
            engine.compile(backend=backend)
        losses = [ds.train_step(engine, rank, world, step) for step in range(4)]
        seen = len(engine.basic_optimizer.matrix_states)
        found.append((losses, ds.model_weights(engine), seen))
        engine.destroy()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "eager") for name in ds.TYPES if name != "MARS"),
        ("MKOR", "inductor"),
    ],
)
def test_a_compiled_engine_trains_alike(name: str, backend: str) -> None:
    for (losses, weights, states), (others, compiled, known) in run_ranks(2, _trained, name, backend):
        assert states == known
        if backend == "eager":
            assert losses == others
        for key, values in weights.items():
            assert np.allclose(values, compiled[key], rtol=0.0, atol=0.0 if backend == "eager" else 2e-3), key
