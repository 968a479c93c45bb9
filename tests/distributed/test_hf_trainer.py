"""Hugging Face's Trainer builds our optimizers itself, trains, saves on one rank and resumes."""

from __future__ import annotations

import os
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import rankwise.hf
from rankwise.names import BY_NAME
from rankwise.options.validation import OptionError

STEPS, LENGTH = 4, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "ldadam": {"rank": 4},
    "mkor": {"update_interval": 1},
    "mkor-h": {"update_interval": 1, "hybrid_min_steps": 2, "hybrid_patience": 1, "hybrid_beta": 1e3},
}


def _model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": LENGTH}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))


def _data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    # Of a few tokens only: the loss falls from the first step on, as MKOR-H wants to see.
    rows = torch.randint(0, 4, (64, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def _arguments(folder: Path, **changed: Any) -> TrainingArguments:
    given: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "no", "weight_decay": 0.1, **changed}
    return TrainingArguments(
        str(folder), per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True, **given
    )


def _trainer(name: str, folder: Path, callbacks: list[TrainerCallback] | None = None, **changed: Any) -> Trainer:
    model = _model()
    built = rankwise.hf.optimizer_cls_and_kwargs(model, name, lr=1e-2, **OPTIONS.get(name, {}))
    arguments = _arguments(folder, **changed)
    return Trainer(model, arguments, train_dataset=_data(), optimizer_cls_and_kwargs=built, callbacks=callbacks)


def _inner(trainer: Trainer) -> Any:
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


USUAL = ("mars-m", "sonew", "ldadam", "mkor-h")


@pytest.mark.parametrize(
    "name",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.exhaustive) for name in BY_NAME if name != "mars"],
)
def test_the_trainer_builds_and_steps_every_type(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = _trainer(name, tmp_path)
    trainer.train()
    optimizer = _inner(trainer)
    told = re.findall(r"^rankwise (\S+): [\d.]+% of [\d,]+ weights .* take its rule", capsys.readouterr().out, re.M)
    assert [name.lower() for name in told] == [name], "once, by the name that was written"
    assert isinstance(optimizer, BY_NAME[name].optimizer)
    rules = {row.name: row.rule for row in optimizer.explain()}
    matrices = {key for key, rule in rules.items() if rule == "matrix"}
    if name in ("mars-shampoo", "mars-m", "ldadam", "mkor", "mkor-h"):
        assert any("c_attn" in key for key in matrices) and not any("wte" in key for key in matrices), rules
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    if name.startswith("mars"):
        assert [group["weight_decay_1d"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.switched == (name == "mkor-h")


class _Weights(TrainerCallback):
    """Whether all ranks have the same weights at the end, and which matrices' factors this rank has."""

    def __init__(self) -> None:
        self.equal, self.factors = False, set[str]()

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        mine = torch.cat([weight.detach().flatten() for weight in known["model"].parameters()])
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(others, mine)
        self.equal = all(torch.equal(mine, other) for other in others)
        self.weights = mine
        self.factors = set(known["optimizer"].optimizer.matrix_states.everything())


def _told(folder: Path) -> bool:
    """Whether this rank prints what the optimizer takes."""
    with redirect_stdout(StringIO()) as said:
        _trainer("mkor", folder).train()
    return "rankwise MKOR: " in said.getvalue()


def _ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    found: dict[str, Any] = {}
    for run in ("through", "resumed"):
        seen = _Weights()
        saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
        trainer = _trainer("mkor", folder, [seen, rankwise.hf.consolidating()], **saving)
        trainer.train(resume_from_checkpoint=None if run == "through" else str(folder / "checkpoint-2"))
        found[run] = (seen.equal, seen.factors, seen.weights)
    found["told"] = _told(folder / "told")
    trainer = _trainer("mkor", folder / "forgotten")
    trainer.train()
    with pytest.raises(RuntimeError, match=r"rankwise\.hf\.consolidating"):
        trainer.optimizer.state_dict()
    return found


def test_ranks_share_the_work_and_one_of_them_saves(tmp_path: Path) -> None:
    first, second = run_ranks(2, _ranks, tmp_path)
    assert first["told"] and not second["told"]
    for found in (first, second):
        (equal, factors, weights), (again, owned, resumed) = found["through"], found["resumed"]
        assert equal and again and torch.equal(weights, resumed)
        assert factors == owned and factors
    assert not first["through"][1] & second["through"][1]


def test_a_decay_of_the_fallback_may_be_named() -> None:
    model = _model()
    cls, keywords = rankwise.hf.optimizer_cls_and_kwargs(model, "mars-adamw", lr=1e-2, weight_decay_1d=0.3)
    optimizer: Any = cls([{"params": list(model.parameters()), "weight_decay": 0.0}], **keywords)
    assert optimizer.param_groups[0]["weight_decay_1d"] == 0.3


def test_what_would_not_count_is_refused(tmp_path: Path) -> None:
    model = _model()
    with pytest.raises(OptionError, match=r"weight_decay.*TrainingArguments"):
        rankwise.hf.optimizer_cls_and_kwargs(model, "mars-m", lr=1e-3, weight_decay=0.1)
    with pytest.raises(OptionError, match="'marsm' is not known: it must be one of mars"):
        rankwise.hf.optimizer_cls_and_kwargs(model, "marsm", lr=1e-3)
    with pytest.raises(OptionError, match="no option 'rnak': did you mean 'rank'"):
        rankwise.hf.optimizer_cls_and_kwargs(model, "ldadam", lr=1e-3, rnak=4)
