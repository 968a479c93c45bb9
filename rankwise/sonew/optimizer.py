"""SONew is the sparsified online Newton method, diagonal, tridiagonal or banded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.comm.halo import Halo, HaloExchange, ReadField
from rankwise.kernels.passes import Pass, Scalars
from rankwise.options.constructor import options_as_keywords
from rankwise.plan.notes import Note
from rankwise.plan.step_costs import PASS_TABLE_BYTES, TABLE_BYTES, ScratchMemory, StepCosts
from rankwise.plan.step_unit import Bucket, Collectives, StepUnit, portion_sizes, portions, spans
from rankwise.sonew.chain_runs import ChainRun, Margins
from rankwise.sonew.cuda_source import scratch_of
from rankwise.sonew.dispatch import directions_for
from rankwise.sonew.formulas import graft_ratio
from rankwise.sonew.options import SONewOptions
from rankwise.sonew.spec import SONewSpec
from rankwise.sonew.windows import windowed_directions
from rankwise.states.entries import Entry
from rankwise.step.first_order import fallback_step
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["DIRECTIONS", "SONew"]

DIRECTIONS: Note[Tensor] = Note("memory for directions on CPUs")
_LINE = 16


class _Directions(NamedTuple):
    """Directions of a bucket's shards, and squared norms of directions and grafts, (2, shards) in fp64."""

    directions: list[Tensor]
    squares: Tensor


def _margins(halos: Sequence[Halo]) -> Margins:
    """Stack the neighbours of a run in each field to its margins."""
    return Margins(torch.stack([halo.left for halo in halos]), torch.stack([halo.right for halo in halos]))


def _sizes(bucket: Bucket) -> list[int]:
    """Return the elements that each direction takes of the memory that they share: whole lines of the cache."""
    return bucket.entries.once("lines", lambda entries: [-(-entry.shard.numel // _LINE) * _LINE for entry in entries])


def _buffers(unit: StepUnit, bucket: Bucket, start: int) -> list[Tensor]:
    """Return memory for a bucket's directions.

    On CPUs it is kept for the next step, as fresh pages cost more than directions; the buckets before take ``start``
    elements of it. On devices it is that of the gradients where nobody needs them any more, because the framework says
    so or because they are copies.
    """
    if not _is_on_cpu(unit):
        return [
            grad if unit.spends(entry, grad) else torch.empty_like(grad)
            for entry, grad in zip(bucket.entries, bucket.grads, strict=True)
        ]
    sizes = _sizes(bucket)
    end = start + sum(sizes)
    memory = unit.notes.get(DIRECTIONS)
    if memory is None or memory.numel() < end:
        memory = unit.notes[DIRECTIONS] = bucket.grads[0].new_empty(end)
    parts = memory[start:end].split(sizes)
    return [part[: grad.numel()] for part, grad in zip(parts, bucket.grads, strict=True)]


def _is_on_cpu(unit: StepUnit) -> bool:
    return unit.device.type == "cpu"


def _at_once(unit: StepUnit, buckets: Sequence[Bucket]) -> Iterator[list[Bucket]]:
    """Return portions of buckets whose directions exist at one time: a single one if ranks must sum the norms."""
    if not unit.sums.trivial:
        return iter([list(buckets)])
    spent = not _is_on_cpu(unit)
    return portions(buckets, lambda entry, grad: 0 if spent and unit.spends(entry, grad) else grad.numel())


class SONew(ShardedOptimizer):
    r"""Sparsified online Newton (arXiv 2311.10085).

    Keeps the covariance of neighbouring gradient entries on a band and steps along ``X m``, ``X`` the positive
    definite matrix that is zero off the band and whose inverse agrees with the covariance on it. The step takes its
    length, per parameter, from a graft direction. Vectors take AdamW with the same lr and betas.

    Example:
        >>> optimizer = rankwise.SONew(model.named_parameters(), lr=3e-3, band=1)
        >>> model(batch).loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()

    Raises:
        OptionError: A value is outside its range, or no parameter takes the SONew rule.
    """

    options: SONewOptions
    spec_class = SONewSpec
    spec: SONewSpec

    @options_as_keywords(SONewOptions)
    def __init__(self, params: Any, options: SONewOptions) -> None:
        super().__init__(params, options)

    def plan(self, unit: StepUnit) -> Collectives:
        """Plan the exchange of neighbours across cuts."""
        keys = unit.keys("matrix") if self.options.band else []
        by_row = self.options.chain == "row"
        halo = HaloExchange(unit.layout, self.options.band, keys, unit.device, unit.dtype, by_row)
        return Collectives(halo=halo)

    def step_costs(self, unit: StepUnit) -> StepCosts:
        """Return the costs of a step: it sums norms of step and graft, and before them "rmsprop" those of gradients."""
        sums = {"none": (), "rmsprop": (1, 2)}.get(self.options.graft, (2,))
        band = self.options.band
        # The plain form opens the narrow states of one parameter at a time.
        opened = len(self.spec.narrow_statistics) if self.options.graft == "rmsprop" else 0

        def elements(everything: int, largest: int) -> float:
            directions = 0 if unit.spends_gradients else 4 * portion_sizes(everything, largest)[0]
            at_once = directions / 4 if directions else everything
            places = everything * (PASS_TABLE_BYTES + TABLE_BYTES if directions else PASS_TABLE_BYTES)
            return directions + 4 * opened * largest + scratch_of(at_once, band) + places

        return StepCosts(
            sums=sums,
            halo_fields=3 + band,
            element_flops=30.0 + 12.0 * band**2,
            scratch=ScratchMemory(elements=elements),
        )

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        matrices = fallback_step(unit, buckets)
        halos = self._halos(unit, matrices)
        for portion in _at_once(unit, matrices):
            self._step_together(unit, portion, halos)
        self.health.add("matrices_updated", sum(len(bucket.entries) for bucket in matrices))

    def _step_together(self, unit: StepUnit, matrices: list[Bucket], halos: dict[int, list[Halo]]) -> None:
        grad_norms = self._grad_norms(unit, matrices) if self.options.graft == "rmsprop" else None
        parts: list[_Directions] = []
        stepped: list[Bucket] = []
        start = 0
        for bucket, span in spans(matrices):
            for piece, directions in self._directions_of(
                unit, bucket, start, halos, None if grad_norms is None else grad_norms[span]
            ):
                parts.append(directions)
                stepped.append(piece)
                start += sum(_sizes(piece))
        ratios = self._graft_ratios(unit, stepped, parts)
        for (bucket, span), part in zip(spans(stepped), parts, strict=True):
            scalars = Scalars(lr=bucket.group["lr"], weight_decay=bucket.group["weight_decay"])
            fields = {"grad": part.directions, "param": bucket.weights}
            unit.run(Pass("step", fields, scalars, None if ratios is None else ratios[span]))

    def _halos(self, unit: StepUnit, buckets: list[Bucket]) -> dict[int, list[Halo]]:
        """Return for each cut shard the neighbours of gradient, momentum, diagonal and covariances; a collective."""
        halo = unit.halo
        assert halo is not None
        if halo.empty:
            return {}
        halos_by_field = halo(_parts_of(unit, buckets, self.spec.statistics))
        return {
            entry.index: [halos[entry.index] for halos in halos_by_field]
            for bucket in buckets
            for entry in bucket.entries
            if not entry.shard.is_whole
        }

    def _grad_norms(self, unit: StepUnit, buckets: list[Bucket]) -> Tensor:
        grads = [grad for bucket in buckets for grad in bucket.grads]
        entries = [entry for bucket in buckets for entry in bucket.entries]
        return unit.sum_over_ranks(entries, unit.squared_norms(grads))[0].sqrt().to(unit.dtype)

    def _directions_of(
        self, unit: StepUnit, bucket: Bucket, start: int, halos: Mapping[int, list[Halo]], grad_norms: Tensor | None
    ) -> Iterator[tuple[Bucket, _Directions]]:
        """Advance the statistics of a bucket; yield its pieces, with directions and the norms for the graft."""
        names = self.spec.statistics
        fused = directions_for(unit.device, unit.dtype, self.options.band)
        narrow = any(unit.narrow.is_narrow(bucket, name) for name in names)
        if (
            fused is None
            or self.options.graft == "rmsprop"
            or (narrow and unit.dtype != torch.float32)
            or any(entry.shard.columns is not None for entry in bucket.entries)
        ):
            # The plain form works on one shard after the other, and need not open the states of more.
            single: list[list[int] | None] = [[place] for place in range(len(bucket.entries))]
            for places in single if narrow else [None]:
                piece = bucket if places is None else bucket.only(places)
                norms = grad_norms if grad_norms is None or places is None else grad_norms[places]
                yield piece, self._windowed(unit, piece, halos, norms)
                unit.narrow.keep_apart()
                piece.found.clear()
            return
        for part in unit.narrow.whole_runs(bucket, names):
            piece = bucket if len(part.places) == len(bucket.entries) else bucket.only(part.places)
            out = _buffers(unit, piece, start)
            start += sum(_sizes(piece))
            states = [part.states[name] for name in names]
            runs, margins = self._places(piece, halos)
            squares = fused(runs, piece.grads, *states[:2], states[2:], margins, out=out, **self._numbers(piece))
            yield piece, _Directions(out, squares)

    def _numbers(self, bucket: Bucket) -> dict[str, Any]:
        group = bucket.group
        hyper = {name: group[name] for name in ("betas", "eps", "gamma", "graft_eps")}
        return hyper | {"step": bucket.step, "graft": self.options.graft}

    def _places(self, bucket: Bucket, halos: Mapping[int, list[Halo]]) -> tuple[list[ChainRun], list[Margins | None]]:
        margins = [_margins(halos[entry.index]) if entry.index in halos else None for entry in bucket.entries]
        return bucket.entries.once("chains", self._chains), margins

    def _chains(self, entries: Sequence[Entry]) -> list[ChainRun]:
        shards, by_row = [entry.shard for entry in entries], self.options.chain == "row"
        return [ChainRun(each.start, each.shape[-1] if by_row and len(each.shape) > 1 else None) for each in shards]

    def _windowed(
        self, unit: StepUnit, bucket: Bucket, halos: Mapping[int, list[Halo]], grad_norms: Tensor | None
    ) -> _Directions:
        directions, grafts = windowed_directions(
            [entry.shard for entry in bucket.entries],
            [bucket.grads, *(bucket.state(name) for name in self.spec.statistics)],
            [halos.get(entry.index) for entry in bucket.entries],
            chain=self.options.chain,
            rms=bucket.state("graft_sq") if self.options.graft == "rmsprop" else None,
            grad_norms=grad_norms,
            **self._numbers(bucket),
        )
        squares = unit.squared_norms(directions)
        both = [squares, squares if grafts is None else unit.squared_norms(grafts)]
        return _Directions(directions, torch.stack(both))

    def _graft_ratios(self, unit: StepUnit, buckets: list[Bucket], parts: list[_Directions]) -> Tensor | None:
        """Return, per shard, the factor that gives its parameter's step the norm of the graft; one collective."""
        if self.options.graft == "none":
            return None
        entries = [entry for bucket in buckets for entry in bucket.entries]
        squares = [part.squares for part in parts] or [torch.zeros(2, 0, dtype=torch.float64, device=unit.device)]
        updates, graft = unit.sum_over_ranks(entries, squares[0] if len(squares) == 1 else torch.cat(squares, dim=1))
        ratios = graft_ratio(graft, updates).to(unit.dtype)
        self.health.add("graft_ratio", ratios.sum(), len(entries))
        return ratios


def _parts_of(unit: StepUnit, buckets: Sequence[Bucket], states: Sequence[str]) -> list[ReadField]:
    """Return functions by which :class:`HaloExchange` reads parts of the shards' gradients and of each state."""
    places = [{entry.index: place for place, entry in enumerate(bucket.entries)} for bucket in buckets]
    zero = torch.zeros((), dtype=unit.dtype, device=unit.device)

    def read(state: str | None, wanted: Sequence[tuple[int, slice]]) -> Sequence[Tensor]:
        # Parameters without a gradient, or without chains, send zeros, which nobody uses.
        values_wanted = [zero.expand(part.stop - part.start) for _, part in wanted]
        for bucket, place_of in zip(buckets, places, strict=True):
            numbers = [number for number, (index, _) in enumerate(wanted) if index in place_of]
            parts = [(place_of[index], part) for index, part in (wanted[number] for number in numbers)]
            if state is None:
                values = [bucket.grads[place][part] for place, part in parts]
            else:
                values = bucket.narrow.peeked(bucket, state, parts)
            for number, value in zip(numbers, values, strict=True):
                values_wanted[number] = value
        return values_wanted

    return [partial(read, state) for state in (None, *states)]
