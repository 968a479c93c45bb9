"""Megatron's memory settings: main weights as 16 bits beside bf16 ones, gradients in bf16, a step on the host."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import apart_devices
import pytest
import torch
from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron_cells import DISTRIBUTED, MOE, OVERLAPPED, Cell
from megatron_harness import Result, Trainer, move, opened, train, trained
from megatron_resumes import went_on
from megatron_types import TYPES, maker
from megatron_weights import initial
from ranks import run_ranks
from rows_apart import HAS_WEIGHT_SHARDS
from torch import Tensor, nn

from megatron_patches import layouts, main_weights
from megatron_patches.cpu import cpu_megatron
from megatron_patches.registry import RankwiseConfig
from megatron_patches.support import SupportError
from megatron_patches.wrappers import _Distributed
from rankwise.kernels.native import building
from rankwise.kernels.native.products import products

AWARE: dict[str, Any] = {"use_precision_aware_optimizer": True}
REUSE: dict[str, Any] = {"reuse_grad_buf_for_mxfp8_param_ag": True}
HOST: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
PLAIN = Cell(precision="bf16", **OVERLAPPED)
LOW = replace(PLAIN, bf16_gradients=True)
# By what is set: the cell without it.
CELLS = {
    "remainders": (replace(PLAIN, optimizer=AWARE), PLAIN),
    "bf16 gradients": (replace(LOW, optimizer={**AWARE, "main_grads_dtype": torch.bfloat16}), LOW),
    "host": (replace(PLAIN, optimizer=HOST), PLAIN),
    "host, as pretrain_gpt.py sets it": (replace(PLAIN, optimizer={**HOST, **AWARE}), PLAIN),
    "host, fp32": (Cell(optimizer=HOST, **OVERLAPPED), Cell(**OVERLAPPED)),
    "host, fp16": (Cell(precision="fp16", optimizer=HOST, **DISTRIBUTED), Cell(precision="fp16", **DISTRIBUTED)),
}
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2": (2, {}),
    "TP2 SP": (2, {"tp": 2, "sp": True}),
    "PP2 interleaved": (2, {"pp": 2, "vpp": 2, "microbatches": 4, "layers": 4}),
    "EP2": (2, {"ep": 2, **MOE}),
    "TP2 DP2": (4, {"tp": 2, "sp": True}),
    **({"WS2 TP2": (4, {"again": 2, "tp": 2, "sp": True})} if HAS_WEIGHT_SHARDS else {}),
}
STEPS = 4
# Since 0.18 dense and expert weights, which share buffers' owner, are gathered when both have taken their step.
DEFERS = hasattr(ChainedOptimizer, "_should_defer_mxfp8_param_sync")
# The harness does not take up overlapped gathers after a load.
ALL_THERE: dict[str, Any] = {"overlap_param_gather": False}


# --- as without the settings -----------------------------------------------------------------------------------------


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def _rounding_half_up(wrapper: Any) -> None:
    """Whole fp32 main weights, rounded as halves must be: in the middle, to the larger magnitude."""
    for models, mains in zip(wrapper.shard_float16_groups, wrapper.shard_fp32_from_float16_groups, strict=True):
        for model, main in zip(models, mains, strict=True):
            model.copy_(((_bits(main) + 0x8000) & ~0xFFFF).view(torch.float32))


def _pairs(rank: int, world: int, jobs: list[tuple[str, Cell, Cell]]) -> list[tuple[Result, Result]]:
    found = []
    with cpu_megatron():
        for name, cell, without in jobs:
            with opened(cell, maker(name)) as trainer:
                kept = trainer.optimizer.chained_optimizers[0].kept
                assert isinstance(kept, main_weights.KeptWeights)
                mine = trained(trainer, STEPS)
            with pytest.MonkeyPatch.context() as patched, opened(without, maker(name)) as trainer:
                if isinstance(kept, main_weights.Remainders):
                    patched.setattr(_Distributed, "_copy_main_params_to_model_params", _rounding_half_up)
                found.append((mine, trained(trainer, STEPS)))
    return found


def _check_alike(jobs: list[tuple[str, Cell, Cell]], world: int) -> None:
    for job, (mine, without) in zip(jobs, run_ranks(world, _pairs, jobs)[0], strict=True):
        assert mine.losses == without.losses and mine.norms == without.norms, job
        for kind in ("weights", "model_weights"):
            ours, theirs = getattr(mine, kind), getattr(without, kind)
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs), (job, kind)
        assert mine.replica_gap == 0, job


def test_weights_are_bitwise_those_without_the_settings() -> None:
    """Three ways to step; every type and setting is exhaustive."""
    chosen = {"mars-lion": "bf16 gradients", "ldadam": "remainders", "mkor": "host"}
    _check_alike([(name, *CELLS[label]) for name, label in chosen.items()], 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("label", CELLS)
def test_weights_are_bitwise_those_without_the_settings_everywhere(label: str, place: str) -> None:
    world, sizes = PLACES[place]
    sizes = {**sizes, "overlap_param_gather": False, "overlap_grad_reduce": False, "bucket_size": None}
    cell, without = (replace(cell, **sizes) for cell in CELLS[label])
    _check_alike([(name, cell, without) for name in TYPES], world)


def _computed(rank: int, world: int, names: list[str]) -> list[tuple[Result, Result, tuple[int, int]]]:
    """Runs on the host, and with a device that multiplies the matrices, which has sent so many bytes up and down."""
    found = []
    with cpu_megatron():
        for name in names:
            with opened(CELLS["host"][0], maker(name, offload_compute="host")) as trainer:
                stayed = trained(trainer, STEPS)
            with opened(CELLS["host"][0], maker(name, offload_compute="device")) as trainer:
                went = trained(trainer, STEPS)
                optimizers = [wrapper.optimizer for wrapper in trainer.optimizer.chained_optimizers]
                exchanges = [unit.exchange for optimizer in optimizers for unit in optimizer.planned_units]
                links = [exchange.link for exchange in exchanges if exchange is not None]
                crossed = sum(link.bytes_up for link in links), sum(link.bytes_down for link in links)
            found.append((stayed, went, crossed))
    return found


@pytest.mark.parametrize(
    "names",
    [["mars-m"], pytest.param(["mars-shampoo", "ldadam", "mkor", "mkor-h"], marks=pytest.mark.exhaustive)],
)
def test_a_device_that_multiplies_has_the_bits_of_the_host(names: list[str]) -> None:
    for name, (stayed, went, crossed) in zip(names, run_ranks(2, _computed, names)[0], strict=True):
        assert stayed.losses == went.losses and min(crossed) > 0, name
        for kind in ("weights", "model_weights"):
            ours, theirs = getattr(went, kind), getattr(stayed, kind)
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs), (name, kind)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def _saved(label: str) -> Cell:
    return replace(CELLS[label][0], **ALL_THERE)


def _check_resumed(jobs: list[tuple[str, Cell, Cell]], folder: Path) -> None:
    for job, whole, again in went_on(jobs, folder):
        assert again.losses == whole.losses, job
        for kind in ("weights", "model_weights"):
            ours, theirs = getattr(again, kind), getattr(whole, kind)
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs), (job, kind)
        assert again.replica_gap == 0, job


def test_resumes_bitwise(tmp_path: Path) -> None:
    remainders, host, plain = _saved("remainders"), _saved("host"), replace(PLAIN, **ALL_THERE)
    jobs = [("ldadam", remainders, remainders), ("sonew", host, plain)]
    _check_resumed([*jobs, ("mars-lion", _saved("host, fp32"), _saved("host, fp32"))], tmp_path)


@pytest.mark.exhaustive
def test_resumes_bitwise_with_and_without(tmp_path: Path) -> None:
    jobs = [(name, _saved(label), _saved(label)) for name in TYPES for label in CELLS]
    for label in ("host", "host, fp32", "host, fp16"):
        host, plain = _saved(label), replace(CELLS[label][1], **ALL_THERE)
        jobs += [job for name in TYPES for job in ((name, host, plain), (name, plain, host))]
    _check_resumed(jobs, tmp_path)


def _written(rank: int, world: int, names: list[str]) -> list[tuple[Result, Result]]:
    """A model in fp32 whose weights someone writes between two steps: on the host, and without."""

    def found(name: str, cell: Cell) -> Result:
        with opened(replace(cell, **ALL_THERE), maker(name)) as trainer:
            trainer.advance(1)
            with torch.no_grad():
                for chunk in trainer.chunks:
                    for parameter in chunk.parameters():
                        parameter.data.mul_(0.5)
            return trained(trainer, 2)

    with cpu_megatron():
        return [tuple(found(name, cell) for cell in CELLS["host, fp32"]) for name in names]


@pytest.mark.parametrize("names", [["sonew"], pytest.param(list(TYPES), marks=pytest.mark.exhaustive)])
def test_what_is_written_into_a_model_in_fp32_counts(names: list[str]) -> None:
    for name, (host, without) in zip(names, run_ranks(2, _written, names)[0], strict=True):
        assert host.losses == without.losses, name
        assert all(torch.equal(host.weights[key], without.weights[key]) for key in without.weights), name


def _into_remainders(rank: int, world: int, folder: Path) -> tuple[float, list[bool]]:
    """The gap between ranks' copies, and whether main weights are those of the checkpoint."""
    with cpu_megatron():
        with opened(PLAIN, maker("mars-lion")) as trainer:
            trainer.advance(2)
            trainer.save(folder)
            saved, _ = trainer.weights()
        with opened(CELLS["remainders"][0], maker("mars-lion")) as trainer:
            trainer.load(folder)
            result = trained(trainer, 0)
            return (
                (0.0, [])
                if result is None
                else (result.replica_gap, [torch.equal(saved[key], result.weights[key]) for key in saved])
            )


def test_whole_main_weights_become_halves(tmp_path: Path) -> None:
    """Also those that a cast has rounded to even: all ranks' copies of the model follow."""
    gap, same = run_ranks(2, _into_remainders, tmp_path)[0]
    assert gap == 0 and same and all(same)


# --- a device apart --------------------------------------------------------------------------------------------------


def _watched(rank: int, world: int, names: list[str]) -> list[tuple[dict[str, int], Any]]:
    found = []
    # What this process was forked from may have loaded the compiled passes.
    for loaded in (building.library, products):
        loaded.cache_clear()
    with cpu_megatron(), pytest.MonkeyPatch.context() as patched, apart_devices.apart() as places:
        made = main_weights._on_host
        patched.setattr(main_weights, "_on_host", lambda *args: places.put(made(*args), apart_devices.HOST))
        for name in names:
            with opened(CELLS["host"][0], maker(name)) as trainer:
                for chunk in trainer.chunks:
                    for buffer in chunk.buffers:
                        places.put(buffer.param_data, apart_devices.DEVICE)
                        places.put(buffer.grad_data, apart_devices.DEVICE)
                places.crossed.update(dict.fromkeys(places.crossed, 0))
                found.append((dict(places.crossed), trained(trainer, 2), dict(places.crossed)))
    return found


@pytest.mark.parametrize("names", [["mkor"], pytest.param(list(TYPES), marks=pytest.mark.exhaustive)])
def test_nothing_mixes_the_host_and_the_device(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """Without the compiled passes, whose reads nothing could watch."""
    monkeypatch.setenv("RANKWISE_NATIVE", "0")
    for _, _, crossed in run_ranks(2, _watched, names)[0]:
        assert crossed[apart_devices.HOST] and crossed[apart_devices.DEVICE]


# --- weights in 8 bits -----------------------------------------------------------------------------------------------


def _rounded(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn).to(torch.bfloat16)


class Fp8Trainer(Trainer):
    """Matrices whose values are those of 8 bits; Transformer Engine's tensors themselves need CUDA."""

    def _chunk(self, stage: int) -> nn.Module:
        wrapped = super()._chunk(stage)
        for parameter in wrapped.parameters():
            if parameter.dim() == 2:
                initial = parameter.detach().clone()
                parameter.data.copy_(_rounded(initial))
                parameter.is_8_bit = True
                parameter.dequantize = functools.partial(torch.clone, parameter.detach())
                parameter.get_high_precision_init_val = functools.partial(torch.clone, initial)
                parameter.clear_high_precision_init_val = lambda: None
        return wrapped


def _quantize(models: list[Any], mains: list[Any], starts: list[Any], *_: Any) -> None:
    for model, main, start in zip(models, mains, starts, strict=True):
        if main is not None:
            model.data.view(-1)[start : start + main.numel()].copy_(_rounded(main))


def _in_8_bits(rank: int, world: int, name: str, refused: bool) -> Any:
    with cpu_megatron(), pytest.MonkeyPatch.context() as patched:
        for module in (layouts, distrib_optimizer):
            patched.setattr(module, "is_float8tensor", lambda tensor: getattr(tensor, "is_8_bit", False))
            patched.setattr(module, "dequantize_fp8_tensor", lambda tensor: tensor.dequantize())
        patched.setattr(distrib_optimizer, "quantize_param_shard", _quantize)
        patched.setattr(Cell, "ddp_config", functools.partialmethod(_gathered_in_8_bits, Cell.ddp_config))
        cell = Cell(precision="bf16", optimizer=AWARE if refused else {}, **DISTRIBUTED)
        if refused:
            with pytest.raises(SupportError, match="--use-precision-aware-optimizer .* leave out --fp8-param-gather"):
                opened(cell, maker(name), Fp8Trainer).__enter__()
            return None, None
        with opened(cell, maker(name), Fp8Trainer) as trainer:
            return trained(trainer, 0), trained(trainer, STEPS)


def _gathered_in_8_bits(cell: Cell, made: Any) -> Any:
    config = made(cell)
    config.fp8_param_gather = True
    return config


def test_main_weights_of_8_bits_are_those_before_rounding() -> None:
    start, end = run_ranks(2, _in_8_bits, "mkor", False)[0]
    _, alone = run_ranks(1, _in_8_bits, "mkor", False)[0]
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert torch.equal(start.weights[qkv], initial(qkv, start.weights[qkv].shape).bfloat16().float())
    assert torch.equal(end.model_weights[qkv], _rounded(end.weights[qkv]).float())
    assert move(end.weights, alone.weights, start.weights).mean < 0.05  # bf16 gradients; a tenth of a step's rounding
    assert end.losses[-1] < end.losses[0]


def _clipped(rank: int, world: int) -> None:
    def make(config: dict[str, Any], chunks: list[Any]) -> Any:
        for chunk in chunks:
            chunk.config.qk_clip = True
        return maker("ldadam")(config, chunks)

    with cpu_megatron(), pytest.raises(SupportError, match="--qk-clip scales main weights .* leave out one of the"):
        with opened(CELLS["remainders"][0], make):
            pass


def test_weights_that_are_put_away_cannot_be_clipped() -> None:
    run_ranks(2, _clipped)


def test_weights_of_8_bits_have_no_remainders() -> None:
    run_ranks(1, _in_8_bits, "ldadam", True)


# --- main weights that are gathered through the gradients' buffers ---------------------------------------------------

STAGED: dict[str, Any] = {"optimizer": REUSE}
# With one bucket for a whole model, as Megatron has without overlap, and with many.
PLAINLY, LATER = Cell(precision="bf16", **DISTRIBUTED), PLAIN
BUFFERS: dict[str, Cell] = {
    "at once": PLAINLY,
    "at once, bf16 gradients": replace(PLAINLY, bf16_gradients=True),
    "later": LATER,
    "later, bf16 gradients": replace(LATER, bf16_gradients=True),
    "later, experts": replace(LATER, ep=2, **MOE),
    "at once, experts": replace(PLAINLY, ep=2, **MOE),
    "later, TP2 SP": replace(LATER, tp=2, sp=True),
}


class StagedTrainer(Trainer):
    """Matrices that are said to be mxfp8: with storage of their own, filled from the buffer of gradients.

    They keep the bits of bf16, so that a run must have those of one without the setting, if nothing is lost or taken
    for what it is not between the step and the forward pass. Of several ranks, vectors are said to be mxfp8, too: in
    buffers apart, ranks would cut weights elsewhere, and sum in another order.
    """

    def _model(self, stage: int, vp_stage: int | None) -> nn.Module:
        model = super()._model(stage, vp_stage)
        for parameter in model.parameters():
            if parameter.dim() == 2 or torch.distributed.get_world_size() > 1:
                parameter.is_8_bit = True
                parameter.dequantize = functools.partial(_own_values, parameter)
                parameter.get_high_precision_init_val = parameter.dequantize
                parameter.clear_high_precision_init_val = lambda: None
        return model

    def clear_gradients(self) -> None:
        super().clear_gradients()
        # As Megatron's loop does from the second step on: the hooks of the first gather nothing.
        if self.cell.overlap_param_gather and self.step:
            self._stage()

    def _stage(self) -> None:
        for optimizer in self.optimizer.chained_optimizers:
            optimizer._copy_main_params_to_param_buffer()

    def gather_params(self) -> None:
        if not self.cell.overlap_param_gather:
            return
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._stage()
        groups = [group for c in self.chunks for group in c.bucket_groups + c.expert_parallel_bucket_groups]
        for group in groups:
            group.start_param_sync()
        for group in groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def _own_values(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().clone()


def _staged(rank: int, world: int, jobs: list[tuple[str, Cell]]) -> list[tuple[Result, Result]]:
    with cpu_megatron():
        return [(_staged_run(name, cell), train(cell, maker(name), STEPS)) for name, cell in jobs]


def _staged_run(name: str, cell: Cell, steps: int = STEPS, folder: Path | None = None) -> Result:
    with _said_to_be_mxfp8(), opened(replace(cell, **STAGED), maker(name), StagedTrainer) as trainer:
        if folder is None:
            return trained(trainer, steps)
        if any(folder.iterdir()):
            trainer.load(folder)
            return trained(trainer, steps)
        trainer.advance(steps)
        trainer.save(folder)
        return trained(trainer, steps)


@contextmanager
def _said_to_be_mxfp8() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for module in (layouts, distrib_optimizer, param_and_grad_buffer, distributed_data_parallel):
            for name in ("is_float8tensor", "is_mxfp8tensor"):
                if hasattr(module, name):
                    patched.setattr(module, name, lambda tensor: getattr(tensor, "is_8_bit", False))
            if hasattr(module, "dequantize_fp8_tensor"):
                patched.setattr(module, "dequantize_fp8_tensor", lambda tensor: tensor.dequantize())
        patched.setattr(Cell, "ddp_config", functools.partialmethod(_through_gradients, Cell.ddp_config))
        yield


def _through_gradients(cell: Cell, made: Any) -> Any:
    config = made(cell)
    config.fp8_param_gather = config.reuse_grad_buf_for_mxfp8_param_ag = True
    return config


def _check_staged(jobs: list[tuple[str, Cell]], world: int = 2) -> None:
    for job, (staged, plain) in zip(jobs, run_ranks(world, _staged, jobs)[0], strict=True):
        assert staged.losses == plain.losses and staged.norms == plain.norms, job
        for kind in ("weights", "model_weights"):
            ours, theirs = getattr(staged, kind), getattr(plain, kind)
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs), (job, kind)
        assert staged.replica_gap == 0, job


def test_weights_through_the_gradients_buffers_are_bitwise_the_same() -> None:
    labels = {"ldadam": "at once", "mkor": "later, bf16 gradients", "sonew": "later, experts"}
    _check_staged([(name, BUFFERS[label]) for name, label in labels.items()])
    _check_staged([("mars-m", LATER)], 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("label", [label for label in BUFFERS if label != "at once, experts" or DEFERS])
def test_weights_through_the_gradients_buffers_are_bitwise_the_same_everywhere(label: str) -> None:
    _check_staged([(name, BUFFERS[label]) for name in TYPES])


def _staged_resumes(rank: int, world: int, folder: Path, jobs: list[tuple[str, Cell]]) -> list[tuple[Result, Result]]:
    found = []
    with cpu_megatron():
        for index, (name, cell) in enumerate(jobs):
            place = folder / str(index)
            if rank == 0:
                place.mkdir()
            torch.distributed.barrier()
            found.append(tuple(_staged_run(name, cell, 2, place) for _ in range(2)))
    return found


@pytest.mark.parametrize(
    "jobs",
    [
        [("ldadam", PLAINLY)],
        pytest.param([(name, PLAINLY) for name in TYPES], marks=pytest.mark.exhaustive),
    ],
)
def test_weights_through_the_gradients_buffers_resume_bitwise(jobs: list[tuple[str, Cell]], tmp_path: Path) -> None:
    for job, (whole, again) in zip(jobs, run_ranks(2, _staged_resumes, tmp_path, jobs)[0], strict=True):
        assert again.losses == whole.losses, job
        assert all(torch.equal(again.weights[key], whole.weights[key]) for key in whole.weights), job


def _staged_refusals(rank: int, world: int) -> list[str]:
    messages = []
    with cpu_megatron(), _said_to_be_mxfp8():
        cases = [(PLAINLY, {}, {"reuse_grad_buf_for_mxfp8_param_ag": False})]
        cases += [(PLAINLY, {}, {"overlap_param_gather": True}), (PLAINLY, {"qk_clip": True}, {})]
        cases += [] if DEFERS else [(BUFFERS["at once, experts"], {}, {})]
        for cell, model, fields in cases:
            with opened(replace(cell, **STAGED), maker("adam"), StagedTrainer) as trainer:
                for key, value in model.items():
                    setattr(trainer.config, key, value)
                with pytest.raises(SupportError) as caught:
                    maker("ldadam")({**trainer.cell.optimizer_config(), **fields}, trainer.chunks)
                messages.append(str(caught.value))
    return messages


def test_what_would_gather_something_else_is_refused() -> None:
    expected = ["reuse_grad_buf_for_mxfp8_param_ag=False", "overlap_param_gather=True", "--qk-clip scales", "experts'"]
    for text, message in zip(expected, run_ranks(2, _staged_refusals)[0], strict=False):
        assert text in message


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("mkor", {**AWARE, "use_distributed_optimizer": False}, "--use-precision-aware-optimizer is invalid .* add"),
        ("mkor", {**HOST, "use_distributed_optimizer": False}, "--optimizer-cpu-offload is invalid .* add"),
        ("mkor", {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, "fraction 0.5 .* must be 1.0"),
        ("mkor", {**REUSE, "use_distributed_optimizer": False}, "--reuse-grad-buf-.* is invalid .* add"),
        ("mkor", {**REUSE, **AWARE}, "--use-precision-aware-optimizer is invalid .* leave one out"),
        ("mkor", {**REUSE, **HOST}, "--optimizer-cpu-offload is invalid .* leave one out"),
        ("mkor", {**HOST, "use_torch_optimizer_for_cpu_offload": True}, "--use-torch-.* leave it out"),
        ("sonew", {"main_grads_dtype": torch.bfloat16}, "--main-grads-dtype is invalid .* add that flag"),
        ("sonew", {**AWARE, "main_params_dtype": torch.float16}, "--main-params-dtype fp16 is invalid .* leave it out"),
        (
            "sonew",
            {**AWARE, "exp_avg_dtype": torch.bfloat16},
            "--exp-avg-dtype is invalid .* and sonew has .* --sonew-state-dtype",
        ),
        ("ldadam", {**AWARE, "exp_avg_sq_dtype": torch.uint8}, "--exp-avg-sq-dtype .* --ldadam-error-dtype for what"),
        ("mkor-h", {**AWARE, "exp_avg_dtype": torch.float16}, "--exp-avg-dtype .* --mkor-factor-dtype for what"),
    ],
)
def test_what_cannot_be_done_is_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SupportError, match=message):
        RankwiseConfig(optimizer=name, lr=1e-3, bf16=True, **{"use_distributed_optimizer": True, **fields})


def test_megatrons_own_optimizer_is_judged_by_megatron() -> None:
    with pytest.raises((RuntimeError, TypeError)):  # Without Transformer Engine, whose version 0.16 compares first.
        RankwiseConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True, **AWARE)
