"""A signature describes what MKOR's layers of one batch have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.layout.fused_blocks import Block

__all__ = ["LayerSignature", "layer_of"]


class LayerSignature(NamedTuple):
    """What layers of one batch have in common.

    Attributes:
        outputs: Features that the layer gives.
        inputs: Features that the layer takes.
        has_bias: Whether the bias gradient rides along as one more column.
        transposed: Whether the weight is (inputs, outputs).
        position: Position of the param group.
        blocks: Matrices that the weight's outputs are divided into; empty for a single matrix. They share the right
            factor, because they share the inputs.
        window: Vectors of each factor inverse; 0 for dense ones.
        cut: The axis of the matrix of which this is a slice; None for a whole one.
        slices: Number of slices.
    """

    outputs: int
    inputs: int
    has_bias: bool
    transposed: bool
    position: int
    blocks: tuple[Block, ...] = ()
    window: int = 0
    cut: int | None = None
    slices: int = 1

    @property
    def cost(self) -> float:
        """Floating-point operations of preconditioning one matrix."""
        columns = self.inputs + self.has_bias
        if self.window:
            return float(8 * self.window * self.outputs * columns)
        return sum(float(2 * outputs * columns * (outputs + columns)) for outputs in self.lefts.values())

    @property
    def whole_shape(self) -> tuple[int, int]:
        """Outputs and inputs of the matrix, also where this is a slice of it."""
        sides = [self.outputs, self.inputs]
        if self.cut is not None:
            sides[self.cut] *= self.slices
        return sides[0], sides[1]

    @property
    def lefts(self) -> Mapping[str, int]:
        """Side of each left factor, by its name."""
        return {f"left[{block.name}]": block.size for block in self.blocks} or {"left": self.outputs}

    def of_block(self, block: Block) -> LayerSignature:
        """Return the signature of one block as if it were a layer."""
        return self._replace(outputs=block.size, blocks=())

    def parts_of(self, block: Block, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return a block of weights and biases, each (..., elements), as :meth:`Block.of` gives it."""
        shape = (self.inputs, self.outputs) if self.transposed else (self.outputs, self.inputs)
        weight, *biases = parts
        return [block.of(weight, *shape), *(replace(block, by_columns=False).of(bias, self.outputs) for bias in biases)]

    def slices_of(self, block: Block) -> list[list[slice]]:
        """Return where the block's elements lie in the flattened weight and, if it rides along, in the bias."""
        shape = (self.inputs, self.outputs) if self.transposed else (self.outputs, self.inputs)
        biases = [replace(block, by_columns=False).slices(self.outputs)] if self.has_bias else []
        return [block.slices(*shape), *biases]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of the weight and, if it rides along, of the bias."""
        return (self.outputs * self.inputs, self.outputs)[: 1 + self.has_bias]


def layer_of(task: MatrixTask) -> str:
    """Name of the weight that a task is, or of which it is a slice."""
    return task.whole or task.key
