"""Section "whole-steps": what optimizers cost where a model trains as fast as the card allows, and what plan says."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu.items import Figure, Found, Item, Place
from benchmarks.gpu.whole_steps import ADAMW, ENGINES, MUON, TOKENS, json_block, measure_whole_steps

__all__ = ["planned", "whole_items"]

_TYPES = (ADAMW, MUON, "MARS-AdamW", "MARS-M", "SONew, tridiagonal", "LDAdam, rank 256", "MKOR")
_LEAST_SHARE = 40.0  # Per cent of the card's measured peak, below which the optimizer's share would look too small.
_SIDE = 8192


def whole_items(place: Place) -> list[Item]:
    """Each optimizer under plain PyTorch, ZeRO-2 and FSDP2, on the shapes of GPT-2 small and Llama 3.2 1B."""
    types = [name.replace("256", "16") for name in _TYPES] if place.tiny else list(_TYPES)
    worths = {"gpt2-small": 10.0, "llama-1b": 9.0}
    items = []
    for model, worth in worths.items():
        for number, engine in enumerate(ENGINES):
            for name in types:
                if (name, engine) == (MUON, "ZeRO-2"):
                    continue  # Its flat partitions are no matrices.
                if engine == "ZeRO-2" and find_spec("deepspeed") is None:
                    continue  # It would fail here, and count as measured where DeepSpeed is.
                run = partial(_whole, place, name, engine, model)
                predict = partial(_prediction, name, engine, model)
                label = f"{name}, {model}, {engine}"
                items.append(Item(label, 20.0 if model == "gpt2-small" else 45.0, run, worth - 0.5 * number, predict))
    return items


def _whole(place: Place, name: str, engine: str, model: str) -> Found:
    row = measure_whole_steps(model, name, engine, place.device, place.tiny) | place.about
    peak = _measured_peak(place) if place.on_cuda else None
    device = _plans_device(place)
    figures = []
    for tokens in map(str, TOKENS):
        seconds = row["whole_seconds"][tokens]
        rate = row["tokens_of_a_step"][tokens] / seconds
        figures.append(Figure(f"step of {tokens} tokens", seconds * 1e3, "ms"))
        figures.append(Figure(f"tokens, {tokens} a step", rate, "a second"))
        if peak is not None:
            share = 100 * rate * row["operations"] / peak
            figures.append(Figure(f"of the measured peak, {tokens} a step", share, "%", _LEAST_SHARE, 100))
        figures.append(Figure(f"optimizer, {tokens} a step", 100 * row["update_seconds"] / seconds, "% of the step"))
    figures.append(Figure("optimizer", row["update_seconds"] * 1e3, "ms"))
    row["peak_rate"] = peak
    expected = planned(name, model, engine, device) if device else None
    if expected is not None:
        row["planned_seconds"] = expected / 1e3
        figures.append(Figure("optimizer, as plan has it", expected, "ms"))
        figures.append(Figure("optimizer over plan's", row["update_seconds"] * 1e3 / expected, "x"))
    if row["peak_bytes"] is not None:
        figures.append(Figure("peak of memory", row["peak_bytes"] / 2**30, "GiB"))
    return Found(figures, [row])


@cache
def _measured_peak(place: Place) -> float:
    """FLOP a second of a large product of bfloat16 on this card."""
    left, right = (torch.randn(_SIDE, _SIDE, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * _SIDE**3 / place.seconds(lambda: left @ right)


def _plans_device(place: Place) -> str | None:
    if not place.on_cuda:
        return "H200"  # Only to try what follows.
    name = torch.cuda.get_device_name(place.device)
    return next((known for known in ("H200", "H100", "A100", "MI300X") if known in name), None)


@cache
def planned(name: str, model: str, engine: str, device: str) -> float | None:
    """Milliseconds of the optimizer on one rank, as ``rankwise plan`` has them; None for another's optimizer."""
    if name in (ADAMW, MUON):
        return None
    from rankwise.launch.planning.costs import cost
    from rankwise.launch.planning.devices import Links, device_of
    from rankwise.launch.planning.plan_request import answered
    from rankwise.launch.planning.question import Goal, Question

    block = json_block(name)
    way: dict[str, Any] = {"engine": "deepspeed", "stage": 2} if engine == "ZeRO-2" else {"mesh": "dp=1"}
    if engine != "ZeRO-2":
        way["engine"] = "fsdp"
    optimizer = block["type"].lower()
    asked = answered(Question(optimizer=optimizer, model=model, ranks=1, batch_tokens=TOKENS[0], seq_len=1024, **way))
    # With the options that are timed, not with those of the packaged configurations.
    asked = asked.changed(replace(asked.picked, params=block["params"]), asked.cluster)
    found = cost(asked.figures(), device_of(device), Links(), asked.tokens, Goal.efficiency)
    return found.total if math.isfinite(found.total) else None


def _prediction(name: str, engine: str, model: str) -> str:
    expected = planned(name, model, engine, "H200")
    return "" if expected is None else f"plan: optimizer {expected:.1f} ms"
