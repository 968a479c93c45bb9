"""How many ranks there are and how the model is cut over them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cluster"]


@dataclass(frozen=True)
class Cluster:
    """The ranks of a run.

    Attributes:
        ranks: All of them.
        stage: ZeRO stage; None under Megatron.
        tp: Ranks each matrix is cut over.
        pp: Pipeline stages.
        distributed: Megatron's distributed optimizer.
        overlap: Its buckets are reduced while the backward pass runs.
        precision: Of the model's weights: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
    """

    ranks: int
    stage: int | None = 2
    tp: int = 1
    pp: int = 1
    distributed: bool = True
    overlap: bool = False
    precision: str = "bf16"

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: They do not fit together.
        """
        if self.stage is not None and self.tp * self.pp > 1:
            raise ValueError("tp and pp are Megatron's: pass its flags, its YAML file or --framework megatron")
        if self.ranks % (self.tp * self.pp):
            raise ValueError(
                f"ranks is {self.ranks}, tp {self.tp} and pp {self.pp}: tp times pp must divide the number of ranks"
            )

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.ranks // (self.tp * self.pp)

    @property
    def width(self) -> int:
        """Bytes of a weight of the model."""
        return 4 if self.precision == "fp32" else 2

    @property
    def words(self) -> str:
        """The same for a title."""
        if self.stage is not None:
            return f"{self.ranks} ranks, ZeRO-{self.stage}, {self.precision}"
        kind = "distributed optimizer" if self.distributed else "no distributed optimizer"
        return f"{self.ranks} ranks: TP{self.tp} x PP{self.pp} x DP{self.dp}, {kind}, {self.precision}"
