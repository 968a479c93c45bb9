"""What cannot work is refused with a way out, and health reaches DeepSpeed's monitor."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import ds_harness as ds
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from ds_harness import run_ranks

from deepspeed_plugin.support import refuse_settings
from rankwise import MARS
from rankwise.options.validation import OptionError


def _fake_engine(offload: dict[str, Any] | None = None, **settings: Any) -> Any:
    found = None if offload is None else SimpleNamespace(**{"ratio": 1.0, "device": "cpu", **offload})
    defaults = {
        "zero_offload_optimizer": lambda: found,
        "super_offload": lambda: getattr(found, "super_offload", False),
        "zenflow": False,
        "has_moe_layers": False,
        "zero_elastic_checkpoint": lambda: False,
        "autotp_size": lambda: 1,
        "zero_hpz_partition_size": lambda: 1,
        "torch_autocast_enabled": lambda: True,
        "torch_autocast_dtype": lambda: torch.bfloat16,
        "gradient_clipping": lambda: 1.0,
        "zero_optimization_stage": lambda: 2,
        "mp_world_size": 1,
        "mpu": None,
        "sequence_parallel_size": 1,
        "bf16_master_weights_and_gradients": lambda: False,
        "fp16_master_weights_and_gradients": lambda: False,
        "bf16_optimizer_states": lambda: False,
    }
    return SimpleNamespace(**{**defaults, **settings})


def _experts(native: bool) -> dict[str, Any]:
    """Settings of an engine whose model has experts of deepspeed.moe.layer.MoE, or of AutoEP."""
    experts = torch.nn.Linear(2, 2)
    for weight in experts.parameters():
        weight.allreduce = False  # type: ignore[attr-defined]
        weight.ds_autoep_uc_meta = {} if native else {"logical_shape": [2, 2]}  # type: ignore[attr-defined]
    return {"has_moe_layers": True, "module": experts}


@pytest.mark.parametrize(
    ("settings", "key", "fix"),
    [
        ({"offload": {"ratio": 0.5}}, "offload_optimizer.ratio=0.5", "set ratio to 1.0"),
        ({"offload": {"device": "nvme"}}, "offload_optimizer.device='nvme'", "device 'cpu'"),
        ({"offload": {"super_offload": True}}, "super_offload=True", "set super_offload to false"),
        (
            {"bf16_master_weights_and_gradients": lambda: True},
            "bf16.bf16_master_weights_and_grads=True",
            "with both keys",
        ),
        (
            {"fp16_master_weights_and_gradients": lambda: True},
            "fp16.fp16_master_weights_and_grads=True",
            "leave it out",
        ),
        (
            {"bf16_master_weights_and_gradients": lambda: True, "bf16_optimizer_states": lambda: True, "offload": {}},
            "bf16.bf16_master_weights_and_grads=True",
            "without offload_optimizer",
        ),
        ({"zenflow": True}, "zenflow=True", "remove the zenflow block"),
        ({"zero_elastic_checkpoint": lambda: True}, "elastic_checkpoint=True", "set it to false"),
        ({"mp_world_size": 2}, "tensor parallelism=2", "tensor_parallel.autotp_size"),
        ({"torch_autocast_dtype": lambda: torch.float16}, "torch_autocast.dtype='float16'", "use bfloat16"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size=2", "parallel_state_sp"),
        ({"autotp_size": lambda: 2, **_experts(native=True)}, "tensor_parallel.autotp_size=2", "leave it out"),
        ({"autotp_size": lambda: 2, **_experts(native=False)}, "gradient_clipping=1.0", "ZeRO stage 3"),
        ({"autotp_size": lambda: 2, "sequence_parallel_size": 2}, "tensor_parallel.autotp_size=2", "leave it out"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], key: str, fix: str) -> None:
    refuse_settings(_fake_engine(), "MARS")
    refuse_settings(_fake_engine(offload={}), "MARS")
    with pytest.raises(OptionError) as refusal:
        refuse_settings(_fake_engine(**settings), "MARS")
    assert key in str(refusal.value)
    assert fix in str(refusal.value)


def _started(rank: int, world: int, job: ds.Job) -> str:
    get_accelerator().is_fp16_supported = lambda: True
    try:
        ds.engine_of(job, world)
    except OptionError as error:
        return str(error)
    return "started"


def _replaced(rank: int, world: int) -> str:
    model = ds.model_of(ds.ours()[0])
    mine = MARS(model.parameters())
    theirs = torch.optim.AdamW(mine.param_groups)  # as accelerate does under optimizer offload
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    try:
        deepspeed.initialize(model=model, optimizer=theirs, config=config)
    except OptionError as error:
        return str(error)
    return f"{type(mine).__name__} was forgotten"


PARTLY = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
REFUSED: list[tuple[Any, tuple[str, ...]]] = [
    ((_started, replace(ds.ours()[1], config={"zero_optimization": PARTLY})), ("ratio=0.5",)),
    (
        (_started, ds.at_stage(ds.Job("MKOR", ds.TYPES["MKOR"], dtype=torch.float16), 0)),
        ("zero_optimization.stage=0 is invalid", "loss scale (256)", "use stage 1"),
    ),
    ((_replaced,), ("a framework replaced it",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("attempt", "words"), REFUSED, ids=["offload", "loss scale", "replaced"])
def test_real_engines_refuse_alike_on_every_rank(attempt: Any, words: tuple[str, ...]) -> None:
    messages = run_ranks(2, *attempt)
    assert len(set(messages)) == 1
    assert all(word in messages[0] for word in words)


def _with_monitor(rank: int, world: int, folder: str) -> dict[str, int]:
    found = {}
    for job in ds.ours():
        monitor = {"enabled": True, "output_path": folder, "job_name": job.name}
        config = {"csv_monitor": monitor, "steps_per_print": 2, "zero_optimization": {"stage": 2}}
        engine = ds.engine_of(replace(job, config=config), world)
        for step in range(5):
            ds.train_step(engine, rank, world, step)
        found[job.name] = sum(len(unit.keys("matrix")) for unit in engine.basic_optimizer.planner.units.values())
        engine.destroy()
    return found


@pytest.mark.slow
def test_health_reaches_the_monitor(tmp_path: Path) -> None:
    matrices = run_ranks(2, _with_monitor, str(tmp_path))[0]
    own = {
        "MARS-AdamW": "clip_rate",
        "SONew": "graft_ratio",
        "LDAdam": "subspace_rotation",
        "MKOR": "factors_updated",
    }
    for name, count in matrices.items():
        files = {path.stem: path for path in (tmp_path / name).rglob("*.csv")}
        label = f"optim_{name.lower()}"
        rows = list(csv.reader(files[f"{label}_matrices_updated"].open()))
        values = [float(row[1]) for row in rows[1:]]
        assert values, rows
        if name == "MKOR-H":
            continue  # its matrices end at the switch
        if "MARS" in name or name == "SONew":
            # Element-wise rules count shards: a cut matrix is updated in parts.
            assert all(value >= count for value in values)
        elif name == "MKOR":
            # The first step has the layer that no input reaches among its matrices, the later ones have not.
            assert values == [count + 1 / 3, count]
        else:
            assert values == [count] * len(values)
        assert f"{label}_bytes_sent" in files
        if name in own:
            assert f"{label}_{own[name]}" in files, sorted(files)
