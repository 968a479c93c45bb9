"""The cells: a framework's setting and its ranks, in the order of their worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.frameworks.problem import CONTROL, FIRST_KINDS, KINDS, SECOND_KINDS

__all__ = ["CELLS", "CODES", "REFERENCES", "Cell", "cell_of", "items_of"]

BFLOAT16, FLOAT16, CODES = 2.0**-10, 2.0**-13, 2.0**-8
"""Root mean square of what rounding to each type does to a number, relative to it; of 8-bit codes that share a scale,
roughly."""


@dataclass(frozen=True)
class Cell:
    """One setting of one framework.

    Attributes:
        front: Framework: the module ``FRONT_front`` runs it.
        name: Of the setting, unique in the front.
        ranks: Processes.
        settings: What the front is told.
        rounding: Relative rounding of the cell's arithmetic beyond float32's; 0: results are compared element by
            element.
        reference: Name of the run of one process that it is compared with: a key of :data:`REFERENCES`.
        resumed_on: Ranks that go on from a checkpoint half-way; None: it is one run.
        kinds: The optimizers that it is for; empty for all.
        seconds: A half of the optimizers should take on a card that several cells share.
    """

    front: str
    name: str
    ranks: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    rounding: float = 0.0
    reference: str = "plain float32"
    resumed_on: int | None = None
    kinds: tuple[str, ...] = ()
    seconds: float = 40.0

    @property
    def key(self) -> str:
        """Its name in records."""
        more = "" if self.resumed_on is None else f" to {self.resumed_on}"
        return f"{self.front}/{self.name}, {self.ranks}{more} rank{'s' * (self.ranks > 1)}"

    @property
    def is_killed(self) -> bool:
        """Whether a rank is killed, and it counts how the others end."""
        return bool(self.settings.get("killed"))

    def chosen(self, kinds: Sequence[str]) -> tuple[str, ...]:
        """Of these optimizers those that it is for."""
        return tuple(kind for kind in kinds if not self.kinds or kind in self.kinds)


def _zero(stage: int, ranks: int = 2, words: str = "", **more: Any) -> Cell:
    named = {key: more.pop(key) for key in ("rounding", "reference", "resumed_on", "kinds") if key in more}
    return Cell("deepspeed", f"ZeRO-{stage}{words}", ranks, {"stage": stage, **more}, **named)


def _half(stage: int, dtype: str, **more: Any) -> Cell:
    rounding = BFLOAT16 if dtype == "bfloat16" else FLOAT16
    return _zero(stage, 2, f", {dtype}", dtype=dtype, rounding=rounding, reference=f"plain {dtype} weights", **more)


def _megatron(name: str, ranks: int = 2, **settings: Any) -> Cell:
    of_experts = "megatron experts" if settings.get("experts") else "megatron dense"
    # Megatron's own Adam resumes with Transformer Engine or Apex alone: it asks torch's for states not made yet.
    without = {"MKOR, sketch", *((CONTROL,) if "resumed_on" in settings else ())}
    kinds = tuple(kind for kind in KINDS if kind not in without)
    named = {key: settings.pop(key) for key in ("rounding", "resumed_on") if key in settings}
    return Cell("megatron", name, ranks, settings, reference=of_experts, kinds=kinds, **named)


def _titan(name: str, ranks: int = 2, **degrees: int) -> Cell:
    return Cell("torchtitan", name, ranks, {"degrees": degrees}, reference="torchtitan", seconds=55.0)


# The host decides MKOR's factor schedule.
_CAPTURED = tuple(kind for kind in KINDS if not kind.startswith("MKOR"))
_BLOCKING = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
_TILED = {"distributed": True, "overlap": True, "bucket": 20000}
_MATRICES = ("MARS-Shampoo", "MARS-M", "LDAdam", "MKOR", "MKOR, sketch", "MKOR-H")

CELLS: Sequence[Cell] = (
    _zero(2),
    _zero(3),
    Cell("fsdp", "rows", 2, {"how": "rows"}),
    _megatron("distributed optimizer, overlaps", **_TILED),
    _half(2, "bfloat16"),
    _zero(3, 3),
    _megatron("TP 2, SP, distributed optimizer", tp=2, sp=True, distributed=True),
    Cell("fsdp", "TP 2 x rows", 4, {"how": "tensor"}),
    _megatron("PP 2", pp=2, distributed=True),
    _zero(1),
    _zero(0),
    _half(3, "bfloat16"),
    _zero(2, 2, ", CPU offload", offload=True),
    _zero(2, 2, ", overlap_comm", overlap=True),
    _zero(3, 2, ", int8 messages", comm="int8", rounding=CODES, kinds=_MATRICES),
    # DeepSpeed takes its own AdamW to another number of ranks by universal checkpoints alone.
    _zero(3, 3, ", resumed", resumed_on=2, kinds=tuple(KINDS)[1:]),
    Cell("fsdp", "HSDP 2 x 2", 4, {"how": "hybrid"}),
    Cell("fsdp", "columns", 2, {"how": "columns"}),
    Cell("fsdp", "rows, resumed", 3, {"how": "rows"}, resumed_on=2),
    _megatron("TP 2 x DP 2, distributed optimizer, overlaps", 4, tp=2, **_TILED),
    _megatron("PP 2, interleaved", pp=2, chunks=2, distributed=True),
    _megatron("EP 2", experts=4, ep=2, distributed=True),
    _megatron("CP 2, own attention", cp=2, distributed=True),
    _megatron("layer-wise", layer_wise=True),
    Cell("fsdp", "rows, compiled", 2, {"how": "rows", "compiled": True}),
    Cell("fsdp", "rows, step captured", 2, {"how": "rows", "captured": True}, kinds=_CAPTURED),
    Cell("fsdp", "rows, CPU offload", 2, {"how": "rows", "offload": True}),
    Cell("fsdp", "rows, a stream of the user's", 2, {"how": "rows", "stream": True}),
    Cell("fsdp", "rows, blocking wait", 2, {"how": "rows", "environment": _BLOCKING}),
    _zero(3, 2, ", expandable segments", environment=_EXPANDABLE),
    Cell("fsdp", "rows, bfloat16", 2, {"how": "rows", "dtype": "bfloat16"}, BFLOAT16, "plain bfloat16"),
    Cell("fsdp", "DDP", 2, {"how": "ddp"}),
    Cell("fsdp", "DDP, step captured", 2, {"how": "ddp", "captured": True}, kinds=_CAPTURED),
    _zero(1, 2, ", AutoTP 2", autotp=2),
    _zero(2, 4, ", AutoTP 2", autotp=2),
    _half(2, "float16"),
    _zero(3, 2, ", CPU offload", offload=True),
    _zero(3, 2, ", overlap_comm", overlap=True),
    _zero(2, 3, ", int8 messages", comm="int8", rounding=CODES, kinds=_MATRICES),
    _zero(2, 4),
    _zero(3, 4),
    Cell("fsdp", "rows", 3, {"how": "rows"}),
    Cell("fsdp", "rows", 4, {"how": "rows"}),
    _megatron("DP 2"),
    _megatron("distributed optimizer, overlaps, resumed", 3, resumed_on=2, **_TILED),
    _megatron("TP 2 x PP 2", 4, tp=2, pp=2, distributed=True),
    _titan("FSDP 2", shard=2),
    _titan("HSDP 2 x 2", 4, shard=2, replicate=2),
    _titan("TP 2 x FSDP 2", 4, tp=2, shard=2),
    _titan("CP 2", 2, cp=2),
    Cell("deepspeed", "ZeRO-2, a rank killed", 2, {"stage": 2, "killed": True}, kinds=("MARS-M",)),
    Cell("deepspeed", "ZeRO-3, a rank killed", 2, {"stage": 3, "killed": True}, kinds=("LDAdam",)),
    Cell("fsdp", "rows, a rank killed", 2, {"how": "rows", "killed": True}, kinds=("LDAdam",)),
)
"""In the order of their worth: what most users run comes first."""

REFERENCES: Mapping[str, Cell] = {
    "plain float32": Cell("plain", "float32", 1),
    "plain bfloat16": Cell("plain", "bfloat16", 1, {"dtype": "bfloat16"}),
    "plain bfloat16 weights": Cell("plain", "bfloat16 weights", 1, {"dtype": "bfloat16", "rounded": "bfloat16"}),
    # Of float32's computation: an engine's loss scale keeps gradients in float16 from vanishing, as nothing does here.
    "plain float16 weights": Cell("plain", "float16 weights", 1, {"rounded": "float16"}),
    "megatron dense": Cell("megatron", "one process, dense", 1, {"plain": True}),
    "megatron experts": Cell("megatron", "one process, experts", 1, {"plain": True, "experts": 4}),
    "torchtitan": Cell("torchtitan", "one rank", 1, {"degrees": {}}),
}
"""What a cell is compared with: one process of plain PyTorch, in Megatron's case with Megatron's model, in torchtitan's
one rank of its trainer."""


def cell_of(key: str) -> Cell:
    """A cell by its key."""
    return next(cell for cell in (*CELLS, *REFERENCES.values()) if cell.key == key)


def items_of(cells: Sequence[Cell] = CELLS) -> list[tuple[Cell, tuple[str, ...]]]:
    """Every cell with the first half of the optimizers, then every one with the second: an item is short enough."""
    halves = [(cell, cell.chosen(half)) for half in (FIRST_KINDS, SECOND_KINDS) for cell in cells]
    return [(cell, kinds) for cell, kinds in halves if set(kinds) - {"AdamW"} and not (cell.is_killed and kinds == ())]
