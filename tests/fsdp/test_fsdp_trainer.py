"""Hugging Face's Trainer shards with FSDP2, follows one process, saves, and goes on in the middle of an epoch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_on_cpu import accept_cpu, forget_accelerate
from ranks import run_ranks

pytest.importorskip("accelerate")
from hugging_face import LENGTH, VOCABULARY, Weights, built, difference, weights_of
from transformers import Trainer, TrainingArguments

import rankwise.hf

OPTIONS: dict[str, dict[str, Any]] = {
    "ldadam": {"rank": 2},
    "mkor": {"update_interval": 1, "factor_dtype": "float32"},
    "mkor-h": {"update_interval": 1, "factor_dtype": "float32", "hybrid_min_steps": 2, "hybrid_patience": 1},
    "mars-m": {"ns_dtype": "float32"},
    "sonew": {"eps": 1e-3},
}


def _trainer(case: str, folder: str, rows: int, **changed: Any) -> Trainer:
    model = built("llama")
    tokens = torch.randint(0, VOCABULARY, (26, LENGTH), generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {"max_steps": 6, "weight_decay": 0.1, "save_steps": 2}
    given |= {"disable_tqdm": True, "report_to": [], **changed}
    options = {"lr": 1e-2, **OPTIONS.get(case, {})}
    ours: dict[str, Any] = {}
    if case != "adamw":
        ours["optimizer_cls_and_kwargs"] = rankwise.hf.optimizer_cls_and_kwargs(model, case, **options)
    arguments = TrainingArguments(folder, per_device_train_batch_size=rows, **given)
    return Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens[:24]], **ours)


def _sharded(rank: int, world: int, case: str, folder: str, form: str, resumes: bool) -> Weights:
    accept_cpu()
    config = {"version": 2, "state_dict_type": form}
    trainer = _trainer(case, folder, 3, fsdp=True, fsdp_config=config)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resumes else None)
    return weights_of(trainer.model)


def _alone(rank: int, world: int, case: str, folder: str) -> Weights:
    forget_accelerate()
    os.environ.update(ACCELERATE_USE_CPU="true", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    trainer = _trainer(case, folder, 6, save_strategy="no")
    trainer.train()
    return weights_of(trainer.model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "form"),
    [
        ("mkor", "FULL_STATE_DICT"),
        *(
            pytest.param(case, form, marks=pytest.mark.exhaustive)
            for case in ("adamw", "mars-adamw", "mars-m", "sonew", "ldadam", "mkor-h")
            for form in ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
        ),
    ],
)
def test_the_trainer_follows_one_process_and_goes_on(case: str, form: str, tmp_path: Path) -> None:
    """The last of an epoch's four steps is the fourth: the checkpoint is from its middle."""
    trained, resumed = (run_ranks(2, _sharded, case, str(tmp_path), form, resumes)[1] for resumes in (False, True))
    assert difference(resumed, trained, "llama") == 0.0
    assert difference(trained, run_ranks(1, _alone, case, str(tmp_path))[0], "llama") <= 2e-4


def _flattened(rank: int, world: int, folder: str) -> str:
    accept_cpu()
    config = {"version": 1, "sync_module_states": "false"}
    with pytest.raises(Exception, match="") as refused:
        _trainer("ldadam", folder, 3, fsdp=True, fsdp_config=config).train()
    return str(refused.value)


def test_fsdp1_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for text in run_ranks(2, _flattened, str(tmp_path)):
        assert re.search(r"is invalid, because it is a parameter that FSDP has flattened.*\(FSDP2\)", text), text
