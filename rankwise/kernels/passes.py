r"""A pass describes one element-wise update of many shards as data, in a form that every kernel takes.

A pass reads and writes main memory once where a kernel can, whatever the number of operations. Each element is updated
so, with the names of the fields and of the scalars:

.. math::
    c &= f\,(g + k\,(g - h)) \quad\text{with a reference } h\text{, else } f g; \qquad
        h \leftarrow g \text{ if \textit{advance}} \\
    \text{"step"} &: \quad x \leftarrow (1 - \eta\lambda)\,x - \eta\,c \\
    \text{"momentum"} &: \quad m \leftarrow \beta_1 m + (1 - \beta_1)\,c \\
    \text{"nesterov"} &: \quad \text{the momentum; } x \leftarrow d, \quad d = m + \nu\,(c - m) \\
    \text{"lion"} &: \quad \text{the momentum; a step along the sign of } d \\
    \text{"adamw"} &: \quad \text{the momentum; } v \leftarrow \beta_2 v + (1 - \beta_2)\,c^2 \text{; a step along }
        \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}

with a factor ``f`` for every shard, or what clips its norm. Where decay is cautious, an element :math:`x` whose sign is
opposed to that of its direction does not decay (arXiv 2510.12402, Algorithm 1). A paper's element-wise rule is one of
these with the paper's own scalars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, stack

from rankwise.kernels.low_precision_runs import LowPrecisionRuns
from rankwise.updates.adamw import Scalar, Step, bias_corrections
from rankwise.updates.clipping import clip_coefficient

__all__ = ["FIELDS", "STATES", "Field", "Pass", "Rule", "Scalars", "Tensors", "only_some"]

Tensors = list[Tensor]
Field = Tensors | LowPrecisionRuns
Rule = Literal["step", "momentum", "nesterov", "lion", "adamw"]

STATES: dict[Rule, tuple[str, ...]] = {
    "step": (),
    "momentum": ("exp_avg",),
    "nesterov": ("exp_avg",),
    "lion": ("exp_avg",),
    "adamw": ("exp_avg", "exp_avg_sq"),
}
"""The states that each rule keeps of every element."""

FIELDS: dict[Rule, tuple[str, ...]] = {
    "step": ("grad", "param"),
    "momentum": ("grad", "exp_avg"),
    "nesterov": ("grad", "exp_avg", "param"),
    "lion": ("grad", "exp_avg", "param"),
    "adamw": ("grad", "exp_avg", "param", "exp_avg_sq"),
}
"""The lists of tensors of each rule, in the order of the kernels; "reference" comes last where there is one."""


@dataclass(slots=True)
class Scalars:
    """The numbers of a pass, of which a rule reads those that it needs.

    Attributes:
        lr: Learning rate, a float or a 0-d tensor.
        betas: Decay rates of the two moments.
        eps: Number added to the bias-corrected root.
        weight_decay: Decoupled decay rate.
        cautious: Whether elements that step away from zero do not decay.
        step: Number of this step, from 1: one for all shards, or (shards,) with a number for each.
        k: Factor of the change since the reference.
        advance: Whether the gradients become the references.
        nesterov: Share of the gradient in what "nesterov" writes, and in what gives "lion" its signs; 0 leaves the
            momentum alone.
        clip: Norm to which gradients are scaled down; the factors are squared norms then. None: they are factors.
    """

    lr: Scalar = 0.0
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    weight_decay: float = 0.0
    cautious: bool = False
    step: Step = 1
    k: float = 0.0
    advance: bool = False
    nesterov: float = 0.0
    clip: float | None = None


@dataclass(slots=True)
class Pass:
    """What every kernel's ``run`` takes.

    Args:
        rule: Formula by which an element is updated.
        fields: The lists of :data:`FIELDS`, and "reference" where the gradients are compared with one. Each list has
            one tensor per shard, and the tensors of a position have one length and type; all lists may be empty. States
            and references may be narrow, and their runs then begin with a block; they are opened, and encoded again if
            the pass changes them. "grad" is only read, but "step" may overwrite its directions; the other fields are
            updated in place. "nesterov" overwrites "param", which may lie where the gradients do.
        scalars: Numbers of the rule.
        factors: (shards,) factors of the (corrected) gradients, or with a clip the squares of their norms; None for 1.
        measured: Whether the form may return the squared norms of the momenta, or of what "nesterov" writes.

    Raises:
        ValueError: A list is missing or superfluous, ``step`` is a number below 1, or there is not one factor, or
            number, per shard.
    """

    rule: Rule
    fields: Mapping[str, Field]
    scalars: Scalars
    factors: Tensor | None = None
    measured: bool = False

    def __post_init__(self) -> None:
        names = (*FIELDS[self.rule], *(("reference",) if "reference" in self.fields else ()))
        if set(names) != set(self.fields):
            raise ValueError(f"rule {self.rule!r} takes the lists {names}, got {tuple(self.fields)}")
        self.fields = {name: self.fields[name] for name in names}
        count, step = len(self.grads), self.scalars.step
        if self.factors is not None and self.factors.shape != (count,):
            raise ValueError(
                f"there are factors of shape {tuple(self.factors.shape)} for {count} tensors; pass one for each"
            )
        if isinstance(step, Tensor) and step.shape != (count,):
            raise ValueError(f"step is {tuple(step.shape)} for {count} tensors; pass one number, or one for each")
        if self.rule == "adamw" and not isinstance(step, Tensor):
            self.corrections()

    def only(self, places: Sequence[int]) -> Pass:
        """Return the pass on some of the shards, which are given by their places in the lists."""
        fields = {name: only_some(field, places) for name, field in self.fields.items()}
        scalars, factors = self.scalars, self.factors
        if isinstance(scalars.step, Tensor):
            scalars = replace(scalars, step=stack([scalars.step[place] for place in places]))
        if factors is not None:
            factors = stack([factors[place] for place in places])
        return Pass(self.rule, fields, scalars, factors)

    @property
    def is_cautious(self) -> bool:
        """Whether the decay of an element depends on its step."""
        return self.scalars.cautious and self.scalars.weight_decay != 0.0 and "param" in self.fields

    @property
    def is_narrow(self) -> bool:
        """Whether a state is kept in codes."""
        return any(isinstance(field, LowPrecisionRuns) for field in self.fields.values())

    @property
    def grads(self) -> Tensors:
        """The gradients, or a step's directions."""
        return self.wide("grad")

    @property
    def references(self) -> Tensors | None:
        """The gradients to compare with; None where there are none."""
        return self.wide("reference") if "reference" in self.fields else None

    @property
    def coefficients(self) -> Tensor | None:
        """(shards,) factors, of the clip where there is one; None for 1."""
        if self.factors is None or self.scalars.clip is None:
            return self.factors
        return clip_coefficient(self.factors, self.scalars.clip).to(self.grads[0].dtype)

    def wide(self, name: str) -> Tensors:
        """Return a field that is not narrow."""
        field = self.fields[name]
        assert not isinstance(field, LowPrecisionRuns)
        return field

    def corrections(self) -> tuple[Scalar, Scalar]:
        """Return ``1 / (1 - beta1^t)`` and the root of ``1 - beta2^t``, as numbers or with one for each shard."""
        first, second = bias_corrections(self.scalars.betas, self.scalars.step)
        return 1.0 / first, second.sqrt() if isinstance(second, Tensor) else math.sqrt(second)


def only_some(field: Field, places: Sequence[int]) -> Field:
    """Return some of a field's shards, by their places."""
    return field.only(places) if isinstance(field, LowPrecisionRuns) else [field[place] for place in places]
