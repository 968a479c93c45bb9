r"""Module hooks take MKOR's statistics of linear layers: the mean input and the gradient of a virtual bias.

The forward hook sums a layer's input over its tokens and leaves a hook on the output. When the output's gradient
arrives in a backward pass that adds to the weight's gradient, both sums are committed together. That happens once per
micro-batch, never for a forward without a backward, so it holds under evaluation, several micro-batches in flight, and
both kinds of activation checkpointing, whose extra forward either records no graph or leaves one that is thrown away.
If a weight's gradient is thrown away, the next backward pass drops its sums. No activation is kept.

With all sums taken over every micro-batch and data-parallel rank of one optimizer step, the scale rule is

.. math::
    a = \frac{\sum x}{\text{count}}, \qquad g = \frac{1}{P S} \sum dY

where :math:`P` and :math:`S` are the divisors the framework applies to gradients (data-parallel size, loss scale), so
that :math:`g` is the gradient the layer's bias has, or would have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from rankwise.kernels.surroundings import is_imagined
from rankwise.layout.dtensors import is_sharded
from rankwise.statistics.backward_passes import BackwardPasses, will_add_to
from rankwise.statistics.linear_views import LinearShape, LinearView, SummedPart, describe_linear, placed, views_of
from rankwise.statistics.window_sums import CommitListener, ModuleCall, Record, clear

__all__ = ["Capture", "Describe", "has_compiled"]

Describe = Callable[[nn.Module], LinearShape | list[LinearView] | None]
"""Recognises a linear module: the shape of its one weight, or a view of each of its weights, or None."""


class Capture:
    """Collects the statistics of the linear layers of a model, by weight.

    A weight that several modules use, or that is used several times, has one record: tokens and gradients of all its
    uses add up. The sums lie on the weight's device in float32 (float64 for a float64 weight); their size is linear in
    the layer's width.

    Weights that are frozen when the hooks are made, or recomputed at each use (parametrizations), are left out. A
    backward pass counts if it adds to the weight's gradient: not where the layer is frozen by then, nor in
    ``torch.autograd.grad`` and ``backward(inputs=...)`` for other tensors. Forward passes within the transforms of
    ``torch.func``, and those by which pipelines find out shapes, do not count.

    Args:
        model: A module to search, or an iterable of modules to hook.
        select: Whether to capture the weight (second argument) of a module (first); all weights by default.
        window: Returns, at each commit, the identifier of the current accumulation window, for example an engine's
            count of optimizer steps. Without it a window ends with `take` or `begin_window`.
        describe: Recognises a module as linear. Replace it to hook a framework's own layers, or layers that ranks
            share: each rank then sums its part, and the sums over all ranks are those of one process.
        kept: Whether the next backward pass adds to an earlier gradient of a parameter, where a framework keeps
            gradients elsewhere; it returns None where they are in ``grad``.

    Raises:
        ValueError: Modules that share a weight disagree on its shape, or a layer has no shape yet.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        select: Callable[[nn.Module, Parameter], bool] | None = None,
        window: Callable[[], Hashable] | None = None,
        describe: Describe = describe_linear,
        kept: Callable[[Tensor], bool | None] = lambda parameter: None,
    ) -> None:
        self.enabled = True
        self.paused = False
        """Whether nothing counts for the time being."""
        self.listener: CommitListener | None = None
        self.on_forward: Callable[[], None] | None = None
        """Called first in every forward pass that is not compiled."""
        self.on_training_forward: Callable[[list[Parameter]], None] | None = None
        """Called with the weights of a module whose output wants a gradient."""
        self._chosen: frozenset[Record] | None = None
        self._in_company = True
        self._passes = BackwardPasses(kept)
        self.is_over: Callable[[], bool] | None = None
        """Whether the window has ended, even if its sums have not been taken; asked as a backward pass begins."""
        self.records: dict[Parameter, Record] = {}
        self._window = window
        self._window_id: Hashable = None
        self.root = model if isinstance(model, nn.Module) else None
        self._by_module: dict[nn.Module, list[tuple[LinearView, Record]]] = {}
        self._names: dict[Parameter, str] = {}
        self._handles: list[RemovableHandle] = []
        for name, module in _named_modules(model):
            for view in views_of(module, describe(module)):
                if view.weight.requires_grad and (select is None or select(module, view.weight)):
                    self._by_module.setdefault(module, []).append((view, self._add(name, view)))
                    direct = module.named_parameters(recurse=False)
                    self._names |= {parameter: key for key, parameter in direct if parameter is view.weight}
        self.attach()

    def attach(self) -> None:
        """Put the hooks in place, unless they are there.

        All that ``torch.compile`` has compiled in this process is compiled again: compiled code does not look for new
        hooks, and would go around them.
        """
        if not self._handles:
            if self._by_module and has_compiled():
                torch.compiler.reset()
            # Hooks run before those of tensor parallelism, after which the output is no DTensor with placements.
            self._handles = [
                module.register_forward_hook(
                    self._on_forward, with_kwargs=True, prepend=any(is_sharded(view.weight) for view, _ in views)
                )
                for module, views in self._by_module.items()
            ]

    def replace_parameters(self, exchanged: Mapping[int, Tensor]) -> None:
        """Replace weights and biases by other tensors, which are given by the identity of the old ones; sums stay."""

        def now(parameter: Any) -> Any:
            return exchanged.get(id(parameter), parameter)

        for record in self.records.values():
            record.parameter, record.bias = now(record.parameter), now(record.bias)
        self.records = {record.parameter: record for record in self.records.values()}
        for views in self._by_module.values():
            views[:] = [(replace(view, weight=now(view.weight), bias=now(view.bias)), record) for view, record in views]
        self._names = {now(parameter): name for parameter, name in self._names.items()}

    def replaced(self) -> set[Parameter]:
        """Return weights that modules without hooks use by now, and no hooked module of the model."""
        present = set() if self.root is None else set(self.root.modules())
        unheard = present - self._by_module.keys()
        used = {parameter for module in unheard for parameter in module._parameters.values()}
        heard = {view.weight for module in present - unheard for view, _ in self._by_module[module]}
        return {parameter for parameter in self.records if parameter in used and parameter not in heard}

    def remove(self) -> None:
        """Take the hooks out and forget the sums; outputs that still wait for their gradients commit nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.clear()

    def let_go(self) -> None:
        """Drop all references to an optimizer that is gone, and count nothing more, while the model lives on.

        The hooks stay with the model, because another thread may be in a forward pass.
        """
        vars(self).update(vars(Capture([])), enabled=False)

    def listen_to(self, records: Collection[Record], in_company: bool) -> None:
        """Collect the statistics of some weights until the next call; without one, of all.

        Args:
            records: Records of these weights; without any, hooks do nothing.
            in_company: Whether the listener hears of commits, because all ranks will use this window's sums.
        """
        self.enabled = bool(records)
        self._chosen = None if len(records) == len(self.records) else frozenset(records)
        self._in_company = in_company

    def listen_to_all(self) -> None:
        """Collect the statistics of all weights."""
        self.listen_to(self.records.values(), True)
        self.enabled = True

    def window_id(self) -> Hashable:
        """Return the identifier of the present accumulation window; None where no `window` was given."""
        return None if self._window is None else self._window()

    def begin_window(self, window_id: Hashable) -> None:
        """Name the accumulation window; sums of another window that nobody has taken are dropped.

        Such sums are left over from a step that was skipped, after an overflow for instance.

        Args:
            window_id: Identifier that differs from one optimizer step to the next.
        """
        if window_id != self._window_id:
            self._window_id = window_id
            self.clear()

    def take(self, parameter: Parameter) -> tuple[Tensor, int, Tensor]:
        """Return the sums of a weight and clear them.

        Args:
            parameter: A key of `records`.

        Returns:
            Sum of the inputs ``(in_features,)``, number of tokens, and sum of the output gradients
            ``(out_features,)``. A number of 0 means that no backward pass counted in this window.

        Raises:
            KeyError: The weight is not captured.
        """
        record = self.records[parameter]
        inputs, outputs = (sums.clone() for sums in record.whole_sums())
        count = record.count
        self._drop([record])
        return inputs, count, outputs

    def clear(self) -> None:
        """Forget the sums of all weights, whether other ranks do so or not."""
        self.is_over = None
        self._drop(list(self.records.values()))

    def drop_thrown_away(self, in_step: bool = False) -> None:
        """Forget sums whose gradients were thrown away since the last backward pass.

        Args:
            in_step: Whether a step is about to use the gradients, rather than a backward pass to add to them.
        """
        if self.is_over is not None and not in_step and self.is_over():
            self.clear()
        elif gone := self._passes.thrown_away(self.records.values(), in_step):
            self._drop(gone)

    def _drop(self, records: list[Record]) -> None:
        clear(records)
        if self.listener is not None:
            self.listener.dropped(records)

    def _add(self, name: str, view: LinearView) -> Record:
        weight, shape = view.weight, view.shape
        if isinstance(weight, nn.parameter.UninitializedParameter):
            raise ValueError(f"module {name!r} is lazy and has no shape yet; run one forward pass before capturing it")
        record = self.records.get(weight)
        if record is None:
            dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
            sum_input = torch.zeros(view.inputs.width(shape.in_features), dtype=dtype, device=weight.device)
            sum_output_grad = torch.zeros(view.outputs.width(shape.out_features), dtype=dtype, device=weight.device)
            sides = view.inputs, view.outputs
            record = Record(name, weight, view.bias, shape, *sides, sum_input, sum_output_grad)
            self.records[weight] = record
        elif (record.shape, record.inputs, record.outputs) != (shape, view.inputs, view.outputs):
            raise ValueError(
                f"modules {record.name!r} and {name!r} share a weight but use it as {record.shape} and {shape}; "
                "exclude its weight (MKOR's option 'exclude', Capture's 'select')"
            )
        elif record.bias is not view.bias:
            record.bias = None
        return record

    def _on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.on_forward is not None and not torch.compiler.is_compiling():
            self.on_forward()
        if not self.enabled or self.paused:
            return
        result = output[0] if isinstance(output, tuple) else output
        if not isinstance(result, Tensor) or not result.requires_grad or _in_transform() or is_imagined():
            return
        if self.on_training_forward is not None:
            self.on_training_forward([record.parameter for _, record in self._by_module.get(module, ())])
        inputs: Tensor = args[0] if args else next(iter(kwargs.values()))
        hooked, rehearsed = _with_gradient(result, inputs), _in_rehearsal()
        for view, record in self._by_module.get(module, ()):
            if not self._wants(record):
                continue
            rows = None if view.rows is None else view.rows(args, kwargs)
            # A rehearsal computes this, too, because selective checkpointing expects each pass's operations again.
            call = _input_call(view, record, inputs, rows, self._in_use(module, record.parameter))
            if not rehearsed:
                hooked.register_hook(partial(self._on_output_grad, call, rows))

    def _in_use(self, module: nn.Module, parameter: Parameter) -> Tensor:
        """Return what the module multiplies by, which may have been put in the weight's place since the capture."""
        used = getattr(module, self._names.get(parameter, ""), parameter)
        return used if isinstance(used, Parameter) else parameter

    def _on_output_grad(self, call: ModuleCall, rows: slice | None, grad: Tensor | None) -> None:
        record = call.record
        if grad is None or not self.enabled or self.paused or not self._handles or not self._wants(record):
            return
        if not will_add_to(record, call.weight):
            return
        if self._window is not None:
            self.begin_window(self._window())
        if self._passes.begins(call.born):
            self.drop_thrown_away()
        grad = grad.detach()
        record.move_to(grad.device)
        record.sum_output_grad += _summed(grad, rows, record.outputs, record.shape.out_features, record.sum_output_grad)
        # A retained graph sends several gradients for one input, and the input counts once.
        if call.epoch != record.epoch:
            call.epoch = record.epoch
            record.sum_input += call.sum_input
            record.count += call.count
        record.touched = True
        record.changes += 1
        self._passes.added(record, call.weight)
        if self.listener is not None and self._in_company:
            self.listener.committed(record)

    def _wants(self, record: Record) -> bool:
        return self._chosen is None or record in self._chosen

    def __deepcopy__(self, memo: dict[int, Any]) -> Capture:
        # Hooks travel with a copied model. Its modules are not among those captured, and commit nothing.
        return self

    def __reduce__(self) -> tuple[type[Capture], tuple[list[nn.Module]]]:
        return Capture, ([],)

    def __repr__(self) -> str:
        state = "enabled" if self.enabled else "disabled"
        return f"Capture({len(self.records)} weights of {len(self._by_module)} modules, {state})"


def _named_modules(model: nn.Module | Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, nn.Module):
        yield from model.named_modules()
    else:
        yield from ((str(index), module) for index, module in enumerate(model))


def _in_transform() -> bool:
    """Whether ``torch.func`` differentiates or maps this forward pass, whose tensors must not be kept."""
    return torch._C._functorch.maybe_current_level() is not None


def _in_rehearsal() -> bool:
    """Whether ``torch.distributed.pipelining`` finds out shapes, before its first step.

    It then runs a stage forward and backward on uninitialized memory, and drops the gradients.
    """
    if "torch.distributed.pipelining.stage" not in sys.modules or torch.compiler.is_compiling():
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_forward_metadata_inference":
        frame = frame.f_back
    return frame is not None


def has_compiled() -> bool:
    """Whether ``torch.compile`` has compiled anything in this process."""
    used = sys.modules.get("torch._dynamo.utils")
    return used is not None and bool(used.counters["frames"])


def _with_gradient(output: Tensor, inputs: Tensor) -> Tensor:
    """Return the tensor that gets the gradient of a module's output, whatever is done to the output afterwards.

    An output may be a view of another tensor, as that of ``nn.Linear`` with a bias and more than two dimensions is.
    Once it has been changed in place, by ``ReLU(inplace=True)`` for example, autograd goes around the view.
    """
    base = None if torch.compiler.is_compiling() else output._base
    if base is None or not base.requires_grad or base is inputs or base is inputs._base:
        return output
    same_rows = base.numel() == output.numel() and base.shape[-1:] == output.shape[-1:]
    return base if same_rows and base.is_contiguous() and output.is_contiguous() else output


def _as_rows(tensor: Tensor, rows: slice | None) -> Tensor:
    held = tensor.detach()
    if tensor.is_nested:  # sequences of several lengths, one behind the other
        held = held.values().reshape(-1, tensor.size(-1))
    flat = held.reshape(held.shape[:-1].numel(), held.shape[-1])  # -1 would be unclear without features
    return flat if rows is None else flat[rows]


def _input_call(view: LinearView, record: Record, inputs: Tensor, chosen: slice | None, weight: Tensor) -> ModuleCall:
    features = record.shape.in_features
    held, side = placed(inputs, record.inputs)
    rows = _as_rows(held, chosen)
    if rows.shape[1] not in (features, side.width(features)):
        raise ValueError(
            f"module {record.name!r} got an input with {rows.shape[1]} features, but its in_features is "
            f"{features}; exclude its weight (MKOR's option 'exclude', Capture's 'select')"
        )
    count = len(range(rows.shape[0])[side.share(rows.shape[0])])
    summed = _summed(inputs, chosen, record.inputs, features, record.sum_input, view.prepare)
    return ModuleCall(record, weight, summed, count, torch._C._current_graph_task_id())


def _summed(
    tensor: Tensor,
    chosen: slice | None,
    side: SummedPart,
    features: int,
    like: Tensor,
    prepare: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the sum over tokens of this rank's part of a tensor, of the length that ``side`` says."""
    held, placed_side = placed(tensor, side)
    part = placed_side.part(_as_rows(held, chosen), features)
    if prepare is not None:
        part = prepare(part)
    total = part.sum(0, dtype=like.dtype)
    return total if placed_side is side else placed_side.widened(total, features)
