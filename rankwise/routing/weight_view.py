"""A weight as its model shows it: its name, the modules around it, and their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

from torch import nn

from rankwise.routing.name_roles import unwrapped

__all__ = ["Surroundings", "WeightView"]

# Models have several names for the same number.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attention_heads_per_partition", "heads")
_KEY_HEADS = (
    "num_kv_heads",
    "num_key_value_heads",
    "kv_n_heads",
    "n_kv_heads",
    "n_head_kv",
    "num_multi_query_groups_per_partition",
)
_HEAD_SIZE = (
    "head_dim",
    "head_size",
    "attention_head_size",
    "hidden_size_per_attention_head",
    "d_head",
    "dim_head",
    "key_value_proj_dim",
)


@dataclass(frozen=True)
class WeightView:
    """The properties of a weight by which its layout is recognised.

    Attributes:
        name: Name of the layer in its module (``c_attn``), or of the parameter if the module keeps it itself.
        own_name: Name of the parameter in its layer.
        kind: Class of the layer.
        owner: The module that uses the layer; its class tells the layout.
        shape: Stored shape.
        configs: Yields the objects in which numbers are looked up that the owner does not have, the nearest first.
    """

    name: str
    own_name: str
    kind: str
    owner: nn.Module
    shape: tuple[int, ...]
    configs: Callable[[], Iterator[object]]

    @cached_property
    def sources(self) -> tuple[object, ...]:
        """Objects in which numbers are looked up, the nearest first; collected only for weights in the table."""
        return (self.owner, *self.configs())

    @property
    def rows(self) -> int:
        """Number of outputs of a layer that stores (outputs, inputs)."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """Number of inputs of such a layer."""
        return self.shape[-1]

    def number(self, *names: str) -> int | None:
        """The first of these attributes that is a positive integer, in the nearest object that has any."""
        for source in self.sources:
            for name in names:
                value = _read(source, name)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None

    def flag(self, *names: str) -> bool | None:
        """The first of these attributes that is true or false; None if there is none."""
        for source in self.sources:
            for name in names:
                value = _read(source, name)
                if isinstance(value, bool):
                    return value
        return None

    @property
    def owner_kinds(self) -> list[str]:
        """Class of the owner, and the classes up to the one that defines its forward pass."""
        kinds = type(self.owner).__mro__
        defining = next((place for place, kind in enumerate(kinds) if "forward" in vars(kind)), 0)
        return [kind.__name__ for kind in kinds[: defining + 1]]

    @property
    def is_transposed(self) -> bool:
        """Whether it is stored as (inputs, outputs), as in layers and stacked experts that multiply from the right."""
        if len(self.shape) == 2:
            by_rows = self.kind == "Conv1D" and self.own_name == "weight"
            return by_rows or (self.name == "w2" and "DbrxExpertGLU" in self.owner_kinds)
        stacked = _read(self.owner, "is_transposed") is True or "Llama4TextExperts" in self.owner_kinds
        return len(self.shape) == 3 and stacked

    @property
    def heads(self) -> int | None:
        """Number of query heads, None if unknown."""
        return self.number(*_HEADS)

    @property
    def key_heads(self) -> int | None:
        """Number of key and value heads; that of query heads, unless the model tells another."""
        return self.number(*_KEY_HEADS) or self.heads

    @property
    def head_size(self) -> int | None:
        """Size of a head that the model tells, else the inputs divided by the number of heads."""
        told = self.number(*_HEAD_SIZE)
        heads = self.heads
        if told or not heads or self.columns % heads:
            return told
        return self.columns // heads


def _read(source: object, name: str) -> object:
    """Read an attribute of foreign code: properties may fail where only the forward pass needs them."""
    try:
        return getattr(source, name, None)
    except Exception:
        return None


class Surroundings:
    """The modules of a model by their names."""

    def __init__(self, model: nn.Module) -> None:
        # What a wrapper wraps comes after the wrapper, and replaces it under the same name.
        self._modules = {unwrapped(name): module for name, module in model.named_modules()}

    def view(self, module: str, local: str, shape: tuple[int, ...]) -> WeightView:
        """Make the view of one parameter.

        Args:
            module: Name of the module that holds the parameter, without wrappers.
            local: Name of the parameter in the module; ``weight`` stands for the layer.
            shape: Logical shape of the parameter.
        """
        outer, _, name = module.rpartition(".")
        holder = self._modules[module]
        place = outer if local == "weight" and outer in self._modules else module
        called = name if local == "weight" else local
        return WeightView(
            called, local, type(holder).__name__, self._modules[place], shape, partial(self._configs, place)
        )

    def _configs(self, place: str) -> Iterator[object]:
        """Configurations of a module and of all modules around it, from the inside out."""
        while True:
            config = _read(self._modules.get(place), "config")
            if config is not None:
                yield config
            if not place:
                return
            place = place.rpartition(".")[0]
