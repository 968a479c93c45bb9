"""Megatron's modules say here what global names, roles, logical shapes and cuts their parameters have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor, nn
from torch.nn import Parameter

from megatron_patches.cuts import WHOLE, ParameterCut, declared_cuts, equal_sections, marked_cut, rows_cut_again
from megatron_patches.fused_weights import fused_parts
from megatron_patches.groups import ParallelGroups
from rankwise.layout.layout import LayoutError
from rankwise.layout.layout_source import Slice
from rankwise.layout.tensor_parallel_shards import TensorParallelShard
from rankwise.routing.roles import ParameterInfo, Role, attach_info

__all__ = ["ModelParameter", "bare_model", "describe_chunks", "is_expert"]

_LINEAR = re.compile(r"(Column|Row)ParallelLinear$|^TE\w*Linear$|^Linear$")
# Transformer Engine's layers hold parameters that are modules of their own in Megatron. They get those modules' names,
# so that checkpoints move from one to the other, as Megatron's do.
_INSIDE_OTHERS = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r"input_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"pre_mlp_layernorm.\1"),
    (re.compile(r"linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$"), r"\1_layernorm.\2"),
    (re.compile(r"experts\.(linear_fc[12])\.(weight|bias)(\d+)$"), r"experts.local_experts.\3.\1.\2"),
    # Since 0.19 these are a state-space layer's own; Megatron's checkpoints have kept the name.
    (re.compile(r"\.conv1d_(weight|bias)$"), r".conv1d.\1"),
)
_HEAD, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class ModelParameter:
    """One parameter of this rank's model chunks.

    Attributes:
        info: Global name, logical (unsharded) shape and role.
        local_shape: Shape of the tensor-parallel shard.
        dim: Dimension that tensor parallelism cuts; None where every tensor-parallel rank holds the whole.
        sections: Rows of the shard's pieces, one from each section of the logical parameter (gate and up projections
            that are stored as one weight have two); empty if that is one section.
        rank: This rank's position among the ``ways`` tensor-parallel shards.
        ways: Number of tensor-parallel ranks.
        expert: Whether it belongs to one rank's experts.
        shared: Whether Megatron keeps equal copies on several pipeline stages, as of tied embeddings.
        stage_copy: Number of this copy among these copies.
        run: This rank's elements [start, end) of the flattened tensor-parallel shard, where its rows are cut once more.
    """

    info: ParameterInfo
    local_shape: tuple[int, ...]
    dim: int | None
    sections: tuple[int, ...]
    rank: int
    ways: int
    expert: bool
    shared: bool = False
    stage_copy: int = 0
    run: tuple[int, int] | None = None

    def slices(self, start: int, end: int, copy: int) -> tuple[Slice, ...]:
        """Return the elements [start, end) of what this rank holds, flattened, in terms of the logical parameter.

        Args:
            start: First element, stored at offset 0 of the optimizer's tensor.
            end: Element behind the last one.
            copy: Number of the data-parallel copy.
        """
        if self.run is not None:
            start, end = start + self.run[0], min(end + self.run[0], self.run[1])
            if start >= end:  # rows of zeros
                return ()
        shard = TensorParallelShard.cut(self.local_shape, self.dim, self.rank, self.ways, self.sections)
        return tuple(shard.slices(self.info.name, start, end, 0, copy))


def bare_model(chunk: nn.Module) -> nn.Module:
    """Return the model without Megatron's data-parallel and half-precision wrappers."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def is_expert(parameter: Tensor) -> bool:
    """Whether Megatron reduces the parameter over the expert-data-parallel group."""
    return not getattr(parameter, "allreduce", True)


def describe_chunks(chunks: Sequence[nn.Module], groups: ParallelGroups) -> dict[Parameter, ModelParameter]:
    """Describe the parameters of this rank's model chunks and attach names and roles for the optimizer to find.

    Args:
        chunks: The chunks passed to ``get_megatron_optimizer``.
        groups: This rank's process groups.

    Raises:
        LayoutError: A parameter is cut in a way that this version does not know.
    """
    described_parameters: dict[Parameter, ModelParameter] = {}
    for chunk in chunks:
        model = bare_model(chunk)
        roles = dict(_roles(model))
        biases = _biases(model)
        modules = dict(model.named_modules())
        cuts = _known_cuts(model, groups)
        prefixes = _global_prefixes(model, groups)
        copies = set(_embedding_copies(model))
        for local_name, parameter in model.named_parameters():
            name = _global_name(local_name, prefixes)
            if parameter in copies:
                name, roles[parameter] = name.removesuffix(_HEAD) + _EMBEDDING, Role.EMBEDDING
            described = _describe(name, parameter, roles.get(parameter, Role.UNKNOWN), groups, cuts[parameter])
            bias = biases.get(parameter)
            if bias is not None:
                suffix = described.info.name.removeprefix(name)
                described = _with_bias(described, _global_name(bias, prefixes) + suffix)
            described = _with_fused(described, local_name, modules)
            described_parameters[parameter] = described
            attach_info(parameter, described.info)
    return described_parameters


def _embedding_copies(model: nn.Module) -> Iterator[Parameter]:
    """Yield the last stage's copies of the first stage's embeddings, which Megatron saves under the latter's name."""
    for module in model.modules():
        if getattr(module, "share_embeddings_and_output_weights", False) and not getattr(module, "pre_process", True):
            weight = getattr(getattr(module, "output_layer", None), "weight", None)
            if isinstance(weight, Parameter) and getattr(module, "mtp_process", False):
                raise LayoutError(
                    "--mtp-num-layers with pipeline parallelism and tied embeddings: the last stage has two copies of "
                    "the embedding, an output layer that nothing uses beside the one that Megatron keeps like the "
                    "first stage's, and Megatron cannot save such a model. Pass "
                    "--untie-embeddings-and-output-weights (share_embeddings_and_output_weights=False)."
                )
            if isinstance(weight, Parameter):
                yield weight


def _known_cuts(model: nn.Module, groups: ParallelGroups) -> dict[Parameter, ParameterCut | None]:
    """Return every parameter's cut, by declarations to checkpoints, else Transformer Engine's class, else marks."""
    marked = {parameter: marked_cut(parameter) for parameter in model.parameters()}
    by_class = dict(_transformer_engine_cuts(model))
    if all(groups.tensor(expert)[1] == 1 for expert in (False, True)):
        return marked | by_class
    cuts: dict[Parameter, ParameterCut | None] = {}
    declared = declared_cuts(model, groups)
    for parameter, mark in marked.items():
        believed = by_class.get(parameter, mark)
        said = declared.get(parameter, WHOLE)
        # Megatron's default declares parameters in a user's containers whole; a mark counts more than that. What is
        # declared of rows that are cut once more includes that cut.
        marked_alone = rows_cut_again(parameter) or (said in (WHOLE, None) and believed != WHOLE)
        cuts[parameter] = believed if marked_alone else said
    return cuts


def _describe(
    name: str, parameter: Parameter, role: Role, groups: ParallelGroups, cut: ParameterCut | None
) -> ModelParameter:
    expert = is_expert(parameter)
    rank, ways = groups.tensor(expert)
    block = groups.block(expert)
    if block is not None:
        name = f"{name}@tp{block}"
    shape, run = tuple(parameter.shape), None
    if (again := rows_cut_again(parameter)) is not None:
        first, last, rows = again
        width = prod(shape[1:])
        shape, run = (rows, *shape[1:]), (first * width, last * width)
    if ways == 1:
        cut = WHOLE
    if cut is None:
        raise LayoutError(
            f"'{name}' of shape {shape} is cut by tensor parallelism in a way that nothing tells: its module's "
            "sharded_state_dict has no place for it that is one of equal parts, and it bears no mark with a dimension. "
            "Set tensor_model_parallel=True and partition_dim on the parameter, or declare it by "
            "make_sharded_tensors_for_checkpoint with its tensor-parallel axis."
        )
    dim = cut.dim
    sections = cut.sections if dim == 0 else ()
    if dim is not None and not (dim == 0 or (dim == 1 and len(shape) == 2)):
        raise LayoutError(
            f"'{name}' of shape {shape} is cut along dimension {dim} by tensor parallelism; only rows of any tensor "
            "and columns of matrices can be followed. Exclude the layer from tensor parallelism."
        )
    if sections and sum(sections) != shape[0]:
        raise LayoutError(
            f"'{name}' of shape {shape} is said to consist of pieces of {sections} rows; correct its partition_sizes."
        )
    logical = tuple(size * ways if index == dim else size for index, size in enumerate(shape))
    shared = bool(getattr(parameter, "shared_embedding", False))
    return ModelParameter(ParameterInfo(name, logical, role), shape, dim, sections, rank, ways, expert, shared, run=run)


def _transformer_engine_cuts(model: nn.Module) -> Iterator[tuple[Parameter, ParameterCut]]:
    """Yield cuts of the parameters that Transformer Engine's layers mark wrongly.

    A layer without tensor parallelism (``parallel_mode`` None) marks its weights as cut by rows. Such layers are those
    whose weights every rank holds whole, and layers of experts, where Megatron itself cuts the weights, by rows or by
    columns, and exchanges the tokens. Their classes tell them apart.
    """
    for module in model.modules():
        if not hasattr(module, "parallel_mode"):
            continue
        if getattr(module, "single_grouped_weight", False):
            raise LayoutError(
                f"{type(module).__name__} keeps its experts' weights as one parameter (single_grouped_weight=True), "
                "which no layout of ours describes. Unset NVTE_GROUPED_LINEAR_SINGLE_PARAM, so that each has its own."
            )
        kinds = " ".join(kind.__name__ for kind in type(module).__mro__)
        mode = "column" if "ColumnParallel" in kinds else "row" if "RowParallel" in kinds else module.parallel_mode
        for name, parameter in module.named_parameters(recurse=False):
            kind = name.rstrip("0123456789")
            if kind == "weight":
                dim = {"column": 0, "row": 1}.get(str(mode))
                yield parameter, equal_sections(parameter, dim, _strips(module, kinds, parameter))
            elif kind == "bias":
                dim = 0 if mode == "column" else None
                yield parameter, equal_sections(parameter, dim, _strips(module, kinds, parameter))


def _strips(module: nn.Module, kinds: str, parameter: Parameter) -> int:
    config = getattr(module, "config", None)
    if "ColumnParallelGroupedLinear" in kinds:  # gate and up projections of experts have no mark
        return 2 if getattr(config, "gated_linear_unit", False) else 1
    return int(getattr(parameter, "partition_stride", 1))


def _with_bias(described: ModelParameter, bias: str) -> ModelParameter:
    info = described.info
    return replace(described, info=replace(info, bias=bias))


def _with_fused(described: ModelParameter, name: str, modules: Mapping[str, nn.Module]) -> ModelParameter:
    """Add which matrices a layer's weight holds."""
    path, _, local = name.rpartition(".")
    outer, _, layer = path.rpartition(".")
    if local.rstrip("0123456789") != "weight" or outer not in modules:
        return described
    info, ways = described.info, described.ways if described.dim == 0 else 1
    fused = fused_parts(layer, modules[outer], info.shape, ways, len(described.sections) or 1)
    return described if fused is None else replace(described, info=replace(info, fused=fused))


def _roles(model: nn.Module) -> Iterator[tuple[Parameter, Role]]:
    """Yield roles by module; a later, more special role overrides an earlier one."""
    special: list[tuple[Parameter, Role]] = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        for local, parameter in module.named_parameters(recurse=False):
            if name.rsplit(".", 1)[-1] == "output_layer":
                special.append((parameter, Role.HEAD))
            elif "Embedding" in kind:
                special.append((parameter, Role.EMBEDDING))
            elif local.startswith("layer_norm_"):
                yield parameter, Role.NORM
            elif _LINEAR.search(kind):  # comes before norms, as TELayerNormColumnParallelLinear is both
                yield parameter, Role.LINEAR
            elif "Norm" in kind:
                yield parameter, Role.NORM
            elif "Conv" in kind or local.startswith("conv1d_"):
                yield parameter, Role.CONV
    yield from special


def _biases(model: nn.Module) -> dict[Parameter, str]:
    """Return the local names of the biases that belong to linear weights."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    names_by_weight = {}
    for module in model.modules():
        if not _LINEAR.search(type(module).__name__):
            continue
        for name, weight in module.named_parameters(recurse=False):
            kind = name.rstrip("0123456789")
            bias = getattr(module, f"bias{name.removeprefix(kind)}", None)
            if kind == "weight" and isinstance(bias, Parameter):
                names_by_weight[weight] = names[bias]
    return names_by_weight


def _global_prefixes(model: nn.Module, groups: ParallelGroups) -> Mapping[str, str]:
    """Return global names for prefixes of module names that count layers and experts from this rank's first one."""
    prefixes: dict[str, str] = {}
    for name, module in model.named_modules():
        prefixes |= {f"{name}.{local}": f"{name}.{layer}" for local, layer in _layer_numbers(module).items()}
        experts = getattr(module, "num_local_experts", None)
        if experts and type(module).__name__ in ("SequentialMLP", "TEGroupedMLP"):
            first = groups.expert_rank * int(experts)
            for local in range(int(experts)):
                prefixes[f"{name}.local_experts.{local}"] = f"{name}.local_experts.{first + local}"
                for layer in ("linear_fc1", "linear_fc2"):
                    for kind in ("weight", "bias"):
                        prefixes[f"{name}.{layer}.{kind}{local}"] = f"{name}.{layer}.{kind}{first + local}"
    return prefixes


def _layer_numbers(module: nn.Module) -> dict[str, int]:
    """Return the positions of a list's layers in the whole model, by their positions on this stage."""
    children = {name: child for name, child in module.named_children() if name.isdigit()}
    layer_numbers = {name: getattr(child, "layer_number", None) for name, child in children.items()}
    numbers = {name: number - 1 for name, number in layer_numbers.items() if isinstance(number, int)}
    if len(set(numbers.values())) < len(layer_numbers):
        return {}  # there are no layers, or parts of one layer, which all have its number
    return numbers


def _global_name(name: str, prefixes: Mapping[str, str]) -> str:
    """Apply the innermost prefix, then the prefixes of what contains it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        if prefix in prefixes:
            parts[end - 1] = prefixes[prefix].rsplit(".", 1)[-1]
    global_name = ".".join(parts)
    for inside, name in _INSIDE_OTHERS:
        global_name = inside.sub(name, global_name)
    return global_name
