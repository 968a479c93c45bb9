"""Names over the pipeline: layers of any class, the last stage's copy of tied embeddings, and names that clash."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import package_info
from megatron.core import parallel_state as mpu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.mamba import MambaModel
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron_cells import LENGTH, VOCABULARY, Cell
from megatron_harness import Trainer, largest_gap, opened
from megatron_resumes import went_on
from megatron_types import maker
from megatron_weights import bare
from ranks import run_ranks
from torch import Tensor, nn

from megatron_patches import parameter_names as names
from megatron_patches.cpu import cpu_megatron
from rankwise.layout.layout import LayoutError

# As in test_megatron_checkpoints: roundings of sums in another order.
LARGEST_MOVE = 1e-6


class _Mixer(MegatronModule):
    """In place of the state-space kernels, which no CPU runs: what is tested is the layer around it."""

    def __init__(self, config: Any, d_model: int, pg_collection: Any, **_: Any) -> None:
        super().__init__(config)
        fixed = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": pg_collection.tp}
        self.in_proj = ColumnParallelLinear(d_model, 2 * d_model, gather_output=False, **fixed)
        self.out_proj = RowParallelLinear(2 * d_model, d_model, input_is_parallel=True, skip_bias_add=True, **fixed)
        self.A_log = nn.Parameter(torch.zeros(2 * d_model // mpu.get_tensor_model_parallel_world_size()))

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, Any]:
        inner = self.in_proj(hidden)[0]
        return self.out_proj(torch.tanh(inner) * self.A_log.exp().to(inner))


class HybridTrainer(Trainer):
    """Trains Megatron's hybrid model: every other layer is no ``TransformerLayer``."""

    def _chunk(self, stage: int) -> nn.Module:
        # Its module differs by version, and finds no norm where Transformer Engine is not installed.
        sys.modules[MambaStack.__module__].TENorm = WrappedTorchNorm  # type: ignore[attr-defined]
        return super()._chunk(stage)

    def _model(self, stage: int, vp_stage: int | None) -> nn.Module:
        layer = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=_Mixer, mamba_bda=get_bias_dropout_add)
        attention = get_gpt_layer_local_spec(normalization="RMSNorm")
        layers = MambaStackSubmodules(mamba_layer=ModuleSpec(MambaLayer, submodules=layer), attention_layer=attention)
        return MambaModel(
            config=self.config,
            mamba_stack_spec=ModuleSpec(MambaStack, submodules=layers),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=mpu.is_pipeline_first_stage(),
            post_process=mpu.is_pipeline_last_stage(),
            hybrid_override_pattern="M*M*",
            share_embeddings_and_output_weights=self.cell.tied,
        )


HYBRID: dict[str, Any] = {"layers": 4}
TIED = {"use_distributed_optimizer": True, "tied": True}
# Optimizer, and the layouts it is saved in and resumed on.
JOBS: dict[str, tuple[Any, ...]] = {
    "hybrid again, mars-m": ("mars-m", Cell(pp=2, **HYBRID), Cell(pp=2, **HYBRID), HybridTrainer),
    "hybrid again, ldadam": ("ldadam", Cell(pp=2, **HYBRID), Cell(pp=2, **HYBRID), HybridTrainer),
    "hybrid from stages, ldadam": ("ldadam", Cell(pp=2, **HYBRID), Cell(**HYBRID), HybridTrainer),
    "hybrid to stages, mars-m": ("mars-m", Cell(**HYBRID), Cell(pp=2, **HYBRID), HybridTrainer),
    "tied from stages, ldadam": ("ldadam", Cell(pp=2, **TIED), Cell(**TIED)),
    "tied to stages, ldadam": ("ldadam", Cell(**TIED), Cell(pp=2, **TIED)),
    "tied to stages, mars-adamw": ("mars-adamw", Cell(**TIED), Cell(pp=2, tied=True)),
    "tied again, sonew": ("sonew", Cell(pp=2, precision="bf16", **TIED), Cell(pp=2, precision="bf16", **TIED)),
}


def test_names_hold_on_any_stage(tmp_path: Path) -> None:
    for label, (_, whole, again) in zip(JOBS, went_on(list(JOBS.values()), tmp_path), strict=True):
        if "again" in label:
            assert again.losses == whole.losses, label
            assert all(torch.equal(again.weights[key], whole.weights[key]) for key in whole.weights), label
        else:
            assert largest_gap(again.weights, whole.weights) <= LARGEST_MOVE, label
        assert again.replica_gap == 0.0, label


# --- names that clash ------------------------------------------------------------------------------------------------


class _OwnLayer(nn.Linear):
    """A user's layer, whose numbers start anew on every stage."""


def _same_names(config: dict[str, Any], chunks: list[nn.Module]) -> Any:
    for chunk in chunks:
        bare(chunk).adapters = nn.ModuleList([_OwnLayer(4, 4, bias=False)])
    return maker("ldadam")(config, chunks)


def _numbered(config: dict[str, Any], chunks: list[nn.Module]) -> Any:
    for chunk in chunks:
        bare(chunk).adapters = nn.ModuleList([_OwnLayer(4, 4, bias=False)])
        bare(chunk).adapters[0].layer_number = 1 + mpu.get_pipeline_model_parallel_rank()
    return [known.info.name for known in names.describe_model(chunks, names.ParallelGroups()).values()]


def _one_fails(config: dict[str, Any], chunks: list[nn.Module]) -> Any:
    def failing(*_: Any) -> Any:
        raise LayoutError("this rank's parameter is cut in an unknown way")

    stock = names.describe_chunks
    try:
        if torch.distributed.get_rank() == 1:
            names.describe_chunks = failing
        return maker("ldadam")(config, chunks)
    finally:
        names.describe_chunks = stock


class _Built(Trainer):
    """Nothing but the model and what builds its optimizer."""

    def __init__(self, cell: Cell, make_optimizer: Any) -> None:
        self.cell, self.config = cell, cell.transformer_config()
        self.result = make_optimizer(cell.optimizer_config(), [self._chunk(0)])


def _clashing(rank: int, world: int) -> tuple[list[str], list[str]]:
    messages = []
    with cpu_megatron():
        for make in (_same_names, _one_fails):
            with pytest.raises(LayoutError) as error, opened(Cell(pp=2), make, _Built):
                pass
            messages.append(str(error.value))
        with opened(Cell(pp=2), _numbered, _Built) as built:
            return messages, built.result


def test_equal_names_are_refused_on_all_ranks() -> None:
    (first, numbered), (second, others) = run_ranks(2, _clashing)
    assert "'adapters.0.weight' on stages [0, 1]" in first[0] and "layer_number" in first[0] and second[0] == first[0]
    assert "cut in an unknown way" in first[1] and second[1] == first[1]
    assert "adapters.0.weight" in numbered and "adapters.1.weight" in others
    assert not set(numbered) & set(others)


class _WithPrediction(_Built):
    """Of several tokens, on the last stage."""

    def _model(self, stage: int, vp_stage: int | None) -> Any:
        last = mpu.is_pipeline_last_stage(ignore_virtual=True)
        spec = self._layers(vp_stage)
        block = get_gpt_mtp_block_spec(self.config, spec, use_transformer_engine=False) if last else None
        return GPTModel(
            self.config,
            spec,
            VOCABULARY,
            LENGTH,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=True),
            post_process=last,
            share_embeddings_and_output_weights=self.cell.tied,
            position_embedding_type="rope",
            mtp_block_spec=block,
        )


def _predicting(rank: int, world: int) -> tuple[str, bool]:
    with cpu_megatron(), pytest.MonkeyPatch.context() as patch:
        stock = Cell.transformer_config

        def config(cell: Cell) -> Any:
            found = stock(cell)
            found.mtp_num_layers = 1
            return found

        patch.setattr(Cell, "transformer_config", config)
        with pytest.raises(LayoutError) as error, opened(Cell(pp=2, tied=True), maker("ldadam"), _WithPrediction):
            pass
        with opened(Cell(pp=2), maker("ldadam"), _WithPrediction) as built:
            return str(error.value), built.result is not None


@pytest.mark.skipif(
    package_info.MINOR >= 20 and not find_spec("transformer_engine"),
    reason="this Megatron builds it with Transformer Engine alone",
)
def test_a_second_copy_of_the_embedding_is_refused_by_the_flag_that_makes_it() -> None:
    for message, works_untied in run_ranks(2, _predicting):
        assert "--mtp-num-layers" in message and "--untie-embeddings-and-output-weights" in message
        assert "layer_number" not in message and works_untied
