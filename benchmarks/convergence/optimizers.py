"""Optimizers by name: ours, torch's, and the rivals written for these experiments alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import rankwise
from benchmarks.convergence import rivals

__all__ = ["OPTIMIZERS", "Joined", "make_optimizer"]

Build = Callable[..., Any]


class Joined:
    """Two optimizers as one: of the matrices of linear layers, and AdamW of the rest.

    Args:
        parts: The optimizers.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """States of all parts."""
        return {param: state for part in self._parts for param, state in part.state.items()}

    def zero_grad(self) -> None:
        """See torch."""
        for part in self._parts:
            part.zero_grad()

    def step(self) -> None:
        """See torch."""
        for part in self._parts:
            part.step()

    @property
    def saved_parts(self) -> tuple[torch.optim.Optimizer, ...]:
        """All that has states."""
        return self._parts

    def state_dict(self) -> dict[str, Any]:
        """States of all parts, one after the other."""
        return {"parts": [part.state_dict() for part in self.saved_parts]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See torch."""
        for part, state in zip(self.saved_parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self._parts for group in part.param_groups]


def _matrices(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Weights of linear layers, without a head that is an embedding too; and the other parameters."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linears = [module for module in model.modules() if type(module).__name__ in ("Linear", "Conv1D")]
    chosen = {id(module.weight): module.weight for module in linears if id(module.weight) not in embeddings}
    return list(chosen.values()), [param for param in model.parameters() if id(param) not in chosen]


def _ours(kind: Callable[..., Any], model: nn.Module, **options: Any) -> Any:
    return kind(list(model.named_parameters()), **options)


def _mkor(model: nn.Module, **options: Any) -> Any:
    # Factors in float32: what bfloat16 does to them is a claim of its own.
    optimizer = _ours(rankwise.MKOR, model, **{"factor_dtype": "float32", **options})
    optimizer.capture(model)
    return optimizer


def _torch(kind: Callable[..., Any], model: nn.Module, **options: Any) -> Any:
    return kind(model.parameters(), **options)


def _for_matrices(kind: Callable[..., Any], model: nn.Module, lr: float, **options: Any) -> Any:
    matrices, others = _matrices(model)
    shared = {key: options[key] for key in ("betas", "eps", "weight_decay") if key in options}
    return Joined(kind(matrices, lr=lr, **options), torch.optim.AdamW(others, lr, **{"weight_decay": 0.0, **shared}))


def _muon_parts(
    model: nn.Module, lr: float, weight_decay: float = 0.0, **options: Any
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """torch's, with the scale of Moonlight's, so that one learning rate serves AdamW's part too."""
    matrices, others = _matrices(model)
    muon = torch.optim.Muon(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw", **options)
    return muon, torch.optim.AdamW(others, lr, (0.9, 0.95), weight_decay=weight_decay)


def _muon(model: nn.Module, lr: float, **options: Any) -> Any:
    return Joined(*_muon_parts(model, lr, **options))


class MKORAndMuon(Joined):
    """Muon of the gradients that MKOR has preconditioned; AdamW, of its own gradients, of what is no matrix.

    Args:
        model: To be trained.
        lr: Of Muon, and of AdamW.
        weight_decay: Weight decay of both.
        options: MKOR's ``mkor_…``, without that prefix; the others are Muon's.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float = 0.0, **options: Any) -> None:
        own = {key.removeprefix("mkor_"): value for key, value in options.items() if key.startswith("mkor_")}
        muon = {key: value for key, value in options.items() if not key.startswith("mkor_")}
        super().__init__(*_muon_parts(model, lr, weight_decay, **muon))
        self._parameters = list(model.parameters())
        self._matrices = _matrices(model)[0]
        # Its step of rate 1 from weights of zero is the preconditioned gradient, with the other sign.
        self.mkor = _mkor(model, lr=1.0, backend="sgd", momentum=0.0, weight_decay=0.0, **own)

    @property
    def state(self) -> dict[Any, Any]:
        """States of all parts, and MKOR's factors."""
        return {**super().state, **self.mkor.matrix_states.everything()}

    @property
    def needs_capture(self) -> bool:
        """Whether hooks have to run."""
        return bool(self.mkor.needs_capture)

    @property
    def saved_parts(self) -> tuple[torch.optim.Optimizer, ...]:
        """See the base class."""
        return (*self._parts, self.mkor)

    @torch.no_grad()
    def step(self) -> None:
        """See torch."""
        weights = [parameter.clone() for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.zero_()
        self.mkor.step()
        directions = [-matrix for matrix in self._matrices]
        for parameter, weight in zip(self._parameters, weights, strict=True):
            parameter.copy_(weight)
        for matrix, direction in zip(self._matrices, directions, strict=True):
            matrix.grad.copy_(direction)  # type: ignore[union-attr] # where a graph may have it
        super().step()


class GradientFactorsAndAdamW(Joined):
    """AdamW of gradients, of which those of matrices are preconditioned by factors of themselves.

    Args:
        model: To be trained.
        lr: Of AdamW.
        betas: Of AdamW.
        weight_decay: Of AdamW.
        options: Of the factors, see :class:`benchmarks.convergence.rivals.GradientFactors`.
    """

    resumes = False  # its factors are not saved

    def __init__(
        self, model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float, **options: Any
    ) -> None:
        super().__init__(torch.optim.AdamW(model.parameters(), lr, betas, weight_decay=weight_decay))
        self.factors = rivals.GradientFactors(_matrices(model)[0], **options)

    @property
    def state(self) -> dict[Any, Any]:
        """AdamW's, and the factors."""
        factors = {number: dict(enumerate(pair)) for number, pair in enumerate(self.factors.inverses)}
        return {**super().state, **factors}

    def step(self) -> None:
        """See torch."""
        self.factors.precondition()
        super().step()


OPTIMIZERS: dict[str, Build] = {
    "adam": partial(_torch, torch.optim.Adam),
    "adamw": partial(_torch, torch.optim.AdamW),
    "rmsprop": partial(_torch, torch.optim.RMSprop),
    "sgd": partial(_torch, torch.optim.SGD),
    "lamb": partial(_torch, rivals.LAMB),
    "lion": partial(_torch, rivals.Lion),
    "muon": _muon,
    "kfac": rivals.KFAC,
    "eva": rivals.Eva,
    "galore": partial(_for_matrices, rivals.GaLore),
    "apollo": partial(_for_matrices, rivals.APOLLO),
    "soap": partial(_for_matrices, rivals.SOAP),
    "mars": partial(_ours, rankwise.MARS),
    "sonew": partial(_ours, rankwise.SONew),
    "ldadam": partial(_ours, rankwise.LDAdam),
    "mkor": _mkor,
    "mkor and muon": MKORAndMuon,
    "gradient factors": GradientFactorsAndAdamW,
}
"""Each is called with a model, ``lr`` and further keywords."""


def make_optimizer(name: str, model: nn.Module, lr: float, options: Mapping[str, Any]) -> Any:
    """An optimizer of a model's parameters.

    Args:
        name: Key of :data:`OPTIMIZERS`.
        model: To be trained.
        lr: Peak learning rate.
        options: Its other keywords.
    """
    return OPTIMIZERS[name](model, lr=lr, **options)
