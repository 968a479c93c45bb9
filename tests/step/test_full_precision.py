"""What the process lets its model's products be rounded to does not round those of a step."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rankwise import MARS, MKOR, LDAdam
from rankwise.kernels import full_precision as switches
from rankwise.kernels import lists
from rankwise.kernels.dispatch import using
from rankwise.kernels.full_precision import full_precision

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "linalg_solve_triangular", "linalg_cholesky_ex", "dot")


def newer(value: str) -> Callable[[], None]:
    """Through the switch of one operation, as torch has them since 2.9."""

    def switch() -> None:
        torch.backends.cuda.matmul.fp32_precision = value
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"

    return switch


def wider() -> None:
    torch.backends.fp32_precision = "tf32"


def mixed() -> None:
    """The older switch, and then the newer one against it: torch refuses to read the older one from here on."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.matmul.fp32_precision = "ieee"


def allowed() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


SETTINGS: dict[str, Callable[[], None]] = {
    "untouched": lambda: None,
    **{name: lambda name=name: torch.set_float32_matmul_precision(name) for name in ("highest", "high", "medium")},
    "allow_tf32": allowed,
    "newer": newer("tf32"),
    "wider": wider,
    "mixed": mixed,
}
NEWER = hasattr(torch._C, "_get_fp32_precision_getter")


def state() -> list[str]:
    """All switches, whether or not they can be read."""

    def read(get: Callable[[], Any]) -> str:
        try:
            return str(get())
        except RuntimeError:
            return "contradiction"

    found = [torch.get_float32_matmul_precision, lambda: torch.backends.cuda.matmul.allow_tf32]
    if NEWER:
        levels = (("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("mkldnn", "all"), ("mkldnn", "matmul"))
        found += [lambda level=level: torch._C._get_fp32_precision_getter(*level) for level in levels]
    return list(map(read, found))


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param in ("newer", "wider", "mixed") and not NEWER:
        pytest.skip("this torch has the older switch only")
    SETTINGS[request.param]()
    yield request.param
    if NEWER:
        for level in (("generic", "all"), ("mkldnn", "all"), ("cuda", "all")):
            torch._C._set_fp32_precision_setter(*level, "none")
    torch.set_float32_matmul_precision("highest")
    if NEWER:
        for operation in (("cuda", "matmul"), ("mkldnn", "matmul")):
            torch._C._set_fp32_precision_setter(*operation, "none")


class Watch(TorchDispatchMode):
    """Notes what products are allowed to be rounded to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in PRODUCTS:
            self.seen.append(switches._is_reduced())
        return func(*args, **kwargs or {})


def trained(build: Callable[[nn.Module], Any], forms: ModuleType | None) -> tuple[Watch, Any, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 12))
    optimizer = build(model)
    watch = Watch()

    def steps() -> None:
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(8, 16)).square().sum().backward()
            with watch:
                optimizer.step()

    if forms is None:
        steps()
    else:
        with using(forms):
            steps()
    return watch, optimizer, model


def mkor(model: nn.Module) -> Any:
    optimizer = MKOR(list(model.named_parameters()), update_interval=1, factor_dtype="float32")
    optimizer.capture(model)
    return optimizer


BUILDS: dict[str, Callable[[nn.Module], Any]] = {
    "LDAdam": lambda model: LDAdam(list(model.named_parameters()), rank=4),
    "MARS-M": lambda model: MARS(list(model.named_parameters()), variant="muon", ns_dtype="float32"),
    "MKOR": mkor,
}


@pytest.mark.parametrize("name", BUILDS)
def test_products_of_a_step_are_not_rounded_and_the_setting_is_left(name: str, setting: str) -> None:
    before = state()
    watch, *_ = trained(BUILDS[name], lists)
    assert len(watch.seen) >= 3 and not any(watch.seen)
    assert state() == before


def test_the_same_bits_under_every_setting_on_this_machine(setting: str) -> None:
    """oneDNN rounds operands where the setting lets it and the processor can."""
    for build in BUILDS.values():
        weights = [model.state_dict() for _, _, model in (trained(build, None), _undisturbed(build))]
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def _undisturbed(build: Callable[[nn.Module], Any]) -> Any:
    with full_precision():
        return trained(build, None)


def test_the_setting_is_left_where_a_step_raises(setting: str) -> None:
    before = state()
    model = nn.Linear(16, 24)
    optimizer = LDAdam(list(model.named_parameters()), rank=4)
    model(torch.randn(8, 16)).sum().backward()

    class Broken(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__.partition(".")[0] in PRODUCTS:
                raise MemoryError("no room for this product")
            return func(*args, **kwargs or {})

    with pytest.raises(MemoryError, match="no room"), using(lists), Broken():
        optimizer.step()
    assert state() == before and switches._inside == 0


def test_the_closures_products_are_the_users(setting: str) -> None:
    model = nn.Linear(16, 24)
    optimizer = LDAdam(list(model.named_parameters()), rank=4)
    seen: list[list[str]] = []
    before = state()

    def closure() -> torch.Tensor:
        seen.append(state())
        loss = model(torch.ones(8, 16)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    assert seen == [before]


def test_threads_that_overlap_leave_the_setting(setting: str) -> None:
    before = state()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with full_precision():
            inside.set()
            assert leave.wait(10)

    thread = threading.Thread(target=other)
    with full_precision():
        thread.start()
        assert inside.wait(10)
    assert not switches._is_reduced(), "the other one still multiplies"
    leave.set()
    thread.join()
    assert state() == before


def test_nothing_is_switched_where_nothing_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "_switched", lambda: pytest.fail("there is nothing to switch"))
    with full_precision():
        pass


def test_torch_without_the_newer_switches() -> None:
    """As before torch 2.9, in a process of its own."""
    code = """
import torch
for name in ("_get_fp32_precision_getter", "_set_fp32_precision_setter"):
    if hasattr(torch._C, name):
        delattr(torch._C, name)
from rankwise.kernels.full_precision import full_precision
for name in ("highest", "high", "medium"):
    torch.set_float32_matmul_precision(name)
    with full_precision():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == name
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
