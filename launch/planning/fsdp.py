"""FSDP2's ranks will hold what the placements of ``fully_shard`` and of tensor parallelism give them.

Tensor parallelism is that of torchtitan's Llama: queries, keys, values, gate, up and head are cut column-wise, the
products that end a branch row-wise, the embedding by token ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rankwise.fsdp.placements import Runs, copy_ranks, held_runs, slices_of
from rankwise.launch.planning.cluster import COPIES, ROWS, TENSOR, Mesh
from rankwise.layout.layout_source import RANKS_OF_A_NODE, LayoutSource, TensorContents, TensorParallel

__all__ = ["MeshSource", "contents_on_mesh", "placements_of", "tensor_parallel_dims"]

_COLUMN_WISE = {
    *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),  # Hugging Face
    *("wq", "wk", "wv", "w1", "w3"),  # torchtitan
}
_ROW_WISE = {"o_proj", "down_proj", "wo", "w2"}
_HEADS, _EMBEDDINGS = {"lm_head", "output"}, {"embed_tokens", "tok_embeddings"}


def tensor_parallel_dims(model: nn.Module) -> dict[str, int]:
    """Return the dimensions along which tensor parallelism cuts parameters, by name; others are whole on all its ranks.

    Args:
        model: Model whose layers have the names of Llama's, in Hugging Face or torchtitan.

    Raises:
        ValueError: No layer of the model has such a name.
    """
    dims, inner = {}, 0
    for path, module in model.named_modules(remove_duplicate=False):
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and name in _EMBEDDINGS:
            dims[f"{path}.weight"] = 0
        elif isinstance(module, nn.Linear) and name in _COLUMN_WISE | _HEADS:
            inner += name not in _HEADS
            dims.update({f"{path}.weight": 0, f"{path}.bias": 0})
        elif isinstance(module, nn.Linear) and name in _ROW_WISE:
            inner += 1
            dims[f"{path}.weight"] = 1
    if not inner:
        raise ValueError(
            "mesh has tp, and no layer of this model is known to be cut by it: linear layers must have Llama's names, "
            f"{', '.join(sorted(_COLUMN_WISE | _ROW_WISE))}; leave tp out"
        )
    return dims


def placements_of(mesh: Mesh, cut: int | None) -> tuple[Placement, ...]:
    """Return a parameter's placement on each dimension of the mesh.

    Args:
        mesh: Mesh of all ranks.
        cut: Dimension of the parameter along which tensor parallelism cuts it; None if it does not.
    """
    rows = _StridedShard(0, split_factor=mesh.tp) if cut == 0 and TENSOR in mesh.meanings else Shard(0)
    tensor = Replicate() if cut is None else Shard(cut)
    placements: Mapping[str, Placement] = {COPIES: Replicate(), ROWS: rows, TENSOR: tensor}
    return tuple(placements[meaning] for meaning in mesh.meanings)


def _checked(parameters: Mapping[str, torch.Tensor], cuts: Mapping[str, int], mesh: Mesh) -> None:
    scalars = [name for name, parameter in parameters.items() if not parameter.dim()]
    if scalars:
        raise ValueError(f"the parameter {scalars[0]} is a scalar, which fully_shard refuses: it must have a dimension")
    for name, dim in cuts.items():
        if name in parameters and parameters[name].shape[dim] % mesh.tp:
            raise ValueError(
                f"mesh is {mesh.words!r}: tp must divide dimension {dim} of {name}, which is "
                f"{parameters[name].shape[dim]}"
            )


def contents_on_mesh(
    parameters: Mapping[str, torch.Tensor], groups: Mapping[str, int], cuts: Mapping[str, int], mesh: Mesh
) -> list[list[TensorContents]]:
    """Return what every rank has of every parameter.

    Args:
        parameters: Whole parameters by name, in the optimizer's order.
        groups: Param group of each parameter, by name.
        cuts: Dimensions from :func:`tensor_parallel_dims`; {} without tensor parallelism.
        mesh: Mesh of all ranks.

    Raises:
        ValueError: Tensor parallelism cannot cut a parameter equally.
    """
    _checked(parameters, cuts, mesh)
    ranks = torch.arange(mesh.ranks).view(mesh.sizes)

    @cache
    def held(shape: tuple[int, ...], cut: int | None, place: tuple[int, ...]) -> tuple[list[Runs], int]:
        placements = placements_of(mesh, cut)
        return held_runs(shape, mesh.sizes, place, placements), copy_ranks(ranks, place, placements)[0]

    contents_of_ranks = []
    for place in mesh.coordinates():
        contents = []
        for name, parameter in parameters.items():
            shape = tuple(parameter.shape)
            slices = slices_of(name, shape, *held(shape, cuts.get(name), place))
            contents.append(TensorContents(groups[name], slices))
        contents_of_ranks.append(contents)
    return contents_of_ranks


class MeshSource(LayoutSource):
    """The source of an imagined rank, which says which ranks may compute a matrix together.

    Args:
        parameters: Whole parameters by name.
        cuts: Dimensions from :func:`tensor_parallel_dims`.
        mesh: Mesh of all ranks.
    """

    missing_alike = True

    def __init__(self, parameters: Mapping[str, torch.Tensor], cuts: Mapping[str, int], mesh: Mesh) -> None:
        self.group = None
        sets: Counter[tuple[tuple[int, ...], ...]] = Counter()
        for name, parameter in parameters.items():
            together = _sets(mesh, cuts.get(name))
            if parameter.dim() > 1 and len(together[0]) > 1:
                sets[together] += prod(parameter.shape)
        if sets:
            chosen = max(sets, key=lambda found: (sets[found], found))
            self.tensor_parallel = TensorParallel.far(chosen, None, RANKS_OF_A_NODE)

    def contents(self, tensor: torch.Tensor) -> TensorContents:
        """No rank has tensors here."""
        raise NotImplementedError("an imagined rank has no tensors")


def _sets(mesh: Mesh, cut: int | None) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each copy of a parameter."""
    return tuple(sorted(set(_copies(mesh, placements_of(mesh, cut)))))


def _copies(mesh: Mesh, placements: Sequence[Placement]) -> Iterator[tuple[int, ...]]:
    ranks = torch.arange(mesh.ranks).view(mesh.sizes)
    first = [
        range(size) if placement.is_replicate() else range(1)
        for size, placement in zip(mesh.sizes, placements, strict=True)
    ]
    for place in mesh.coordinates():
        if all(number in numbers for number, numbers in zip(place, first, strict=True)):
            yield tuple(copy_ranks(ranks, place, placements))
