from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from cpu_deepspeed import NO_BUILD
from torch.multiprocessing import start_processes

from rankwise.launch.comparing.logs import read_runs
from rankwise.launch.comparing.side_by_side import as_rows
from rankwise.launch.environment import missing_build_tools, rank_environment
from rankwise.launch.run_configs import planned_configs
from rankwise.launch.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
# Our own command starts it too.
TORCHRUN = pytest.param("torchrun", marks=pytest.mark.exhaustive)
# README's script is run by it.
OURS = pytest.param("rankwise", marks=pytest.mark.exhaustive)


def command(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **NO_BUILD, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **variables}
    environment = {name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "rankwise.launch.cli", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text("".join(f"line {i} of file {number}\n" for i in range(200)))
    return folder


def left_behind_lock(folder: Path) -> Path:
    """A lock as a killed job leaves it where DeepSpeed builds its collectives."""
    lock = folder / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return lock


SMALL = "--device cpu --layers 1 --hidden 32 --heads 2 --seq-len 32 --validation-samples 6".split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler",
    [
        NO_BUILD,
        # A minute of its own: of such a lock `test_waits_at_start.py` tells.
        pytest.param({"CXX": "c++"}, marks=pytest.mark.exhaustive),
    ],
)
def test_two_ranks_train_and_leave_a_table_and_a_plot(compiler: dict[str, str], text: Path, tmp_path: Path) -> None:
    """Also beside a lock, which is looked for where something is built."""
    pytest.importorskip("deepspeed")
    own = tmp_path / "ds.json"
    own.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            }
        )
    )
    lock = left_behind_lock(tmp_path / "extensions")
    result = command(
        *("train", "--config", str(own), "--ranks", "2", "--stage", "2", "--steps", "3", "--validation-interval", "2"),
        *("--data", str(text), "--output", "out", *SMALL),
        cwd=tmp_path,
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
        **compiler,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    built = compiler is not NO_BUILD and not missing_build_tools()
    assert (not lock.exists()) == built and result.stderr.count(f"removed {lock}") == built
    assert bool(list(lock.parent.glob("*.so"))) == built
    assert "validation" in result.stdout and "unigram" in result.stdout
    # Not a terminal: lines, and no bar.
    assert re.findall(r"^adamw: step (\d+)/3, loss \d\.\d+, [\d,]+ tokens/s", result.stdout, re.MULTILINE) == ["3"]
    assert "it/s" not in result.stderr and "step/s" not in result.stderr
    summary = json.loads((tmp_path / "out/adamw/summary.json").read_text())
    assert summary["world_size"] == 2 and summary["zero_stage"] == 2
    assert summary["tokens"] == 3 * 2 * 2 * 2 * 32
    assert 0 < summary["step_share"] < 1 and summary["tokens_per_second"] > 0
    per_rank = summary["parameters"] * 4 * 2 / 2  # two fp32 moments, halved by ZeRO
    assert per_rank <= summary["state_bytes_per_rank"] <= per_rank + 64
    records = [json.loads(line) for line in (tmp_path / "out/adamw/metrics.jsonl").read_text().splitlines()]
    validated = {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}
    assert list(validated) == [2, 3] and validated[3] == summary["validation_loss"] < validated[2] < 6
    assert (tmp_path / "out/loss.png").read_bytes().startswith(b"\x89PNG")
    (run,) = read_runs([tmp_path / "out"])
    row = as_rows([run])[0]
    assert row["validation_loss"] == validated[3] and row["tokens"] == summary["tokens"] and row["seconds"] > 0
    assert row["step_share"] == summary["step_share"] and row["state_bytes"] == summary["state_bytes_per_rank"]


@pytest.mark.exhaustive
def test_losses_do_not_depend_on_the_number_of_ranks(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    losses = []
    for ranks, accumulation, stage in ((1, 4, 0), (2, 2, 3)):
        result = command(
            *("train", "--optimizer", "adamw", "--ranks", str(ranks), "--accumulation", str(accumulation)),
            *("--stage", str(stage), "--micro-batch", "2", "--steps", "3", "--data", str(text), "--output"),
            *(f"out{ranks}", *SMALL),
            cwd=tmp_path,
        )
        assert result.returncode == 0, result.stderr[-4000:]
        losses.append(json.loads((tmp_path / f"out{ranks}/adamw/summary.json").read_text())["validation_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)


def megatron_settings(family: str, optimizer: str, tp: int, text: Path, tmp_path: Path) -> Settings:
    """Three steps on two ranks."""
    config = planned_configs(None, [optimizer], Settings(micro_batch=2))[optimizer]
    shape: dict[str, Any] = {"model": family, "layers": 1, "hidden": 32, "heads": 2, "seq_len": 32}
    how: dict[str, Any] = {"framework": "megatron", "tensor_parallel": tp, "steps": 3, "validation_samples": 6}
    places = {"output": tmp_path / f"{family}-{tp}", "data": text, "cache": tmp_path / "cache"}
    return Settings(label=optimizer, deepspeed=config, **places, **shape, **how)


def _megatron_rank(rank: int, settings: Settings, port: int) -> None:
    from rankwise.launch import megatron_pretrain

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    megatron_pretrain.run(settings)


def summary_of(settings: Settings) -> dict[str, Any]:
    """What two ranks say of a run that they start without the command, and that it has the size of Hugging Face's."""
    from rankwise.launch.models import build_model

    import_module("megatron.core.models.gpt")  # here, and not in every rank
    settings.write()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    start_processes(_megatron_rank, (settings, port), nprocs=2, start_method="fork")
    summary = json.loads((settings.output / "summary.json").read_text())
    model = build_model(settings.model, vocab_size=257, layers=1, hidden=32, heads=2, seq_len=32)
    assert summary["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert summary["tokens"] == 3 * 2 * 2 * 32 and summary["world_size"] == 2
    assert summary["validation_loss"] < 6 and summary["state_bytes_per_rank"] > 0
    found: dict[str, Any] = summary
    return found


@pytest.mark.slow
def test_megatron_trains_the_same_model_and_leaves_the_same_table(text: Path, tmp_path: Path) -> None:
    """Also that tensor parallelism, which divides the model and not the samples, leaves the losses as they are."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    result = command(
        *("train", "--framework", "megatron", "--optimizer", "mars-m", "--ranks", "2", "--tp", "2", "--model", "llama"),
        *("--micro-batch", "2", "--steps", "3", "--data", str(text), "--output", "out", *SMALL),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert "validation" in result.stdout and "unigram" in result.stdout and "TP 2, DP 1" in result.stdout
    assert (tmp_path / "out/loss.png").read_bytes().startswith(b"\x89PNG")
    divided = json.loads((tmp_path / "out/mars-m/summary.json").read_text())
    whole = summary_of(megatron_settings("llama", "mars-m", 1, text, tmp_path))
    assert divided["validation_loss"] == pytest.approx(whole["validation_loss"], abs=1e-4)
    assert divided["parameters"] == whole["parameters"]
    baseline = summary_of(megatron_settings("gpt2", "adamw", 1, text, tmp_path))
    moments = 4 * 2 * baseline["parameters"] / 2  # fp32, halved by the distributed optimizer
    assert moments <= baseline["state_bytes_per_rank"] <= moments * 1.1


USER_SCRIPT = """
import argparse, deepspeed, torch
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
engine = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())[0]
for _ in range(2):
    loss = engine(torch.ones(2, 8)).square().mean()
    engine.backward(loss)
    engine.step()
with open(f"rank{engine.global_rank}.txt", "w") as file:
    print(type(engine.basic_optimizer).__name__, engine.world_size, file=file)
torch.distributed.barrier()
engine.destroy()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [OURS, TORCHRUN, "deepspeed"])
def test_unedited_script_trains_with_our_type(launcher: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "train.py").write_text(USER_SCRIPT)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "MARS-M", "params": {"lr": 0.01}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    script = ["train.py", "--deepspeed_config", "ds.json"]
    if launcher == "rankwise":
        result = command("deepspeed", "--ranks", "2", "--device", "cpu", *script, cwd=tmp_path)
    else:
        module = "torch.distributed.run" if launcher == "torchrun" else "deepspeed.launcher.runner"
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = f"--master_port={free.getsockname()[1]}"
        flags = ["--nproc-per-node=2", port] if launcher == "torchrun" else ["--num_gpus=2", port]
        result = subprocess.run(
            [sys.executable, "-m", module, *flags, "--module", "rankwise.launch.shim", *script],
            cwd=tmp_path,
            env=rank_environment(2, cpu=True) | NO_BUILD,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert result.returncode == 0, result.stderr[-4000:]
    assert [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)] == ["MARS 2\n"] * 2
    assert result.stdout.count("rankwise MARS-M: 88.9% of 72 weights (1 of 2 tensors)") == 1


MEGATRON_SCRIPT = """
import sys, torch, torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer
from megatron.training.arguments import parse_args
from megatron.training.training import get_megatron_optimizer_config
args = parse_args()
config, _ = get_megatron_optimizer_config(args)
dist.init_process_group(args.distributed_backend)
total = torch.ones(2, device="cuda")
dist.all_reduce(total)
with open(f"rank{dist.get_rank()}.txt", "w") as file:
    import megatron_patches
    ours = get_megatron_optimizer is megatron_patches.get_megatron_optimizer
    print(config.optimizer, config.rankwise, ours, total.tolist(), file=file)
dist.barrier()
dist.destroy_process_group()
"""
# As much of a checkout as the script asks for.
MEGATRON_TRAINING = {
    "__init__.py": "",
    "initialize.py": "def _compile_dependencies(): raise RuntimeError('compiles CUDA kernels')",
    "arguments.py": """
import argparse

def add_megatron_arguments(parser):
    parser.add_argument("--optimizer", default="adam", choices=["adam", "sgd"])
    parser.add_argument("--distributed-backend")
    return parser

def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser()).parse_known_args()[0]
""",
    "checkpointing.py": """
def load_checkpoint(ddp_model, optimizer, opt_param_scheduler):
    pass
""",
    "training.py": """
from megatron.core.optimizer import OptimizerConfig

def get_megatron_optimizer_config(args):
    return OptimizerConfig(optimizer=args.optimizer), {}

def training_log(loss_dict, total_loss_dict, learning_rate, iteration):
    pass
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["rankwise", TORCHRUN])
def test_unedited_megatron_script_takes_our_name_and_flags(launcher: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    folder = tmp_path / "checkout" / "megatron" / "training"
    folder.mkdir(parents=True)
    for name, source in MEGATRON_TRAINING.items():
        (folder / name).write_text(source)
    (tmp_path / "checkout" / "train.py").write_text(MEGATRON_SCRIPT)
    script = ["checkout/train.py", "--optimizer", "ldadam", "--ldadam-rank", "8"]
    if launcher == "rankwise":
        result = command("megatron", "--cpu", "--ranks", "2", *script, cwd=tmp_path)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
        result = subprocess.run(
            [*torchrun, "--module", "rankwise.launch.megatron_shim", "--cpu", *script],
            cwd=tmp_path,
            env=rank_environment(2, cpu=True),
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert result.returncode == 0, result.stderr[-4000:]
    expected = "ldadam {'rank': 8} True [2.0, 2.0]\n"
    assert [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)] == [expected] * 2


def copy_of_the_checkout(folder: Path) -> Path:
    names = "rankwise deepspeed_plugin megatron_patches launch configs tests docs benchmarks".split()
    names += "setup.cfg pyproject.toml MANIFEST.in LICENSE CHANGELOG.md Makefile mkdocs.yml".split()
    for name in [*names, "README.md"]:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            (folder / "checkout").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / "checkout" / name)
    return folder / "checkout"


@pytest.mark.slow
def test_wheel_holds_the_mapped_packages_and_nothing_generic(tmp_path: Path) -> None:
    """Made from the source distribution, as installers do that find no wheel."""
    build = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    archive = subprocess.check_output(
        [sys.executable, "-c", build, str(tmp_path)], cwd=copy_of_the_checkout(tmp_path), text=True, timeout=120
    ).split()[-1]
    with tarfile.open(tmp_path / archive) as sources:
        held = {name.partition("/")[2] for name in sources.getnames()}
    assert {"tests/ranks.py", "docs/choose.md", "benchmarks/step.py", "CHANGELOG.md", "Makefile", "mkdocs.yml"} <= held
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", str(tmp_path)]
    subprocess.run([*pip, str(tmp_path / archive)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("rankwise-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entries,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "rankwise = rankwise.launch.cli:app" in archive.read(entries).decode()
        archive.extractall(tmp_path / "site")
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops <= {"rankwise", "deepspeed_plugin", "megatron_patches"}
    expected = {
        "rankwise/launch/cli.py",
        "rankwise/launch/pretrain.py",
        "rankwise/configs/deepspeed/zero3/mkor-h.json",
        "rankwise/configs/megatron/mkor-h.yaml",
    }
    assert expected | {"rankwise/configs/README.md", "rankwise/py.typed"} <= names
    assert {"deepspeed_plugin/py.typed", "megatron_patches/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    # Every subpackage must be listed in setup.cfg: setuptools leaves out silently what is not.
    for source in (ROOT / "rankwise").rglob("*.py"):
        assert source.relative_to(ROOT).as_posix() in names
    code = "import rankwise.launch.cli as c, rankwise.configs as g; print(c.__file__, g.deepspeed_config_path('mkor'))"
    found = subprocess.check_output(
        [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]);" + code, str(tmp_path / "site")],
        text=True,
        cwd=tmp_path,
    )
    assert all(path.startswith(str(tmp_path / "site")) for path in found.split())


def test_console_script_is_installed() -> None:
    (entry,) = entry_points(group="console_scripts", name="rankwise")
    assert entry.value == "rankwise.launch.cli:app"


@pytest.mark.slow
def test_the_way_of_a_gpu_is_taken_on_a_cpu(tmp_path: Path, text: Path) -> None:
    """Compiled and in bfloat16, as a GPU's runs are; two types, one table and one picture."""
    sizes = "--layers 1 --hidden 64 --heads 2 --seq-len 32 --micro-batch 4 --validation-samples 8".split()
    words = ["--bf16", "--compile", "aot_eager", "--steps", "12", "--device", "cpu", "--ranks", "1"]
    done = command("train", *words, *sizes, "--data", str(text), "--output", "runs", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    for label in ("adamw", "mars-m"):
        settings = json.loads((tmp_path / "runs" / label / "settings.json").read_text())
        assert settings["compiled"] == "aot_eager" and settings["deepspeed"]["bf16"] == {"enabled": True}
        summary = json.loads((tmp_path / "runs" / label / "summary.json").read_text())
        assert summary["validation_loss"] < 5.6 and "peak_memory_bytes" not in summary
    assert (tmp_path / "runs/loss.png").is_file()
