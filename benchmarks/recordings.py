"""Every command of ``rankwise`` as a user types it, with what it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RECORDINGS", "Recording", "record", "recordings_page"]

_SCRIPT = """\
import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=500))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
for step in range(4):
    tokens = torch.randint(0, 500, (2, 32))
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"step {step + 1}: loss {float(loss.detach()):.3f}", flush=True)
engine.save_checkpoint("checkpoints")
torch.distributed.destroy_process_group()
"""
_CONFIG = """\
{
  "train_micro_batch_size_per_gpu": 2,
  "zero_optimization": {"stage": 2},
  "optimizer": {"type": "LDAdam", "params": {"lr": 1e-3, "rank": 16}}
}
"""


@dataclass(frozen=True)
class Recording:
    """A command.

    Attributes:
        words: What follows ``rankwise``.
        text: What it shows.
        width: Columns of the terminal.
    """

    words: str
    text: str
    width: int = 100


RECORDINGS: Sequence[Recording] = (
    Recording("doctor", "Is everything there, and does it work? Two ranks follow recorded steps at the end."),
    Recording("list", "Which type is for what.", width=180),
    Recording(
        "plan --optimizer ldadam --model llama-8b --ranks 64 --stage 3",
        "What a run on 64 GPUs will hold, send and compute, before any is there.",
    ),
    Recording(
        "explain --config ds.json --model gpt2-small",
        "Which rule each parameter takes; equal layers share a line, unless `--all` is given. `--ranks 4` adds "
        "which rank owns each matrix (MKOR's factors, LDAdam's basis), and why.",
    ),
    Recording(
        "train --optimizer adamw --optimizer mars-m --steps 30 --layers 2 --hidden 64 --heads 4 --output runs/first",
        "A first run: a small model, real text, two processes.",
    ),
    Recording("compare runs/first", "Any runs, from the logs they left."),
    Recording(
        "deepspeed --ranks 2 --device cpu train.py", "A script of yours as it stands, with the types known to its JSON."
    ),
    Recording(
        "megatron --dry-run --cpu --ranks 8 Megatron-LM/pretrain_gpt.py --optimizer ldadam --ldadam-rank 256",
        "What would be started, and its environment.",
    ),
    Recording(
        "universal checkpoints/global_step4 checkpoints/universal",
        "A universal checkpoint, for any ranks and ZeRO stage, with the states.",
    ),
    Recording(
        "convert checkpoints/universal checkpoints/torch --to torch",
        "A checkpoint for FSDP2 and torch.distributed.checkpoint, or for Megatron.",
    ),
)
"""In the order in which they make sense: later ones read what earlier ones leave."""


def record(folder: Path) -> Iterator[tuple[Recording, str]]:
    """Run all of them in a folder; each with what it printed.

    Raises:
        RuntimeError: A command has failed.
    """
    (folder / "train.py").write_text(_SCRIPT)
    # As much of a checkout as a dry run looks for.
    (folder / "Megatron-LM/megatron/training").mkdir(parents=True)
    (folder / "Megatron-LM/megatron/training/__init__.py").touch()
    (folder / "Megatron-LM/pretrain_gpt.py").touch()
    (folder / "ds.json").write_text(_CONFIG)
    environment = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    for recording in RECORDINGS:
        command = [sys.executable, "-m", "rankwise", *recording.words.split()]
        wide = {**environment, "COLUMNS": str(recording.width)}
        done = subprocess.run(command, cwd=folder, env=wide, capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise RuntimeError(f"rankwise {recording.words} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        yield recording, _shown(done.stdout, folder)


_NOISE = ("built successfully", "real_accelerator")
"""Words of lines that DeepSpeed prints everywhere, and that say nothing."""


def _shown(output: str, folder: Path) -> str:
    """Without what only this machine has: its folders."""
    text = output.replace(str(folder.resolve()), ".").replace(str(folder), ".")
    text = re.sub(r"\bPATH=\S+", "PATH=…", text.replace(sys.executable, "python"))
    lines = [line.rstrip() for line in text.strip("\n").splitlines() if not any(noise in line for noise in _NOISE)]
    if any(sys.prefix in line for line in lines):
        raise RuntimeError(f"the output names a folder of this machine:\n{text}")
    return "\n".join(lines)


def recordings_page(found: Sequence[tuple[Recording, str]]) -> str:
    """The page of these recordings."""
    rows = [f"| [`{name}`](#{name}) | {text} |\n" for name, text in ((_name(one), one.text) for one, _ in found)]
    parts = [_HEAD.format(rows="".join(rows), config=_CONFIG, script=_SCRIPT)]
    for recording, output in found:
        title = _name(recording)
        parts.append(f"## {title}\n\n{recording.text}\n\n```text\n$ rankwise {recording.words}\n{output}\n```\n")
    return "\n".join([*parts, _TAIL])


def _name(recording: Recording) -> str:
    return recording.words.split()[0]


_HEAD = """# The commands, recorded

| `rankwise …` | what it shows |
|---|---|
{rows}
`rankwise COMMAND --help` lists the options. [Exit codes, pipes and JSON](#exit-codes-pipes-json) are the same for all.

What follows is each command with what it printed, in a folder with this `ds.json` and this `train.py`, on a CPU
machine. It was made by `python -m benchmarks recordings --page docs/commands.md`, which fails if a command does.

```json
{config}```

```python
{script}```
"""

_TAIL = """\
## Exit codes, pipes, JSON

| code | what |
|---|---|
| 0 | done |
| 1 | a check found a fault, a limit is not met, a run failed, or a file could not be written |
| 2 | bad usage: what was typed, or a file that it names, cannot be used; no training was started |
| 130, 143, 129 | ended by Ctrl-C, SIGTERM or a closed terminal; no rank is left behind |
| 141 | whoever read the output stopped, as in `rankwise list \\| head -1` |

- `rankwise deepspeed` and `rankwise megatron` end as torchrun does, whose place they take, but for signals. Under a
  launcher they run the script in their own process, and it ends as it would under Python.
- `--json` of doctor, list, plan, explain and compare prints one JSON value on stdout and nothing else; `null` stands
  for a loss that is no number. Errors go to stderr, and stdout is empty then.
- A closed stdout (`>&-`) is as `>/dev/null`. Without a terminal, or with `NO_COLOR`, there are no colours;
  `FORCE_COLOR` asks for them.
"""
