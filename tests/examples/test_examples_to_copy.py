"""The files of examples/ run as they stand, on CPU ranks, with their options for small models."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_deepspeed import NO_BUILD

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BIN = Path(sys.executable).parent
CHECKOUT = next(filter(None, os.environ.get("RANKWISE_MEGATRON_LM", "").split(os.pathsep)), None)
TINY = "--tiny --length 64 --micro-batch 2 --lr 1.2e-2 --save-every 8"


def started(folder: Path, command: str, **variables: str) -> str:
    """What a command prints, in a folder to which the examples were copied."""
    for file in EXAMPLES.iterdir():
        if file.is_file():
            (folder / file.name).write_text(file.read_text())
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join([str(BIN), environment["PATH"]])
    environment |= {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        shlex.split(command),
        cwd=folder,
        env={**environment, **NO_BUILD, **variables},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)", text, re.MULTILINE)}


COMMANDS = {
    "deepspeed": f"rankwise deepspeed --ranks 2 --device cpu llama_deepspeed.py {TINY} --accumulation 2",
    "fsdp": f"torchrun --standalone --nproc-per-node 2 llama_fsdp.py {TINY} --backend aot_eager",
}


def pretrained(command: str, folder: Path) -> dict[int, float]:
    said = started(folder, f"{command} --steps 16")
    assert re.search(r"rankwise (MARS|MARS-M): [\d.]+% of [\d,]+ weights .* take its rule", said), said[-3000:]
    first = losses(said)
    assert min(first) == 1 and max(first) == 16 and first[16] < first[1] - 1.0, first
    return first


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_llama_is_pretrained_and_saved(name: str, tmp_path: Path) -> None:
    pretrained(COMMANDS[name], tmp_path)
    assert any((tmp_path / "checkpoints").iterdir())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COMMANDS)
def test_a_llama_is_pretrained_and_resumed(name: str, tmp_path: Path) -> None:
    first = pretrained(COMMANDS[name], tmp_path)
    resumed = losses(started(tmp_path, f"{COMMANDS[name]} --steps 18 --resume"))
    assert set(resumed) == {18} and resumed[18] < first[1] - 1.0, resumed


@pytest.mark.slow
@pytest.mark.parametrize(("words", "kind"), [("--lora 4", "MARS-AdamW"), ("", "LDAdam")])
def test_a_model_is_fine_tuned(words: str, kind: str, tmp_path: Path) -> None:
    """Under LoRA all that is trained are matrices of adapters."""
    said = started(tmp_path, f"python finetune_trainer.py --tiny --steps 10 --length 64 --lr 1e-2 {words}")
    (share,) = re.findall(rf"rankwise {kind}: ([\d.]+)% of [\d,]+ weights", said)
    assert (float(share) == 100.0) == bool(words), said[-3000:]
    assert "'loss'" in said and (tmp_path / "out/checkpoint-10").is_dir()


def test_what_the_example_for_megatron_starts(tmp_path: Path) -> None:
    """Its flags are read by Megatron where there is a checkout, below."""
    (tmp_path / "megatron/training").mkdir(parents=True)
    (tmp_path / "megatron/training/__init__.py").touch()
    (tmp_path / "pretrain_gpt.py").touch()
    given = {"MEGATRON": str(tmp_path), "TINY": "1", "DRY_RUN": "1", "OPTIMIZER": "ldadam"}
    said = started(tmp_path, "bash pretrain_gpt.sh --train-iters 7", **given)
    assert "--nproc-per-node=2" in said and "--cpu" in said and "--mock-data" in said
    assert "--optimizer ldadam" in said and said.rstrip().endswith("--train-iters 7")


@pytest.mark.exhaustive
@pytest.mark.skipif(CHECKOUT is None, reason="RANKWISE_MEGATRON_LM names no Megatron-LM checkout")
def test_megatrons_script_is_run_by_the_example(tmp_path: Path) -> None:
    assert CHECKOUT is not None
    lent = "import typing\ntyping.override = getattr(typing, 'override', lambda f: f)\n"
    (tmp_path / "sitecustomize.py").write_text(lent)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(tmp_path)]))
    said = started(tmp_path, "bash pretrain_gpt.sh", MEGATRON=CHECKOUT, TINY="1", PYTHONPATH=path)
    found = [float(loss) for loss in re.findall(r"lm loss: (\S+)", said)]
    assert len(found) == 20 and found[-1] < found[0], found
    assert "take its rule" in said and (tmp_path / "checkpoints/iter_0000020").is_dir()
