"""One rank of the soak: a tiny GPT on real text under DeepSpeed ZeRO-3, from a checkpoint to a planned step."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["GLOBAL_BATCH", "TYPES", "Segment", "import_early", "live"]

GLOBAL_BATCH, LENGTH, VOCABULARY, WIDTH, LAYERS = 12, 16, 128, 32, 2
"""Twelve samples a step can be shared among one to four ranks."""

TYPES: dict[str, dict[str, Any]] = {
    "MARS": {"lr": 3e-3},
    "MARS-AdamW": {"lr": 3e-3},
    "MARS-Lion": {"lr": 3e-4},
    "MARS-Shampoo": {"lr": 5e-3},
    "MARS-M": {"lr": 5e-3},
    "SONew": {"lr": 2e-3},
    "LDAdam": {"lr": 3e-3, "rank": 8},
    "MKOR": {"lr": 2e-3},
    "MKOR-H": {"lr": 2e-3, "hybrid_min_steps": 200},
}
"""Every JSON type with its ``params``."""


@dataclass(frozen=True)
class Segment:
    """What the processes of one start are to do.

    Attributes:
        type: JSON type of the optimizer.
        world: Number of ranks.
        last: Step after which they save and end.
        total: Steps of the whole run, for the schedule of the learning rate.
        save_every: Steps between checkpoints.
        report_every: Steps between reports of the loss.
        folder: Folder of the run's checkpoints; continued from, if there are any.
    """

    type: str
    world: int
    last: int
    total: int
    save_every: int
    report_every: int
    folder: str

    @property
    def config(self) -> dict[str, Any]:
        """The DeepSpeed configuration: the same samples a step on any number of ranks."""
        schedule = {
            "total_num_steps": self.total,
            "warmup_num_steps": max(2, self.total // 50),
            "warmup_type": "linear",
        }
        lr = TYPES[self.type]["lr"]
        return {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // self.world,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            "optimizer": {"type": self.type, "params": TYPES[self.type]},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": lr, **schedule}},
            # Embedding and MLP weights are fetched layer by layer, the rest stays whole, as in larger models.
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 3500},
        }


@cache
def _text() -> Tensor:
    """The reference manual that every CPython brings along, as bytes below 128."""
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    return torch.tensor(list(whole))


def _windows(seed: int, count: int, held_out: bool = False) -> Tensor:
    """(count, tokens + 1) of the text, the same for a seed whatever the ranks; the last tenth is held out."""
    text = _text()
    border = text.numel() * 9 // 10
    first, end = (border, text.numel()) if held_out else (0, border)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(first, end - LENGTH - 1, (count, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


class _Block(nn.Module):
    """Causal attention of two heads and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        """(samples, tokens, width)."""
        heads = self.qkv(self.attention_norm(h)).unflatten(-1, (6, WIDTH // 2)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        h = h + self.proj(mixed.transpose(1, 2).flatten(2))
        return h + self.down(nn.functional.gelu(self.up(self.mlp_norm(h))))


class _GPT(nn.Module):
    """GPT-2 in small, of few modules: DeepSpeed's work per module is most of a step of such a model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(LAYERS)))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, windows: Tensor) -> Tensor:
        """Loss of (samples, tokens + 1)."""
        x, y = windows[:, :-1], windows[:, 1:]
        h = self.embedding(x) + self.position(torch.arange(LENGTH))
        logits = self.lm_head(self.norm(self.blocks(h)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def initial_model() -> nn.Module:
    """The model before its first step."""
    torch.manual_seed(0)
    return _GPT()


def _share(samples: Tensor, rank: int, world: int) -> Tensor:
    size = len(samples) // world
    return samples[rank * size : (rank + 1) * size]


def _loss_of(engine: Any, rank: int, world: int) -> float:
    """Loss of the text held out, over all ranks."""
    samples = _share(_windows(-1, 8 * GLOBAL_BATCH, held_out=True), rank, world)
    engine.eval()
    with torch.no_grad():
        loss = engine(samples).double()
    engine.train()
    dist.all_reduce(loss)
    return float(loss) / world


def weights_of(engine: Any) -> dict[str, Tensor]:
    """The model's weights, whole."""
    import deepspeed

    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    return found


def counts_of(engine: Any) -> dict[str, int]:
    """What must not become more from step to step: of the optimizer, of the engine, and of this whole process."""
    optimizer, modules = engine.basic_optimizer, list(engine.module.modules())
    hooks = [value for module in modules for name, value in vars(module).items() if name.endswith("_hooks")]
    units = optimizer.planned_units
    kinds = _living()
    return {
        "units": len(units),
        "index tables": sum(len(unit.indices) for unit in units),
        "entries of units": sum(len(unit.notes) for unit in units),
        "module hooks": sum(map(len, hooks)),
        "states": sum(len(state) for state in optimizer.state.values()),
        "matrix states": sum(len(states) for states in optimizer.matrix_states.values()),
        "tensors": sum(issubclass(kind, Tensor) for kind in kinds),
        "objects": len(kinds),
    }


def _living(looks: int = 5) -> list[type]:
    """Types of all objects, at the one of several looks that finds fewest.

    Threads that send messages let go of tensors a moment after these have arrived; what leaks is there at every look.
    """
    found = []
    for _ in range(looks):
        gc.collect()
        found.append([type(one) for one in gc.get_objects()])
        time.sleep(0.02)
    return min(found, key=lambda kinds: (sum(issubclass(kind, Tensor) for kind in kinds), len(kinds)))


def resident_bytes() -> int:
    """Memory of this process that is not shared with a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _forget_old(folder: Path, kept: int = 2) -> None:
    tags = sorted(folder.glob("step[0-9]*"), key=lambda path: int(path.name.removeprefix("step")))
    for path in tags[:-kept]:
        shutil.rmtree(path)


def import_early() -> None:
    """Import what the ranks need and build what DeepSpeed compiles, for forked processes to inherit."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed looks for ninja on the path; it is installed beside the interpreter.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    import deepspeed  # noqa: F401
    from deepspeed.accelerator import get_accelerator

    import deepspeed_plugin  # noqa: F401
    from rankwise.launch.environment import prepare_shm_build

    with suppress(ImportError):
        # Engines ask whether their optimizer is Muon: seconds of imports (of a compiler) that each rank would pay for.
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if not prepare_shm_build() and builder is not None:
        builder.load(verbose=False)
    _text()


def live(rank: int, segment: Segment, store: str, progress: Any, report: Callable[[Mapping[str, Any]], None]) -> None:
    """Be one rank from the latest checkpoint to the segment's last step.

    Args:
        rank: This process's.
        segment: What to do.
        store: File at which the ranks meet.
        progress: Array of each rank's step, for whoever watches.
        report: Takes what is to be written down.
    """
    import deepspeed

    import deepspeed_plugin  # noqa: F401

    parent, world = os.getppid(), segment.world
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    gc.freeze()  # what was inherited need not be searched each time DeepSpeed collects garbage
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    deepspeed.init_distributed("gloo")
    model = initial_model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=segment.config)
    folder = Path(segment.folder)
    if (folder / "latest").exists():
        engine.load_checkpoint(str(folder))
    optimizer, first = engine.basic_optimizer, engine.global_steps
    report({"kind": "started", "first": first})
    for step in range(first, segment.last):
        if os.getppid() != parent:
            os._exit(3)
        progress[rank] = step
        samples = _share(_windows(step, GLOBAL_BATCH), rank, world)
        engine.backward(engine(samples))
        engine.step()
        done = step + 1
        if done % segment.report_every == 0:
            row = {"kind": "loss", "step": done, "loss": _loss_of(engine, rank, world)}
            report({**row, "resident": resident_bytes(), "lr": engine.get_lr()[0]})
        if done % segment.save_every == 0 and done > first + 5:
            sizes = {"resident": resident_bytes(), "state_bytes": sum(optimizer.state_bytes().values())}
            report({"kind": "counts", "step": done, "counts": counts_of(engine), **sizes})
        if done % segment.save_every == 0 or done == segment.last:
            progress[rank] = done
            engine.save_checkpoint(str(folder), tag=f"step{done}")
            if rank == 0:
                _forget_old(folder)
    report({"kind": "done"})
    if segment.last == segment.total:
        weights = weights_of(engine)
        if rank == 0:
            torch.save(weights, folder / "weights.pt")
    engine.destroy()
    with suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()
