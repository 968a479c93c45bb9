"""What an optimizer tells users of itself: rules and owners, memory, health."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rankwise.comm.message_format import Traffic
from rankwise.kernels.low_precision_runs import blocks_of, is_coded
from rankwise.layout.dtensors import local_view
from rankwise.layout.fused_blocks import Block, cut_into_blocks
from rankwise.layout.logical_matrices import block_info
from rankwise.plan.planner import Planner
from rankwise.routing.unknown_parts import unknown_parts
from rankwise.states.element_states import States
from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.step.health import Health

__all__ = ["Explanation", "Reports", "health_of", "print_on_first_rank"]

logger = logging.getLogger(__name__)

_PER_STEP = ("bytes_sent", "collectives", "matrices_updated", "steps")


@dataclass(frozen=True)
class Explanation:
    """The treatment of one parameter, as ``optimizer.explain()`` reports it."""

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


def print_on_first_rank(text: str) -> None:
    """Print a line on the first rank, whatever the levels of its loggers."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def health_of(spec: OptimizerSpec) -> Health:
    """Make the counters that :class:`Reports` reads."""
    return Health(spec.health_means, (*_PER_STEP, "skipped_steps", *spec.health_totals))


class Reports:
    """Describes an optimizer, and changes none of it.

    Attributes:
        announce: Called with :meth:`summary` and further lines, once every unit is planned; it logs them, unless a
            framework replaces it.
    """

    def __init__(self, planner: Planner, health: Health) -> None:
        self._planner, self._spec, self._table, self._health = planner, planner.spec, planner.table, health
        self.announce: Callable[[str], None] = logger.info
        self._announced = False
        self._reported = Traffic()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has announced nothing yet.
        return type(self), (self._planner, self._health)

    def announce_once(self, states: States) -> None:
        """Announce the summary, unless it was announced before."""
        if not self._announced:
            self._announced = True
            self.announce(self.summary(states))
            for line in (*self._heads(), *self._unknown_parts()):
                self.announce(line)

    def _heads(self) -> list[str]:
        """A line on the weights whose attention heads are matrices of their own, and on those whose heads are not."""
        spec, table = self._spec, self._table
        if not getattr(spec.options, "split_heads", False):
            return []
        divided: Counter[str] = Counter()
        together: Counter[str] = Counter()
        for name, (info, _) in table.catalog.items():
            heads, layer = table.heads_of(name), name.removesuffix(".weight").rpartition(".")[2]
            if heads:
                shapes = Counter("x".join(map(str, block_info(info, block).shape)) for block in heads)
                divided[f"{layer} ({', '.join(f'{count} of {shape}' for shape, count in shapes.items())})"] += 1
            elif info.fused is not None and any(info.fused.heads):
                together[layer] += 1
        text = f"rankwise {spec.name}: split_heads makes matrices of the heads of {_listed(divided)}"
        return [f"{text}, and leaves {_listed(together)} undivided" if together else text]

    def _unknown_parts(self) -> list[str]:
        """Lines on weights that look fused, and would be several matrices to the rule if their layout were known."""
        spec, table = self._spec, self._table
        matrices = [info for name, info in table.infos.items() if table.routes[name].rule == "matrix"]
        infos = [info for info in matrices if spec.splits(info)]
        return unknown_parts(spec.name, infos, getattr(spec.options, "blocks", None) or ())

    def read_health(self, further: Iterable[Traffic]) -> dict[str, float]:
        """See :meth:`ShardedOptimizer.read_health`; ``further``: messages that this rank has sent outside its units."""
        sent = [*(unit.total_traffic for unit in self._planner.units.values()), *further]
        total = Traffic(sum(part.collectives for part in sent), sum(part.bytes for part in sent))
        if total.collectives < self._reported.collectives:
            self._reported = Traffic()  # new plans count from zero
        self._health.add("collectives", total.collectives - self._reported.collectives)
        self._health.add("bytes_sent", total.bytes - self._reported.bytes)
        self._reported = total
        group = self._planner.source.group
        metrics = self._health.read(group)
        ranks = 1 if group is None else dist.get_world_size(group)
        steps = max(metrics.pop("steps") / ranks, 1.0)
        metrics["skipped_steps"] /= ranks
        return {name: value / steps if name in _PER_STEP else value for name, value in metrics.items()}

    def state_bytes(self, states: States) -> dict[str, int]:
        """Bytes of optimizer state this rank holds: ``{"element": …, "matrix": …}``."""
        element = sum(value.nbytes for state in states.values() for value in _element_states(state).values())
        return {"element": element, "matrix": self._planner.matrix_states.nbytes}

    def summary(self, states: States) -> str:
        """One line: matrices routed, balance over owners, type of their products, state and bytes sent of this rank."""
        exchanges = [unit.exchange for unit in self._planner.units.values() if unit.exchange is not None]
        loads = self._planner.loads
        mean = sum(loads) / max(len(loads), 1)
        balance = f", owners' load max/mean {max(loads) / mean:.2f}" if mean else ""
        held = self.state_bytes(states)
        sent = sum(exchange.bytes_per_gather for exchange in exchanges)
        far = dict.fromkeys(exchange.link.device.type for exchange in exchanges if exchange.link is not None)
        place = f"; offloaded matrices are multiplied on {', '.join(far)}" if far else ""
        return (
            f"rankwise {self._spec.name}: {self._shares()}{balance}{self._product_types()}{place}; state on this rank "
            f"{held['element'] / 2**20:.1f} MiB by element and {held['matrix'] / 2**20:.1f} MiB in matrices; "
            f"{sent / 2**20:.2f} MiB sent to owners per step"
        )

    def _shares(self) -> str:
        """Shares of the model that take the optimizer's own rule, and the reasons of the rest."""
        sizes: Counter[str] = Counter()
        matrices = tensors = ours = 0
        for unit in self._planner.units.values():
            for key, shape in unit.stored.shapes.items():
                chosen, size = self._table.routes[self._table.base_name(key)], prod(shape)
                tensors += 1
                if chosen.rule == "matrix":
                    matrices, ours = matrices + 1, ours + size
                else:
                    sizes[chosen.reason] += size
        total = max(ours + sizes.total(), 1)
        text = f"{ours / total:.1%} of {ours + sizes.total():,} weights ({matrices} of {tensors} tensors) take its rule"
        rest = ", ".join(f"{size / total:.1%} {reason}" for reason, size in sizes.most_common())
        return f"{text}, the rest the first-order fallback ({rest})" if rest else text

    def _product_types(self) -> str:
        spec = self._spec
        units = self._planner.units.values()
        types = dict.fromkeys(dtype for unit in units for dtype in spec.product_types(unit.work_device, unit.dtype))
        if not types:
            return ""
        option = spec.product_option
        chosen = " and ".join(str(dtype).removeprefix("torch.") for dtype in types)
        return f"; products in {chosen} ({option}={getattr(spec.options, option)!r})"

    def explain(self, states: States) -> list[Explanation]:
        """One line per parameter, or block of one: rule, reason, owner, bytes of optimizer state on this rank."""
        table = self._table
        state_bytes = self._element_bytes(states)
        owner_of: dict[str, int] = {}
        for key, owner in self._planner.owners().items():
            for line in self._lines_of(key):
                owner_of.setdefault(line, owner)
        for key, state in self._planner.matrix_states.items():
            for name, value in state.items():
                # A state that blocks have in common is counted once.
                line = self._lines_of(key, name)[0]
                state_bytes[line] = state_bytes.get(line, 0) + value.nbytes
        return [
            Explanation(
                line,
                info.shape if block is None else block_info(info, block).shape,
                table.routes[name].rule,
                self._reason(name),
                owner_of.get(line),
                state_bytes.get(line, 0),
            )
            for name, (info, _) in table.catalog.items()
            for line, block in self._blocks_of(name)
        ]

    def _reason(self, name: str) -> str:
        reason, scale = (
            self._table.routes[name].reason,
            self._spec.step_groups.scale(self._table.catalog[name][0].own_name),
        )
        return reason if scale == 1.0 else f"{reason}, lr times {scale:g}"

    def _blocks_of(self, name: str) -> list[tuple[str, Block | None]]:
        """Lines of a parameter: one, or one for each block."""
        blocks = self._table.blocks.get(name, ()) if self._table.routes[name].rule == "matrix" else ()
        return [(block.key(name), block) for block in blocks] or [(name, None)]

    def _lines_of(self, key: str, state: str = "") -> list[str]:
        """Lines that a matrix, or a state of one, belongs to: all of a parameter's if it is of no block."""
        name = self._table.base_name(key)
        lines, marks = self._blocks_of(name), key[len(name) :] + state
        of_block = [line for line, block in lines if block is not None and f"[{block.name}]" in marks]
        return of_block or [line for line, _ in lines]

    def _element_bytes(self, states: States) -> dict[str, int]:
        bytes_of: dict[str, int] = {}
        for unit in self._planner.units.values():
            for entry in unit.stored_entries:
                kept = _element_states(states.get(unit.tensors[entry.shard.tensor], {}))
                names = kept.keys() & unit.parameters[entry.key].states
                types = [unit.states.type_now(name, entry, kept[name]) for name in names]
                width, numel = sum(dtype.itemsize for dtype in types), entry.shard.numel
                # Exponents that elements of several lines share are counted in the first line.
                shared = sum(blocks_of(entry.shard.start, numel) for dtype in types if is_coded(dtype))
                for line, block in self._blocks_of(self._table.base_name(entry.key)):
                    parts = cut_into_blocks(entry.shard, () if block is None else (block,))
                    bytes_of[line] = bytes_of.get(line, 0) + width * sum(part.numel for part in parts) + shared
                    shared = 0
        return bytes_of


def _listed(layers: Counter[str]) -> str:
    return ", ".join(f"{count} {layer}" for layer, count in layers.items()) or "no weight of this rank"


def _element_states(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: local_view(value) for name, value in state.items() if isinstance(value, Tensor) and name != "step"}
