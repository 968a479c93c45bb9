"""What an optimizer's paper says of parameters and states, as far as its options decide it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.kernels.dispatch import product_dtype_for
from rankwise.kernels.low_precision_runs import ROOT, SIGNED
from rankwise.options.fields import Options
from rankwise.options.validation import called_or
from rankwise.routing.roles import ParameterInfo, Route, RoutingPolicy, Rule
from rankwise.routing.step_groups import StepGroups
from rankwise.states.declared_states import MatrixForm, State, StoredState
from rankwise.states.element_states import StateTypes

__all__ = ["MOMENTS", "OptimizerSpec"]

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Averages of the gradient and of its square, under AdamW's names; Muon has the first one."""

FEWEST_CODED = 4096
"""Elements that a parameter must have for its states to be kept in codes; smaller ones take little memory."""


class OptimizerSpec(ABC):
    """Routes and states of parameters by the options alone; nothing here changes while an optimizer lives.

    Args:
        kind: Name of the optimizer's class, for checkpoints.
        options: The optimizer's options.

    Attributes:
        name: What messages call the optimizer: the name that the user chose it by, or its class.
        group_options: Options that may differ between param groups.
        structural_options: Keys of a param group on which routes and shapes of states depend.
        constant_options: Options that no group may set otherwise than the constructor.
        step_groups: Makes the views of param groups that steps read.
        capturable: Whether steps can be captured in a CUDA graph; their counts then lie on the device of the weights.
    """

    required: ClassVar[tuple[str, ...]] = ("lr", "skip_nonfinite", "transition_steps")
    """Options without which nothing works."""
    idle_advice: ClassVar[Mapping[str, str]] = {}
    """Advice for an optimizer whose own rule nothing takes, by a part of the reason for it."""
    matrix_states: tuple[State, ...] = ()
    """The states that an owner keeps of a matrix."""
    compared_options: ClassVar[tuple[str, ...]] = ()
    """Options that change the meaning of a state of the same name and shape."""
    optional_states: ClassVar[tuple[str, ...]] = ()
    """Element states that a parameter may have been stepped without."""
    health_means: ClassVar[tuple[str, ...]] = ()
    """Metrics of the optimizer's health beyond the common ones, reported as means."""
    health_totals: ClassVar[tuple[str, ...]] = ()
    """Metrics of the optimizer's health beyond the common ones, reported as totals over ranks."""
    product_option: ClassVar[str] = ""
    """The option that names the type of the rule's matrix products, or leaves it to the machine."""
    owns_blocks: ClassVar[bool] = False
    """Whether the blocks of a fused weight are matrices with owners of their own."""
    codes: ClassVar[Mapping[str, torch.dtype]] = {"exp_avg_sq": ROOT}
    """Types of codes that "int8" means, for element states that have other ones than signed codes."""
    slow_states: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)
    """Prefixes of the names of element states that decay by less than half a digit a step."""
    always_coded: ClassVar[tuple[str, ...]] = ()
    """Element states that are kept in codes for small parameters, too."""
    sums_cover_fallback: ClassVar[bool] = False
    """Whether per-parameter sums are also taken over parameters on the fallback."""

    def __init__(self, kind: str, options: Options) -> None:
        self.kind, self.name = kind, called_or(kind)
        self.options = options
        self.group_options = options.varying
        self.structural_options = ("fallback", *options.structural())
        self.constant_options = frozenset(options.names()).difference(self.group_options, self.structural_options)
        self.step_groups = StepGroups(options)
        self.capturable = bool(getattr(options, "capturable", False))

    @property
    def identity(self) -> str:
        """Class and structural choices of the optimizer; states of a checkpoint fit if they agree."""
        values = {name: getattr(self.options, name) for name in self.compared_options}
        defaults = self.options.table()
        return "-".join([self.family, *(f"{n}={v}" for n, v in values.items() if v != defaults[n].default)])

    @property
    def family(self) -> str:
        """Class of the optimizer, and the choice that decides which states it has."""
        return self.kind

    @property
    @abstractmethod
    def policy(self) -> RoutingPolicy:
        """Tells which parameters take the matrix rule."""

    def adjust_route(self, info: ParameterInfo, group: Mapping[str, Any], chosen: Route) -> Route:
        """Change a parameter's route, after everything else was considered."""
        return chosen

    @property
    def learns_from_modules(self) -> bool:
        """Whether the optimizer is shown the model's modules after it is built, whatever the framework."""
        return False

    def splits(self, info: ParameterInfo) -> bool:
        """Whether the rule treats each logical matrix of a fused weight as a matrix."""
        return False

    @abstractmethod
    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """Names of a parameter's per-element states, and their type (None: that of the computation)."""

    def kept_as(self, states: Sequence[str], info: ParameterInfo, **own: str | None) -> StateTypes:
        """Types in which element states of a parameter are kept, by the option ``state_dtype``.

        Args:
            states: Names of the states.
            info: The parameter.
            own: Types that other options ask for, by name of the state.
        """
        numel = prod(info.shape)
        return {name: self.type_of(name, numel, own.get(name)) for name in states}

    def type_of(self, name: str, numel: int, own: str | None = None) -> torch.dtype | None:
        """The type in which a state of one value per element is kept; None: that of the computation.

        Args:
            name: Name of the state.
            numel: Elements of the parameter.
            own: Type that another option than ``state_dtype`` asks for.
        """
        asked = own or self.asked_type(name)
        if asked != "int8":
            return None if asked is None else getattr(torch, asked)
        if numel < FEWEST_CODED and name not in self.always_coded:
            return None
        return self.codes.get(name, SIGNED)

    def asked_type(self, state: str) -> str | None:
        """Type that the option ``state_dtype`` names for a state; None: the type of the computation."""
        wish = getattr(self.options, "state_dtype", None)
        word = wish.get(state.rstrip("_0123456789")) if isinstance(wish, Mapping) else wish
        return None if word == "float32" else word

    def rounds_stochastically(self, state: str) -> bool:
        """Whether an element state is rounded stochastically where it is narrow."""
        wish = getattr(self.options, "state_rounding", "nearest")
        return wish == "stochastic" or (wish == "auto" and state.startswith(self.slow_states))

    def moments(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> Mapping[str, str]:
        """Element states that mean the same in AdamW, by AdamW's names; a parameter hands over all of them, or none."""
        kept = self.element_states(info, rule, group)
        return {name: name for name in MOMENTS if name in kept}

    def squares(self, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor | None:
        """Running average of a matrix gradient's squared norm; None where the states do not tell it."""
        return None

    @property
    def matrix_state_names(self) -> list[str]:
        """Names of the states that an owner keeps of a matrix."""
        return [state.name for state in self.matrix_states]

    def form_of(self, task: MatrixTask, info: ParameterInfo) -> MatrixForm:
        """The matrix of a task, or of which the task is a slice, as the rule sees it."""
        return MatrixForm(*info.matrix_shape)

    def possible_forms(self, info: ParameterInfo) -> Sequence[MatrixForm]:
        """The forms that a matrix may have, where there is no task."""
        return [MatrixForm(*info.matrix_shape)]

    def type_of_matrix_state(self, state: State, numel: int) -> torch.dtype | None:
        """The type in which a state of a matrix of so many elements is kept; None: that of the computation."""
        return self.type_of(state.name, numel) if state.shape is None else state.dtype

    def stored_states(self, matrix: MatrixForm, group: Mapping[str, Any]) -> dict[str, StoredState]:
        """How the declared states of a matrix are kept, by name.

        Args:
            matrix: The matrix.
            group: Its param group.
        """
        stored = {}
        values = {**vars(self.options), **group}
        for state in self.matrix_states:
            rows_by_name = {state.name: matrix.rows}
            if state.by_block and matrix.blocks:
                rows_by_name = {f"{state.name}[{block}]": rows for block, rows in matrix.blocks.items()}
            axes = () if state.axes is None else state.axes(matrix.rows, matrix.columns)
            for name, rows in rows_by_name.items():
                shape = state.shape_of(matrix, rows, values)
                if shape is not None:
                    dtype = self.type_of_matrix_state(state, rows * matrix.columns)
                    on_host = state.counted and not self.capturable
                    stored[name] = StoredState(state, shape, dtype, axes, on_host)
        return stored

    def shapes_of_states(self, info: ParameterInfo, group: Mapping[str, Any]) -> dict[str, list[tuple[int, ...]]]:
        """Shapes in which the states of one matrix may be kept, by name."""
        shapes: dict[str, list[tuple[int, ...]]] = {}
        for form in self.possible_forms(info):
            for name, stored in self.stored_states(form, group).items():
                shapes.setdefault(name, []).append(stored.stored_shape)
        return shapes

    def converted(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A matrix's saved states as these options keep them, where other ones have kept more or less of the same."""
        return dict(state)

    def product_type(self, device: torch.device, dtype: torch.dtype) -> torch.dtype | None:
        """Type of the rule's matrix products on this machine; None for a rule without a choice."""
        if not self.product_option:
            return None
        wish = getattr(self.options, self.product_option)
        return product_dtype_for(device, dtype) if wish == "auto" else getattr(torch, wish)

    def product_types(self, device: torch.device, dtype: torch.dtype) -> list[torch.dtype]:
        """Types that the products may have, in the words of the line that a run begins with."""
        product = self.product_type(device, dtype)
        return [] if product is None else [product]

    def count_device(self, tensor: Tensor) -> torch.device:
        """Device of the step count of a weight."""
        # On the CPU, as torch.optim keeps it: reading it costs no device synchronisation.
        return tensor.device if self.capturable else torch.device("cpu")

    def structure_of(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """A group's values of the structural options."""
        return tuple(group.get(name) for name in self.structural_options)

    def structures_of(self, groups: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
        """All groups' values of the structural options."""
        return [self.structure_of(group) for group in groups]
