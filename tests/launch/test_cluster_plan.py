"""``rankwise plan``: as a user calls it, and against sums written out by hand."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rankwise.launch.cli import app
from rankwise.launch.planning.advice import why_unbalanced
from rankwise.launch.planning.cluster import Cluster
from rankwise.launch.planning.model_shapes import KNOWN, build
from rankwise.launch.planning.optimizers import Chosen
from rankwise.launch.planning.rank_figures import deepspeed_figures, megatron_figures
from rankwise.launch.report import plot_curves

pytest.importorskip("transformers")
LLAMA = "llama-70b"
V, H, F, L, KV = 128256, 8192, 28672, 80, 1024
MATRICES = {"q": (H, H), "k": (KV, H), "v": (KV, H), "o": (H, H), "gate": (F, H), "up": (F, H), "down": (H, F)}
MKOR: dict[str, Any] = {"factor_dtype": "bfloat16", "max_factor_dim": 16384, "update_interval": 10}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def plan(*arguments: str) -> dict[str, Any]:
    status, output = run("--json", *arguments)
    assert status == 0, output
    found: dict[str, Any] = json.loads(output)
    return found


def factors(outputs: int, inputs: int) -> int:
    """Bytes of 128 vectors in bfloat16 and their weights, of sides up to 16,384, and of MKOR's count of failures."""
    return sum(128 * (2 * side + 4) for side in (outputs, inputs) if side <= 16384) + 4


def test_a_narrow_master_is_two_bytes_and_what_it_lacks_two_of_state() -> None:
    options = {"lr": 1e-3}, {"lr": 1e-3, "store_param_remainders": True}
    wide, narrow = (
        deepspeed_figures(Chosen("mars-adamw", own), build("gpt2-small")[0], Cluster(8, 3)) for own in options
    )
    assert narrow.master[0] * 2 == wide.master[0]
    assert narrow.states()[0] - wide.states()[0] == narrow.master[0]


def test_offloaded_matrices_cost_a_link_or_the_hosts_cores(tmp_path: Path) -> None:
    """Of gpt2-small, whose 48 matrices of 7,077,888 elements a block are cut over two ranks by ZeRO-3."""
    config = tmp_path / "ds.json"
    config.write_text(
        json.dumps(
            {
                "optimizer": {"type": "MARS-M", "params": {"lr": 1e-3}},
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            }
        )
    )
    sizes = ("--model", "gpt2-small", "--ranks", "2", "--config", str(config))
    offload = plan(*sizes)["offload"]
    elements = 12 * 7_077_888 // 2  # up as momenta, and down as directions
    assert (offload["up"], offload["down"], offload["on_device"]) == (4 * elements, 4 * elements, True)
    assert (
        offload["link_ms"] == pytest.approx(1e3 * 4 * elements / 25e9) and offload["host_ms"] > 20 * offload["link_ms"]
    )
    assert "matrices are multiplied on the device" in re.sub(r"\s+", " ", run(*sizes)[1])
    assert plan("--optimizer", "mars-m", "--model", "gpt2-small", "--ranks", "2", "--stage", "2")["offload"] is None
    low = plan("--optimizer", "mars-adamw", "--model", "gpt2-small", "--ranks", "2", "--stage", "2", "--offload")
    assert low["offload"] is None, "nothing is multiplied"


def test_llama_70b_under_zero_3_on_1024_ranks_agrees_with_a_calculation_by_hand() -> None:
    """Every parameter is cut into 1,024 parts, and 560 matrices have an owner each."""
    ranks, begin = 1024, time.monotonic()
    found = deepspeed_figures(Chosen("mkor", MKOR), build(LLAMA)[0], Cluster(ranks, 3))
    assert time.monotonic() - begin < 30
    sizes = [
        V * H,
        V * H,
        *([H] * (2 * L + 1)),
        *(rows * columns for rows, columns in MATRICES.values() for _ in range(L)),
    ]
    assert found.parameters == sum(sizes) == 70_553_706_496
    shares = sum(size // ranks for size in sizes)  # all of them are multiples of 1,024
    assert max(found.states()) == 8 * shares + factors(H, H)
    assert found.lent == 0 and found.largest[0] == factors(H, H)
    total = 8 * sum(sizes) + L * sum(factors(*shape) for shape in MATRICES.values())
    assert sum(found.states()) == total
    assert len(found.owners) == len(set(found.owners.values())) == 7 * L
    # Each rank sends its part of every matrix to the owner; the owner of a gate returns all but its own part, too.
    inner, gate = sum(r * c for r, c in MATRICES.values()) * L, F * H
    assert max(rank.bytes_sent for rank in found.ranks) == 4 * (inner - gate) // ranks + 4 * gate * (ranks - 1) // ranks
    vectors = L * sum(rows + columns + 2 for rows, columns in MATRICES.values())
    assert {(rank.periodic_bytes, rank.period) for rank in found.ranks} == {(4 * vectors, 10)}
    assert found.master[0] == 4 * shares and found.gradients[0] == found.weights[0] == 2 * shares
    assert found.adamw[0] == 8 * shares
    assert found.fullest < 1.07 and not why_unbalanced(found)
    found.ranks[0].matrix_state_bytes += 1 << 28
    assert why_unbalanced(found).endswith("there are 560 matrices for 1024 ranks, and a matrix has one owner.")


def test_llama_70b_under_megatron_tp_8_pp_8_agrees_with_a_calculation_by_hand() -> None:
    begin = time.monotonic()
    found = megatron_figures(Chosen("mkor", MKOR), KNOWN[LLAMA], Cluster(1024, None, 8, 8))
    assert time.monotonic() - begin < 30
    padded, layers, tp, dp = 129024, L // 8, 8, 16
    cut = layers * sum(rows * columns for rows, columns in MATRICES.values())
    stages = [cut + layers * 2 * H * tp] * 8  # norms are held by all tensor-parallel ranks
    stages[0] += padded * H
    stages[7] += padded * H + H * tp
    elements = [sum(rank.elements for rank in found.ranks[128 * i : 128 * (i + 1)]) for i in range(8)]
    assert elements == stages
    # Equal parts of a buffer, whose padding is all that is left out.
    assert max(rank.elements for rank in found.ranks) == pytest.approx(stages[7] / (tp * dp), rel=1e-4)
    assert found.weights[0] == 2 * stages[0] // tp and found.gradients[0] == 4 * stages[0] // tp
    held = sum(rank.element_state_bytes + rank.matrix_state_bytes for rank in found.ranks)
    # Queries, keys and values share their input's factor; gate and up are too wide for one of their outputs.
    attention = factors(H, H) + 2 * (factors(KV, F) - 4)
    # What follows attention and the gates is cut: each rank has weights of its own of both sides, or of one; a count.
    copies = (tp - 1) * ((2 * 128 * 4 + 4) + (128 * 4 + 4))
    assert held - 8 * sum(stages) == L * (attention + factors(H, H) + factors(2 * F, H) + factors(H, F) + copies)


def test_mixtral_with_experts_on_ranks_agrees_with_a_calculation_by_hand() -> None:
    """64 ranks: TP2 x PP4 x DP8, two chunks a stage, experts TP2 x EP4 x DP2."""
    layers, hidden, ffn, experts, vocab = 32, 4096, 14336, 8, 32000
    cluster = Cluster(64, None, 2, 4, vpp=2, ep=4)
    found = megatron_figures(Chosen("mars-m", {}), KNOWN["mixtral-8x7b"], cluster)
    attention = hidden * (hidden + 2 * 1024) + hidden * hidden
    expert = 3 * hidden * ffn
    ends = vocab * hidden  # 32,000 is a multiple of 2 x 128
    rest = layers * (attention + experts * hidden + 2 * hidden) + 2 * ends + hidden
    assert found.parameters == rest + layers * experts * expert == 46_702_792_704
    assert found.active == rest + layers * 2 * expert == 12_879_925_248
    # Of the second stage: 8 layers, a quarter of their experts on each rank, all of them cut in two.
    held = 8 * (attention // 2 + experts * hidden + 2 * hidden) + 8 * 2 * expert // 2
    assert found.weights[16:32] == [2 * held] * 16
    # Eight ranks share the rest of a stage, two what is left of its experts.
    shares = 8 * (attention // 2 + experts * hidden + 2 * hidden) / 8 + 8 * 2 * expert / 2 / 2
    assert found.adamw[20] == pytest.approx(8 * shares, rel=1e-4)
    names = {f"decoder.layers.{layer}." for layer in range(layers)}
    assert {name[: name.index(".", 15) + 1] for name in found.owners} == names
    # Chunks alternate between stages: the second has layers 4 to 7 and 20 to 23.
    owners = {
        rank // 16
        for name, rank in found.owners.items()
        if name.startswith(("decoder.layers.5.", "decoder.layers.21."))
    }
    assert owners == {1}


def test_context_parallel_ranks_share_as_data_parallel_ones_do() -> None:
    found = [
        megatron_figures(Chosen("ldadam", {"rank": 8}), KNOWN["gpt2-small"], Cluster(8, None, 2, 2, cp=ways))
        for ways in (1, 2)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (1024, 4096)])
def test_405_billion_parameters_in_less_than_a_minute(ranks: int) -> None:
    begin = time.process_time()
    found = deepspeed_figures(Chosen("ldadam", {"rank": 256}), build("llama-405b")[0], Cluster(ranks, 3))
    assert time.process_time() - begin < 60
    assert found.parameters == 405_853_388_800 and len(found.ranks) == ranks
    if ranks > 1024:
        assert f"there are 882 matrices for {ranks} ranks" in why_unbalanced(found)
    else:
        # What the 142 ranks without a matrix lack is little beside each rank's share of weights and gradients.
        assert found.fullest < 1.05 and why_unbalanced(found) == ""


def test_a_deepspeed_json_says_stage_batch_precision_and_optimizer(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    block = {"type": "LDAdam", "params": {"lr": "auto", "rank": 64}}
    content = {"train_batch_size": 64, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "optimizer": block}
    config.write_text(json.dumps(content))
    found = plan("--config", str(config), "--ranks", "4", "--model", "gpt2-small")
    assert found["layout"] == "4 ranks, ZeRO-1, bf16" and found["optimizer"] == "ldadam"
    assert len(found["owners"]) == 72 and set(found["owners"].values()) == {0, 1, 2, 3}
    assert found["parameters"] == 124_439_808
    # Six operations for each parameter and token, of 64 samples of 4,096, over 4 ranks at 40 % of an H100's 989e12.
    (h100,) = (cost for cost in found["costs"] if cost["device"] == "H100")
    assert h100["training_ms"] == pytest.approx(1e3 * 6 * 124_439_808 * 64 * 4096 / 4 / (0.4 * 989e12))
    again = plan(
        "--config", str(config), "--ranks", "4", "--model", "gpt2-small", "--stage", "3", "--precision", "fp32"
    )
    assert again["layout"] == "4 ranks, ZeRO-3, fp32"
    assert again["bytes"]["gradients"]["max"] == pytest.approx(4 * 124_439_808 / 4, rel=1e-3)


def test_models_by_configuration_function_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 100, **shape}))
    by_file = plan("--optimizer", "mars-m", "--model", str(tmp_path / "config.json"), "--ranks", "2")
    assert (
        by_file["parameters"] == plan("--optimizer", "mars-m", "--model", str(tmp_path), "--ranks", "3")["parameters"]
    )
    (tmp_path / "mine.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(64, 32)\n")
    monkeypatch.chdir(tmp_path)
    assert plan("--optimizer", "sonew", "--model", "mine:make", "--ranks", "2")["parameters"] == 64 * 32 + 32
    sizes = "--layers 2 --hidden 64 --heads 4 --vocab-size 100".split()
    assert plan("--optimizer", "mkor", "--model", "llama", *sizes)["ranks"] == 8


def test_megatrons_flags_and_yaml(tmp_path: Path) -> None:
    flags = tmp_path / "run.yaml"
    lines = "optimizer: ldadam", "ldadam-rank: 8", "use-distributed-optimizer: true", "bf16: true", "num-layers: 4"
    flags.write_text("\n".join([*lines, "hidden-size: 128", "num-attention-heads: 4", "swiglu: true"]) + "\n")
    found = plan("--config", str(flags), "--ranks", "8", "--tp", "2", "--pp", "2")
    assert found["layout"] == "8 ranks: TP2 x PP2 x DP2, distributed optimizer, bf16" and found["optimizer"] == "ldadam"
    typed = plan(
        *("--ranks", "8", "--", "--optimizer", "ldadam", "--ldadam-rank", "8", "--use-distributed-optimizer", "--bf16"),
        *("--num-layers=4", "--hidden-size", "128", "--num-attention-heads", "4", "--swiglu"),
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
    )
    assert typed == found
    other = plan("--config", str(flags), "--ranks", "8", "--tp", "2", "--pp", "2", "--", "--ldadam-rank", "32")
    assert other["bytes"]["optimizer states"]["mean"] > found["bytes"]["optimizer states"]["mean"]
    experts = "--num-experts 4 --moe-ffn-hidden-size 64 --moe-router-topk 1 --expert-model-parallel-size 2".split()
    cut = "--context-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --expert-tensor-parallel-size 1".split()
    cut += ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    mixed = plan("--config", str(flags), "--ranks", "8", "--", *experts, *cut)
    assert mixed["layout"].startswith("8 ranks: TP2 x CP2 x PP2 in 2 chunks x DP1, experts TP1 x EP2, distributed")
    assert mixed["parameters"] - mixed["active_parameters"] == 4 * 3 * (3 * 128 * 64)


def test_typed_flags_win_over_what_the_name_comes_with(tmp_path: Path) -> None:
    """Whoever names the optimizer before the dashes means the flags after them, too; a file's are of its own type."""
    sizes = ("--layers", "2", "--hidden", "64", "--heads", "4", "--vocab-size", "100", "--ranks", "4")
    means, sketches = (
        run("--optimizer", "mkor", "--engine", "megatron", *sizes, "--", "--mkor-rule", rule)
        for rule in ("official", "sketch")
    )
    assert means[0] == sketches[0] == 0 and "every 10 steps" in means[1]
    assert not re.search(r"every \d+ steps? ", sketches[1])  # nothing is sent for its factors
    status, output = run("--optimizer", "mkor", "--engine", "megatron", *sizes, "--", "--mkor-sketch-gain", "-3")
    assert status == 2 and "sketch_gain" in output
    flags = tmp_path / "run.yaml"
    flags.write_text("optimizer: mkor\nmkor-rule: ema\nbf16: true\n")
    assert plan("--config", str(flags), "--optimizer", "ldadam", *sizes)["optimizer"] == "ldadam"


def test_a_picture_without_matplotlib_is_refused_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, output = run("--optimizer", "mkor", "--model", "gpt2-small", "--png", str(tmp_path / "load.png"))
    assert status == 2 and 'pip install "rankwise[plots]"' in output and "GiB" not in output
    assert not plot_curves([tmp_path], tmp_path / "loss.png")


def test_table_picture_limits_and_advice(tmp_path: Path) -> None:
    picture = tmp_path / "load.png"
    status, output = run("--optimizer", "mkor", "--model", "gpt2-small", "--ranks", "4", "--png", str(picture))
    assert status == 0 and picture.stat().st_size > 10_000
    for words in (
        "AdamW's states",
        "MI300X",
        "48 matrices (or slices of them) have",
        "every 10 steps",
        "Nothing here",
    ):
        assert words in output
    held = plan("--optimizer", "mkor", "--model", "gpt2-small", "--ranks", "4")["bytes"]["optimizer states"]["max"]
    limit = 0.9 * held / 2**30
    status, output = run("--optimizer", "mkor", "--model", "gpt2-small", "--ranks", "4", "--max-state-gb", f"{limit}")
    assert status == 1 and re.search(
        r'Not met: .*\nIt is met with "params": {"state_dtype": "bfloat16"}: 0\.\d+ GiB', output
    )
    status, output = run("--optimizer", "mkor", "--model", "gpt2-small", "--ranks", "4", "--max-state-gb", "9")
    assert status == 0 and re.search(r"^Met: 0\.\d+ GiB of states on the fullest rank, at most 9\.$", output, re.M)
    status, output = run(
        *("--optimizer", "mars-m", "--model", "gpt2-xl", "--ranks", "64", "--stage", "3", "--batch-tokens", "65536"),
        *("--max-overhead", "0.1%"),
    )
    assert status == 1 and 'Nothing that was tried meets it. Nearest comes "params": {"state_dtype": "int8"' in output
    assert "Assumed: 65,536 tokens a step (--batch-tokens), 40% of the peak" in " ".join(output.split())
    status, output = run("--optimizer", "mars-m", "--max-overhead", "99%", "--max-state-gb", "10", "--gpu", "100:1.5")
    assert status == 0 and re.search(r"┃ +100:1.5 ┃", output)


@pytest.mark.parametrize("kept", [None, "bfloat16", "int8"])
def test_states_are_narrowed_before_the_rank(kept: str | None, tmp_path: Path) -> None:
    config = {"optimizer": {"type": "LDAdam", "params": {"rank": 32, "state_dtype": kept}}}
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 4, "zero_optimization": {"stage": 2}, **config}))
    arguments = ["--config", str(tmp_path / "ds.json"), "--model", "gpt2-small", "--ranks", "1"]
    held = plan(*arguments)["bytes"]["optimizer states"]["max"]
    status, output = run(*arguments, "--max-state-gb", f"{0.99 * held / 2**30}")
    wanted = {None: '"state_dtype": "bfloat16"', "bfloat16": '"state_dtype": "int8"', "int8": '"rank": 16'}[kept]
    assert status == 1 and f'It is met with "params": {{{wanted}}}: 0.' in output


def test_advice_is_in_the_words_of_its_framework(tmp_path: Path) -> None:
    """Changes that do not lower what is asked for, as the type of messages does not lower states, are left out."""
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 0}, "optimizer": {"type": "MARS-M", "params": {}}})
    )
    sizes = "--model gpt2 --layers 2 --hidden 64 --heads 2 --max-state-gb 0.003 --ranks 4".split()
    status, output = run("--config", str(tmp_path / "ds.json"), *sizes)
    met = 'It is met with "zero_optimization": {"stage": 2} and "params": {"state_dtype": "int8"}: 0.00'
    assert status == 1 and met in output
    small = "--optimizer mkor-sketch --model gpt2-small --ranks 4 --max-state-gb".split()
    status, output = run("--engine", "megatron", *small, "0.3")
    assert status == 1 and re.search(r"It is met with --mkor-state-dtype (bfloat16|int8)( --mkor-|:)", output)
    status, output = run("--engine", "fsdp", *sizes)
    assert status == 1 and "It is met with MARS(..., state_dtype='int8'): 0.00" in output


def test_no_figure_is_cut_off_in_80_columns() -> None:
    done = CliRunner().invoke(app, "plan --model llama-405b --gpu 100:1.5".split(), env={"COLUMNS": "80"})
    assert done.exit_code == 0 and "…" not in done.output and max(map(len, done.output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "adamw"], "the optimizer is 'adamw': it must be one of ours"),
        (["--model", "nowhere.json"], "model is 'nowhere.json': it must be gpt2-small"),
        (["--model", "json:nothing"], "has no attribute 'nothing'"),
        (["--model", "json:dumps", "--tp", "2"], "Megatron builds its own models"),
        (["--model", "llama", "--layers", "2"], "sizes are --model gpt2 or llama with all of"),
        (["--tp", "3", "--ranks", "8"], "tp times pp times cp is 3: that must divide the number of ranks"),
        (["--ep", "2", "--model", "llama-8b"], "ep is 2 and the model has no experts"),
        (["--ep", "2", "--stage", "2", "--model", "mixtral-8x7b"], "stage is 2, which is ZeRO's"),
        (["--vpp", "2"], "vpp is 2 and pp is 1"),
        (["--etp", "2", "--model", "mixtral-8x7b"], "without expert parallelism"),
        (["--ep", "3", "--ranks", "6", "--model", "mixtral-8x7b"], "experts is 8: 3 ranks"),
        (["--pp", "5", "--ranks", "10", "--model", "gpt2-small"], "layers is 12: 5 ranks, stages or chunks"),
        (["--tp", "2", "--stage", "1"], "stage is 1, which is ZeRO's"),
        (
            ["--tp", "3", "--ranks", "9", "--model", "llama-1b", "--engine", "deepspeed"],
            "tp is 3: it must divide dimension",
        ),
        (["--max-overhead", "lots"], "'lots' must be a share such as 2%"),
        (["--max-overhead", "2"], "'2' must lie between 0 and 100%; did you mean 2%?"),
        (["--gpu", "B300"], "gpu is 'B300': it must be one of A100"),
        (["--gpu", "0:1"], "or TFLOP/s:TB/s such as 989:3.35"),
        (["--", "--optimizer", "adam"], "--optimizer is 'adam': it must be one of ours"),
        (["--", "--optimizer", "ldadam", "--ldadam-rank", "-3"], "rank=-3 is invalid"),
        (["--", "--optimizer", "ldadam", "--ldadam-rnk", "3"], "has no option 'rnk': did you mean 'rank'?"),
    ],
)
def test_what_cannot_be_planned(arguments: list[str], message: str) -> None:
    status, output = run(*arguments)
    assert status == 2 and message in re.sub(r"[\s│]+", " ", output), output
