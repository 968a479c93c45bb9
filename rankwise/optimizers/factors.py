"""MKOR's Kronecker factors: one left and one right inverse per matrix, handled in batches of equal shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankwise.optimizers.layer_statistics import LayerVectors
from rankwise.optimizers.matrix_states import MatrixState
from rankwise.optimizers.options import MKOROptions
from rankwise.sharding import MatrixTask
from rankwise.updates import mkor as updates

__all__ = ["KroneckerFactors", "LayerSignature"]


class LayerSignature(NamedTuple):
    """What layers of one batch have in common.

    Attributes:
        outputs: Features the layer gives.
        inputs: Features it takes.
        has_bias: Whether the bias gradient rides along as one more column.
        transposed: Whether the weight is (inputs, outputs).
        position: Param group.
    """

    outputs: int
    inputs: int
    has_bias: bool
    transposed: bool
    position: int

    @property
    def cost(self) -> float:
        """Floating-point operations of preconditioning one matrix."""
        columns = self.inputs + self.has_bias
        return float(2 * self.outputs * columns * (self.outputs + columns))


class KroneckerFactors:
    """Creates, moves and applies the factors; the states stay with their owner.

    Args:
        options: MKOR's.
    """

    def __init__(self, options: MKOROptions) -> None:
        self._options = options

    def fresh(self, signature: LayerSignature, device: torch.device) -> MatrixState:
        """Identity factors, and the number of factor steps in a row that failed. Too long a side gets no factor."""
        dtype = getattr(torch, self._options.factor_dtype)
        lengths = {"left": (signature.outputs, 0), "right": (signature.inputs, int(signature.has_bias))}
        state = {
            name: torch.eye(length + extra, dtype=dtype, device=device)
            for name, (length, extra) in lengths.items()
            if length <= self._options.max_factor_dim
        }
        return {**state, "failures": torch.zeros((), dtype=torch.int32, device=device)}

    def move(
        self, tasks: Sequence[MatrixTask], states: Sequence[MatrixState], vectors: Mapping[str, LayerVectors]
    ) -> tuple[Tensor, Tensor]:
        """One guarded rank-1 update of both sides of a batch; a matrix that saw no token keeps its factors.

        Args:
            tasks: The matrices.
            states: Theirs, changed in place.
            vectors: The statistics by key.

        Returns:
            Numbers of matrices moved, and kept because the result was not finite, 0-d.
        """
        tokens = torch.cat([vectors[task.key][2] for task in tasks])
        seen = tokens > 0
        healthy = torch.ones_like(seen)
        for side in ("right", "left"):
            if side not in states[0]:
                continue
            vector = self._vector(side, tasks, vectors)
            old = torch.stack([state[side] for state in states])
            new, ok = self._moved(old, vector)
            committed = torch.where(seen[:, None, None], new, old)
            for state, factor in zip(states, committed, strict=True):
                state[side].copy_(factor)
            healthy &= ok | ~seen
        for state, ok in zip(states, healthy, strict=True):
            state["failures"].copy_(torch.where(ok, 0, state["failures"] + 1))
        return (healthy & seen).sum(), (~healthy).sum()

    def _vector(self, side: str, tasks: Sequence[MatrixTask], vectors: Mapping[str, LayerVectors]) -> Tensor:
        if side == "left":
            return torch.stack([vectors[task.key][1] for task in tasks]) * self._options.output_gain
        inputs = torch.stack([vectors[task.key][0] for task in tasks])
        return torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1) if tasks[0].signature.has_bias else inputs

    def _moved(self, old: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        options = self._options
        if options.stabilizer is None:
            moved = updates.rank1_inverse_update(old, vector, options.factor_decay, options.rule)  # type: ignore[arg-type]
            return updates.guarded(moved, old)
        return updates.update_factor(
            old,
            vector,
            options.factor_decay,
            options.rule,  # type: ignore[arg-type]
            *options.stabilizer,
            norm=options.stabilizer_norm,  # type: ignore[arg-type]
        )

    def apply(self, signature: LayerSignature, states: Sequence[MatrixState], stack: Tensor) -> Tensor:
        """Precondition the gradients of a batch.

        Args:
            signature: Of its matrices.
            states: Theirs.
            stack: (matrices, elements): each the flattened weight gradient, followed by that of the bias.

        Returns:
            The preconditioned gradients, laid out alike.
        """
        outputs, inputs, has_bias, transposed, _ = signature
        weight, bias = stack[:, : outputs * inputs], stack[:, outputs * inputs :]
        matrix = weight.view(-1, inputs, outputs).mT if transposed else weight.view(-1, outputs, inputs)
        if has_bias:
            matrix = torch.cat([matrix, bias.unsqueeze(-1)], dim=2)
        left, right = (
            torch.stack([state[side] for state in states]) if side in states[0] else None for side in ("left", "right")
        )
        result = updates.precondition(matrix, left, right, self._options.rescale, has_bias)  # type: ignore[arg-type]
        weight = result[..., :inputs]
        flat = (weight.mT if transposed else weight).reshape(len(states), -1)
        return torch.cat([flat, result[..., inputs]], dim=1) if has_bias else flat
