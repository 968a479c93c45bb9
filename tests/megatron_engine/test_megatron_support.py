"""What a loop of one's own passes and cannot work, refused when the config is made or the optimizer is built."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_cells import Cell
from megatron_harness import opened
from megatron_types import CAPTURING, TYPES, maker
from ranks import run_ranks
from torch import nn

from megatron_patches.cpu import cpu_megatron
from megatron_patches.registry import NAMES, RankwiseConfig, get_megatron_optimizer
from megatron_patches.support import SupportError
from rankwise.options.validation import OptionError


def test_remainders_are_a_setting_of_megatrons() -> None:
    with pytest.raises(OptionError, match="invalid under Megatron, .* and set --use-precision-aware-optimizer"):
        RankwiseConfig(optimizer="ldadam", lr=1e-3, rankwise={"store_param_remainders": True})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": "ldadam", "rankwise": {"rank": 0}}, "^ldadam: rank=0 is invalid: it must be an integer"),
        ({"optimizer": "ldadam", "rankwise": {"rnak": 4}}, "has no option 'rnak': did you mean 'rank'?"),
        ({"optimizer": "ldadam", "rankwise": None}, "rankwise=None is invalid: it must be a dictionary"),
        ({"optimizer": "mars-m", "rankwise": {"exact": True}}, "exact=True is invalid with --optimizer mars-m"),
        ({"optimizer": "LDAdam"}, "optimizer='LDAdam' is invalid .* did you mean 'ldadam'?"),
        ({"optimizer": "mars_adamw"}, "did you mean 'mars-adamw'?"),
        ({"rankwise": {"rank": 4}}, "optimizer='adam' is invalid .* leave rankwise out"),
        (
            {"optimizer": "sonew", "rankwise_tp_mode": "blocks"},
            "rankwise_tp_mode='blocks' is invalid: it must be 'exact'",
        ),
        ({"optimizer": "sonew", "rankwise_layer_wise": "yes"}, "rankwise_layer_wise='yes' is invalid: it must be True"),
        ({"optimizer": "mkor", "optimizer_cpu_offload": True}, "--optimizer-cpu-offload is invalid .* add --use-dist"),
        (
            {"optimizer": "mkor", "rankwise_layer_wise": True, "use_distributed_optimizer": True},
            "--use-distributed-optimizer is invalid with the layer-wise optimizer",
        ),
    ],
)
def test_a_wrong_config_ends_where_it_is_made(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, SupportError), match=message):
        RankwiseConfig(lr=1e-3, **fields)


@pytest.mark.parametrize("name", [*NAMES, "adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"])
def test_every_name_makes_a_config(name: str) -> None:
    """Megatron's own names too: a config is often made before it is known which optimizer is to run."""
    assert RankwiseConfig(optimizer=name, lr=1e-3).optimizer == name


def test_experts_in_one_tensor_are_refused() -> None:
    model = nn.Sequential(type("GroupedMLP", (nn.Module,), {})())
    with pytest.raises(SupportError, match="--moe-grouped-gemm without .* with --optimizer mars-m.*one matrix; use"):
        get_megatron_optimizer(RankwiseConfig(optimizer="mars-m", lr=1e-3), [model])


def test_settings_only_some_versions_have_are_refused() -> None:
    for field in ("optimizer_cuda_graph", "use_layer_wise_distributed_optimizer"):
        config = RankwiseConfig(optimizer="ldadam", lr=1e-3)
        setattr(config, field, True)
        with pytest.raises(SupportError, match="is invalid with --optimizer ldadam"):
            get_megatron_optimizer(config, [])


def _beside_graphs(rank: int, world: int, settings: list[dict[str, Any]]) -> list[list[str]]:
    """Names of the types that are refused beside each setting."""
    refused: list[list[str]] = []
    with cpu_megatron():
        for given in settings:
            refused.append([])
            with opened(Cell(), maker("adam")) as trainer:
                vars(trainer.config).update(given)
                for name in (*TYPES, "mkor-sketch"):
                    try:
                        maker(name)(Cell().optimizer_config(), trainer.chunks)
                    except SupportError as error:
                        assert "is invalid for MKOR: replayed graphs run no module hooks" in str(error)
                        refused[-1].append(name)
    return refused


def test_graphs_of_the_models_passes_are_refused_by_what_needs_hooks_in_them() -> None:
    """The step is not in them, and steps in place; what they do needs a GPU."""
    settings = [{"cuda_graph_impl": name} for name in ("local", "transformer_engine", "full_iteration")]
    settings += [{"enable_cuda_graph": True}, {"external_cuda_graph": True}]
    found = run_ranks(1, _beside_graphs, [{"cuda_graph_impl": "none"}, *settings])[0]
    assert found == [[], *[list(CAPTURING)] * len(settings)]
