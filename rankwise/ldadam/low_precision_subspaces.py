"""Bases and moments of matrices in a narrower type than that of the computation: rounded once, at the end of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rankwise.kernels.dispatch import quantization_for
from rankwise.kernels.lists import copy_
from rankwise.kernels.low_precision_runs import LowPrecisionRuns
from rankwise.kernels.quantization import key_of
from rankwise.ldadam.in_place import InPlace, LowRankStep, StepsInPlace
from rankwise.ldadam.signature import ELEMENTS_AT_ONCE
from rankwise.ldadam.spec import SUBSPACE, LDAdamSpec

__all__ = ["LowPrecisionSubspaces", "opened"]


class LowPrecisionSubspaces:
    """Keeps what steps compute in the type of the states.

    Args:
        spec: Says how states are rounded.
    """

    def __init__(self, spec: LDAdamSpec) -> None:
        self._spec = spec
        self._some = any(spec.subspace_types.values())

    def keep(
        self,
        keys: Sequence[str],
        states: Sequence[Mapping[str, Tensor]],
        new: Mapping[str, Sequence[Tensor]],
        step: int | Tensor | None,
    ) -> None:
        """Overwrite the states of some matrices.

        What their holders get is not rounded: the momentum in the error buffer is exact then, and with it the next
        one, which is made of the buffer alone.

        Args:
            keys: Keys of the matrices.
            states: States of the matrices.
            new: What they are to be, by name.
            step: The number of the step, one for all or (matrices,) on the device; None: the states have it counted.
        """
        for name, values in new.items():
            own = [state[name] for state in states]
            if own[0].dtype == values[0].dtype:
                copy_(own, list(values))
                continue
            count = None
            if self._spec.rounds_stochastically(name):
                count = torch.stack([state["step"] for state in states]) if step is None else step
            numbers = [key_of(key, name) for key in keys]
            narrow = LowPrecisionRuns([state.view(-1) for state in own], (), [0] * len(own), numbers, count)
            form = quantization_for(values[0].device, values[0].dtype)
            form.encode_([value.reshape(-1) for value in values], narrow)

    def step_in_place(self, keys: Sequence[str], jobs: Sequence[LowRankStep], form: StepsInPlace) -> InPlace:
        """Step matrices where they lie; narrow states are opened for some of them at a time.

        Args:
            keys: Keys of the matrices.
            jobs: The matrices.
            form: What steps them.
        """
        if not self._some:
            return form.step(jobs)
        left: list[int] = []
        rotation: Tensor | float = 0.0
        kept: Tensor | float = 0.0
        for some in _at_once(jobs):
            found = self._step_opened(keys[some], jobs[some], form)
            left += [some.start + place for place in found.left]
            rotation, kept = rotation + found.rotation, kept + found.kept
        return InPlace(left, rotation, kept)

    def _step_opened(self, keys: Sequence[str], jobs: Sequence[LowRankStep], form: StepsInPlace) -> InPlace:
        found = [{name: job.weight.new_empty(job.state[name].shape) for name in SUBSPACE} for job in jobs]
        for name in SUBSPACE:
            copy_([state[name] for state in found], [job.state[name] for job in jobs])
        result = form.step([replace(job, state=state) for job, state in zip(jobs, found, strict=True)])
        left = set(result.left)
        stepped = [place for place in range(len(jobs)) if place not in left]
        if stepped:
            steps = [jobs[place].step for place in stepped]
            step: int | Tensor = steps[0]
            if len(set(steps)) > 1:
                step = torch.tensor(steps, dtype=torch.int64, device=jobs[0].weight.device)
            new = {name: [found[place][name] for place in stepped] for name in SUBSPACE}
            self.keep([keys[place] for place in stepped], [jobs[place].state for place in stepped], new, step)
        return result


def _at_once(jobs: Sequence[LowRankStep]) -> Iterator[slice]:
    """Matrices whose states are opened at a time."""
    first = elements = 0
    for place, job in enumerate(jobs):
        own = sum(job.state[name].numel() for name in SUBSPACE)
        if place > first and elements + own > ELEMENTS_AT_ONCE:
            yield slice(first, place)
            first, elements = place, 0
        elements += own
    yield slice(first, len(jobs))


def opened(states: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """(..., m, n) of matrices in the type of the computation; of a single one as such."""
    return (states[0] if len(states) == 1 else torch.stack(list(states))).to(dtype)
