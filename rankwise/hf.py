"""Hugging Face's Trainer builds an optimizer by these functions if it runs without DeepSpeed.

With DeepSpeed the JSON names the type, and :mod:`deepspeed_plugin` does the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from rankwise.mars.optimizer import MARS
from rankwise.mkor.optimizer import MKOR
from rankwise.names import BY_NAME, SPELLINGS
from rankwise.options.hints import misspelt
from rankwise.options.validation import OptionError, called
from rankwise.routing.roles import annotate
from rankwise.statistics.module_hooks import ModuleHook
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.step.reports import print_on_first_rank

__all__ = ["CapturingMKOR", "consolidating", "optimizer_cls_and_kwargs"]


def optimizer_cls_and_kwargs(
    model: nn.Module, name: str, *, lr: float, **options: Any
) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the Trainer's argument of this name, for one of our optimizers.

    Names and types of the model's modules are written to its parameters, so that embeddings, heads and fused weights
    are known in the Trainer's param groups, which have no names. MKOR captures the model when it is built.

    Example:
        >>> arguments = TrainingArguments(..., weight_decay=0.1)
        >>> trainer = Trainer(
        ...     model,
        ...     arguments,
        ...     optimizer_cls_and_kwargs=rankwise.hf.optimizer_cls_and_kwargs(model, "mkor", lr=3e-3),
        ...     callbacks=[rankwise.hf.consolidating()],  # for MKOR on several ranks
        ... )

    Args:
        model: Model that is handed to the Trainer.
        name: ``"mars-m"``, ``"ldadam"``, ``"mkor-h"`` ...: a DeepSpeed JSON's ``"type"``, in any case.
        lr: Learning rate. The Trainer does not read its own ``learning_rate`` if it is given an optimizer.
        options: Further options of the optimizer, but for the weight decay, which is the Trainer's.

    Returns:
        A class and its keywords. Its call builds the optimizer, which prints on rank 0, at the first step, how much of
        the model takes its rule.

    Raises:
        OptionError: A name or option is unknown, a value is outside its range, or a weight decay is given.
    """
    named = BY_NAME.get(name.lower())
    if named is None:
        raise OptionError(
            f"optimizer '{name}' is not known: it must be one of {', '.join(BY_NAME)}{misspelt(name, BY_NAME)}"
        )
    if "weight_decay" in options:
        raise OptionError(
            f"weight_decay={options['weight_decay']} would have no effect: the Trainer's param groups carry a weight "
            "decay of their own; set TrainingArguments(weight_decay=...) instead"
        )
    keywords = named.complete({"lr": lr, **options}, name, instead=named.optimizer.__name__)
    annotate(model)
    optimizer: type[ShardedOptimizer] = named.optimizer
    if optimizer is MKOR:
        optimizer, keywords = CapturingMKOR, {"captured": model, **keywords}
    elif optimizer is MARS and "weight_decay_1d" not in options:
        optimizer = _MARSOfTrainer
    return _printing(optimizer, SPELLINGS[name.lower()]), keywords


def _printing(optimizer: type[ShardedOptimizer], spelling: str) -> type[Optimizer]:
    """Return a class, as the Trainer takes nothing else, whose call builds an optimizer that prints its first line."""

    def built(cls: type[Optimizer], params: Any, **keywords: Any) -> ShardedOptimizer:
        with called(spelling):
            made = optimizer(params, **keywords)
        made.reports.announce = print_on_first_rank
        return made

    kind: type[Optimizer] = type(optimizer.__name__, (Optimizer,), {"__new__": built, "__doc__": optimizer.__doc__})
    return kind


class _MARSOfTrainer(MARS):
    """MARS whose fallback, too, does not decay the parameters that the Trainer exempts from decay."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if param_group.get("weight_decay") == 0:
            param_group.update(dict.fromkeys(self.options_type.decay_options, 0.0))
        super().add_param_group(param_group)


def _hear_of_loss(optimizer: weakref.ref[MKOR], output: Any) -> None:
    listener, loss = optimizer(), output.get("loss") if isinstance(output, Mapping) else None
    if listener is not None and isinstance(loss, Tensor):
        listener.switch.expect(loss)


class CapturingMKOR(MKOR):
    """MKOR that captures the model it is built for.

    Args:
        params: Parameters, or param groups.
        captured: Model with these parameters. What it returns as ``loss`` while it trains is reported to MKOR-H.
        options: Options of :class:`rankwise.MKOR`.
    """

    def __init__(self, params: Any, captured: nn.Module, **options: Any) -> None:
        super().__init__(params, **options)
        self.capture(captured)
        if self.needs_loss:
            # The model may outlive the optimizer.
            captured.register_forward_hook(ModuleHook(captured, partial(_hear_of_loss, weakref.ref(self))))

    def state_dict(self) -> dict[str, Any]:
        """Return MKOR's states; the Trainer calls this on one rank.

        Raises:
            RuntimeError: The other ranks' states were not collected first.
        """
        if self.saved.is_shared:
            raise RuntimeError(
                "MKOR: every rank has the factors of some matrices only, and the Trainer saves one rank's. Add "
                "callbacks=[rankwise.hf.consolidating()] to the Trainer, or call "
                "optimizer.consolidate_state_dict() on every rank before saving."
            )
        return super().state_dict()


def consolidating() -> Any:
    """Return a callback of the Trainer that collects every rank's share of the states before one rank saves them.

    Returns:
        A ``transformers.TrainerCallback``.
    """
    from transformers import TrainerCallback

    class Consolidating(TrainerCallback):
        """Runs on every rank, after the Trainer has decided whether to save."""

        def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            if control.should_save:
                _consolidate(known.get("optimizer"))

        def on_epoch_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            self.on_step_end(args, state, control, **known)

    return Consolidating()


def _consolidate(optimizer: Any) -> None:
    """Consolidate the states of an optimizer, which accelerate may have wrapped."""
    while not isinstance(optimizer, MKOR) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if isinstance(optimizer, MKOR):
        optimizer.consolidate_state_dict()
