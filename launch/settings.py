"""The options of ``rankwise train``, and a JSON file next to its results, decide a pretraining run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rankwise.launch.models import ModelFamily
from rankwise.launch.typed_options import count, share

__all__ = ["ON_A_GPU", "Config", "Form", "Framework", "Place", "Ranks", "Settings"]

ON_A_GPU: dict[str, Any] = {
    **{"layers": 12, "hidden": 768, "heads": 12, "seq_len": 1024, "micro_batch": 16, "accumulation": 4, "steps": 1000},
    **{"bf16": True, "compiled": "inductor", "values_of": "gpt2-small"},
    **{"validation_interval": 250, "validation_samples": 256},
}
"""What ``rankwise train`` takes on GPUs for options that were not typed: GPT-2 small's shape, compiled, in bfloat16."""

Framework = Literal["deepspeed", "megatron"]
Form = Literal["deepspeed", "megatron", "torch"]
"""The framework of a checkpoint."""

_WHERE, _RUN, _SHAPE, _TEXT = "Ranks", "The run", "The model", "Text and results"
Ranks = Annotated[int | None, typer.Option(metavar="N", help="Processes; by default one per GPU, or two.")]
Place = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Config = Annotated[Path | None, typer.Option(help="DeepSpeed JSON file.", exists=True, dir_okay=False)]


def _text(help: str, panel: str | None = None, metavar: str | None = None, default: str | bool = True) -> Any:
    return typer.Option(help=help, rich_help_panel=panel, metavar=metavar, show_default=default)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The typed options, and with the last three attributes one pretraining run.

    Attributes:
        optimizer: Types; each entry may have several, separated by commas.
        config: File of the DeepSpeed configuration.
        framework: ``"deepspeed"`` or ``"megatron"``.
        stage: ZeRO stage; None: the configuration's.
        tensor_parallel: Number of ranks that each matrix is cut over, under Megatron only.
        ranks: Number of processes; None: one per GPU, or two.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        steps: Number of optimizer steps.
        warmup: Share of the steps in which the learning rate rises from 0.
        lr: Peak learning rate; None: the configuration's.
        data: Text file or folder; None for the Python standard library's sources.
        tokenizer: ``"bytes"`` or a Hugging Face tokenizer.
        model: ``"gpt2"`` or ``"llama"``.
        layers: Number of transformer blocks.
        hidden: Width of the residual stream.
        heads: Number of attention heads.
        seq_len: Tokens per sample.
        micro_batch: Samples per forward pass and rank; None: the configuration's.
        accumulation: Micro-batches per step; None: the configuration's.
        bf16: Whether the model is in bfloat16; False: as the configuration says.
        compiled: Backend of ``torch.compile`` for the model; None: it is not compiled.
        validation_interval: Steps between two validations; the last step always has one.
        validation_samples: Windows per validation, over all ranks.
        seed: Decides initialisation and sample order.
        output: Folder for metrics and summary.
        cache: Folder of the token files.
        final_lr: Share of the peak learning rate that the cosine ends at.
        values_of: Model of :data:`rankwise.configs.MODELS` whose files have the optimizers' values; "": the small one.
        label: Name of the run in the table and the plot.
        deepspeed: The DeepSpeed configuration, which is passed on unchanged. Under Megatron, optimizer, batch sizes and
            clipping come from it.
    """

    optimizer: Annotated[list[str] | None, _text("Types, separated by commas, or 'all'.", default="adamw, mars-m")] = (
        None
    )
    config: Config = None
    framework: Annotated[Framework, _text("deepspeed or megatron.", _WHERE, "NAME")] = "deepspeed"
    stage: Annotated[
        int | None, count("ZeRO's; default: the config's, or 2. Megatron: 0 is plain.", _WHERE, least=0, most=3)
    ] = None
    tensor_parallel: Annotated[int, count("Megatron's tensor parallelism.", _WHERE, "--tp")] = 1
    ranks: Ranks = None
    device: Place = "auto"
    steps: Annotated[int, count("Optimizer steps.", _RUN)] = 300
    warmup: Annotated[float, share("Share of steps lr rises in.", _RUN, least=0, most=1)] = 0.1
    lr: Annotated[float | None, share("Peak, instead of the config's.", _RUN)] = None
    data: Annotated[Path | None, _text("File or folder; by default Python's standard library.", _TEXT)] = None
    tokenizer: Annotated[str, _text("'bytes', or one of Hugging Face.", _TEXT)] = "bytes"
    model: Annotated[ModelFamily, _text("gpt2 or llama.", _SHAPE, "NAME")] = "gpt2"
    layers: Annotated[int, count("Transformer blocks.", _SHAPE)] = 4
    hidden: Annotated[int, count("Width; a multiple of --heads.", _SHAPE)] = 192
    heads: Annotated[int, count("Attention heads.", _SHAPE)] = 6
    seq_len: Annotated[int, count("Tokens per sample.", _SHAPE)] = 128
    micro_batch: Annotated[int | None, count("Samples of a pass and rank.", _RUN)] = None
    accumulation: Annotated[int | None, count("Micro-batches per step.", _RUN)] = None
    bf16: Annotated[bool, typer.Option(help="Model in bfloat16; on a GPU by default.", hidden=True)] = False
    compiled: Annotated[
        str | None, typer.Option("--compile", help="Backend of torch.compile.", metavar="NAME", rich_help_panel=_RUN)
    ] = None
    validation_interval: Annotated[int, count("Steps between validations.", _TEXT)] = 50
    validation_samples: Annotated[int, count("Windows per validation.", _TEXT)] = 128
    seed: Annotated[int, count("Of weights and samples.", _RUN, least=0)] = 0
    output: Annotated[Path, _text("Folder; by default runs/<time>.", _TEXT)] = field(
        default_factory=lambda: Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    )
    cache: Annotated[Path, _text("Of the tokenized text.", _TEXT)] = Path("runs/.cache")
    final_lr: float = 0.1
    values_of: str = ""
    label: str = ""
    deepspeed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what depends on more than one option, and what no option has checked.

        Raises:
            ValueError: A value is out of range.
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

    def write(self) -> Path:
        """Write ``settings.json`` into the output folder, and return its path."""
        path = self.output / "settings.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2, default=str), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Return the settings of a file that :meth:`write` has written."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        given = [name for name in ("config", "data", "output", "cache") if values[name] is not None]
        return cls(**{**values, **{name: Path(values[name]) for name in given}})
