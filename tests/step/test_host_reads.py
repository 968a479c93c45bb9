"""No step of MARS, SONew and LDAdam waits for the device: nothing but the CPU step counts is read back to the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import BY_NAME, advance, loss_of, setup
from torch.utils._python_dispatch import TorchDispatchMode

from rankwise.kernels import lists as foreach
from rankwise.kernels.dispatch import using

READS = {
    torch.ops.aten._local_scalar_dense.default,  # item(), float(t), bool(t)
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,  # its size depends on the data
    torch.ops.aten.masked_select.default,
    torch.ops.aten._to_copy.default,  # only to the CPU, see below
    torch.ops.aten.lift_fresh.default,  # torch.tensor(...): on an accelerator a blocking copy
}


class NoHostReads(TorchDispatchMode):
    """Raises on operations that would make the host wait, were these tensors on an accelerator.

    Args:
        on_host: Tensors that live on the CPU by design; they are told by their memory.
    """

    def __init__(self, on_host: list[torch.Tensor]) -> None:
        super().__init__()
        self.exempt = {tensor.data_ptr() for tensor in on_host}
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if func is torch.ops.aten.index.Tensor:
            masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
            assert not masks, f"{func} by a mask makes the host wait for the device"
        if func in READS and args[0].data_ptr() not in self.exempt:
            to_host = func is not torch.ops.aten._to_copy.default or str((kwargs or {}).get("device")) == "cpu"
            assert not to_host, f"{func} makes the host wait for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _as_on_an_accelerator() -> Iterator[None]:
    """The forms for CPUs may read their own memory."""
    with using(foreach):
        yield


WITHOUT_READS = [name for name, case in BY_NAME.items() if case.cls.__name__ in ("MARS", "SONew", "LDAdam")]


@pytest.mark.parametrize("name", WITHOUT_READS)
def test_a_step_reads_nothing_back(name: str) -> None:
    model, optimizer = setup(BY_NAME[name])
    advance(model, optimizer, range(2))  # plans and states are made at the first step
    for index in range(2, 4):
        optimizer._recorded = True  # exact mode: the reference of the step before will do
        optimizer.zero_grad()
        loss_of(model, index).backward()
        counts = [state["step"] for state in optimizer.state.values()]
        counts += [state[name] for state in optimizer.matrix_states.values() for name in ("step", "beta1")]
        with NoHostReads(counts) as guard:
            optimizer.step()
        assert guard.operations > 50


@pytest.mark.parametrize("name", ["mkor-adamw", "mkor-lamb"])
def test_mkor_reads_back_on_factor_steps_only(name: str) -> None:
    model, optimizer = setup(BY_NAME[name])
    advance(model, optimizer, range(1))
    for index in range(1, 4):
        optimizer.zero_grad()
        loss_of(model, index).backward()
        guard = NoHostReads([state["step"] for state in optimizer.state.values()])
        if index < 3:
            with guard:
                optimizer.step()
        else:
            with guard, pytest.raises(AssertionError, match="makes the host wait"):
                optimizer.step()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: float(x[0, 0]),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: x.to("cpu", torch.float64),
    ],
)
def test_the_guard_sees_every_kind_of_read(read: Any) -> None:
    x = torch.ones(2, 2)
    with NoHostReads([]), pytest.raises(AssertionError, match="makes the host wait"):
        read(x)
    with NoHostReads([x]):
        assert float(x.view(-1)[:1]) == 1.0  # exempt by its memory


def test_counts_are_kept_on_the_cpu_in_fp32() -> None:
    """As torch.optim keeps them: that is what exempts them above."""
    for name in ("mars-adamw", "ldadam", "mkor-adamw"):
        model, optimizer = setup(BY_NAME[name])
        advance(model, optimizer, range(1))
        for state in optimizer.state.values():
            assert (state["step"].device.type, state["step"].dtype, float(state["step"])) == ("cpu", torch.float32, 1.0)
