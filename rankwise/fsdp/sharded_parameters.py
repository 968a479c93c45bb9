"""The layout of parameters that are ``DTensor``, as ``fully_shard`` and ``parallelize_module`` make them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankwise.comm.local_groups import host_group, local_group
from rankwise.fsdp.living_modules import living_modules
from rankwise.fsdp.placements import PlacementError, copy_ranks, held_runs, slices_of
from rankwise.layout.agreement import gather_together
from rankwise.layout.dtensors import is_sharded, local_view
from rankwise.layout.layout import LayoutError
from rankwise.layout.layout_source import Slice, TensorContents, TensorParallel, WholeParameters, WorkPlace
from rankwise.options.validation import OptionError
from rankwise.routing.patterns import are_checked_later

__all__ = [
    "ShardedParameters",
    "averaged_over",
]


class _Sets(NamedTuple):
    """Sets of ranks that have a copy of a parameter together.

    Attributes:
        sets: Sets of every copy, ranks of the world in ascending order.
        mine: The set of this rank.
        group: Group of its ranks, if the mesh has one.
    """

    sets: tuple[tuple[int, ...], ...]
    mine: tuple[int, ...]
    group: dist.ProcessGroup | None


class ShardedParameters(WholeParameters):
    """Every tensor of the param groups is a parameter, of which this rank has the part that its placements name.

    Parameters may lie on several meshes; every rank has those whole that are no ``DTensor``. Where ranks have the same
    elements (``Replicate``, or a smaller mesh than that of other parameters) they hold copies. All ranks have all
    parameters in their param groups, even if only an empty part, and gradients that are missing are missing on all
    ranks, as ``fully_shard`` makes sure.
    """

    missing_alike = True

    def __init__(self) -> None:
        super().__init__()
        self._meshes: list[Any] = []
        self._ranks: set[int] = set()
        self._sets: Counter[_Sets] = Counter()
        self._connected = False
        self._devices: set[str] = set()
        self._modules: list[Any] = []
        self._managed: dict[int, Any] = {}
        self._mesh: Any = None
        self._host: dist.ProcessGroup | None = None
        self._far: WorkPlace | None = None

    @classmethod
    def of(cls, whole: WholeParameters) -> ShardedParameters:
        """Make the layout from another one, with the parameters that it knows."""
        sharded = cls()
        sharded._names.update(whole._names)
        for key, contents in whole._contents.items():
            slices = tuple(replace(part, copy=_rank()) for part in contents.slices)
            sharded._contents[key] = TensorContents(contents.group, slices)
        return sharded

    def replicated_over(self, group: dist.ProcessGroup) -> WholeParameters:
        """Refuse to be wrapped, because the wrapper would average gradients of parts.

        Raises:
            OptionError: Always.
        """
        raise OptionError(
            "a DistributedDataParallel around a model with DTensor parameters is invalid: it must be fully_shard with "
            "a two-dimensional mesh (replicate, shard), which averages gradients over both"
        )

    # --- parameters ---------------------------------------------------------------------------------------------

    def register(self, tensor: Tensor, name: str, group: int) -> None:
        """Register a parameter of the constructor by its name.

        Raises:
            OptionError: Its placements are not known, or this rank has no part in its mesh.
        """
        self._names[id(tensor)] = name
        if not is_sharded(tensor):
            whole = (Slice(name, 0, tensor.numel(), 0, None, _rank()),) if tensor.numel() else ()
            self._contents[id(tensor)] = TensorContents(group, whole)
            return
        try:
            self._contents[id(tensor)] = TensorContents(group, self._slices(tensor, name))
        except (LayoutError, OptionError):
            # A framework that cuts otherwise than by placements says later what the tensors hold.
            if not are_checked_later():
                raise

    def _slices(self, tensor: Any, name: str) -> tuple[Slice, ...]:
        mesh, placements = tensor.device_mesh, tensor.placements
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise OptionError(
                f"the parameter '{name}' is invalid, because it is a DTensor on a mesh without rank {_rank()}: an "
                "optimizer must be given the parameters of its own pipeline stage alone"
            )
        if tensor.is_complex():
            raise OptionError(f"the parameter '{name}' is invalid: a DTensor must be real, but it is complex")
        ranks = mesh.mesh
        try:
            held = held_runs(tensor.shape, tuple(ranks.shape), coordinate, placements)
            mine = copy_ranks(ranks, coordinate, placements)
            slices = slices_of(name, tensor.shape, held, mine[0])
        except PlacementError as error:
            raise OptionError(
                f"the parameter '{name}' is invalid, with the placements {tuple(placements)}: {error}"
            ) from None
        has, expected = local_view(tensor).numel(), sum(part.numel for part in slices)
        if has != expected:
            raise LayoutError(
                f"this rank has {has} elements of '{name}', but by its placements {tuple(placements)} on a mesh of "
                f"{tuple(ranks.shape)} it must have {expected}; report this version of torch, {torch.__version__}"
            )
        self._join(tensor, mesh, ranks, placements, mine)
        return slices

    def _join(self, tensor: Any, mesh: Any, ranks: Tensor, placements: Sequence[Any], mine: list[int]) -> None:
        self._ranks.update(int(rank) for rank in ranks.flatten())
        self._devices.add(local_view(tensor).device.type if not tensor.is_meta else mesh.device_type)
        if all(mesh != known for known in self._meshes):
            self._meshes.append(mesh)
        cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
        if len(tensor.shape) > 1 and len(mine) > 1:
            coordinates = _coordinates(ranks)
            sets = dict.fromkeys(tuple(copy_ranks(ranks, place, placements)) for place in coordinates)
            group = mesh.get_group(cut[0]) if len(cut) == 1 else None
            self._sets[_Sets(tuple(sorted(sets)), tuple(mine), group)] += prod(tensor.shape)

    # --- ranks --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Find the group of all ranks that have a part of the parameters; a collective of them.

        Raises:
            LayoutError: Ranks that share a mesh have parameters on other meshes.
        """
        if self._connected or not self._meshes:
            return
        ranks = sorted(self._ranks)
        for mesh in self._meshes:
            for dim in range(mesh.ndim):
                everyone = gather_together(lambda: ranks, mesh.get_group(dim))
                if any(ranks_there != ranks for ranks_there in everyone):
                    raise LayoutError(
                        f"the optimizer's parameters lie on the ranks {ranks} here and on others on ranks that share a "
                        "mesh with this one; build it from the same parameters on all of them"
                    )
        self._connected = True
        if len(ranks) > 1:
            self.group = self._group_of(ranks, None)
            self.tensor_parallel = self._slices_together()
            alone = not self._names.keys() <= _managed_parameters()
            if any(gather_together(lambda: alone, self.group)):
                self._host = self.group if self._devices == {"cpu"} else local_group(ranks, backend="gloo")

    def _group_of(self, ranks: Sequence[int], known: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """A group of these ranks; an existing one if its messages can carry tensors of the parameters' device."""
        groups = [known, *(mesh.get_group() for mesh in self._meshes if mesh.ndim == 1), dist.group.WORLD]
        host = self._devices == {"cpu"}
        for group in groups:
            if group is not None and dist.get_process_group_ranks(group) == list(ranks):
                return host_group(group) if host else group
        return local_group(list(ranks), **({"backend": "gloo"} if host else {}))

    def _slices_together(self) -> TensorParallel | None:
        """Choose the ranks that compute matrices together, slice by slice: those that share most of the matrices.

        A mesh of only some of the ranks does not tell which sets the others would choose, and is left out.
        """
        known = [candidate for candidate in self._sets if sum(map(len, candidate.sets)) == len(self._ranks)]
        if not known:
            return None
        chosen = max(known, key=lambda candidate: (self._sets[candidate], candidate.sets))
        assert self.group is not None
        place = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(self.group))}
        sets = tuple(tuple(place[rank] for rank in ranks) for ranks in chosen.sets)
        whole = list(chosen.mine) == dist.get_process_group_ranks(self.group)
        return TensorParallel.far(sets, self.group if whole else self._group_of(chosen.mine, chosen.group))

    def mesh(self) -> Any:
        """A one-dimensional mesh of all ranks; None for one rank."""
        if self._mesh is None and self.group is not None:
            from torch.distributed.device_mesh import DeviceMesh

            host = self._devices == {"cpu"}
            self._mesh = DeviceMesh.from_group(self.group, "cpu" if host else self._meshes[0].device_type)
        return self._mesh

    def work_place(self, group: dist.ProcessGroup | None) -> WorkPlace | None:
        """The mesh's device, where ``CPUOffloadPolicy`` keeps the parameters on the host."""
        kinds = {mesh.device_type for mesh in self._meshes}
        if self._devices != {"cpu"} or len(kinds) != 1:
            return None
        (kind,) = kinds
        if self._far is None:
            near = (group, None if self.tensor_parallel is None else self.tensor_parallel.group)
            groups = [None if ranks is None else self._device_group(ranks, kind) for ranks in near]
            place = kind if kind == "cpu" else f"{kind}:{torch.get_device_module(kind).current_device()}"
            self._far = WorkPlace(torch.device(place), *groups)
        return self._far

    def _device_group(self, host: dist.ProcessGroup, kind: str) -> dist.ProcessGroup:
        """A group of the same ranks whose messages can carry tensors of a device; all of them call this alike."""
        ranks = dist.get_process_group_ranks(host)
        known = (mesh.get_group(dim) for mesh in self._meshes for dim in range(mesh.ndim))
        for group in (host, *known, dist.group.WORLD):
            if group is not None and dist.get_process_group_ranks(group) == ranks and _carries(group, kind):
                return group
        return local_group(ranks)

    # --- gradients ----------------------------------------------------------------------------------------------

    def agree_on_missing(self, tensors: Sequence[Tensor]) -> None:
        """Give this rank a gradient of zeros where another rank has a gradient of a parameter.

        One process has one, too, if one rank's experts have seen no token. Nothing is sent where ``fully_shard``
        reduces all gradients, because they are missing alike.
        """
        if self._host is None:
            return
        ordered = sorted(tensors, key=lambda tensor: self._names[id(tensor)])
        present = torch.tensor([tensor.grad is not None for tensor in ordered], dtype=torch.uint8, device="cpu")
        dist.all_reduce(present, dist.ReduceOp.MAX, group=self._host)
        for tensor, somewhere in zip(ordered, present.tolist(), strict=True):
            if somewhere and tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)

    def watch(self, model: nn.Module) -> None:
        """Learn from a model's modules what their gradients are divided by."""
        self._modules = _groups_of(model.modules())
        self._managed = {id(own.sharded_param): own for group in self._modules for own in group.fsdp_params}

    def keeps_gradient(self, parameter: Tensor) -> bool | None:
        """See the base class; what is not reduced yet lies with the gathered parameter, where no zero_grad() looks."""
        managed = self._managed.get(id(parameter))
        if managed is None or parameter.grad is not None:
            return None
        gathered = getattr(managed, "_unsharded_param", None)
        kept = managed.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None)
        return True if kept else None

    def alike(self) -> tuple[int, int]:
        """This rank's place among those that see the same tokens, and their number."""
        return _seen_alike(self._modules, self._meshes, len(self._ranks))

    def averaged_over(self) -> float:
        """Divisor of the sum of the ranks' gradients that ``fully_shard`` uses."""
        return averaged_over(self._modules)


def _carries(group: dist.ProcessGroup, kind: str) -> bool:
    try:
        group._get_backend(torch.device(kind))
    except RuntimeError:
        return False
    return True


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _coordinates(ranks: Tensor) -> Iterator[tuple[int, ...]]:
    coordinates: list[tuple[int, ...]] = [()]
    for ways in ranks.shape:
        coordinates = [(*place, number) for place in coordinates for number in range(ways)]
    return iter(coordinates)


def _managed_parameters() -> set[int]:
    """Identities of the parameters whose gradients ``fully_shard`` reduces; these are missing on all ranks alike."""
    groups = _groups_of(living_modules(_sharded_classes()))
    return {id(parameter.sharded_param) for group in groups for parameter in group.fsdp_params}


def _sharded_classes() -> tuple[type[Any], ...]:
    """The class that ``fully_shard`` derives those of modules from; none before anybody has imported it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return () if fsdp is None else (fsdp.FSDPModule,)


def _groups_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The parameter groups that ``fully_shard`` has made of modules."""
    sharded = _sharded_classes()
    all_groups: list[Any] = []
    for module in modules:
        if issubclass(type(module), sharded):
            state = module._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.10 has one
            all_groups += [state._fsdp_param_group] if groups is None else groups
    return [group for group in all_groups if group is not None]


def _ranks(group: Any) -> int:
    """Number of data-parallel ranks of a parameter group."""
    mesh = group.mesh_info
    return int(getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1))


def _seen_alike(groups: list[Any], meshes: list[Any], world: int) -> tuple[int, int]:
    """This rank's place among those that see the same tokens, and their number: those of tensor parallelism."""
    widest = max(groups, key=_ranks, default=None)
    ways = world // (1 if widest is None else _ranks(widest))
    data = () if widest is None else widest.mesh_info.mesh.mesh_dim_names or ()
    for mesh in meshes:
        other_dims = [dim for dim, name in enumerate(mesh.mesh_dim_names or range(mesh.ndim)) if name not in data]
        sizes = [mesh.size(dim) for dim in other_dims]
        if ways > 1 and prod(sizes) == ways:
            position = 0
            for dim, size in zip(other_dims, sizes, strict=True):
                position = position * size + mesh.get_local_rank(dim)
            return position, ways
    return 0, 1


def averaged_over(groups: list[Any]) -> float:
    """Divisor of the sum of all ranks' gradients; 1 where nothing of a model is sharded.

    Raises:
        OptionError: Groups have different divisors.
    """
    factors = set()
    for group in groups:
        factor = getattr(group, "gradient_divide_factor", None)
        factors.add(float(_ranks(group) if factor is None else factor))
    if len(factors) > 1:
        raise OptionError(
            f"MKOR: gradients divided by {sorted(factors)} are invalid: its layers' must all be divided by the same; "
            "call set_gradient_divide_factor with one value, or exclude the other layers"
        )
    return factors.pop() if factors else 1.0
