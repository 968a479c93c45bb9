"""What is timed: torch's optimizers, ours, and the published implementations from checkouts outside this project."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rankwise
from megatron_patches import detect_apex

__all__ = ["BASELINE", "NARROW", "OFFICIAL", "OURS", "Contender", "official", "others", "selected"]

Build = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Contender:
    """An optimizer to be timed.

    Attributes:
        name: For tables.
        build: Makes it for a model.
        bytes_per_parameter: Least memory traffic of a step with everything in fp32; None: bound by its products.
        rival: Key of :data:`OFFICIAL`: its published implementation.
    """

    name: str
    build: Build
    bytes_per_parameter: float | None = None
    rival: str | None = None


BASELINE = Contender("AdamW(fused=True)", lambda model: torch.optim.AdamW(model.parameters(), fused=True), 28.0)


def _named(kind: Callable[..., Any], **options: Any) -> Build:
    return lambda model: kind(list(model.named_parameters()), **options)


def _mkor(**options: Any) -> Build:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = rankwise.MKOR(list(model.named_parameters()), **options)
        optimizer.capture(model)
        return optimizer

    return build


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for module in model.modules() if isinstance(module, nn.Linear) for p in [module.weight]])


OURS = (
    Contender("MARS-AdamW", _named(rankwise.MARS, variant="adamw"), 44.0, "MARS-AdamW"),
    Contender("MARS-Lion", _named(rankwise.MARS, variant="lion"), 36.0, "MARS-Lion"),
    Contender("MARS-Shampoo", _named(rankwise.MARS, variant="shampoo"), None, "MARS-Shampoo"),
    Contender("MARS-M", _named(rankwise.MARS, variant="muon"), None, "MARS-M"),
    Contender("SONew, diagonal", _named(rankwise.SONew, band=0), 36.0, None),
    Contender("SONew, tridiagonal", _named(rankwise.SONew, band=1), 44.0, "SONew"),
    Contender("SONew, band 4", _named(rankwise.SONew, band=4), 68.0, None),
    Contender("LDAdam, rank 16", _named(rankwise.LDAdam, rank=16), 40.0, "LDAdam, rank 16"),
    Contender("LDAdam, rank 256", _named(rankwise.LDAdam, rank=256), None, "LDAdam, rank 256"),
    Contender("MKOR", _mkor(), None, "MKOR"),
)
"""The types of this project with their published defaults."""

NARROW = (
    Contender("MARS-AdamW, states int8", _named(rankwise.MARS, variant="adamw", state_dtype="int8")),
    Contender("MARS-M, states int8", _named(rankwise.MARS, variant="muon", state_dtype="int8")),
    Contender("SONew, tridiagonal, states int8", _named(rankwise.SONew, band=1, state_dtype="int8")),
    Contender("LDAdam, rank 256, states int8", _named(rankwise.LDAdam, rank=256, state_dtype="int8")),
    Contender("MKOR, states int8", _mkor(state_dtype="int8")),
)
"""The same with a byte for each element of a state."""


def _fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    kind = importlib.import_module("apex.optimizers").FusedAdam
    return kind(model.parameters(), adam_w_mode=True, weight_decay=0.01)  # type: ignore[no-any-return]


def _adamw_8bit(package: str, model: nn.Module) -> torch.optim.Optimizer:
    return importlib.import_module(f"{package}.optim").AdamW8bit(model.parameters())  # type: ignore[no-any-return]


def others(device: torch.device) -> tuple[Contender, ...]:
    """What is timed for comparison besides fused AdamW.

    Args:
        device: Where to run.

    Returns:
        torch's Muon; on a CUDA device apex's FusedAdam, and AdamW with 8-bit states, where they are installed.
    """
    found = [Contender("Muon (torch), linear weights only", _muon)]
    if device.type == "cuda":
        if detect_apex().is_usable:
            found.append(Contender("FusedAdam (apex)", _fused_adam, 28.0))
        for package in ("torchao", "bitsandbytes"):
            if importlib.util.find_spec(package) is not None:
                found.append(Contender(f"AdamW8bit ({package})", partial(_adamw_8bit, package)))
    return tuple(found)


def selected(contenders: Sequence[Contender], names: Sequence[str]) -> list[Contender]:
    """Contenders of these names.

    Args:
        contenders: To choose from.
        names: Empty for all.

    Raises:
        ValueError: There is none of that name.
    """
    known = {contender.name: contender for contender in contenders}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no type {unknown[0]!r} here; there are: {'; '.join(known)}")
    return [known[name] for name in names] if names else list(contenders)


@contextlib.contextmanager
def _importing(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Linear weights, and everything else."""
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    known = {id(parameter) for parameter in matrices}
    return matrices, [parameter for parameter in model.parameters() if id(parameter) not in known]


class _Both:
    """Two optimizers stepped one after the other."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def state(self) -> dict[Any, Any]:
        """States of both optimizers."""
        return {key: value for part in self.parts for key, value in part.state.items()}

    def step(self) -> None:
        """Step both."""
        for part in self.parts:
            part.step()


def _mars(root: Path, variant: str) -> Build:
    with _importing(root / "MARS" / "MARS" / "optimizers"):
        kind = importlib.import_module("mars").MARS

    def build(model: nn.Module) -> Any:
        if variant != "mars-shampoo":
            return kind(model.parameters(), mars_type=variant, optimize_1d=False)
        # It would orthogonalise the embeddings too, which ours, as other Muons, leaves to AdamW: not our gain.
        matrices, rest = _split(model)
        return _Both(kind(matrices, mars_type=variant), torch.optim.AdamW(rest, fused=True))

    return build


def _mars_m(root: Path) -> Build:
    with _importing(root / "MARS" / "MARS_M" / "optimizers"):
        kind = importlib.import_module("mars_m").MARS_M

    def build(model: nn.Module) -> torch.optim.Optimizer:
        matrices, rest = _split(model)
        return kind(muon_params=matrices, adamw_params=rest, clip_c=True)  # type: ignore[no-any-return]

    return build


def _sonew(root: Path) -> Build:
    with _importing(root / "SONew" / "torch_code"):
        kind = importlib.import_module("tds").TDS
    return lambda model: kind(model.parameters(), betas=(0.9, 0.99))


def _ldadam(root: Path, rank: int) -> Build:
    with _importing(root / "LDAdam"):
        kind = importlib.import_module("ldadamw_torch").LDAdamW

    def build(model: nn.Module) -> torch.optim.Optimizer:
        matrices, rest = _split(model)
        groups = [{"params": rest, "enable_lowrank": False}, {"params": matrices, "enable_lowrank": True}]
        return kind(groups, rank=rank)  # type: ignore[no-any-return]

    return build


def _official_mkor(root: Path) -> Build:
    with _importing(root / "mkor"):
        module = importlib.import_module("mkor.mkor")

    def build(model: nn.Module) -> torch.optim.Optimizer:
        with contextlib.redirect_stdout(io.StringIO()):
            inner = torch.optim.AdamW(model.parameters())
            return module.MKOR(model, optimizer=inner, half_precision=False)  # type: ignore[no-any-return]

    return build


OFFICIAL: dict[str, Callable[[Path], Build]] = {
    "MARS-AdamW": lambda root: _mars(root, "mars-adamw"),
    "MARS-Lion": lambda root: _mars(root, "mars-lion"),
    "MARS-Shampoo": lambda root: _mars(root, "mars-shampoo"),
    "MARS-M": _mars_m,
    "SONew": _sonew,
    "LDAdam, rank 16": lambda root: _ldadam(root, 16),
    "LDAdam, rank 256": lambda root: _ldadam(root, 256),
    "MKOR": _official_mkor,
}
"""Published implementations by name, from a folder with the checkouts ``MARS``, ``SONew``, ``LDAdam`` and ``mkor``."""


def official(rival: str, root: Path) -> Contender:
    """A published implementation.

    Args:
        rival: Key of :data:`OFFICIAL`.
        root: Folder with the checkouts.

    Raises:
        ImportError: The checkout is not there.
    """
    return Contender(f"official {rival}", OFFICIAL[rival](root))
