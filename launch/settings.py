"""Everything that decides a pretraining run, as one JSON file next to its results."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rankwise.launch.models import ModelFamily

__all__ = ["Form", "Framework", "Settings"]

Framework = Literal["deepspeed", "megatron"]
Form = Literal["deepspeed", "megatron", "torch"]
"""Whose checkpoint it is."""


@dataclass(frozen=True)
class Settings:
    """One pretraining run of the reference script.

    Attributes:
        label: name of the run in the table and the plot.
        output: folder for metrics and summary.
        deepspeed: the DeepSpeed configuration, passed on as it is. Under Megatron, where optimizer, batch sizes and
            clipping come from.
        model: ``"gpt2"`` or ``"llama"``.
        layers: transformer blocks.
        hidden: width of the residual stream.
        heads: attention heads.
        seq_len: tokens per sample.
        steps: optimizer steps.
        warmup: share of the steps in which the learning rate rises from 0.
        final_lr: share of the peak learning rate the cosine ends at.
        data: text file or folder; None for the Python standard library's sources.
        tokenizer: ``"bytes"`` or a Hugging Face tokenizer.
        cache: folder of the token files.
        seed: initialisation and sample order.
        validation_interval: steps between two validations; the last step always has one.
        validation_samples: windows per validation, over all ranks.
        framework: ``"deepspeed"`` or ``"megatron"``.
        tensor_parallel: ranks each matrix is cut over; Megatron's alone.
    """

    label: str
    output: str
    deepspeed: dict[str, Any]
    model: ModelFamily = "gpt2"
    layers: int = 4
    hidden: int = 192
    heads: int = 6
    seq_len: int = 128
    steps: int = 300
    warmup: float = 0.1
    final_lr: float = 0.1
    data: str | None = None
    tokenizer: str = "bytes"
    cache: str = "runs/.cache"
    seed: int = 0
    validation_interval: int = 50
    validation_samples: int = 128
    framework: Framework = "deepspeed"
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: if one is out of range.
        """
        counts = "layers hidden heads seq_len steps validation_interval validation_samples tensor_parallel"
        for name in counts.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("warmup", "final_lr"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it is a share and must lie between 0 and 1")
        if self.hidden % self.heads:
            raise ValueError(f"hidden is {self.hidden} and heads is {self.heads}: hidden must be a multiple of heads")
        if self.heads % self.tensor_parallel:
            raise ValueError(f"tp is {self.tensor_parallel} and heads is {self.heads}: it must divide the heads")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}: it must not be negative")

    @property
    def text(self) -> Path | None:
        """Path of the text; None for the standard library."""
        return None if self.data is None else Path(self.data)

    def write(self) -> Path:
        """Writes ``settings.json`` into the output folder and returns its path."""
        path = Path(self.output) / "settings.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Settings:
        """The settings of a file written by :meth:`write`."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
