"""A cluster says how many ranks there are, and how ZeRO, Megatron or FSDP2's device mesh cuts the model over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod

__all__ = ["COPIES", "ROWS", "TENSOR", "Cluster", "Mesh"]

MOST_RANKS = 1 << 17
ROWS, COPIES, TENSOR = "rows", "copies", "tensor"
"""What a dimension does with a parameter: ``fully_shard`` cuts its rows or keeps copies; tensor parallelism cuts it."""
_MEANINGS = {
    **dict.fromkeys(("dp", "shard", "fsdp", "dp_shard"), ROWS),
    **dict.fromkeys(("rep", "dp_replicate"), COPIES),
    "tp": TENSOR,
}
_ORDERS = ((ROWS,), (ROWS, TENSOR), (COPIES, ROWS), (COPIES, ROWS, TENSOR))
_RULE = "it must be dp=64, dp=8,tp=8, rep=2,shard=8 or rep=2,shard=8,tp=4, with sizes of at least 1"


@dataclass(frozen=True)
class Mesh:
    """The device mesh of an FSDP2 run, as ``init_device_mesh`` would get it.

    The ranks of the last dimension lie next to each other.

    Attributes:
        names: Names of the dimensions, as typed.
        sizes: Sizes of the dimensions.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> Mesh:
        """Return a mesh from text such as ``dp=8,tp=8``.

        Raises:
            ValueError: ``fully_shard``, beside tensor parallelism, does not take such a mesh.
        """
        pairs = [part.strip().partition("=") for part in text.split(",")]
        names, sizes = tuple(name for name, _, _ in pairs), [size for _, _, size in pairs]
        for name in names:
            if name not in _MEANINGS:
                raise ValueError(
                    f"mesh is {text!r}: {name!r} is none of {', '.join(_MEANINGS)}; {_RULE}. Ranks of context "
                    "parallelism cut rows, too: count them in dp; pipeline stages are planned one by one"
                )
        if not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ValueError(f"mesh is {text!r}: {_RULE}")
        mesh = cls(names, tuple(map(int, sizes)))
        if mesh.ranks > MOST_RANKS:
            raise ValueError(f"mesh is {text!r}: it must have at most {MOST_RANKS:,} ranks, and has {mesh.ranks:,}")
        if mesh.meanings not in _ORDERS:
            raise ValueError(f"mesh is {text!r}: {_RULE}, in this order")
        return mesh

    @property
    def meanings(self) -> tuple[str, ...]:
        """Meaning of each dimension."""
        return tuple(_MEANINGS[name] for name in self.names)

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return prod(self.sizes)

    @property
    def tp(self) -> int:
        """Number of ranks that tensor parallelism cuts over."""
        return prod(size for size, meaning in zip(self.sizes, self.meanings, strict=True) if meaning == TENSOR)

    @property
    def words(self) -> str:
        """The mesh as it was typed."""
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    def coordinates(self) -> list[tuple[int, ...]]:
        """Coordinates of every rank."""
        return list(product(*map(range, self.sizes)))


@dataclass(frozen=True)
class Cluster:
    """The ranks of a run.

    Attributes:
        ranks: Number of all ranks.
        stage: ZeRO stage; None under Megatron and FSDP2.
        tp: Number of ranks over which Megatron or DeepSpeed's AutoTP cuts each matrix.
        pp: Number of pipeline stages.
        distributed: Whether Megatron's distributed optimizer is used.
        overlap: Whether its buckets are reduced while the backward pass runs.
        precision: Precision of the model's weights: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        cp: Number of ranks that each sequence is cut over.
        vpp: Number of model chunks of a pipeline stage.
        ep: Number of ranks that share the experts of a layer.
        etp: Number of ranks that each expert's matrix is cut over; None: that of ``tp``.
        mesh: Mesh of FSDP2; None under others.
        offloaded: Whether weights and states are kept on the host.
    """

    ranks: int
    stage: int | None = 2
    tp: int = 1
    pp: int = 1
    distributed: bool = True
    overlap: bool = False
    precision: str = "bf16"
    cp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    mesh: Mesh | None = None
    offloaded: bool = False

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: The numbers do not fit together.
        """
        ways = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "vpp": self.vpp, "ep": self.ep, "etp": self.expert_tp}
        for name, size in ways.items():
            if size < 1:
                raise ValueError(f"{name} is {size}: it must be at least 1")
        given = ", ".join(name for name, size in ways.items() if size > 1 and name not in ("tp", "etp"))
        if self.stage is not None and given:
            raise ValueError(f"{given} are Megatron's: pass its flags or its YAML file, and no ZeRO stage")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp is {self.vpp} and pp is 1: chunks are interleaved over at least 2 pipeline stages")
        if self.ep == 1 and self.expert_tp != self.tp:
            raise ValueError(
                f"etp is {self.etp} and tp {self.tp}: without expert parallelism (ep) experts are cut as the rest is"
            )
        self._divided("tp", "pp", "cp")
        self._divided("etp", "pp", "ep")

    def _divided(self, *names: str) -> None:
        product = 1
        for name in names:
            product *= self.expert_tp if name == "etp" else getattr(self, name)
        if self.ranks % product:
            raise ValueError(
                f"ranks is {self.ranks}, and {' times '.join(names)} is {product}: that must divide the number of ranks"
            )

    @property
    def expert_tp(self) -> int:
        """Number of ranks that each expert's matrix is cut over."""
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        """Number of ranks that copy or cut the rest of a pipeline stage: data parallel times context parallel."""
        return self.ranks // (self.tp * self.pp)

    @property
    def of_experts(self) -> Cluster:
        """The ranks that share one rank's experts, stage by stage, and how they cut them."""
        return replace(self, ranks=self.ranks // self.ep, tp=self.expert_tp, cp=1, ep=1, etp=None)

    def expert_places(self, share: int) -> list[int]:
        """Return the places in a stage of ranks with one share of the experts, tensor-parallel ranks side by side."""
        step = self.expert_tp * self.ep
        starts = range(share * self.expert_tp, self.tp * self.dp, step)
        return [first + rank for first in starts for rank in range(self.expert_tp)]

    @property
    def width(self) -> int:
        """Number of bytes of a weight of the model."""
        return 4 if self.precision == "fp32" else 2

    @property
    def words(self) -> str:
        """The cluster in words, for a title."""
        if self.stage is not None:
            cut = f", AutoTP over {self.tp}" if self.tp > 1 else ""
            return f"{self.ranks} ranks, ZeRO-{self.stage}{cut}, {self.precision}"
        if self.mesh is not None:
            return f"{self.ranks} ranks, fully_shard on {self.mesh.words}, {self.precision} shards"
        kind = "distributed optimizer" if self.distributed else "no distributed optimizer"
        chunks = f" in {self.vpp} chunks" if self.vpp > 1 else ""
        context = f" x CP{self.cp}" if self.cp > 1 else ""
        experts = f", experts TP{self.expert_tp} x EP{self.ep}" if self.ep > 1 else ""
        cut = f"TP{self.tp}{context} x PP{self.pp}{chunks} x DP{self.dp // self.cp}{experts}"
        return f"{self.ranks} ranks: {cut}, {kind}, {self.precision}"
