"""Chooses the rule of each parameter by its logical shape and role, never by the shape of a flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from types import MappingProxyType
from typing import Any, Literal
from weakref import WeakValueDictionary, ref

from torch import Tensor, nn

from rankwise.routing.fused_layers import fused_parts
from rankwise.routing.fused_shape import FusedShape
from rankwise.routing.name_roles import Role, is_head, is_router, role_by_name, unwrapped
from rankwise.routing.weight_view import Surroundings

__all__ = [
    "ParameterInfo",
    "Role",
    "Route",
    "RoutingPolicy",
    "Rule",
    "annotate",
    "annotated_modules",
    "assign_role",
    "attach_info",
    "describe",
    "info_of",
    "recall",
    "route",
]

Rule = Literal["matrix", "fallback"]
_ATTRIBUTE = "_rankwise_info"
_TWIN = "@group"
_annotated: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
"""The modules that have been annotated in this process, and their copies, by identity."""


@dataclass(frozen=True)
class ParameterInfo:
    """What is known of a parameter before any framework flattens it.

    Attributes:
        name: Qualified name in the model.
        shape: Logical shape on this tensor-parallel rank.
        role: Role of the parameter; an UNKNOWN one is judged by name and shape.
        transposed: Whether it is stored as (inputs, outputs), as in GPT-2's Conv1D and some experts, instead of
            (outputs, inputs).
        bias: Name of the bias added to this linear weight's output, if any.
        fused: Its logical matrices, if it holds several.
    """

    name: str
    shape: tuple[int, ...]
    role: Role = Role.UNKNOWN
    transposed: bool = False
    bias: str | None = None
    fused: FusedShape | None = None

    @property
    def own_name(self) -> str:
        """Name in the model, which patterns and roles refer to."""
        return self.name.partition(_TWIN)[0]

    def told_apart(self, group: int, position: int) -> ParameterInfo:
        """A copy with a unique name, for a parameter whose name another one of the optimizer has."""
        return replace(self, name=f"{self.name}{_TWIN}{group}.param{position}")

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Stored rows and columns of one matrix of the stack."""
        return self.shape[-2], self.shape[-1]

    @property
    def logical_matrix_shape(self) -> tuple[int, int]:
        """Outputs and inputs of one matrix of the stack."""
        rows, columns = self.matrix_shape
        return (columns, rows) if self.transposed else (rows, columns)


@dataclass(frozen=True)
class RoutingPolicy:
    """Which parameters an optimizer sends to its matrix rule.

    Attributes:
        embeddings: Whether embeddings and output heads take the matrix rule, as published for that optimizer.
        exclude: Name patterns (shell wildcards) that are sent to the fallback.
        max_dim: Matrices with a longer side go to the fallback; None sets no limit.
        vectors: Whether 0-D and 1-D parameters take the matrix rule too (MARS's ``optimize_1d``).
    """

    embeddings: bool
    exclude: Sequence[str] = ()
    max_dim: int | None = None
    vectors: bool = False


@dataclass(frozen=True)
class Route:
    """The rule a parameter takes, and why."""

    rule: Rule
    reason: str


def route(info: ParameterInfo, policy: RoutingPolicy, fallback: bool | None = None) -> Route:
    """Choose the rule for one parameter.

    Args:
        info: The parameter.
        policy: The optimizer's policy.
        fallback: A param group's ``"fallback"`` key: True forces the first-order rule, False the matrix rule.
    """
    if fallback is not None:
        return Route("fallback" if fallback else "matrix", "param group")
    for pattern in policy.exclude:
        if fnmatch(info.own_name, pattern):
            return Route("fallback", f"excluded by '{pattern}'")
    role = info.role if info.role is not Role.UNKNOWN else role_by_name(info.own_name, info.shape)
    dimensions = len(info.shape)
    # A matrix with a side of 1 is a vector, too.
    if role is Role.VECTOR or dimensions < 2 or (dimensions < 4 and 1 in info.matrix_shape):
        return Route("matrix" if policy.vectors else "fallback", "vector")
    if role is Role.CONV or dimensions > 3:
        return Route("fallback", "convolution" if role is Role.CONV else f"{dimensions}-D tensor")
    if role is Role.NORM:
        return Route("fallback", "norm")
    if role in (Role.EMBEDDING, Role.HEAD, Role.ROUTER) and not policy.embeddings:
        return Route("fallback", role.value)
    if policy.max_dim is not None and max(info.matrix_shape) > policy.max_dim:
        return Route("fallback", f"side above {policy.max_dim}")
    return Route("matrix", "stack of matrices" if dimensions == 3 else role.value)


def describe(
    model: nn.Module, shape_of: Callable[[nn.Parameter], Sequence[int]] = lambda parameter: parameter.shape
) -> Mapping[nn.Parameter, ParameterInfo]:
    """Find name, logical shape, role and logical matrices of every parameter of a model.

    Args:
        model: The model.
        shape_of: Returns a parameter's logical shape; frameworks that replace parameters by placeholders pass one.

    Returns:
        One entry per distinct parameter; a tied weight keeps its first name and its most special role.
    """
    infos: dict[nn.Parameter, ParameterInfo] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    head = _output_head(model)
    # A wrapped head is a wrapper, and the module in it has the weight.
    heads = {unwrapped(name) for name, module in model.named_modules() if module is head}
    surroundings = Surroundings(model)
    for module_name, module in model.named_modules():
        for local, parameter in module.named_parameters(recurse=False):
            if parameter not in names:
                continue
            outer = unwrapped(module_name)
            shape = tuple(int(size) for size in shape_of(parameter))
            role = _role_by_module(module, outer, outer in heads, shape)
            is_weight = local == "weight"
            bias, view = getattr(module, "bias", None), surroundings.view(outer, local, shape)
            info = ParameterInfo(
                name=names[parameter],
                shape=shape,
                role=role,
                transposed=view.is_transposed,
                bias=names.get(bias) if is_weight and isinstance(bias, nn.Parameter) else None,
                fused=fused_parts(view),
            )
            earlier = infos.get(parameter)
            if earlier is not None and role not in (Role.EMBEDDING, Role.HEAD):
                info = replace(info, role=earlier.role)
            infos[parameter] = info
    return infos


def annotate(
    model: nn.Module, shape_of: Callable[[nn.Parameter], Sequence[int]] = lambda parameter: parameter.shape
) -> None:
    """Attach the result of :func:`describe` to the parameters, for optimizers that are built later.

    It is also attached to the modules, by which :func:`recall` knows copies and replaced parameters.
    """
    infos = describe(model, shape_of)
    for parameter, info in infos.items():
        setattr(parameter, _ATTRIBUTE, info)
    for module in model.modules():
        own = {local: infos.get(parameter) for local, parameter in module._parameters.items() if parameter is not None}
        vars(module)[_ATTRIBUTE] = _Annotation({local: info for local, info in own.items() if info is not None}, module)


class _Annotation:
    """The infos that :func:`annotate` found for a module's own parameters; a copy of the module has its own."""

    def __init__(self, infos: Mapping[str, ParameterInfo], module: nn.Module) -> None:
        self.infos, self._module = infos, ref(module)
        _annotated[id(module)] = module

    def __deepcopy__(self, memo: dict[int, Any]) -> _Annotation | None:
        # deepcopy registers a module's copy before it copies the attributes.
        copied = memo.get(id(self._module()))
        return None if copied is None else _Annotation(self.infos, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        # Parameters are pickled with their own infos.
        return type(None), ()


def recall(parameters: Iterable[Tensor]) -> Mapping[int, ParameterInfo]:
    """Find the infos of parameters that took the place of annotated ones.

    ``copy.deepcopy``, ``to_empty``, ``load_state_dict(assign=True)`` and ``fully_shard`` put them there.

    Returns:
        Infos by identity. Looks through all living annotated modules if some parameters have no info of their own.
    """
    strange = {id(each): each for each in parameters if not isinstance(getattr(each, _ATTRIBUTE, None), ParameterInfo)}
    infos: dict[int, ParameterInfo] = {}
    for module in annotated_modules() if strange else ():
        for local, info in vars(module)[_ATTRIBUTE].infos.items():
            present = module._parameters.get(local)
            if id(present) in strange and tuple(strange[id(present)].shape) == info.shape:
                infos.setdefault(id(present), info)
    return infos


def annotated_modules() -> list[nn.Module]:
    """All living modules that :func:`annotate` has seen, and their copies."""
    modules = [reference() for reference in _annotated.valuerefs()]
    return [module for module in modules if module is not None]


def assign_role(parameters: Iterable[Tensor], role: Role) -> None:
    """Overrule the role that :func:`annotate` found for some parameters."""
    for parameter in parameters:
        setattr(parameter, _ATTRIBUTE, replace(info_of(parameter, None, ""), role=role))


def attach_info(parameter: Tensor, info: ParameterInfo) -> None:
    """Attach an info to a parameter, for optimizers that are built later."""
    setattr(parameter, _ATTRIBUTE, info)


def info_of(
    parameter: Tensor, name: str | None, default_name: str, recalled: Mapping[int, ParameterInfo] = MappingProxyType({})
) -> ParameterInfo:
    """Info of a parameter: its annotation, else its name, else its shape alone.

    Args:
        parameter: The parameter.
        name: Name that the user gave with it, if any.
        default_name: Name for a parameter that has none.
        recalled: Infos found by :func:`recall`.
    """
    info = getattr(parameter, _ATTRIBUTE, None) or recalled.get(id(parameter))
    if isinstance(info, ParameterInfo):
        return info
    return ParameterInfo(name=name or default_name, shape=tuple(parameter.shape))


def _output_head(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def _role_by_module(module: nn.Module, name: str, is_the_head: bool, shape: tuple[int, ...]) -> Role:
    kind = type(module).__name__
    if "Router" in kind or is_router(name.lower(), shape):
        return Role.ROUTER
    if is_the_head or is_head(name):
        return Role.HEAD
    if isinstance(module, nn.Embedding) or kind.endswith("Embedding"):
        return Role.EMBEDDING
    if isinstance(module, nn.Linear) or kind == "Conv1D":
        return Role.LINEAR
    if "Norm" in kind:
        return Role.NORM
    if isinstance(module, nn.modules.conv._ConvNd):
        return Role.CONV
    return Role.UNKNOWN
