"""Steps of several ranks, recorded with their collectives as a CUDA graph records them, and repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graph_recorder import Recorder, capturing
from ranks import run_ranks
from simulated import CASES, Framework, gradients, world_group
from torch import Tensor

from rankwise.comm.exchange import MatrixExchange
from rankwise.kernels import lists as foreach
from rankwise.kernels.dispatch import using
from rankwise.options.validation import OptionError

CELLS = [
    ("mars-adamw", "cut"),
    ("mars-muon", "cut"),
    ("sonew-1-tensor-adam", "cut"),
    ("sonew-4-row-rmsprop", "views"),
    ("ldadam-ef", "cut"),
    ("ldadam-ef", "replicated"),
    ("ldadam-plain", "views"),
]


def _place_gradients(framework: Framework) -> None:
    """Those of the next step, where the last ones lie."""
    values = {name: value.to(torch.float64) for name, value in gradients(framework.count).items()}
    for tensor, slices in framework.shards:
        new = framework._filled(values, tensor.numel(), slices).view(tensor.shape)
        tensor.grad = new if tensor.grad is None else tensor.grad.copy_(new)
    framework.count += 1


def _train(rank: int, world: int, name: str, layout: str, capturable: bool) -> dict[str, Tensor]:
    case = replace(CASES[name], options={**CASES[name].options, "capturable": capturable})
    MatrixExchange.one_by_one_on = ()  # as on accelerators; the process is this test's own
    framework = Framework(layout, case, torch.float64, rank, world, world_group())
    with using(foreach):
        for index in range(7):
            _place_gradients(framework)
            if not capturable or index < 3:
                framework.optimizer.step()
            elif index == 3:
                graph = Recorder()
                with capturing(), graph:
                    framework.optimizer.step()
            else:
                graph.replay()
    found = {f"{piece.key} {piece.start}": value.clone() for piece, value in framework.pieces()}
    for key, state in framework.optimizer.matrix_states.items():
        if name == "ldadam-plain" and key == "unused.weight":
            # A gradient of zero leaves any basis open: this one is kept, and that of the twin is completed anew.
            del state["basis"]
        found |= {f"{key} {name}": value for name, value in state.items()}
    return found


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_replays_of_several_ranks_are_steps(name: str, layout: str) -> None:
    run, twin = (run_ranks(2, _train, name, layout, capturable) for capturable in (True, False))
    for mine, theirs in zip(run, twin, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(
                mine[key], value, rtol=1e-9, atol=1e-11, msg=lambda text, key=key: f"{key}: {text}"
            )


def _slices(rank: int, world: int) -> str:
    case = replace(CASES["ldadam-ef"], options={**CASES["ldadam-ef"].options, "capturable": True})
    framework = Framework("tensor", case, torch.float64, rank, world, world_group())
    with pytest.raises(OptionError) as error:
        framework.step()
    return str(error.value)


def test_slices_of_matrices_are_refused() -> None:
    (message, other) = run_ranks(2, _slices)
    assert message == other and "capturable=True is invalid under tensor parallelism" in message
