"""This reference training script trains a small language model on megatron-core, in a loop of its own.

Every rank runs it: ``torchrun --nproc-per-node 2 -m rankwise.launch.megatron_pretrain runs/x/settings.json``. All that
is particular to rankwise is in :func:`build_optimizer`; any loop on megatron-core does the rest.
"""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import lcm
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.launch.data import load_corpus, load_tokenizer
from rankwise.launch.environment import leave_groups
from rankwise.launch.loop import Loop, learning_rate_factor, optimizer_state_bytes
from rankwise.launch.settings import Settings

__all__ = ["build_model", "build_optimizer", "run"]


def run(settings: Settings) -> None:
    """Train one model, and write ``metrics.jsonl`` and ``summary.json`` into ``settings.output``."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    warnings.filterwarnings("ignore", module="megatron")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    cpu = not torch.cuda.is_available()
    with ExitStack() as stack:
        if cpu:
            from megatron_patches.cpu import cpu_megatron

            stack.enter_context(cpu_megatron())
        else:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("gloo" if cpu else "nccl")
        stack.callback(leave_groups)
        _train(settings)
        # A rank that closes its connections while a peer still uses them makes that peer abort.
        dist.barrier()


def build_model(settings: Settings, vocab_size: int) -> nn.Module:
    """Return Megatron's GPT in the shape of the DeepSpeed run's Hugging Face model, wrapped for data parallelism.

    Args:
        settings: Shape, tensor parallelism, and the stage, where 1 and 2 mean the distributed optimizer.
        vocab_size: Number of token ids, which is rounded up to a multiple of 64.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    llama = settings.model == "llama"
    fusions = "bias_dropout_fusion bias_activation_fusion masked_softmax_fusion gradient_accumulation_fusion"
    config = TransformerConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        # 8/3 of the width keeps a SwiGLU block at the parameter count of a plain four-times-wider one.
        ffn_hidden_size=-(-8 * settings.hidden // 3 // 32) * 32 if llama else 4 * settings.hidden,
        num_attention_heads=settings.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gated_linear_unit=llama,
        activation_func=F.silu if llama else F.gelu,
        normalization="RMSNorm" if llama else "LayerNorm",
        add_bias_linear=not llama,
        tensor_model_parallel_size=settings.tensor_parallel,
        # The whole matrix is drawn before it is cut, so that tensor parallelism leaves the initial model as it is.
        use_cpu_initialization=True,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **dict.fromkeys(fusions.split(), False),
    )
    padding = lcm(64, settings.tensor_parallel)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=-(-vocab_size // padding) * padding,
        max_sequence_length=settings.seq_len,
        share_embeddings_and_output_weights=not llama,
        position_embedding_type="rope" if llama else "learned_absolute",
    )
    if torch.cuda.is_available():
        model.cuda()
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=_uses_distributed_optimizer(settings)
    )
    wrapped: nn.Module = DistributedDataParallel(config, ddp, model)
    return wrapped


def build_optimizer(settings: Settings, model: nn.Module) -> Any:
    """Return Megatron's optimizer for the run: its own Adam, or one of ours by its name.

    Args:
        settings: Settings, of which the ``optimizer`` block and ``gradient_clipping`` are read.
        model: Model from :func:`build_model`.
    """
    import megatron_patches

    megatron_patches.apply()
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    block = settings.deepspeed["optimizer"]
    name, params = block["type"].lower(), dict(block.get("params", {}))
    common: dict[str, Any] = {
        "lr": params.pop("lr"),
        "weight_decay": params.pop("weight_decay", 0.0),
        "clip_grad": settings.deepspeed.get("gradient_clipping", 1.0),
        "use_distributed_optimizer": _uses_distributed_optimizer(settings),
        "bf16": False,
        "params_dtype": torch.float32,
    }
    if name in ("adam", "adamw"):
        betas = params.get("betas", (0.9, 0.999))
        adam = {"adam_beta1": betas[0], "adam_beta2": betas[1], "adam_eps": params.get("eps", 1e-8)}
        config = OptimizerConfig(optimizer="adam", **adam, **common)
    else:
        config = megatron_patches.RankwiseConfig(optimizer=name, rankwise=params, **common)
    return get_megatron_optimizer(config, [model])


def _train(settings: Settings) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from rankwise.launch.megatron_data import MegatronSampler, write_indexed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=settings.tensor_parallel)
    torch.manual_seed(settings.seed)
    model_parallel_cuda_manual_seed(settings.seed)
    tokenizer = load_tokenizer(settings.tokenizer)
    corpus = load_corpus(settings.data, tokenizer, settings.cache)
    model = build_model(settings, corpus.vocab_size)
    optimizer = build_optimizer(settings, model)
    trained = _Megatron(model, optimizer, settings)
    prefix = corpus.folder / "megatron-train"
    if dist.get_rank() == 0:
        write_indexed(corpus.train, tokenizer, prefix)
    dist.barrier()
    samples = settings.steps * trained.global_batch
    trained.sampler = MegatronSampler(prefix, tokenizer, settings.seq_len, samples, settings.seed)
    summary = Loop(trained, settings, corpus).train()
    summary["parameters"] = trained.parameters()
    summary["layout"] = trained.layout()
    summary["device"] = "cuda" if torch.cuda.is_initialized() else "cpu"
    if dist.get_rank() == 0:
        (settings.output / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    parallel_state.destroy_model_parallel()


def _uses_distributed_optimizer(settings: Settings) -> bool:
    stage: int = settings.deepspeed.get("zero_optimization", {}).get("stage", 0)
    return stage > 0


class _Megatron:
    """A model on megatron-core for the loop."""

    sampler: Any

    def __init__(self, model: nn.Module, optimizer: Any, settings: Settings) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads

        self.model, self.optimizer, self.settings = model, optimizer, settings
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_size = parallel_state.get_data_parallel_world_size()
        self.device = next(model.parameters()).device
        self.micro_batch: int = settings.deepspeed["train_micro_batch_size_per_gpu"]
        # A global batch is that of the DeepSpeed run on as many ranks, for any tensor parallelism.
        self.micro_batches = settings.deepspeed.get("gradient_accumulation_steps", 1) * settings.tensor_parallel
        self.global_batch = self.micro_batch * self.micro_batches * self.data_size
        self.update_seconds = 0.0
        model.config.grad_scale_func = optimizer.scale_loss  # type: ignore[union-attr]
        model.config.finalize_model_grads_func = finalize_model_grads  # type: ignore[union-attr]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def rate(self, step: int) -> float:
        settings = self.settings
        factor = learning_rate_factor(step, settings.steps, settings.warmup, settings.final_lr)
        return float(self.optimizer.config.lr) * factor

    def train_step(self, step: int) -> Tensor:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._schedule(step)
        self.model.train()
        self.model.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=self._micro_batches(step),
            model=self.model,
            num_microbatches=self.micro_batches,
            seq_length=self.settings.seq_len,
            micro_batch_size=self.micro_batch,
            forward_only=False,
        )
        self.synchronize()
        before = time.perf_counter()
        self.optimizer.step()
        self.synchronize()
        self.update_seconds += time.perf_counter() - before
        return torch.stack([entry["loss"] for entry in reported]).mean()

    def _schedule(self, step: int) -> None:
        """Do what Megatron's scheduler does, but with the rates of the DeepSpeed run at every step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step) * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.optimizer.config.weight_decay * group.get("wd_mult", 1.0)

    def _micro_batches(self, step: int) -> Iterator[dict[str, Tensor]]:
        for index in range(self.micro_batches):
            place = (index * self.data_size + self.data_rank) * self.micro_batch
            batch = self.sampler.batch(step * self.global_batch + place, self.micro_batch)
            yield {key: value.to(self.device) for key, value in batch.items()}

    def evaluate(self, tokens: Tensor) -> Tensor:
        self.model.eval()
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        losses: Tensor = self.model(inputs, positions, None, labels=labels)
        return losses.float().mean(dim=1)

    def state_bytes(self) -> int:
        built = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return sum(optimizer_state_bytes(wrapper.optimizer) for wrapper in built if wrapper.optimizer is not None)

    def parameters(self) -> int:
        """Return the number of the whole model's parameters."""
        cut = [getattr(p, "tensor_model_parallel", False) for p in self.model.parameters()]
        ways = [self.settings.tensor_parallel if is_cut else 1 for is_cut in cut]
        return sum(p.numel() * factor for p, factor in zip(self.model.parameters(), ways, strict=True))

    def layout(self) -> str:
        """Return the layout in words, for the table's title."""
        from megatron.core.package_info import __version__

        sharded = " with the distributed optimizer" if _uses_distributed_optimizer(self.settings) else ""
        return f"Megatron {__version__}, TP {self.settings.tensor_parallel}, DP {self.data_size}{sharded}"


def _forward(
    batches: Iterator[dict[str, Tensor]], model: nn.Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    batch = next(batches)
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), _mean_loss


def _mean_loss(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach().clone()}


def main(
    settings: Annotated[Path, typer.Argument(help="settings.json of the run.", exists=True, dir_okay=False)],
) -> None:
    """Train one model on this rank."""
    run(Settings.read(settings))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
