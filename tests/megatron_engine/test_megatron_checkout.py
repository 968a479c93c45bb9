"""``pretrain_gpt.py`` of Megatron-LM checkouts, unedited, with every optimizer: trains, saves and resumes.

Set RANKWISE_MEGATRON_LM to the folder of a checkout, or to several joined by ``:``. Checkouts ask for packages that the
wheel of megatron-core does without (``six``), and those above 0.16 for Python 3.12; what 3.11 lacks is lent to them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from with_stand_in import STAND_IN

from megatron_patches.registry import NAMES

VARIABLE = "RANKWISE_MEGATRON_LM"
CHECKOUTS = [Path(folder) for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder]

RUN_LIMIT = 1800.0
"""Seconds of one run, which takes one minute or two: only one that hangs lasts longer, however busy the machine is."""

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(2 * RUN_LIMIT + 60.0),
    pytest.mark.skipif(not CHECKOUTS, reason=f"{VARIABLE} names no Megatron-LM checkout"),
]

STEPS = 20
MODEL = """
--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-layers 2 --hidden-size 32 --num-attention-heads 4
--seq-length 32 --max-position-embeddings 32 --swiglu --disable-bias-linear --normalization RMSNorm
--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 8
--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 40 --lr-warmup-iters 2 --train-iters 20 --seed 1
--eval-iters 1 --eval-interval 1000 --log-interval 1 --no-create-attention-mask-in-dataloader --save-interval 10
"""
LAYOUTS = {
    "distributed optimizer": "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "tensor parallel": "--bf16 --tensor-model-parallel-size 2 --sequence-parallel",
}
LAYOUTS["both"] = " ".join(LAYOUTS.values())
FSDP2 = "--use-torch-fsdp2 --untie-embeddings-and-output-weights --ckpt-format torch_dist --no-load-rng".split()
OWN_FSDP = """
--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params
--overlap-grad-reduce --overlap-param-gather --no-gradient-reduce-div-fusion --ckpt-format fsdp_dtensor --no-save-rng
--no-load-rng
""".split()
RANKS = {"both": 4}
IN_BOTH = ("ldadam", "mars-m")
FLAGS = {
    "mars": "--mars-variant lion --mars-clip none",
    "sonew": "--sonew-band 2",
    "ldadam": "--ldadam-rank 4 --ldadam-betas 0.9 0.99",
    "mkor": "--mkor-update-interval 2",
    "mkor-h": "--mkor-update-interval 2 --mkor-hybrid-min-steps 5 --mkor-hybrid-patience 2",
}
LINE = re.compile(r"iteration +(\d+)/ .* learning rate: (\S+) .* lm loss: (\S+) .* grad norm: (\S+)")


def pretrain(
    checkout: Path, work: Path, *arguments: str, ranks: int = 2, stand_in: bool = False
) -> dict[int, tuple[str, str, str]]:
    """Run the script; learning rate, loss and gradient norm of each step it took, as it printed them.

    Args:
        checkout: Its folder.
        work: Where it is run.
        arguments: Beside those of the model.
        ranks: Number of processes.
        stand_in: Whether there is a stand-in for Transformer Engine.
    """
    lent = work / "lent"
    lent.mkdir(exist_ok=True)
    source = "import typing\ntyping.override = getattr(typing, 'override', lambda f: f)\n"
    (lent / "sitecustomize.py").write_text(source)
    theirs = [str(STAND_IN), str(STAND_IN.parent)] if stand_in else []
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(lent), *theirs]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    if "--use-torch-fsdp2" in arguments or "--use-megatron-fsdp" in arguments:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # Megatron demands more than the 1 that conftest sets.
    command = [sys.executable, "-m", "rankwise.launch.cli", "megatron", "--cpu", "--ranks", str(ranks)]
    if stand_in:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(STAND_IN.with_name("checkout_with_stand_in.py"))]
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    done = subprocess.run(
        [*command, str(checkout / "pretrain_gpt.py"), *MODEL.split(), *arguments],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    lines = [match.groups() for match in map(LINE.search, done.stdout.splitlines()) if match]
    return {int(step): (rate, loss, norm) for step, rate, loss, norm in lines}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a distributed checkpoint."""
    reader = FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in known.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name in NAMES for layout in LAYOUTS if layout != "both" or name in IN_BOTH]
)
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_pretrain_gpt_trains_saves_and_resumes(checkout: Path, name: str, layout: str, tmp_path: Path) -> None:
    given = ["--optimizer", name, *FLAGS.get(name, "").split(), *LAYOUTS[layout].split()]
    ranks = RANKS.get(layout, 2)
    first = pretrain(checkout, tmp_path, *given, "--save", "first", ranks=ranks)
    assert list(first) == list(range(1, STEPS + 1))
    losses = [float(loss) for _, loss, _ in first.values()]
    assert sum(losses[-5:]) < sum(losses[:5])

    resumed = ["--save", "second", "--load", "first", "--ckpt-step", "10"]
    second = pretrain(checkout, tmp_path, *given, *resumed, ranks=ranks)
    assert list(second) == list(range(11, STEPS + 1))
    # What Megatron logs as the loss of the second step after a resume is not that step's, its own Adam's neither.
    second[12] = (second[12][0], first[12][1], second[12][2])
    assert second == {step: first[step] for step in second}

    before, after = (tensors(tmp_path / folder / "iter_0000020") for folder in ("first", "second"))
    assert before.keys() == after.keys() and any(key.startswith("optimizer.rankwise") for key in before)
    different = [key for key in before if not torch.equal(before[key], after[key]) and "rng" not in key]
    assert different == []


@pytest.mark.parametrize("name", IN_BOTH)
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_runs_under_fsdp2_resume(checkout: Path, name: str, tmp_path: Path) -> None:
    if (
        "force_all_reduce"
        not in (checkout / "megatron/core/distributed/torch_fully_sharded_data_parallel.py").read_text()
    ):
        pytest.skip("this Megatron's wrapper cannot take a step")
    given = ["--optimizer", name, *FLAGS.get(name, "").split(), "--bf16", *FSDP2]
    first = pretrain(checkout, tmp_path, *given, "--save", "first")
    second = pretrain(checkout, tmp_path, *given, "--save", "second", "--load", "first", "--ckpt-step", "10")
    second[12] = (second[12][0], first[12][1], second[12][2])
    assert second == {step: first[step] for step in range(11, STEPS + 1)}


@pytest.mark.parametrize("name", (*IN_BOTH, "mkor"))
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_runs_under_megatrons_fsdp_resume(checkout: Path, name: str, tmp_path: Path) -> None:
    given = ["--optimizer", name, *FLAGS.get(name, "").split(), *OWN_FSDP]
    first = pretrain(checkout, tmp_path, *given, "--save", "first")
    assert list(first) == list(range(1, STEPS + 1))
    second = pretrain(checkout, tmp_path, *given, "--save", "second", "--load", "first", "--ckpt-step", "10")
    second[12] = (second[12][0], first[12][1], second[12][2])
    assert second == {step: first[step] for step in range(11, STEPS + 1)}


@pytest.mark.parametrize("name", IN_BOTH)
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_context_parallel_runs_begin_as_megatrons_own_and_resume(checkout: Path, name: str, tmp_path: Path) -> None:
    """With a stand-in for Transformer Engine, as Megatron's own attention knows no context parallelism."""
    cut = ["--use-distributed-optimizer", "--context-parallel-size", "2"]
    given = ["--optimizer", name, *FLAGS.get(name, "").split(), *cut]
    stock = pretrain(checkout, tmp_path, "--optimizer", "adam", *cut, stand_in=True)
    first = pretrain(checkout, tmp_path, *given, "--save", "first", stand_in=True)
    assert list(first) == list(range(1, STEPS + 1)) and first[1] == stock[1]
    losses = [float(loss) for _, loss, _ in first.values()]
    assert sum(losses[-5:]) < sum(losses[:5])
    second = pretrain(checkout, tmp_path, *given, "--load", "first", "--ckpt-step", "10", stand_in=True)
    # The second logged loss of a resumed run is not that step's, its own Adam's neither.
    second[12] = (second[12][0], first[12][1], second[12][2])
    assert second == {step: first[step] for step in range(11, STEPS + 1)}


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_megatrons_own_optimizer_is_left_alone(checkout: Path, tmp_path: Path) -> None:
    """The same run with Megatron's Adam, which also shows what the second logged loss of a resumed run is worth."""
    given = ["--optimizer", "adam", *LAYOUTS["tensor parallel"].split()]
    first = pretrain(checkout, tmp_path, *given, "--save", "first")
    second = pretrain(checkout, tmp_path, *given, "--save", "second", "--load", "first", "--ckpt-step", "10")
    assert [step for step in second if second[step] != first[step]] == [12]


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_a_bad_value_ends_before_training(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="argument --ldadam-rank: ldadam: rank=0 is invalid"):
        pretrain(checkout, tmp_path, "--optimizer", "ldadam", "--ldadam-rank", "0")


@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_decoupled_rates_override_the_checkpoints(checkout: Path, tmp_path: Path) -> None:
    """From 0.20 on Megatron's loop gives all groups ``--lr`` then; the line says that this run's counts."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    given = ["--optimizer", "ldadam", *FLAGS["ldadam"].split(), "--untie-embeddings-and-output-weights"]
    pretrain(checkout, tmp_path, *given, "--decoupled-lr", "5e-3", "--save", "first")
    resumed = ["--save", "second", "--load", "first", "--ckpt-step", "10", "--override-opt_param-scheduler"]
    pretrain(checkout, tmp_path, *given, "--decoupled-lr", "2e-3", *resumed)
    for folder, rate in (("first", 5e-3), ("second", 2e-3)):
        state = load_common_state_dict(str(tmp_path / folder / "iter_0000020"))["optimizer"]
        assert {group["max_lr"] for group in state["rankwise"]["groups"]} == {1e-3, rate}, folder
