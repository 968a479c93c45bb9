"""examples/speedrun_track3.py: its entries train on ranks, and all but two statements are the baseline's."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from example_files import example
from ranks import run_ranks

SCRIPT = '''
"""Written for this test: it sets what the baseline sets, and steps as the baseline does."""
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.proj = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.proj(self.fc(x).relu().square())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Block() for _ in range(2))
        self.proj = nn.Linear(8, 16)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.proj(x).flatten(0, 1), targets.flatten(), reduction="sum")

model = Model()
losses = []
for _ in range(1):
    train_steps = 3375
    torch.manual_seed(0)
    for p in model.parameters():
        p.data.normal_(std=0.1)
    optimizer1 = AdamW([dict(params=[p for p in model.parameters() if p.ndim < 2]),
                        dict(params=[model.embed.weight, model.proj.weight])], lr=0.01)
    optimizer2 = Muon([p for p in model.blocks.parameters() if p.ndim >= 2],
                      lr=0.025, weight_decay=0.025)
    optimizers = [optimizer1, optimizer2]
    assert set(p for opt in optimizers for group in opt.param_groups
               for p in group["params"]) == set(model.parameters())
    for opt in optimizers:
        for group in opt.param_groups:
            group["initial_lr"] = group["lr"]
    for step in range(train_steps):
        torch.manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(0, 16, (4, 8))
        loss = model(tokens, (3 * tokens + 1) % 16)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        for opt in optimizers:
            for group in opt.param_groups:
                group["lr"] = group["initial_lr"] * (1 - step / train_steps)
            opt.step()
        model.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()) / 32)
'''


def trained(rank: int, world: int, script: str) -> tuple[list[float], list[float]]:
    variables: dict[str, object] = {}
    exec(compile(script, "entry", "exec"), variables)
    return variables["losses"], [float(p.sum()) for p in variables["model"].parameters()]  # type: ignore[attr-defined, return-value]


@pytest.mark.parametrize("name", ["MARS-M", "MKOR-Sketch"])
def test_an_entry_trains_on_two_ranks(name: str) -> None:
    entry = example("speedrun_track3").entry(SCRIPT, name, 40)
    changed = [line for line in difflib.ndiff(SCRIPT.splitlines(), entry.splitlines()) if line[0] in "-+"]
    assert [line.split("=")[0].split()[-1] for line in changed if line[0] == "+"] == ["train_steps", "optimizer2"]
    assert len(changed) == 5, "the statement of two lines and the number"
    (losses, sums), (_, others) = run_ranks(2, trained, entry)
    assert sums == others and len(losses) == 40 and losses[-1] < losses[0] - 0.3


def test_what_is_replaced_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A baseline whose rate has changed is seen."""
    (tmp_path / "train_gpt_simple.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["speedrun", "train_gpt_simple.py", "--steps", "40"])
    example("speedrun_track3").main()
    said = capsys.readouterr().out
    assert "lr=0.025, weight_decay=0.025)" in said and "-     train_steps = 3375" in said


def test_another_script_is_refused() -> None:
    with pytest.raises(ValueError, match="sets optimizer2 0 times, train_steps 1 times: it must set each once"):
        example("speedrun_track3").entry(SCRIPT.replace("optimizer2 =", "second ="), "MARS-M", 40)
