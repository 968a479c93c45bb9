"""What the pages say of DeepSpeed is what DeepSpeed itself takes and says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from deepspeed.monitor.config import get_monitor_config
from deepspeed.runtime.config import DeepSpeedConfig

from deepspeed_plugin import validate_config
from rankwise.names import BY_SPELLING

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "configs/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")


def blocks() -> Iterator[tuple[str, dict[str, Any]]]:
    for page in PAGES:
        for text in re.findall(r"^```json\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            yield page.name, json.loads(text)


def test_blocks_for_monitors_are_taken_as_they_are() -> None:
    met = set()
    for page, block in blocks():
        given = {key: block[key] for key in MONITORS if key in block}
        read = get_monitor_config(block)  # refuses keys and types that it does not know
        for key, values in given.items():
            assert {name: getattr(getattr(read, key), name) for name in values} == values, (page, key)
        met |= set(given)
    assert met == set(MONITORS)


def test_blocks_with_an_optimizer_are_accepted() -> None:
    found = [block for _, block in blocks() if "optimizer" in block]
    assert len(found) >= 3
    for block in found:
        validate_config(block)


def test_deepspeed_reads_the_packaged_files() -> None:
    """Each of them, comment and all; the Trainer's once "auto" is filled in."""
    root = Path(str(files("rankwise.configs")))
    filled = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    for path in sorted(root.rglob("*.json")):
        config = json.loads(path.read_text())
        if path.parent.name == "huggingface":
            config |= {**filled, "bf16": {"enabled": True}}
        read = DeepSpeedConfig(config)
        assert read.zero_config.stage == config["zero_optimization"]["stage"], path
        assert read.optimizer_name.lower() == config["optimizer"]["type"].lower(), path
        assert read.optimizer_params == config["optimizer"]["params"] and read.gradient_clipping == 1.0, path


WITHOUT = """
import sys

import deepspeed
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # a minute of a compiler
for stage, name in enumerate(sys.argv[1:]):
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage % 4}, "optimizer": {"type": name}}
    model = torch.nn.Linear(4, 4)
    try:
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    except Exception as error:
        print(f"said: {type(error).__name__}: {error}")
"""


def test_without_the_import_deepspeed_says_what_the_page_quotes() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    (quoted,) = re.findall(
        r"^\| `(\w+: MKOR is .+)` \| .*`import deepspeed_plugin`.*`rankwise deepspeed", page, re.MULTILINE
    )
    names = [*BY_SPELLING, *map(str.lower, BY_SPELLING)]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-c", WITHOUT, *names]
    done = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True, timeout=200)
    said = re.findall(r"^said: (.+)$", done.stdout, re.MULTILINE)
    assert said == [quoted.replace("MKOR", name) for name in names], done.stderr[-2000:]
