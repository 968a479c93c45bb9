"""MKOR has one left and one right factor inverse per matrix, which are handled in batches of equal shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, zip_longest
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.kernels.dispatch import product_dtype_for
from rankwise.layout.fused_blocks import Block
from rankwise.mkor import formulas
from rankwise.mkor.dispatch import factor_update_for, precondition_into_for, together_for
from rankwise.mkor.layer_signature import LayerSignature, layer_of
from rankwise.mkor.options import MKOROptions
from rankwise.mkor.preconditioning import Gradient, Preconditioned
from rankwise.mkor.product_groups import ProductGroups
from rankwise.mkor.rule import Rule, guarded, rescale_to_norm
from rankwise.mkor.vector_windows import Factor, Norms, Window, factor_of, multiply_, update_windows_
from rankwise.mkor.workspace import Workspace
from rankwise.states.matrix_states import MatrixState
from rankwise.statistics.factor_vectors import LayerVectors

__all__ = ["KroneckerFactors"]

_Value = TypeVar("_Value")


class _Side(NamedTuple):
    """One side of matrices of one signature: its name, which matrices they are, and their factors."""

    name: str
    span: slice
    factors: list[Any]


class KroneckerFactors:
    """Moves and applies the factors; the states stay with their owner.

    Args:
        options: Options of MKOR.

    Attributes:
        decay: Factor momentum.
    """

    def __init__(self, options: MKOROptions) -> None:
        self._options, self.decay = options, options.decay
        # Sketches keep 0 < J <= I but for rounding, so that nothing grows; yet row sums of such a matrix may be large.
        self._stabilizer = None if options.sketches else options.stabilizer
        self._formula: Rule = "official" if options.sketches else options.rule  # type: ignore[assignment]

    def product_type(self, device: torch.device, dtype: torch.dtype) -> torch.dtype:
        """Return the type of products with gradients of a type on a device, which the option names or leaves open."""
        wish = self._options.product_dtype
        if wish != "auto":
            return getattr(torch, wish)  # type: ignore[no-any-return]
        # Users ask for wider factors because of their digits.
        return product_dtype_for(device, dtype) if self._options.factor_dtype == "bfloat16" else dtype

    @property
    def comm_dtype(self) -> str | None:
        """Type of messages: in any, sums over the holders of slices travel in bfloat16."""
        return self._options.comm_dtype

    @property
    def rescales(self) -> bool:
        """Whether gradients keep their norms."""
        return self._options.rescale is not None

    @staticmethod
    def computes_singly(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether :meth:`apply_to_one` takes gradients of this type on this device."""
        return precondition_into_for(device, dtype) is not None

    def move(
        self,
        tasks: Sequence[MatrixTask],
        states: Sequence[MatrixState],
        vectors: Mapping[str, LayerVectors],
        decay: float,
        norms: Norms | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Do one guarded rank-1 update of both sides of matrices; one that saw no token keeps its factors.

        Factors of one shape move together, whichever sides they are of, but where ranks measure them together.

        Args:
            tasks: Tasks of the matrices, those of one signature one after another.
            states: States of the matrices, changed in place.
            vectors: Statistics of the matrices, by key.
            decay: Factor momentum.
            norms: What measures windows, where ranks do it together.

        Returns:
            Number of matrices that moved, and of those that stayed because the result was not finite, 0-d.
        """
        seen = torch.cat([vectors[layer_of(task)][2] for task in tasks]) > 0
        counts = [len(list(alike)) for _, alike in groupby(tasks, attrgetter("signature"))]
        spans = [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
        missed = ~seen
        sides = [
            _Side(side, span, factors)
            for span in spans
            for side in ("right", *tasks[span.start].signature.lefts)
            if (factors := _alike(states[span], side)) is not None
        ]
        fine: dict[int, list[Tensor]] = {span.start: [] for span in spans}
        sides.sort(key=attrgetter("name"))  # so that vectors that are made alike come together
        for alike in _collected(sides, lambda side: (side.name if norms else "", *_form(side.factors[0]))):
            vector = self._vectors_of(alike, tasks, vectors)
            own_seen, own_missed = (_joined([flags[side.span] for side in alike]) for flags in (seen, missed))
            inverses = [factor for side in alike for factor in side.factors]
            kept = self._update(inverses, vector, own_seen, decay, norms) | own_missed
            for side, part in zip(alike, kept.split([len(side.factors) for side in alike]), strict=True):
                fine[side.span.start].append(part)
        healthy = all_fine = torch.ones_like(seen)
        for parts in zip_longest(*fine.values()):
            # Some matrices have more sides than others.
            own = [all_fine[span] if part is None else part for span, part in zip(spans, parts, strict=True)]
            healthy = healthy & _joined(own)
        failures = [state["failures"] for state in states]
        torch._foreach_copy_(failures, list(torch.where(healthy, 0, torch.stack(failures) + 1)))
        return (healthy & seen).sum(), (~healthy).sum()

    def _vectors_of(
        self, alike: Sequence[_Side], tasks: Sequence[MatrixTask], vectors: Mapping[str, LayerVectors]
    ) -> Tensor:
        """The vectors (n, d) of the factors of some sides."""

        def kind(side: _Side) -> tuple[Any, ...]:
            signature = tasks[side.span.start].signature
            return side.name, signature.has_bias if side.name == "right" else (signature.outputs, signature.blocks)

        stacks = [
            self._vector(name, [task for side in sides for task in tasks[side.span]], vectors)
            for (name, _), sides in groupby(alike, kind)
        ]
        return self._of_sketch(_joined(stacks)) if self._options.sketches else _joined(stacks)

    def _of_sketch(self, vectors: Tensor) -> Tensor:
        """Scale vectors to the size of the identity, because the size of a gradient says nothing."""
        root = math.sqrt(self._options.sketch_gain * vectors.shape[1])
        largest = vectors.abs().amax(1, keepdim=True)
        # Without this division, squares of very small or large numbers would be 0 or infinite.
        vectors = vectors / torch.where(largest > 0, largest, 1.0)
        norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
        return vectors * (root / torch.where(norms > 0, norms, 1.0))

    def _vector(self, side: str, tasks: Sequence[MatrixTask], vectors: Mapping[str, LayerVectors]) -> Tensor:
        if side != "right":
            outputs = torch.stack([vectors[layer_of(task)][1] for task in tasks]) * self._options.output_gain
            blocks = [block for block in tasks[0].signature.blocks if side == f"left[{block.name}]"]
            return replace(blocks[0], by_columns=False).of(outputs, outputs.shape[1]).flatten(1) if blocks else outputs
        inputs = torch.stack([vectors[layer_of(task)][0] for task in tasks])
        return torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1) if tasks[0].signature.has_bias else inputs

    def _update(self, inverses: list[Any], vectors: Tensor, seen: Tensor, decay: float, norms: Norms | None) -> Tensor:
        """Move the inverses that were seen, in place, and return which of them took the update."""
        options = self._options
        if options.window:
            product = self.product_type(vectors.device, vectors.dtype)
            of_norm: Any = {"stabilizer": self._stabilizer, "norm": options.stabilizer_norm, "product": product}
            return update_windows_(inverses, vectors, decay=decay, seen=seen, norms=norms, **of_norm)
        update_in_place = factor_update_for(vectors.device, vectors.dtype, inverses[0].dtype)
        if options.sketches and update_in_place is not None:
            return update_in_place(inverses, vectors, decay=decay, seen=seen)
        taken = []
        for old, vector, is_seen in zip(inverses, vectors, seen, strict=True):
            new, ok = self._moved(old, vector, decay)
            old.copy_(torch.where(is_seen, new, old))
            taken.append(ok)
        return torch.stack(taken)

    def _moved(self, old: Tensor, vector: Tensor, decay: float) -> tuple[Tensor, Tensor]:
        options = self._options
        if self._stabilizer is None:
            return guarded(formulas.rank1_inverse_update(old, vector, decay, self._formula), old)
        norm: Any = options.stabilizer_norm
        return formulas.update_factor(old, vector, decay, self._formula, *self._stabilizer, norm=norm)

    def apply(
        self,
        signature: LayerSignature,
        states: Sequence[MatrixState],
        stack: Tensor,
        product: torch.dtype,
        space: Workspace,
        spent: bool = False,
    ) -> Tensor:
        """Precondition the gradients of a batch.

        Args:
            signature: Signature of the matrices.
            states: States of the matrices.
            stack: (matrices, elements), in each row the flattened gradients of the weight and then of the bias; it does
                not change unless it is spent.
            product: Type of the products.
            space: Memory for temporaries on a CPU.
            spent: Whether the result may be the stack.

        Returns:
            The preconditioned gradients in the layout of ``stack``.
        """
        if signature.blocks:
            return _by_block(signature, states, stack, partial(self.apply, product=product, space=space))
        if self.computes_singly(stack.device, stack.dtype):
            result, sizes = torch.empty_like(stack), signature.sizes
            for new, state, grad in zip(result, states, stack, strict=True):
                self.apply_to_one(signature, state, grad.split(sizes), new.split(sizes), product, space)
            return result
        together = together_for(stack.device, stack.dtype, product)
        if together is not None:
            result, sizes = stack if spent else torch.empty_like(stack), signature.sizes
            parts = [row.split(sizes) for row in stack]
            gradients = [
                _gradient(signature, state, [weight], biases)
                for state, (weight, *biases) in zip(states, parts, strict=True)
            ]
            out = [row.split(sizes) for row in result]
            together.precondition_into(out, gradients, product, self.rescales)
            return result
        left, right = _alike(states, "left"), _alike(states, "right")
        shape = (signature.outputs, signature.inputs)
        if signature.transposed:
            # The factors are symmetric, so that they change places for a transposed gradient; its bias is its last row.
            left, right = right, left
            shape = (signature.inputs + signature.has_bias, signature.outputs)
        update = _products(stack, shape, left, right, product)
        if not self.rescales:
            return update
        norms = (formulas.gradient_norm(stacked[:, None]) for stacked in (update, stack))
        return rescale_to_norm(update[:, None], stack[:, None], *norms)[:, 0]

    def together(self, device: torch.device, dtype: torch.dtype, product: torch.dtype) -> ModuleType | None:
        """Return what preconditions many gradients of this type on this device at once, if there is such a form."""
        return together_for(device, dtype, product)

    def precondition(
        self,
        arrangement: ProductGroups,
        runs: Sequence[Tensor],
        lefts: Sequence[Factor | None],
        rights: Sequence[Factor | None],
        form: ModuleType,
        product: torch.dtype,
    ) -> Preconditioned:
        """Precondition gradients of many matrices as
        :func:`rankwise.mkor.cuda.preconditioning_together.preconditioned_as` does.
        """
        return form.preconditioned_as(arrangement, runs, lefts, rights, product, self.rescales)  # type: ignore[no-any-return]

    def apply_to_one(
        self,
        signature: LayerSignature,
        state: MatrixState,
        parts: Sequence[Tensor],
        out: Sequence[Tensor],
        product: torch.dtype,
        space: Workspace,
    ) -> None:
        """Precondition one gradient, to the bits of :meth:`apply`, where :meth:`computes_singly` says so.

        Args:
            signature: Signature of the matrix.
            state: State of the matrix.
            parts: Gradients of the weight and, if it rides along, of the bias, 1-D; they do not change.
            out: Tensors for the preconditioned gradients, in other memory.
            product: Type of the products.
            space: Memory for temporaries.
        """
        for block in signature.blocks:
            old, new = signature.parts_of(block, parts), signature.parts_of(block, out)
            # Parts with gaps are copied; parts without gaps are used where they lie.
            results = [part.flatten() if len(part) == 1 else part.new_empty(part.numel()) for part in new]
            gradients = [part.flatten() for part in old]
            block_signature, factors = signature.of_block(block), _of_block(state, block)
            self.apply_to_one(block_signature, factors, gradients, results, product, space)
            for target, values in zip(new, results, strict=True):
                if len(target) > 1:
                    target.copy_(values.view(target.shape))
        if signature.blocks:
            return
        left, right = factor_of(state, "left"), factor_of(state, "right")
        shape, turned = (signature.outputs, signature.inputs), signature.transposed
        if turned:
            left, right, shape = right, left, shape[::-1]
        into = precondition_into_for(parts[0].device, parts[0].dtype)
        assert into is not None
        into(out, parts, shape, left, right, space, turned=turned, rescale=self.rescales, product=product)


def _by_block(
    signature: LayerSignature, states: Sequence[MatrixState], stack: Tensor, apply: Callable[..., Tensor]
) -> Tensor:
    """Apply a function to each block of a batch as if it were a layer, and put the results together."""
    result, sizes = torch.empty_like(stack), signature.sizes
    for block in signature.blocks:
        block_signature, old = signature.of_block(block), signature.parts_of(block, stack.split(sizes, dim=1))
        gradients = torch.cat([part.flatten(1) for part in old], dim=1)
        preconditioned = apply(block_signature, [_of_block(state, block) for state in states], gradients)
        new = signature.parts_of(block, result.split(sizes, dim=1))
        for target, values in zip(new, preconditioned.split(block_signature.sizes, dim=1), strict=True):
            target.copy_(values.view(target.shape))
    return result


def _of_block(state: MatrixState, block: Block) -> MatrixState:
    """Return the factors of one block by the names that they would have in a layer of its own."""
    mark = f"[{block.name}]"
    return {key.removesuffix(mark): value for key, value in state.items() if key.endswith(mark) or "right" in key}


def _collected(values: Iterable[_Value], key: Callable[[_Value], Any]) -> list[list[_Value]]:
    """Return the values that have equal keys, wherever they are."""
    found: dict[Any, list[_Value]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return list(found.values())


def _form(factor: Factor) -> tuple[Any, ...]:
    """Return the shape and type of a factor."""
    tensor = factor.vectors if isinstance(factor, Window) else factor
    return *tensor.shape, tensor.dtype


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _alike(states: Sequence[MatrixState], side: str) -> list[Any] | None:
    """Return the factors of one side of matrices of one signature; None if they have none."""
    return None if factor_of(states[0], side) is None else [factor_of(state, side) for state in states]


def _gradient(
    signature: LayerSignature, state: MatrixState, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()
) -> Gradient:
    left, right = factor_of(state, "left"), factor_of(state, "right")
    rows, columns = signature.outputs, signature.inputs
    if signature.transposed:
        left, right, rows, columns = right, left, columns, rows
    return Gradient(rows, columns, weights, biases, signature.transposed, left, right)


def _products(
    stack: Tensor,
    shape: tuple[int, int],
    left: Sequence[Factor] | None,
    right: Sequence[Factor] | None,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply a batch by its factors; what follows a matrix in a row of the batch is the matrix's last column."""
    elements = math.prod(shape)
    matrix = stack[:, :elements].view(-1, *shape)
    whole = torch.cat([matrix, stack[:, elements:, None]], dim=2) if stack.shape[1] > elements else matrix
    product = _product(whole, left, right, dtype)
    if whole is matrix:
        return product.view_as(stack)
    return torch.cat([product[..., : shape[1]].flatten(1), product[..., shape[1]]], dim=1)


def _product(matrices: Tensor, left: Sequence[Any] | None, right: Sequence[Any] | None, dtype: torch.dtype) -> Tensor:
    sides = [*(left or ()), *(right or ())]
    if sides and isinstance(sides[0], Window):
        of_rows, of_columns = (None if side is None else Window.of(side) for side in (left, right))
        return multiply_(matrices.to(dtype, copy=True), of_rows, of_columns).to(matrices.dtype)
    rows, columns = (None if side is None else torch.stack(list(side)) for side in (left, right))
    return formulas.apply_inverses(matrices, rows, columns, dtype)
