"""What a framework tells an optimizer: which parameters the tensors in the param groups store."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankwise.layout.dtensors import is_sharded
from rankwise.layout.front_ends import framework_advice, sharded_readers
from rankwise.layout.shards import Slice
from rankwise.options.validation import OptionError

__all__ = [
    "LayoutSource",
    "Slice",
    "TensorContents",
    "TensorParallel",
    "RANKS_OF_A_NODE",
    "WholeParameters",
    "WorkPlace",
    "layout_with",
    "real_view",
    "refuse_unreadable",
]


def real_view(tensor: Tensor) -> Tensor:
    """View a complex tensor as real and imaginary parts along a last dimension; return other tensors as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def refuse_strangers(owner: str, named: Mapping[str, Tensor]) -> None:
    """Refuse parameters, given by name, that are not those of a sharded model by these names.

    Raises:
        OptionError: The model has other parameters in their place.
    """
    if readers := sharded_readers():
        readers[1](owner, named)


def layout_with(plain: WholeParameters, tensor: Tensor) -> WholeParameters:
    """Return a layout that can take another parameter, too: the same one unless the first ``DTensor`` joins it."""
    if is_sharded(tensor) and not plain.missing_alike and (readers := sharded_readers()):
        layout: WholeParameters = readers[0](plain)
        return layout
    return plain


def refuse_unreadable(owner: str, name: str, tensor: Tensor) -> None:
    """Refuse tensors whose values are not where a plain tensor has them.

    Raises:
        OptionError: The tensor is a subclass that holds its values elsewhere, is flattened and sharded by FSDP, or has
            no values yet.
    """
    if nn.parameter.is_lazy(tensor):
        raise OptionError(
            f"{owner}: the parameter '{name}' is invalid, because its module is lazy: it must have a shape; run one "
            "forward pass of the model before the optimizer is built"
        )
    kind = type(tensor)
    sharded = any(getattr(tensor, mark, False) for mark in ("_is_flat_param", "_fsdp_flattened"))
    if sharded or "_flat_param" in name or "_fsdp_wrapped_module" in name:
        kind_of = "a parameter that FSDP has flattened"
        fix = "shard the model with torch.distributed.fsdp.fully_shard (FSDP2) instead of FullyShardedDataParallel"
    elif getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__ and not is_sharded(tensor):
        kind_of, fix = f"a {kind.__name__}, a tensor subclass", "pass the tensors that it is made of"
    else:
        return
    raise OptionError(
        f"{owner}: the parameter '{name}' is invalid, because it is {kind_of}: it must be a plain tensor or a "
        f"DTensor; {fix}"
    )


@dataclass(frozen=True)
class TensorContents:
    """What one optimizer tensor stores.

    Attributes:
        group: Index of the param group it came from, as passed to the constructor.
        slices: The runs of parameters in it; padding belongs to none.
    """

    group: int
    slices: tuple[Slice, ...]


RANKS_OF_A_NODE = 8
"""What is assumed of ranks that are imagined."""
SLOWER_IN_PAIRS = 4.0
"""Across nodes, where data sheets say 300 GB/s to 50: of a ring all cards of a node carry a part of each byte."""


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel groups among the ranks of a layout.

    Attributes:
        sets: Ranks of each tensor-parallel group, as positions in the layout's group; the same on every rank.
        group: Tensor-parallel group of this rank; None for imagined ranks.
        near: Whether messages in a group are cheap, as inside a node; else matrices are computed together only where
            that sends less than if one rank gathered them.
        slower_in_pairs: How many times as long a byte takes from any rank to any other as around a ring of all.
    """

    sets: tuple[tuple[int, ...], ...]
    group: dist.ProcessGroup | None
    near: bool = True
    slower_in_pairs: float = 1.0

    @classmethod
    def among(cls, everyone: dist.ProcessGroup, group: dist.ProcessGroup) -> TensorParallel:
        """Find the tensor-parallel groups among the ranks of ``everyone``; a collective of these ranks."""
        ranks_of: list[list[int]] = [[] for _ in range(dist.get_world_size(everyone))]
        dist.all_gather_object(ranks_of, dist.get_process_group_ranks(group), group=everyone)
        sets = {tuple(dist.get_group_rank(everyone, rank) for rank in ranks) for ranks in ranks_of}
        return cls(tuple(sorted(sets)), group)

    @classmethod
    def far(
        cls, sets: tuple[tuple[int, ...], ...], group: dist.ProcessGroup | None, per_node: int | None = None
    ) -> TensorParallel:
        """Ranks that are far from one another.

        Args:
            sets: See the class.
            group: See the class.
            per_node: Ranks of a node; None: as the launchers of torch and DeepSpeed say, else all.
        """
        ranks = max(map(len, sets))
        said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ranks
        local = per_node or int(said)
        return cls(sets, group, near=False, slower_in_pairs=SLOWER_IN_PAIRS if ranks > local else 1.0)


class WorkPlace(NamedTuple):
    """The device of a model whose weights and states a framework keeps on the host.

    Attributes:
        device: The device.
        group: The ranks of the layout, which can send tensors of the device; None for one rank.
        partners: The ranks of tensor parallelism, which can do so, too.
    """

    device: torch.device
    group: dist.ProcessGroup | None
    partners: dist.ProcessGroup | None = None


class LayoutSource(ABC):
    """What a framework tells the optimizer about the tensors it put into the param groups.

    An adapter derives from it and gives the three attributes and :meth:`contents`; checkpoints that are read by name
    need :meth:`units` and :meth:`publish_weights`, too. The other methods have defaults that suit most frameworks.

    Attributes:
        group: Group of the ranks that hold pieces or copies of the parameters; None for a single process.
        replicated: Whether every rank holds every parameter whole.
        saved_by_some: Whether some of the ranks save what others hold alike, and must then have the states of all.
        missing_alike: Whether each of the optimizer's tensors is one parameter, of which all ranks have a tensor, and a
            missing gradient is missing on all of them: the parameter then takes no step, as in one process. Else a
            missing gradient counts as zeros.
        tensor_parallel: Where ranks hold slices of matrices, those that may compute one together, slice by slice;
            checkpoints must then take states of slices. None: every matrix is computed by one rank.
        spends_gradients: Whether nobody reads the gradients of the optimizer's tensors after the step, so that their
            memory may be overwritten.
    """

    group: dist.ProcessGroup | None
    replicated: bool = False
    saved_by_some: bool = False
    missing_alike: bool = False
    tensor_parallel: TensorParallel | None = None
    spends_gradients: bool = False

    @abstractmethod
    def contents(self, tensor: Tensor) -> TensorContents:
        """Name the parameters stored in ``tensor``."""

    def name_of(self, tensor: Tensor) -> str | None:
        """Name of the parameter that a tensor is, where the tensors are parameters; else None."""
        return None

    def connect(self) -> None:
        """Start the collectives of this source, if any; all ranks that plan a unit call it before."""
        return

    def mesh(self) -> Any:
        """A one-dimensional mesh of all ranks of :attr:`group`, for torch's sharded tensors; None if there are none."""
        return None

    def agree_on_missing(self, tensors: Sequence[Tensor]) -> None:
        """Make a gradient missing on all ranks or on none, before a step."""
        return

    def refuse_replaced(self, owner: str, idle: Sequence[Tensor]) -> None:
        """Raise if tensors without gradients are not the model's any more; called once."""
        return

    def watch(self, model: nn.Module) -> None:
        """Learn about the model whose statistics are gathered."""
        return

    def units(self) -> list[list[tuple[Tensor, int]]]:
        """The tensors each ``step()`` call will find in the param groups, and the position of their group there.

        Raises:
            NotImplementedError: The framework does not say so before the first step.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say which tensors a step will find")

    def publish_weights(self) -> None:
        """Copy the optimizer's weights, changed from outside, to the model, if these are copies."""
        return

    def ranks_apart(self, tensor: Tensor) -> dist.ProcessGroup | None:
        """The ranks that hold the rest of a tensor's parameters where they are not ``group``, as of experts.

        All tensors of one ``step()`` call have the same ranks; None: those of ``group``.
        """
        return None

    def work_place(self, group: dist.ProcessGroup | None) -> WorkPlace | None:
        """The model's device, where the optimizer's tensors are on the host between its steps; None: where they are.

        Args:
            group: The ranks of a unit, which get a group that can send tensors of that device.
        """
        return None

    def loss_scale(self) -> float | Tensor | None:
        """Factor of the present gradients in the backward pass; None if the framework cannot say."""
        return None

    def keeps_gradient(self, parameter: Tensor) -> bool | None:
        """Whether the next backward pass adds to what an earlier one has left of a parameter's gradient.

        Returns:
            False where it begins anew; None if it begins anew exactly where the parameter's ``grad`` is gone.
        """
        return None

    def alike(self) -> tuple[int, int]:
        """This rank's place among those that see the same tokens, and their number, where modules do not show it."""
        return 0, 1

    def averaged_over(self) -> float | None:
        """Divisor of the sum of the ranks' gradients; None stands for the number of ranks."""
        return None

    def gradient_divisor(self) -> float | Tensor | None:
        """Divisor of the output gradients, summed over ranks and micro-batches, that makes them the loss's mean ones.

        None stands for the number of ranks times :meth:`loss_scale`.
        """
        return None


class WholeParameters(LayoutSource):
    """The layout of plain PyTorch: every tensor of the param groups is a whole parameter of this process."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.replicated = False
        self._contents: dict[int, TensorContents] = {}
        self._names: dict[int, str] = {}

    def replicated_over(self, group: dist.ProcessGroup) -> WholeParameters:
        """Make a layout of the same parameters, held alike by every rank of a data-parallel group."""
        source = WholeParameters()
        source.group = group
        source.replicated = source.saved_by_some = dist.get_world_size(group) > 1
        source._contents, source._names = self._contents, self._names
        return source

    def register(self, tensor: Tensor, name: str, group: int) -> None:
        """Register a parameter of the constructor by its name."""
        whole = Slice(name, 0, real_view(tensor).numel(), 0)
        self._names[id(tensor)] = name
        self._contents[id(tensor)] = TensorContents(group, (whole,) if tensor.numel() else ())

    def refuse_replaced(self, owner: str, idle: Sequence[Tensor]) -> None:
        """Refuse to go on with parameters without gradients that are not the model's any more.

        Raises:
            OptionError: Others have been put in their place.
        """
        refuse_strangers(owner, {self._names[id(tensor)]: tensor for tensor in idle if id(tensor) in self._names})

    def name_of(self, tensor: Tensor) -> str | None:
        """Name by which a parameter was registered; None if it was not."""
        return self._names.get(id(tensor))

    def contents(self, tensor: Tensor) -> TensorContents:
        """Name the parameters stored in ``tensor``; see :class:`LayoutSource`."""
        try:
            return self._contents[id(tensor)]
        except KeyError:
            raise RuntimeError(
                f"step() met a tensor of shape {tuple(tensor.shape)} that was not among the constructor's parameters. "
                f"A framework replaced the parameters; {framework_advice()}, so that the optimizer is told their "
                "layout."
            ) from None
