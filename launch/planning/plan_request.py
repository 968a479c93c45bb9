"""Options, a DeepSpeed JSON and Megatron's flags become a request for a plan here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rankwise.launch.planning.cluster import Cluster, Mesh
from rankwise.launch.planning.model_shapes import KNOWN, Sizes, build, from_config, sizes_of, with_function
from rankwise.launch.planning.optimizers import Chosen, chosen, flag_value
from rankwise.launch.planning.question import Question
from rankwise.launch.planning.rank_figures import Figures, deepspeed_figures, fsdp_figures, megatron_figures

__all__ = ["ENGINES", "Asked", "answered"]

ENGINES = ("deepspeed", "megatron", "fsdp")
_BATCH_TOKENS = 1 << 22
_RANKS = 8


@dataclass(frozen=True)
class Asked:
    """A request for a plan.

    Attributes:
        picked: The optimizer.
        cluster: The ranks.
        model: Model on the meta device, under DeepSpeed and FSDP2.
        sizes: Sizes of the model, under Megatron.
        tokens: Tokens of a global batch.
        config: Hugging Face configuration of the model, if it has one.
    """

    picked: Chosen
    cluster: Cluster
    model: nn.Module | None
    sizes: Sizes | None
    tokens: int
    config: Mapping[str, Any] | None = None

    def figures(self) -> Figures:
        """Compute the plan."""
        if self.sizes is not None:
            return megatron_figures(self.picked, self.sizes, self.cluster)
        assert self.model is not None
        if self.cluster.mesh is not None:
            return fsdp_figures(self.picked, self.model, self.cluster, self.config)
        return deepspeed_figures(self.picked, self.model, self.cluster, self.config)

    def changed(self, picked: Chosen, cluster: Cluster) -> Asked:
        """Return the request with another optimizer or other ranks."""
        return replace(self, picked=picked, cluster=cluster)


def answered(question: Question) -> Asked:
    """Make a request of a question.

    Raises:
        ValueError: An option is wrong; the message names it, its value and what it must be.
    """
    picked = chosen(question.config, question.optimizer, list(question.flags))
    words = picked.flags  # flags of the file, and typed ones
    question = replace(question, flags=words)
    engine = _engine(question, picked)
    if engine == "fsdp":
        return _on_a_mesh(question, picked)
    if engine == "megatron" and question.stage is not None:
        raise ValueError(f"stage is {question.stage}, which is ZeRO's; under Megatron leave it out")
    deepspeed = picked.deepspeed or {}
    if engine == "deepspeed":
        cluster = Cluster(
            question.ranks or _RANKS,
            _stage(deepspeed) if question.stage is None else question.stage,
            tp=question.tp or _autotp(deepspeed),
            precision=question.precision or _precision(deepspeed),
            offloaded=question.offload or _is_offloaded(deepspeed),
        )
        model, config = _model(question)
        # Tensor-parallel ranks share tokens.
        tokens = _tokens(replace(question, ranks=cluster.dp), deepspeed)
        return Asked(picked, cluster, model, None, tokens, config)
    sizes, ways = _sizes(question), _ways(question)
    cluster = Cluster(
        question.ranks or _RANKS,
        None,
        **{**ways, "vpp": question.vpp or _chunks(words, sizes, ways["pp"])},
        distributed=not words or "--use-distributed-optimizer" in words,
        overlap="--overlap-grad-reduce" in words,
        precision=question.precision or ("bf16" if not words or "--bf16" in words else "fp32"),
        offloaded=question.offload or "--optimizer-cpu-offload" in words,
    )
    return Asked(picked, cluster, None, sizes, _tokens(question, deepspeed))


def _engine(question: Question, picked: Chosen) -> str:
    """Return the engine of the run, which was typed or follows from other options.

    Raises:
        ValueError: There is no such engine, or it does not read another option that was typed.
    """
    ways = [name for name in _MEGATRON_WAYS if (getattr(question, name) or 1) > 1]
    if question.engine == "deepspeed" and picked.deepspeed is not None:
        ways = [name for name in ways if name != "tp"]  # AutoTP has tp, too
    megatron = picked.deepspeed is None or bool(ways)
    engine = question.engine or ("fsdp" if question.mesh is not None else "megatron" if megatron else "deepspeed")
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}: it must be one of {', '.join(ENGINES)}")
    if question.mesh is not None and engine != "fsdp":
        raise ValueError(f"mesh is {question.mesh!r} and engine is {engine!r}: it needs --engine fsdp")
    if megatron and engine != "megatron":
        given = ", ".join(f"{name} is {getattr(question, name)}" for name in ways) or "flags are given"
        fix = "write tp into --mesh, count context-parallel ranks as dp" if engine == "fsdp" else "leave it out"
        raise ValueError(f"engine is {engine!r} and {given}, which is Megatron's: {fix}, or name --engine megatron")
    return engine


def _on_a_mesh(question: Question, picked: Chosen) -> Asked:
    """Make a request for FSDP2, which takes optimizer and batch of a DeepSpeed JSON."""
    if question.stage is not None:
        raise ValueError(f"stage is {question.stage}, which is ZeRO's; under FSDP2 leave it out")
    mesh = Mesh.read(f"dp={question.ranks or _RANKS}" if question.mesh is None else question.mesh)
    if question.ranks not in (None, mesh.ranks):
        raise ValueError(
            f"ranks is {question.ranks} and mesh is {question.mesh!r}, which has {mesh.ranks}: leave ranks out"
        )
    model, config = _model(question)
    precision = question.precision or "fp32"
    cluster = Cluster(mesh.ranks, None, precision=precision, mesh=mesh, offloaded=question.offload)
    # Tensor-parallel ranks share tokens.
    tokens = _tokens(replace(question, ranks=mesh.ranks // mesh.tp), picked.deepspeed or {})
    return Asked(picked, cluster, model, None, tokens, config)


_MEGATRON_WAYS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
}


def _ways(question: Question) -> dict[str, Any]:
    """Return the numbers of ranks of each parallelism, which were typed or come from Megatron's flags."""
    ways: dict[str, Any] = {}
    for name, flag in _MEGATRON_WAYS.items():
        given = getattr(question, name) or flag_value(question.flags, flag)
        if given:
            ways[name] = int(given)
    return {"tp": 1, "pp": 1, **ways}


def _chunks(words: tuple[str, ...], sizes: Sizes, stages: int) -> int:
    """Return the number of a stage's model chunks, for which Megatron also takes the layers of each."""
    layers = flag_value(words, "--num-layers-per-virtual-pipeline-stage")
    if not layers:
        return int(flag_value(words, _MEGATRON_WAYS["vpp"]) or 1)
    chunks, left = divmod(sizes.layers, stages * int(layers))
    if left:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage is {layers}: times {stages} stages it must divide {sizes.layers} "
            "layers"
        )
    return chunks


def _stage(config: Mapping[str, Any]) -> int:
    if not config:
        return 2
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage is {stage!r}: it must be 0, 1, 2 or 3")
    number: int = stage
    return number


def _is_offloaded(config: Mapping[str, Any]) -> bool:
    return ((config.get("zero_optimization") or {}).get("offload_optimizer") or {}).get("device") == "cpu"


def _autotp(config: Mapping[str, Any]) -> int:
    return max(int((config.get("tensor_parallel") or {}).get("autotp_size") or 1), 1)


def _precision(config: Mapping[str, Any]) -> str:
    enabled = [kind for kind in ("bf16", "fp16") if (config.get(kind) or {}).get("enabled")]
    return enabled[0] if enabled else "fp32" if config else "bf16"


def _tokens(question: Question, config: Mapping[str, Any]) -> int:
    if question.batch_tokens:
        return question.batch_tokens
    samples: Any = config.get("train_batch_size") or flag_value(question.flags, "--global-batch-size")
    micro = config.get("train_micro_batch_size_per_gpu")
    if not samples and isinstance(micro, int):
        samples = micro * int(config.get("gradient_accumulation_steps") or 1) * (question.ranks or _RANKS)
    try:
        return int(samples) * int(flag_value(question.flags, "--seq-length") or question.seq_len)
    except (TypeError, ValueError):  # the value is "auto", or absent
        return _BATCH_TOKENS


def _family(question: Question) -> Sizes | None:
    """Return the sizes of a family's model if some were typed."""
    words = question.flags
    layers = question.layers or flag_value(words, "--num-layers")
    hidden = question.hidden or flag_value(words, "--hidden-size")
    heads = question.heads or flag_value(words, "--num-attention-heads")
    given = [name for name, value in (("layers", layers), ("hidden", hidden), ("heads", heads)) if value]
    if not given and question.model not in ("gpt2", "llama"):
        return None
    if question.model in KNOWN and flag_value(words, "--num-layers"):
        raise ValueError(f"model is {question.model!r}, and Megatron's flags have --num-layers: leave --model out")
    if len(given) < 3 or question.model not in (None, "gpt2", "llama"):
        raise ValueError("sizes are --model gpt2 or llama with all of --layers, --hidden and --heads")
    llama = question.model == "llama" or (question.model is None and "--swiglu" in words)
    wide, vocab = int(hidden or 0), question.vocab_size or int(flag_value(words, "--vocab-size") or 50257)
    ffn = int(flag_value(words, "--ffn-hidden-size") or (-(-8 * wide // 3 // 32) * 32 if llama else 4 * wide))
    kv = int(flag_value(words, "--num-query-groups") or heads or 0)
    tied = "--untie-embeddings-and-output-weights" not in words if words else not llama
    if wide % int(heads or 1):
        raise ValueError(f"hidden is {wide} and heads is {heads}: hidden must be a multiple of heads")
    family = "llama" if llama else "gpt2"
    experts = int(flag_value(words, "--num-experts") or 0)
    inner = int(flag_value(words, "--moe-ffn-hidden-size") or ffn) if experts else 0
    chosen = int(flag_value(words, "--moe-router-topk") or 2)
    positions = int(flag_value(words, "--max-position-embeddings") or question.seq_len)
    return Sizes(
        family, int(layers or 0), wide, int(heads or 0), kv, ffn, vocab, positions, tied, experts, inner, chosen
    )


def _sizes(question: Question) -> Sizes:
    sizes = _family(question)
    if sizes is not None:
        return sizes
    name = question.model or "gpt2-small"
    if name in KNOWN:
        return KNOWN[name]
    if with_function(name):
        raise ValueError(f"model is {name!r}: Megatron builds its own models; name sizes or a config.json")
    _, config = build(name)
    return sizes_of(config or {})


def _model(question: Question) -> tuple[nn.Module, Mapping[str, Any] | None]:
    sizes = _family(question)
    if sizes is None:
        return build(question.model or "gpt2-small")
    return from_config(sizes.config())
