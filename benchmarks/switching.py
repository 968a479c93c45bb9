"""From AdamW to one of ours in the middle of a run, and back: what the loss does."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch

from benchmarks.convergence.tasks import LanguageModel
from benchmarks.performance import markdown
from rankwise.launch.loop import learning_rate_factor
from rankwise.names import BY_NAME, READY

matplotlib.use("Agg")
import matplotlib.pyplot as plt

__all__ = ["STEPS", "SWITCH", "TYPES", "measure_switches", "switching_page"]

Row = Mapping[str, Any]
STEPS, SWITCH = 300, 200
_MEASURED = (201, 202, 205, 210, 215, 220, 225, 230, 240, 250, 275, 300)
TYPES = ("mars-adamw", "mars-m", "sonew", "ldadam", "mkor")
_ADAMW: Mapping[str, Any] = {"lr": 0.003, "betas": (0.9, 0.95), "weight_decay": 0.1}
STAY = ("stay", "adamw")
_WINDOWS = 128
GONE = 250
_COLOURS = {"stay": "C0", "there": "C1", "there, nothing carried": "C2", "start": "C3", "back": "C4"}


def _task() -> LanguageModel:
    """That of ``rankwise train``."""
    task = LanguageModel(layers=4, hidden=192, heads=6, window=128, batch=16, clip=1.0, seed=0)
    task.validation_windows = _WINDOWS  # the same ones every time: differences are of runs
    return task


def _build(name: str, model: torch.nn.Module) -> Any:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), **_ADAMW)
    named = BY_NAME[name]
    optimizer = named.optimizer(
        list(model.named_parameters()),  # type: ignore[arg-type]
        **named.complete(READY[name], name, instead=named.optimizer.__name__),
    )
    optimizer.capture(model)
    return optimizer


class _Run:
    """A model, an optimizer, and the steps taken."""

    def __init__(self, name: str) -> None:
        self.task, self.step, self.losses = _task(), 0, {}  # type: ignore[var-annotated]
        self.take(_build(name, self.task.model))

    def take(self, optimizer: Any) -> None:
        """Go on with it, at its own rate."""
        self.optimizer = optimizer
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def until(self, last: int) -> _Run:
        """Train, and measure the validation loss where that is wanted."""
        while self.step < last:
            factor = learning_rate_factor(self.step, STEPS, 0.1, 0.1)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
            self.task.gradient(self.step)
            self.optimizer.step()
            self.step += 1
            if self.step in (SWITCH, *_MEASURED):
                self.losses[self.step] = self.task.figures()["validation_loss"]
        return self


def _switched(begun: _Run, name: str, hand: Callable[[Any, Any], Any] | None) -> _Run:
    """The run goes on with another optimizer."""
    other = _Run("adamw")
    other.task.model.load_state_dict(copy.deepcopy(begun.task.model.state_dict()))
    other.step, other.losses = begun.step, dict(begun.losses)
    successor = _build(name, other.task.model)
    if hand is not None:
        hand(begun.optimizer, successor)
    other.take(successor)
    return other.until(STEPS)


def measure_switches(done: Iterable[tuple[str, str]], types: Sequence[str] = TYPES) -> Iterator[dict[str, Any]]:
    """A row for each way to go and type, as it is finished.

    Args:
        done: Ways and types that are there already.
        types: Types of ours.
    """
    done = set(done)
    adamw = _Run("adamw").until(SWITCH)
    if STAY not in done:
        stayed = _switched(adamw, "adamw", lambda old, new: new.load_state_dict(copy.deepcopy(old.state_dict())))
        yield {"way": STAY[0], "type": STAY[1], "losses": stayed.losses}
    for name in types:
        if all((way, name) in done for way in ("there", "there, nothing carried", "back", "start")):
            continue
        ours = _Run(name).until(SWITCH)
        ways: list[tuple[str, Callable[[], _Run]]] = [
            ("there", partial(_switched, adamw, name, lambda old, new: new.continue_from(old.state_dict()))),
            ("there, nothing carried", partial(_switched, adamw, name, None)),
            ("back", partial(_switched, ours, "adamw", lambda old, new: old.hand_over(new))),
            ("start", partial(ours.until, STEPS)),  # the last, for it goes on
        ]
        for way, run in ways:
            if (way, name) not in done:
                yield {"way": way, "type": name, "losses": run().losses}


def bump(row: Row, other: Row, first: int = SWITCH, last: int = STEPS) -> float:
    """How far the loss lies above another run's at most, at the steps after ``first`` up to ``last``."""
    losses = {int(step): loss for step, loss in row["losses"].items()}
    others = {int(step): loss for step, loss in other["losses"].items()}
    return max(losses[step] - others[step] for step in losses if first < step <= last)


def switching_page(rows: Sequence[Row], picture: str) -> str:
    """The page of these figures.

    Args:
        rows: As :func:`measure_switches` gives them.
        picture: Address of the plot.
    """
    by = {(row["way"], row["type"]): row for row in rows}
    stay, lines = by[STAY], []
    for name in dict.fromkeys(row["type"] for row in rows if row["type"] != STAY[1]):
        fresh = by["there, nothing carried", name]
        for way, kept, bare in (
            ("there", stay, f"{bump(fresh, stay, last=GONE):+.3f}"),
            ("back", by["start", name], "-"),
        ):
            row = by[way, name]
            pair = f"AdamW → {name}" if way == "there" else f"{name} → AdamW"
            ends = [f"{one['losses'][_last(one)]:.3f}" for one in (row, kept)]
            lines.append([pair, f"{bump(row, kept, last=GONE):+.3f}", bare, f"{bump(row, kept, GONE):+.3f}", *ends])
    headings = ["switch", f"most above staying, to {GONE}", "nothing carried", f"after {GONE}", "at the end", "stayed"]
    carried, bare_rises = (max(float(line[at]) for line in lines if line[at] != "-") for at in (1, 2))
    return _HEAD.format(picture=picture, carried=carried, bare=bare_rises) + markdown(headings, lines)


def _last(row: Row) -> Any:
    return max(row["losses"], key=int)


_HEAD = f"""# Switching in the middle of a run

This page measures what the validation loss does when another optimizer takes over in the middle of a run. The short
answer: with states carried over, the loss rises by at most {{carried:.3f}} nats per byte above the run that keeps its
optimizer, within {GONE - SWITCH} steps. Without them it rises by up to {{bare:.3f}}.

The model and text are those of `rankwise train`: GPT-2 of 4 x 192, 16 x 128 bytes a step, {STEPS} steps with warm-up
and cosine, plain PyTorch, one seed. Every type has the rate of its ready configuration. At step {SWITCH}
`continue_from` or `hand_over` replaces the optimizer
([how](checkpoints.md#from-adamw-or-muon-and-back-in-the-middle-of-a-run)). In the
table:

- *most above staying*: the largest difference of the validation loss (nats per byte, {_WINDOWS} windows) from the run
  that keeps its optimizer, at steps {SWITCH + 1} to {GONE}. Negative means never above;
- *nothing carried*: the same, if the new optimizer begins without states and at full size;
- *after {GONE}*: the same difference after step {GONE}. On the way back AdamW also learns slower than some of our
  types. This is no jump, and shows here.

```
python -m benchmarks switch --results docs/data/switching.jsonl --page docs/switching.md
```

![validation loss around the switch]({{picture}})

"""


def draw_switches(rows: Sequence[Row], path: Path) -> None:
    """Validation losses around the switch, one panel for each type.

    Args:
        rows: As :func:`measure_switches` gives them.
        path: The PNG to write.
    """
    names = list(dict.fromkeys(row["type"] for row in rows if row["type"] != STAY[1]))
    figure, panels = plt.subplots(2, -(-len(names) // 2), figsize=(11, 6), layout="constrained", squeeze=False)
    for name, panel in zip(names, panels.flat, strict=False):
        for row in rows:
            if row["type"] in (name, STAY[1]):
                steps = sorted(map(int, row["losses"]))
                losses = {int(step): loss for step, loss in row["losses"].items()}
                style = ":" if "nothing" in row["way"] else "--" if row["way"] in ("stay", "start") else "-"
                panel.plot(steps, [losses[step] for step in steps], style, color=_COLOURS[row["way"]], label=row["way"])
        panel.set(title=name, xlabel="step")
    for panel in panels.flat[len(names) :]:
        panel.set_axis_off()
    panels[0, 0].set_ylabel("validation loss, nats per byte")
    panels[0, 0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows written so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
