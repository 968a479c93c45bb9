"""E3, E4 and E5: MKOR, MARS and LDAdam on small language models."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from benchmarks.convergence.experiment import Claim, Contender, Experiment, harmless

__all__ = ["ADAMW", "E3", "E4", "E5", "LONG_MEMORY", "SMALL_MODEL"]

SMALL_MODEL: dict[str, Any] = {"kind": "language model", "heads": 4, "window": 64, "batch": 32, "clip": 1.0}
_SMALL = {**SMALL_MODEL, "layers": 2, "hidden": 64}
_LARGER = {**SMALL_MODEL, "layers": 2, "hidden": 96}
_on_text = partial(Experiment, metric="validation_loss", counts=0.01, relative=False)
_TEXT = (
    "{} parameters in GPT-2's shape, bytes of the Python standard library, as `make train` takes them; {} steps of 32 "
    "windows of 64 bytes, 20 bytes per parameter; gradients clipped to a norm of 1; warm-up of a twentieth, cosine to "
    "zero; the figure is the loss on held-out files after the last step, in nats per byte."
)
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}

_MKOR = "MKOR, arXiv 2306.01685"
LONG_MEMORY = "MKOR on AdamW, every step, decay 0.995"


_SKETCH = {"rule": "sketch", "update_interval": 1, "factor_decay": 0.998, "sketch_gain": 0.04}
SKETCHED = Contender(
    "MKOR on AdamW, rule sketch", "mkor", 1.6e-2, ({**ADAMW, **_SKETCH, "factor_dtype": "bfloat16"},), afterwards=True
)
"""With what the rule has where nothing else is given."""


def _mkor(name: str, guess: float, **options: Any) -> Contender:
    return Contender(name, "mkor", guess, ({**ADAMW, **options},))


E3 = _on_text(
    name="E3",
    title="MKOR on a language model",
    about=_TEXT.format("0.26 M", "2,550") + " MKOR's factors are in float32.",
    task=_LARGER,
    steps=2550,
    contenders=(
        Contender("AdamW", "adamw", 4e-3, (ADAMW,)),
        _mkor("MKOR on AdamW", 8e-3),
        Contender("LAMB", "lamb", 1e-2, (ADAMW,)),
        _mkor("MKOR on LAMB", 1e-2, backend="lamb"),
        _mkor("MKOR-H on AdamW", 8e-3, hybrid=True),
        _mkor("MKOR on AdamW, every step", 4e-3, update_interval=1),
        _mkor("MKOR on AdamW, rule ema", 8e-3, rule="ema"),
        Contender(
            LONG_MEMORY, "mkor", 1.6e-2, ({**ADAMW, "update_interval": 1, "factor_decay": 0.995},), afterwards=True
        ),
    ),
    claims=(
        Claim(_MKOR, "better than its own backend on a language model: AdamW", "MKOR on AdamW", "AdamW"),
        Claim(_MKOR, "better than its own backend on a language model: LAMB", "MKOR on LAMB", "LAMB"),
        Claim(_MKOR, "MKOR-H, which drops the factors, is as good", "MKOR-H on AdamW", "MKOR on AdamW", "no worse"),
        Claim(_MKOR, "MKOR-H is lower than AdamW (asked afterwards)", "MKOR-H on AdamW", "AdamW"),
        Claim(_MKOR, "frequent updates help", "MKOR on AdamW, every step", "MKOR on AdamW"),
        Claim(
            _MKOR,
            "frequent updates help, with as long a memory in steps (asked afterwards)",
            LONG_MEMORY,
            "MKOR on AdamW",
        ),
        harmless("AdamW as the backend instead of LAMB", "MKOR on AdamW", "MKOR on LAMB"),
        harmless("the published rule", "MKOR on AdamW", "MKOR on AdamW, rule ema"),
    ),
)

_MARS = "MARS, arXiv 2411.10438"
_MARS_M = "MARS-M, arXiv 2510.21800"
_ASADAMW = "MARS-AdamW, AdamW's betas"
_BETAS = ((0.9, 0.95), (0.95, 0.99))


def _mars(name: str, guess: float = 8e-3, **options: Any) -> Contender:
    settings = tuple({"betas": betas, "weight_decay": 0.1, **options} for betas in _BETAS)
    return Contender(name, "mars", guess, settings)


def _afterwards(text: str, ours: str, than: str, kind: Literal["less", "no worse"] = "less") -> Claim:
    # All of these have AdamW's betas at their best trial.
    return Claim(_MARS, f"{text}, with AdamW's betas (asked afterwards)", ours, than, kind)


def _mars_m(name: str, gamma: float) -> Contender:
    # In float32 on every machine: the type of its products is no part of the claim.
    return _mars(name, 1e-2, variant="muon", gamma=gamma, ns_dtype="float32")


E4 = _on_text(
    name="E4",
    title="MARS on a language model",
    about=_TEXT.format("0.12 M", "1,220") + " Betas are tuned with two settings for everybody (Muon: momentum).",
    task=_SMALL,
    steps=1220,
    contenders=(
        Contender("AdamW", "adamw", 4e-3, tuple({"betas": betas, "weight_decay": 0.1} for betas in _BETAS)),
        _mars("MARS-AdamW", gamma=0.025),
        Contender("Muon", "muon", 1e-2, tuple({"momentum": mu, "weight_decay": 0.1} for mu in (0.9, 0.95))),
        _mars_m("MARS-M", 0.025),
        _mars("MARS-AdamW, gamma 0", gamma=0.0),
        _mars("MARS-AdamW, gamma 0.05", gamma=0.05),
        _mars("MARS-AdamW, no clip", gamma=0.025, clip=None),
        _mars("MARS-AdamW, exact", gamma=0.025, exact=True),
        _mars_m("MARS-M, gamma 0", 0.0),
        Contender(
            "Lion", "lion", 5e-4, tuple({"betas": betas, "weight_decay": 0.1} for betas in ((0.9, 0.99), (0.95, 0.98)))
        ),
        _mars("MARS-Lion", 5e-4, variant="lion", gamma=0.025),
        Contender(_ASADAMW, "mars", 8e-3, ({**ADAMW, "gamma": 0.025},), afterwards=True),
    ),
    claims=(
        Claim(_MARS, "lower than AdamW (published: 0.036 nats at 125 M)", "MARS-AdamW", "AdamW"),
        Claim(_MARS, "the correction does it, not the betas or the clip", "MARS-AdamW", "MARS-AdamW, gamma 0"),
        Claim(_MARS, "gamma 0.05 is no better than 0.025", "MARS-AdamW", "MARS-AdamW, gamma 0.05", "no worse"),
        Claim(
            _MARS, "approximate is as good as exact, at half the cost", "MARS-AdamW", "MARS-AdamW, exact", "no worse"
        ),
        Claim(_MARS, "the clip does no harm", "MARS-AdamW", "MARS-AdamW, no clip", "no worse"),
        Claim(_MARS, "MARS-Lion is lower than Lion", "MARS-Lion", "Lion"),
        Claim(_MARS, "MARS-Lion is as good as AdamW (asked afterwards)", "MARS-Lion", "AdamW", "no worse"),
        _afterwards("lower than AdamW", _ASADAMW, "AdamW"),
        _afterwards("the correction does it", _ASADAMW, "MARS-AdamW, gamma 0"),
        _afterwards("the clip does no harm", _ASADAMW, "MARS-AdamW, no clip", "no worse"),
        _afterwards("gamma 0.05 is no better than 0.025", _ASADAMW, "MARS-AdamW, gamma 0.05", "no worse"),
        _afterwards("lower than AdamW with gamma 0.05", "MARS-AdamW, gamma 0.05", "AdamW"),
        harmless("its betas instead of AdamW's", "MARS-AdamW", _ASADAMW),
        Claim(_MARS_M, "MARS-M is lower than Muon", "MARS-M", "Muon"),
        Claim(_MARS_M, "its correction does it", "MARS-M", "MARS-M, gamma 0"),
    ),
)

_LDADAM = "LDAdam, arXiv 2410.16103"


def _ldadam(name: str, rank: int, **options: Any) -> Contender:
    return Contender(name, "ldadam", 8e-3, ({"rank": rank, "weight_decay": 0.1, **options},))


def _low_rank(name: str, optimizer: str, rank: int) -> Contender:
    settings = ({**ADAMW, "rank": rank, "buffer_bytes": 4.0},)
    return Contender(name, optimizer, 8e-3, settings)


E5 = _on_text(
    name="E5",
    title="LDAdam on a language model",
    about=_TEXT.format("0.12 M", "1,220") + " The width d is 64. GaLore and APOLLO get as many bytes for a matrix as "
    "LDAdam with its error buffer in float32, as a higher rank. Rank d/2 with that buffer would take as much as "
    "AdamW, and LDAdam refuses it; it runs without the buffer.",
    task=_SMALL,
    steps=1220,
    contenders=(
        Contender("AdamW", "adamw", 4e-3, (ADAMW,)),
        _ldadam("LDAdam, rank d/4", 16),
        _ldadam("LDAdam, rank d/4, no error feedback", 16, error_feedback=False),
        _ldadam("LDAdam, rank d/16", 4),
        _ldadam("LDAdam, rank d/16, no error feedback", 4, error_feedback=False),
        _low_rank("GaLore, bytes of LDAdam d/4", "galore", 16),
        _low_rank("APOLLO, bytes of LDAdam d/4", "apollo", 16),
        _ldadam("LDAdam, rank d/2, no error feedback", 32, error_feedback=False),
        _ldadam("LDAdam, rank d/4, buffer bfloat16", 16, error_dtype="bfloat16"),
        _ldadam("LDAdam, rank d/4, buffer int8", 16, error_dtype="int8"),
        _low_rank("GaLore, bytes of LDAdam d/16", "galore", 4),
        _low_rank("APOLLO, bytes of LDAdam d/16", "apollo", 4),
    ),
    claims=(
        Claim(_LDADAM, "as good as AdamW (rank d/4)", "LDAdam, rank d/4", "AdamW", "no worse"),
        Claim(_LDADAM, "as good as AdamW (rank d/16)", "LDAdam, rank d/16", "AdamW", "no worse"),
        Claim(_LDADAM, "error feedback helps (rank d/4)", "LDAdam, rank d/4", "LDAdam, rank d/4, no error feedback"),
        Claim(_LDADAM, "error feedback helps (rank d/16)", "LDAdam, rank d/16", "LDAdam, rank d/16, no error feedback"),
        Claim(_LDADAM, "better than GaLore at equal bytes", "LDAdam, rank d/4", "GaLore, bytes of LDAdam d/4"),
        Claim(_LDADAM, "better than APOLLO at equal bytes", "LDAdam, rank d/4", "APOLLO, bytes of LDAdam d/4"),
        Claim(
            _LDADAM,
            "a buffer in bfloat16 does no harm",
            "LDAdam, rank d/4, buffer bfloat16",
            "LDAdam, rank d/4",
            "no worse",
        ),
        Claim(
            _LDADAM,
            "a buffer in 8 bits does no harm",
            "LDAdam, rank d/4, buffer int8",
            "LDAdam, rank d/4",
            "no worse",
        ),
        Claim(
            _LDADAM,
            "as good as AdamW with a buffer in 8 bits (asked afterwards)",
            "LDAdam, rank d/4, buffer int8",
            "AdamW",
            "no worse",
        ),
        # Asked once the others were answered: both have 5.2 bytes a parameter.
        Claim(
            _LDADAM,
            "better than GaLore at equal bytes, with a buffer in bfloat16 (asked afterwards)",
            "LDAdam, rank d/4, buffer bfloat16",
            "GaLore, bytes of LDAdam d/16",
        ),
    ),
)
