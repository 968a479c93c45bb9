"""Make an entry for modded-nanogpt's third track, the fewest steps to a loss of 3.28, with MARS-M or MKOR-Sketch.

In a checkout of modded-nanogpt, with its data (2 B tokens), on 1, 2, 4 or 8 A100s or H100s:

    python speedrun_track3.py records/track_3_optimization/train_gpt_simple.py --type MARS-M --steps 3250
    torchrun --standalone --nproc_per_node=8 train_gpt_MARS-M.py

The entry is the baseline's script with two statements changed: the optimizer of the blocks' matrices, and the number of
steps. Data, batch, architecture, initialisation and the AdamW of all else stay, to the byte. Both are printed: the
rates here are made of a baseline's with rate 0.025 and decay 0.05.

What it costs, by arithmetic: 3,250 steps of 524,288 tokens through 0.12 B multiplying parameters are 1.4e18 operations,
about an hour of an H100 at 40 % of its peak, eight minutes of eight. A claim needs several runs, and rates have to be
searched: those here are the baseline's (Muon's, AdamW's), converted by formula. Nothing of this has been run on a GPU.
"""

from __future__ import annotations

import argparse
import ast
from difflib import ndiff
from pathlib import Path

BLOCKS = "[(name, p) for name, p in model.blocks.named_parameters() if p.ndim >= 2]"
OPTIMIZERS = {
    # The baseline's step (rate 0.025, decay 0.05) has a spectral norm of rate * sqrt(max(1, rows / columns)), ours
    # 0.2 * sqrt(longer side) times the rate: 0.025 at 768 columns is 4.5e-3. Rate times decay is the baseline's. Losses
    # are sums over tokens, so that a norm to clip at would have to grow with the batch.
    "MARS-M": f'rankwise.MARS({BLOCKS}, variant="muon", lr=4.5e-3, weight_decay=0.28, clip=None)',
    "MKOR-Sketch": f'rankwise.MKOR({BLOCKS}, rule="sketch", lr=3e-3, betas=(0.9, 0.95), weight_decay=0.125)',
}


def entry(script: str, name: str, steps: int) -> str:
    """Return the baseline's script with another optimizer of the blocks.

    Args:
        script: The baseline.
        name: A key of :data:`OPTIMIZERS`.
        steps: Steps of training.

    Raises:
        ValueError: The script does not set ``optimizer2`` and ``train_steps`` once each.
    """
    found = {"optimizer2": [], "train_steps": []}
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.get(node.targets[0].id, []).append(node)
    if any(len(nodes) != 1 for nodes in found.values()):
        counts = ", ".join(f"{key} {len(nodes)} times" for key, nodes in found.items())
        raise ValueError(f"the script sets {counts}: it must set each once, as the baseline of the third track does")
    changed = {
        "optimizer2": f"import rankwise; optimizer2 = {OPTIMIZERS[name]}",
        "train_steps": f"train_steps = {steps}",
    }
    lines = script.splitlines(keepends=True)
    for key, (node,) in sorted(found.items(), key=lambda pair: -pair[1][0].lineno):
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        indent = lines[first][: node.col_offset]
        lines[first:last] = [f"{indent}{changed[key]}\n"]
    return "".join(lines)


def main() -> None:
    """Write the entry beside this process's other files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("baseline", type=Path, help="train_gpt_simple.py of a checkout")
    parser.add_argument("--type", choices=OPTIMIZERS, default="MARS-M")
    parser.add_argument("--steps", type=int, default=3250, help="of the run; the baseline has 3,250")
    args = parser.parse_args()
    path = Path(f"train_gpt_{args.type}.py")
    baseline = args.baseline.read_text()
    script = entry(baseline, args.type, args.steps)
    path.write_text(script)
    # The baseline changes with time: whether its rate is still that of which ours is made is seen here.
    print(*(line for line in ndiff(baseline.splitlines(), script.splitlines()) if line[0] in "-+"), sep="\n")
    print(f"{path}: start it with torchrun, where the data are")


if __name__ == "__main__":
    main()
