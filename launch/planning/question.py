"""The options of ``rankwise plan`` say what to plan, and how to judge it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rankwise.launch.planning.devices import SPEED
from rankwise.launch.typed_options import count, share

__all__ = [
    *("ANSWER", "MODEL", "Goal", "Heads", "Hidden", "Layers", "ModelName", "OptimizerName", "PlanConfig", "Question"),
    "VocabSize",
]

MODEL, _SIZES, ANSWER = "The model", "The cluster", "The answer"


def _name(help: str, panel: str | None = None, metavar: str | None = "NAME") -> Any:
    return typer.Option(metavar=metavar, help=help, rich_help_panel=panel)


PlanConfig = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="DeepSpeed JSON, or YAML of Megatron's flags.", exists=True, dir_okay=False),
]
OptimizerName = Annotated[str | None, _name("Ready options; else the config's, or mars-m.")]
ModelName = Annotated[str | None, _name("llama-70b, a config.json, or module:function.", MODEL)]
Layers = Annotated[int | None, count("Blocks.", MODEL)]
Hidden = Annotated[int | None, count("Width.", MODEL)]
Heads = Annotated[int | None, count("Attention heads.", MODEL)]
VocabSize = Annotated[int | None, count("Token ids.", MODEL)]


@dataclass(frozen=True)
class Question:
    """The options that were typed; None for others.

    Attributes:
        config: A DeepSpeed JSON or a YAML file of Megatron's flags.
        optimizer: A name, with its packaged options.
        model: A model for :func:`rankwise.launch.planning.model_shapes.build`, or a family with the next four.
        layers: Number of transformer blocks of a family's model.
        hidden: Width of a family's model.
        heads: Number of attention heads of a family's model.
        vocab_size: Number of token ids of a family's model.
        engine: A name of :data:`rankwise.launch.planning.plan_request.ENGINES`; by default it follows from the others.
        mesh: Mesh of FSDP2, which :meth:`rankwise.launch.planning.cluster.Mesh.read` reads.
        ranks: Number of all ranks; by default those of the mesh, else 8.
        stage: ZeRO stage.
        tp: Number of tensor-parallel ranks.
        pp: Number of pipeline stages.
        cp: Number of context-parallel ranks.
        vpp: Number of model chunks of a pipeline stage.
        ep: Number of expert-parallel ranks.
        etp: Number of ranks that an expert's matrix is cut over.
        precision: Precision of the weights.
        batch_tokens: Tokens of a global batch.
        seq_len: Tokens of a sample.
        offload: Whether weights and states are kept on the host; a config may say so, too.
        flags: Flags of Megatron.
    """

    config: PlanConfig = None
    optimizer: OptimizerName = None
    model: ModelName = None
    layers: Layers = None
    hidden: Hidden = None
    heads: Heads = None
    vocab_size: VocabSize = None
    engine: Annotated[str | None, _name("deepspeed, megatron or fsdp.", _SIZES)] = None
    mesh: Annotated[str | None, _name("FSDP2's: dp=64,tp=8.", _SIZES, "NAME=N,..")] = None
    ranks: Annotated[int | None, count("All of them; 8, or the mesh's.", _SIZES)] = None
    stage: Annotated[int | None, count("Of ZeRO; by default the config's.", _SIZES, least=0, most=3)] = None
    tp: Annotated[int | None, count("Megatron's tensor parallelism.", _SIZES)] = None
    pp: Annotated[int | None, count("Megatron's pipeline stages.", _SIZES)] = None
    cp: Annotated[int | None, count("Context parallelism.", _SIZES)] = None
    vpp: Annotated[int | None, count("Chunks of a stage.", _SIZES)] = None
    ep: Annotated[int | None, count("Expert parallelism.", _SIZES)] = None
    etp: Annotated[int | None, count("Tensor parallelism of experts.", _SIZES)] = None
    precision: Annotated[Literal["bf16", "fp16", "fp32"] | None, _name("Of weights.", _SIZES, None)] = None
    batch_tokens: Annotated[int | None, count("Tokens of a global batch.", _SIZES)] = None
    seq_len: int = 4096
    offload: Annotated[
        bool, typer.Option("--offload", help="Weights and states on the host.", rich_help_panel=_SIZES)
    ] = False
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Goal:
    """The limits of the plan, and the form of the answer.

    Attributes:
        efficiency: Share of the peak that products reach.
        max_state_gb: Most GiB of states on the fullest rank.
        max_overhead: Largest share of a training step.
        gpu: Device on which this is judged, for :func:`rankwise.launch.planning.devices.device_of`.
        png: File for a picture.
        as_json: Whether the answer is for programs.
    """

    efficiency: Annotated[float, share("Share of peak FLOP/s.", SPEED, least=0.01, most=1)] = 0.4
    max_state_gb: Annotated[float | None, share("GiB on the fullest rank; not met: status 1.", ANSWER, least=0)] = None
    max_overhead: Annotated[str | None, _name("Share of a training step.", ANSWER, "X%")] = None
    gpu: Annotated[str, _name("A100…MI300X, TFLOP/s:TB/s.", ANSWER)] = "H100"
    png: Annotated[Path | None, _name("Picture of the load per rank.", ANSWER, "FILE")] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs, with every rank and owner.", rich_help_panel=ANSWER)
    ] = False

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            ValueError: One is no share.
        """
        list(self.limits(0.0, 0.0))

    @property
    def most(self) -> float | None:
        """Return ``max_overhead`` as a number.

        Raises:
            ValueError: The value is no share.
        """
        text = self.max_overhead
        if text is None:
            return None
        try:
            value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError as error:
            raise ValueError(f"{text!r} must be a share such as 2% or 0.02") from error
        if not 0 < value < 1:
            meant = f"; did you mean {text}%?" if 1 <= value < 100 and not text.endswith("%") else ""
            raise ValueError(f"{text!r} must lie between 0 and 100%{meant}")
        return value

    def limits(self, state: float, share: float) -> Iterator[tuple[str, float]]:
        """Yield each limit in words, and by how much of itself it is exceeded; not above 0 where it is met.

        Args:
            state: Bytes of states on the fullest rank.
            share: Share of a training step on :attr:`gpu`.
        """
        if self.max_state_gb is not None:
            held = state / 2**30
            words = f"{held:.3f} GiB of states on the fullest rank, at most {self.max_state_gb:g}"
            yield words, held / self.max_state_gb - 1 if self.max_state_gb else held
        if self.most is not None:
            yield f"{share:.2%} of a training step on {self.gpu}, at most {self.most:.2%}", share / self.most - 1
