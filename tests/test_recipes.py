"""The recipes of the documentation run as they stand; the scripts are forked, so that they share what they import."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from accelerate_on_cpu import accept_cpu, forget_accelerate
from ranks import run_ranks

PAGES = Path(__file__).resolve().parents[1] / "docs/frameworks"


def block(section: str, language: str = "python", page: str = "huggingface.md") -> str:
    text = (PAGES / page).read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return found


def _executed(rank: int, world: int, folder: str, section: str, result: str, **variables: str) -> str:
    from cpu_deepspeed import choose_cpu

    os.chdir(folder)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", **variables)
    choose_cpu()
    if find_spec("accelerate") is not None:
        forget_accelerate()
    names: dict[str, object] = {"__name__": "recipe"}
    exec(compile(block(section), section, "exec"), names)
    return str(eval(result, names))


def _without_engine(rank: int, world: int, folder: str, section: str, result: str) -> str:
    return _executed(rank, world, folder, section, result, ACCELERATE_USE_CPU="true")


def _with_deepspeed(rank: int, world: int, folder: str, section: str, result: str) -> str:
    file = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}
    return _executed(rank, world, folder, section, result, **(file if section.startswith("accelerate") else {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "engine"),
    [("The Trainer with DeepSpeed", "trainer.model_wrapped"), ("accelerate with DeepSpeed", "model")],
)
def test_an_engine_gets_what_the_json_leaves_open(section: str, engine: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "ds.json").write_text(block("The Trainer with DeepSpeed", "json"))
    read = f"[{engine}.basic_optimizer.param_groups[0][key] for key in ('weight_decay', 'betas')]"
    result = f"(type({engine}.basic_optimizer).__name__, {engine}.global_steps, {read})"
    (found,) = run_ranks(1, _with_deepspeed, str(tmp_path), section, result)
    assert found.startswith("('LDAdam', ") and found.endswith("[0.1, (0.908, 0.99)])"), found


def test_accelerate_prepares_an_optimizer_of_ours(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    read = "optimizer.optimizer.read_health()['factors_updated']"
    (found,) = run_ranks(1, _without_engine, str(tmp_path), "accelerate without DeepSpeed", read)
    assert float(found) > 0


def test_lightning_steps_an_optimizer_of_ours(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs pip install lightning")
    read = "(trainer.global_step, trainer.optimizers[0].read_health()['factors_updated'] > 0)"
    (found,) = run_ranks(1, _without_engine, str(tmp_path), "Lightning", read)
    assert found == "(3, True)"


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def _sharded(rank: int, world: int, folder: str, section: str, result: str, page: str) -> str:
    os.chdir(folder)
    # Lightning starts no processes where torchrun has.
    os.environ.update(TORCHELASTIC_RUN_ID="1", LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0")
    if page == "huggingface.md":
        accept_cpu()
    names: dict[str, object] = {"__name__": "recipe"}
    exec(compile(block(section, page=page), section, "exec"), names)
    return str(eval(result, names))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("needs", "section", "page", "optimizer"),
    [
        ("accelerate", "accelerate with FSDP2", "huggingface.md", "optimizer.optimizer"),
        ("accelerate", "The Trainer with FSDP2", "huggingface.md", "trainer.optimizer.optimizer"),
        ("lightning", "Lightning with FSDP2", "huggingface.md", "trainer.optimizers[0]"),
        ("transformers", "A training loop", "fsdp.md", "optimizer"),
    ],
)
def test_sharded_models_are_trained(needs: str, section: str, page: str, optimizer: str, tmp_path: Path) -> None:
    pytest.importorskip(needs, reason=f"needs pip install {needs}")
    pytest.importorskip("transformers")
    # Once, for the ranks to inherit.
    from transformers import GPT2LMHeadModel, Trainer  # noqa: F401

    result = (
        f"(type({optimizer}.param_groups[0]['params'][0]).__name__, {optimizer}.read_health()['matrices_updated'] > 0)"
    )
    assert run_ranks(2, _sharded, str(tmp_path), section, result, page) == ["('DTensor', True)"] * 2
