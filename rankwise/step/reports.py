"""What an optimizer says about itself: rules and owners, memory, health."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.sharding import Traffic
from rankwise.step.health import Health
from rankwise.step.table import RoutedOptimizer
from rankwise.step.unit import StepUnit
from rankwise.step.work import StepWork

__all__ = ["Explanation", "Reports"]

_PER_STEP = ("bytes_sent", "collectives", "matrices_updated", "steps")


@dataclass(frozen=True)
class Explanation:
    """What happens to one parameter, as reported by :meth:`Reports.explain`."""

    name: str
    shape: tuple[int, ...]
    rule: str
    reason: str
    owner: int | None
    state_bytes: int

    def __str__(self) -> str:
        owner = "-" if self.owner is None else str(self.owner)
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.name}  {shape}  {self.rule} ({self.reason})  owner {owner}  {self.state_bytes} B"


class Reports(RoutedOptimizer):
    """The part of :class:`rankwise.step.optimizer.ShardedOptimizer` that is only read."""

    health_means: ClassVar[tuple[str, ...]] = ()
    """Metrics of :attr:`health` beyond the common ones, reported as means."""
    health_totals: ClassVar[tuple[str, ...]] = ()
    """The same, reported as totals over ranks."""

    product_option: ClassVar[str] = ""
    """The option that names the type of the rule's matrix products, or leaves it to the machine."""

    def product_type(self, unit: StepUnit) -> torch.dtype | None:
        """The type of the rule's matrix products on this machine; None for a rule without a choice."""
        return None

    def _detach(self) -> None:
        super()._detach()
        self.health = Health(self.health_means, (*_PER_STEP, "skipped_steps", *self.health_totals))
        self._reported = Traffic()

    def read_health(self) -> dict[str, float]:
        """What happened since the last reading; every data-parallel rank must call it.

        Returns:
            Per step: ``matrices_updated``, ``collectives`` and ``bytes_sent`` (summed over ranks); ``skipped_steps``,
            the calls of ``step()`` that ``skip_nonfinite`` undid; and the optimizer's
            own metrics, see its ``health_means`` and ``health_totals``.
        """
        sent = [*(unit.total_traffic for unit in self._units.values()), *self.further_traffic]
        total = Traffic(sum(part.collectives for part in sent), sum(part.bytes for part in sent))
        if total.collectives < self._reported.collectives:
            self._reported = Traffic()  # planned anew since
        self.health.add("collectives", total.collectives - self._reported.collectives)
        self.health.add("bytes_sent", total.bytes - self._reported.bytes)
        self._reported = total
        found = self.health.read(self._source.group)
        ranks = 1 if self._source.group is None else dist.get_world_size(self._source.group)
        steps = max(found.pop("steps") / ranks, 1.0)
        found["skipped_steps"] /= ranks
        return {name: value / steps if name in _PER_STEP else value for name, value in found.items()}

    @property
    def further_traffic(self) -> list[Traffic]:
        """What this rank has sent outside its units."""
        return []

    def work(self, unit: StepUnit) -> StepWork:
        """What a step of a planned unit costs beyond what its layout and owners say; for estimates."""
        return StepWork()

    def state_bytes(self) -> dict[str, int]:
        """Bytes of optimizer state this rank holds: ``{"element": …, "matrix": …}``."""
        element = sum(value.nbytes for state in self.state.values() for value in _element_states(state).values())
        return {"element": element, "matrix": self.matrix_states.nbytes}

    def owners(self) -> dict[str, int]:
        """Owner rank of every planned matrix."""
        return {
            key: owner
            for unit in self._units.values()
            if unit.exchange is not None
            for key, owner in unit.exchange.plan.owners.items()
        }

    def summary(self) -> str:
        """One line: matrices routed, balance over owners, type of their products, state and bytes sent of this rank."""
        exchanges = [unit.exchange for unit in self._units.values() if unit.exchange is not None]
        mean = sum(self._loads) / max(len(self._loads), 1)
        balance = f", owners' load max/mean {max(self._loads) / mean:.2f}" if mean else ""
        held = self.state_bytes()
        sent = sum(exchange.bytes_per_gather for exchange in exchanges)
        return (
            f"rankwise {type(self).__name__}: {self._shares()}{balance}{self._product_types()}; state on this rank "
            f"{held['element'] / 2**20:.1f} MiB by element and {held['matrix'] / 2**20:.1f} MiB in matrices; "
            f"{sent / 2**20:.2f} MiB sent to owners per step"
        )

    def _shares(self) -> str:
        """How much of the model takes the optimizer's own rule, and why the rest does not."""
        sizes: Counter[str] = Counter()
        matrices = tensors = own = 0
        for unit in self._units.values():
            for key, shape in unit.layout.shapes.items():
                chosen, size = unit.routes[key], prod(shape)
                tensors += 1
                if chosen.rule == "matrix":
                    matrices, own = matrices + 1, own + size
                else:
                    sizes[chosen.reason] += size
        total = max(own + sizes.total(), 1)
        text = f"{own / total:.1%} of {own + sizes.total():,} weights ({matrices} of {tensors} tensors) take its rule"
        rest = ", ".join(f"{size / total:.1%} {reason}" for reason, size in sizes.most_common())
        return f"{text}, the rest the first-order fallback ({rest})" if rest else text

    def _product_types(self) -> str:
        types = {found: None for unit in self._units.values() if (found := self.product_type(unit)) is not None}
        if not types:
            return ""
        option = self.product_option
        chosen = " and ".join(str(dtype).removeprefix("torch.") for dtype in types)
        return f"; products in {chosen} ({option}={getattr(self.options, option)!r})"

    def explain(self) -> list[Explanation]:
        """One line per parameter: rule, why, owner, bytes of optimizer state on this rank."""
        owners = self.owners()
        state_bytes = self._element_bytes()
        owner_of: dict[str, int] = {}
        for key, owner in owners.items():
            owner_of.setdefault(self._base_name(key), owner)
        for key in self.matrix_states:
            name = self._base_name(key)
            state_bytes[name] = state_bytes.get(name, 0) + self.matrix_states.bytes_of(key)
        return [
            Explanation(
                name,
                info.shape,
                self._routes[name].rule,
                self._routes[name].reason,
                owner_of.get(name),
                state_bytes.get(name, 0),
            )
            for name, (info, _) in self._catalog.items()
        ]

    def _element_bytes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for unit in self._units.values():
            for entry in unit.entries:
                name = self._base_name(entry.key)
                states = _element_states(self.state.get(unit.tensors[entry.fragment.tensor], {}))
                for state_name, value in states.items():
                    if unit.states.offset(state_name, entry) is not None:
                        found[name] = found.get(name, 0) + entry.fragment.numel * value.element_size()
        return found


def _element_states(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and name != "step"}
