"""Which parameters MARS takes, and what states they keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rankwise.kernels.dispatch import orthogonal_product_for
from rankwise.mars.options import MARSOptions
from rankwise.routing.roles import ParameterInfo, RoutingPolicy, Rule
from rankwise.states.element_states import StateTypes
from rankwise.states.optimizer_spec import OptimizerSpec

__all__ = ["MARSSpec"]


class MARSSpec(OptimizerSpec):
    """See the base class.

    Attributes:
        orthogonalises: Whether matrices step along their orthogonalised momentum.
    """

    options: MARSOptions
    health_means = ("clip_rate",)
    product_option = "ns_dtype"
    compared_options = ("exact",)  # another gradient is compared with
    optional_states = ("next_reference",)

    def __init__(self, kind: str, options: MARSOptions) -> None:
        super().__init__(kind, options)
        self.orthogonalises = options.variant in ("shampoo", "muon")
        self.structural_options += ("clip",)

    @property
    def family(self) -> str:
        """Class and variant: variants have different element states."""
        return f"MARS-{self.options.variant}"

    @property
    def policy(self) -> RoutingPolicy:
        """Embeddings take the element-wise variants' rule, as published; orthogonalisation leaves them out."""
        options = self.options
        return RoutingPolicy(embeddings=not self.orthogonalises, exclude=options.exclude, vectors=options.optimize_1d)

    def structure_of(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """See the base class: of the clip, whether there is one."""
        found = super().structure_of(group)
        return (*found[:-1], None if found[-1] is None else 1.0)

    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """The momentum, the second moment where AdamW is involved, and the comparison gradient(s).

        One average of the gradients where it tells all that there is to know, see :meth:`folds`.
        """
        if rule == "fallback":
            return self.kept_as(("exp_avg", "exp_avg_sq"), info)
        if self.folds(self.is_orthogonal(info), group):
            return {"grad_avg": self.kept_as(("exp_avg",), info)["exp_avg"]}
        second = () if self.options.variant == "lion" or self.is_orthogonal(info) else ("exp_avg_sq",)
        references = ("reference", "next_reference") if self.options.exact else ("reference",)
        own = self.options.reference_dtype
        if self.options.exact and own is None:
            # What is recorded between steps is never in codes.
            wish = self.kept_as(("reference",), info)["reference"]
            own = None if wish is None else "bfloat16"
        return self.kept_as(("exp_avg", *second, *references), info, reference=own, next_reference=own)

    def folds(self, orthogonal: bool, group: Mapping[str, Any]) -> bool:
        r"""Whether the momentum of a parameter that takes the rule is made of an average of its gradients alone.

        With :math:`n_t = \beta_1 n_{t-1} + (1 - \beta_1) g_t` the momentum of gradients that are corrected by the
        previous one is :math:`m_t = (1 - \gamma) n_t + \gamma g_t`. A clip multiplies every :math:`c_t` by another
        number, and AdamW squares it: both need the previous gradient itself.

        Args:
            orthogonal: Whether the momentum is orthogonalised.
            group: Group of the parameter.
        """
        linear = orthogonal or self.options.variant == "lion"
        return linear and group["clip"] is None and not self.options.exact

    def moments(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> Mapping[str, str]:
        """See the base class: the average of the gradients is AdamW's first moment."""
        kept = self.element_states(info, rule, group)
        return {"exp_avg": "grad_avg"} if "grad_avg" in kept else super().moments(info, rule, group)

    @property
    def owns_blocks(self) -> bool:  # type: ignore[override]
        """See the base class."""
        return self.orthogonalises

    def splits(self, info: ParameterInfo) -> bool:
        """Only what is orthogonalised; element-wise rules know no matrices."""
        return self.is_orthogonal(info)

    def product_type(self, device: torch.device, dtype: torch.dtype) -> torch.dtype | None:
        """See the base class; of Newton-Schulz."""
        return super().product_type(device, dtype) if self.orthogonalises else None

    def product_types(self, device: torch.device, dtype: torch.dtype) -> list[torch.dtype]:
        """See the base class; long matrices may have another type."""
        types = super().product_types(device, dtype)
        return types + [orthogonal_product_for(device, own) for own in types if self.options.ns_dtype == "auto"]

    def is_orthogonal(self, info: ParameterInfo) -> bool:
        """Whether a parameter that takes the rule is such a matrix."""
        return self.orthogonalises and len(info.shape) >= 2
