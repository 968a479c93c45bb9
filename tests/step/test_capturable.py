"""Steps recorded as a CUDA graph records them, and repeated, follow those that are taken one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import BY_NAME, is_exact, net
from graph_recorder import Recorder, capturing
from test_host_reads import NoHostReads
from torch import Tensor, nn

from rankwise import MKOR
from rankwise.comm.exchange import MatrixExchange
from rankwise.kernels import graphs, native
from rankwise.kernels import lists as foreach
from rankwise.kernels.dispatch import using
from rankwise.options.validation import OptionError

NAMES = [name for name, case in BY_NAME.items() if not case.is_mkor]
LATE = "2.weight"  # has no gradient at the first step, and so another count than the rest


@pytest.fixture(autouse=True)
def _as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(MatrixExchange, "one_by_one_on", ())
    with using(foreach):
        yield


class Run:
    """A network whose gradients are given, and lie where they lay."""

    def __init__(self, name: str, *, dtype: torch.dtype = torch.float64, **overrides: Any) -> None:
        self.model = net(dtype=dtype)
        self.lr = torch.tensor(float(BY_NAME[name].options["lr"]), dtype=dtype)
        self.optimizer = BY_NAME[name].build(self.model.named_parameters(), **{"lr": self.lr, **overrides})
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def prepare(self, index: int) -> None:
        """Gradients, the recorded ones of exact mode, and the learning rate of a step."""
        if is_exact(self.optimizer):
            self._fill(index + 1)
            self.optimizer.record_reference()
        self._fill(index)
        self.lr.fill_(0.01 / (1 + index))

    def _fill(self, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        scale = 0.02 if index % 4 > 1 else 1.0  # clipped at some steps, not at others
        for parameter in self.model.parameters():
            values = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.grad is not None:
                parameter.grad.copy_(values)

    def step(self, index: int, without: str | None = None) -> None:
        left_out = None if without is None else self.model.get_parameter(without)
        memory = None if left_out is None else left_out.grad
        if left_out is not None:
            left_out.grad = None
        self.prepare(index)
        self.optimizer.step()
        if left_out is not None:
            left_out.grad = memory

    def capture(self, index: int, **options: Any) -> Recorder:
        """A step that is taken and recorded."""
        self.prepare(index)
        recorder = Recorder(**options)
        with capturing(), recorder:
            self.optimizer.step()
        return recorder

    def replay(self, recorder: Recorder, index: int) -> None:
        self.prepare(index)
        recorder.replay()

    def host_counts(self) -> list[Tensor]:
        states = self.optimizer.matrix_states.values()
        counted = [state.name for state in self.optimizer.spec.matrix_states if state.counted]
        counts = [state[name] for state in states for name in counted]
        return counts + [state["step"] for state in self.optimizer.state.values()]

    def everything(self) -> dict[str, Tensor]:
        """Weights and all states by name."""
        found = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            found |= {f"{name}/{key}": value.clone() for key, value in self.optimizer.state[parameter].items()}
        for key, state in self.optimizer.matrix_states.items():
            found |= {f"matrix {key}/{name}": value.clone() for name, value in state.items()}
        return found


def _deviation(run: Run, twin: Run) -> float:
    """Largest difference in weights and states, in shares of the largest entry."""
    mine, theirs = run.everything(), twin.everything()
    assert mine.keys() == theirs.keys()
    worst = 0.0
    for name, value in theirs.items():
        if name.endswith("next_reference"):  # in the twin the buffer that was spent
            continue
        assert (mine[name].dtype, mine[name].shape) == (value.dtype, value.shape)
        difference = (mine[name].double() - value.double()).abs().max()
        worst = max(worst, float(difference / value.double().abs().max().clamp(min=1e-12)))
    return worst


def _tolerance(name: str, dtype: torch.dtype = torch.float64) -> float:
    # An error buffer in bfloat16 may be rounded the other way.
    return 5e-3 if "bf16" in name else 1e-11 if dtype == torch.float64 else 3e-4


@pytest.mark.parametrize("name", NAMES)
def test_replays_are_steps(name: str) -> None:
    run, twin = Run(name, capturable=True), Run(name)
    for each in (run, twin):
        each.step(0, without=LATE)
        each.step(1)
        each.step(2)
        each.optimizer.read_health()
    graph = run.capture(3)
    assert len(graph) > 40
    for index in range(4, 8):
        run.replay(graph, index)
    for index in range(3, 8):
        twin.step(index)
    assert _deviation(run, twin) < _tolerance(name)
    counted = {key.partition("/")[2]: float(value) for key, value in run.everything().items() if key.endswith("step")}
    assert set(counted.values()) <= {7.0, 8.0}
    # Health is added up on the device, replays included; messages are the host's, and there are none.
    mine, theirs = (each.optimizer.read_health() for each in (run, twin))
    assert mine.get("kept_bases", 0.0) == 0.0
    assert mine == pytest.approx(theirs, rel=1e-9)
    assert name != "mars-adamw" or 0.1 < mine["clip_rate"] < 0.9
    # And on it goes, one by one or from a second graph.
    for each in (run, twin):
        each.step(8)
    second = run.capture(9)
    run.replay(second, 10)
    run.replay(graph, 11)
    for index in range(9, 12):
        twin.step(index)
    assert _deviation(run, twin) < _tolerance(name)


@pytest.mark.parametrize("name", ["mars-adamw", "mars-shampoo", "mars-m", "sonew-tridiagonal", "ldadam"])
@pytest.mark.parametrize("method", ["independent", "cautious"])
def test_replays_follow_multiplied_rates_and_their_decay(name: str, method: str) -> None:
    """A schedule writes one rate; parameters with a multiplier, and decay as a share of it, follow in the graph."""
    options = {"lr_scale": {"0.*": 0.25, "*.bias": 2.0}, "weight_decay": 0.3, "weight_decay_method": method}
    if name in ("mars-shampoo", "mars-m"):
        options["scale"] = "rms"
    run, twin, plain = Run(name, capturable=True, **options), Run(name, **options), Run(name)
    for each in (run, twin, plain):
        for index in range(3):
            each.step(index)
    graph = run.capture(3)
    for index in range(4, 7):
        run.replay(graph, index)
    for index in range(3, 7):
        twin.step(index)
        plain.step(index)
    assert _deviation(run, twin) < _tolerance(name)
    assert _deviation(twin, plain) > 1e-3


@pytest.mark.parametrize("name", ["mars-adamw", "mars-m", "sonew-tridiagonal", "sonew-band4", "ldadam"])
def test_replays_in_single_precision(name: str) -> None:
    run, twin = (Run(name, dtype=torch.float32, capturable=capturable) for capturable in (True, False))
    for each in (run, twin):
        for index in range(3):
            each.step(index)
    graph = run.capture(3)
    for index in range(4, 8):
        run.replay(graph, index)
    for index in range(3, 8):
        twin.step(index)
    assert _deviation(run, twin) < _tolerance(name, torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_without_the_option_replays_repeat_one_step(name: str) -> None:
    """What the first test would miss if replays did not freeze what the host knows."""
    run, twin = Run(name), Run(name)
    for each in (run, twin):
        for index in range(3):
            each.step(index)
    run.prepare(3)
    graph = Recorder(on_host=run.host_counts(), reads=True)
    with graph:
        run.optimizer.step()
    twin.step(3)
    assert _deviation(run, twin) == 0.0
    for index in range(4, 8):
        run.replay(graph, index)
        twin.step(index)
    weights = [torch.cat([p.detach().flatten() for p in each.model.parameters()]) for each in (run, twin)]
    assert (weights[0] - weights[1]).abs().max() > 1e-5 * weights[1].abs().max()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_back(name: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatrixExchange, "one_by_one_on", ("cpu",) if alone else ())
    run = Run(name, capturable=True)
    for index in range(2):
        run.step(index)
    for index in range(2, 4):
        run.prepare(index)
        with NoHostReads([]) as guard:
            run.optimizer.step()
        assert guard.operations > 50


def test_a_graph_without_some_parameter() -> None:
    """Counts go apart during replays, of which the host knows nothing, and the next step has them right."""
    for name in ("mars-adamw", "sonew-tridiagonal", "ldadam"):
        run, twin = Run(name, capturable=True), Run(name)
        for each in (run, twin):
            for index in range(2):
                each.step(index)
            each.step(2, without=LATE)
        left_out = run.model.get_parameter(LATE)
        memory, left_out.grad = left_out.grad, None
        graph = run.capture(3)
        for index in (4, 5):
            run.replay(graph, index)
        left_out.grad = memory
        run.step(6)
        for index in (3, 4, 5):
            twin.step(index, without=LATE)
        twin.step(6)
        assert _deviation(run, twin) < 1e-11, name
        states = run.optimizer.state
        assert (float(states[left_out]["step"]), float(states[run.model.get_parameter("0.weight")]["step"])) == (3, 7)


@pytest.mark.parametrize("name", ["mars-m", "ldadam"])
def test_a_graph_without_one_of_two_equal_matrices(name: str) -> None:
    """Which of a batch's matrices are stepped is known on the device, too, once it was met."""
    runs = [Run(name, capturable=capturable) for capturable in (True, False)]
    for each in runs:
        each.model = nn.Sequential(*(nn.Linear(10, 10, bias=False, dtype=torch.float64) for _ in range(3)))
        each.model.load_state_dict({f"{layer}.weight": torch.eye(10) * (layer + 1) for layer in range(3)})
        each.optimizer = BY_NAME[name].build(
            each.model.named_parameters(), lr=each.lr, capturable=each.optimizer.spec.capturable
        )
        for parameter in each.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        each.step(0)
        each.model[1].weight.grad = None
        each.step(1)
    run, twin = runs
    before = run.model[1].weight.detach().clone()
    run.prepare(2)
    recorder = Recorder()
    with capturing(), NoHostReads([]), recorder:
        run.optimizer.step()
    run.replay(recorder, 3)
    for index in (2, 3):
        twin.step(index)
    assert torch.equal(run.model[1].weight, before)
    assert _deviation(run, twin) < 1e-11


@pytest.mark.parametrize("name", ["ldadam", "ldadam-no-feedback"])
def test_betas_that_change_before_a_capture(name: str) -> None:
    """The first repeated step finds a buffer that was written with other betas, the next ones do not."""
    run, twin = Run(name, capturable=True), Run(name)
    for each in (run, twin):
        for index in range(3):
            each.step(index)
        for group in each.optimizer.param_groups:
            group["betas"] = (0.7, 0.9)
    graph = run.capture(3)
    twin.step(3)
    for index in range(4, 7):
        assert _deviation(run, twin) < 1e-11
        run.replay(graph, index)
        twin.step(index)
    assert _deviation(run, twin) < 1e-11


def test_steps_taken_one_by_one_are_the_same() -> None:
    for name in NAMES:
        run, twin = Run(name, capturable=True), Run(name)
        for each in (run, twin):
            each.step(0, without=LATE)
            for index in range(1, 5):
                each.step(index)
        assert _deviation(run, twin) < _tolerance(name), name


@pytest.mark.compiled
def test_on_cpus_the_option_changes_nothing() -> None:
    for name in NAMES:
        run, twin = Run(name, capturable=True), Run(name)
        with using(native):
            for each in (run, twin):
                each.step(0, without=LATE)
                for index in range(1, 4):
                    each.step(index)
        assert _deviation(run, twin) == 0.0, name


@pytest.mark.parametrize("name", ["mars-adamw", "sonew-tridiagonal", "ldadam"])
@pytest.mark.parametrize(("written", "read"), [(True, False), (False, True), (True, True)])
def test_checkpoints_are_the_same(name: str, written: bool, read: bool) -> None:
    source, target, twin = Run(name, capturable=written), Run(name, capturable=read), Run(name)
    for each in (source, twin):
        for index in range(3):
            each.step(index)
    target.step(0)
    target.model.load_state_dict(source.model.state_dict())
    target.optimizer.load_state_dict(source.optimizer.state_dict())
    for parameter in target.model.parameters():
        assert target.optimizer.state[parameter]["step"].dtype == torch.float32
    # What a checkpoint says of lr is a tensor of its own.
    for group in target.optimizer.param_groups:
        group["lr"] = target.lr
    for index in (3, 4):
        target.step(index)
        twin.step(index)
    if read:
        graph = target.capture(5)
        target.replay(graph, 6)
    for index in (5, 6):
        twin.step(index)
        if not read:
            target.step(index)
    assert _deviation(target, twin) < _tolerance(name)


def test_counts_lie_on_the_device() -> None:
    """Moved there when a checkpoint is loaded, as torch does; without the option they stay on the CPU."""
    saved = Run("ldadam")
    saved.step(0)
    for capturable, wanted in ((True, "meta"), (False, "cpu")):
        parameter = nn.Parameter(torch.empty(10, 10, device="meta"))
        case = BY_NAME["ldadam"]
        optimizer = case.build([("2.weight", parameter)], capturable=capturable)
        one = case.build([("2.weight", nn.Parameter(saved.model.get_parameter("2.weight").detach()))])
        (tensor,) = one.param_groups[0]["params"]
        tensor.grad = torch.ones_like(tensor)
        one.step()
        optimizer.load_state_dict(one.state_dict())
        assert optimizer.state[parameter]["step"].device.type == wanted
        unit = optimizer.planner.plan_present(optimizer, optimizer.param_groups)
        fresh = unit.fresh_states(unit.exchange.owned()[0])
        assert {fresh[name].device.type for name in ("step", "beta1")} == {wanted}


def test_a_failed_factorisation_keeps_the_basis() -> None:
    run = Run("ldadam-no-feedback", capturable=True)
    names = [name for name, _ in run.model.named_parameters()]

    def gradients(value: float) -> None:
        for parameter in run.model.parameters():
            parameter.grad.fill_(value)  # type: ignore[union-attr]

    gradients(0.0)
    run.optimizer.step()
    before = {key: state["basis"].clone() for key, state in run.optimizer.matrix_states.items()}
    run.optimizer.read_health()
    assert before and set(before) <= set(names)
    with NoHostReads([]):
        run.optimizer.step()
    for key, basis in before.items():
        assert torch.equal(run.optimizer.matrix_states[key]["basis"], basis)
    assert run.optimizer.read_health()["kept_bases"] == len(before)
    # It goes on from there, where all gradients are one vector's multiples and the second column fails, too.
    gradients(1.0)
    run.optimizer.step()
    for key in before:
        basis = run.optimizer.matrix_states[key]["basis"]
        torch.testing.assert_close(basis.mT @ basis, torch.eye(2, dtype=basis.dtype), rtol=0.0, atol=1e-12)
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())
    generator = torch.Generator().manual_seed(0)
    for parameter in run.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    run.optimizer.read_health()
    run.optimizer.step()
    assert run.optimizer.read_health()["kept_bases"] == 0.0
    assert all(not torch.equal(run.optimizer.matrix_states[key]["basis"], basis) for key, basis in before.items())


@pytest.mark.compiled
def test_the_metric_is_not_of_cpus() -> None:
    """Where the host sees what has failed, and another basis is found."""
    found = []
    for module in (foreach, native):
        run = Run("ldadam")
        with using(module):
            for index in range(2):
                run.step(index)
            found.append("kept_bases" in run.optimizer.read_health())
    assert found == [True, False]


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_basis_must_have_moved_before_a_capture() -> None:
    """The second step meets solvers and kernels that the first has no use for, and a capture cannot load them."""
    run = Run("ldadam", capturable=True)
    run.step(0)
    before = run.everything()
    with pytest.raises(RuntimeError, match="first step that moves a basis cannot be captured"):
        run.capture(1)
    assert all(torch.equal(value, before[key]) for key, value in run.everything().items())
    run.step(1)
    run.replay(run.capture(2), 3)


@pytest.mark.parametrize("name", ["mars-adamw", "mars-lion", "sonew-tridiagonal", "ldadam"])
def test_the_first_step_cannot_be_captured(name: str) -> None:
    run = Run(name, capturable=True)
    start = run.everything()
    with pytest.raises(RuntimeError, match=r"first step.* cannot be captured in a graph: take a step on the same"):
        run.capture(0)
    assert all(torch.equal(value, start[key]) for key, value in run.everything().items())
    run.step(0)
    if name.startswith("ldadam"):
        run.step(1)
    run.capture(2)


def test_nor_can_that_of_a_parameter() -> None:
    run = Run("mars-adamw", capturable=True)
    run.step(0, without=LATE)
    counts = [float(state["step"]) for state in run.optimizer.state.values() if state]
    with pytest.raises(RuntimeError, match="the first step of a parameter cannot be captured"):
        run.capture(1)
    assert counts == [float(state["step"]) for state in run.optimizer.state.values() if state]


def test_nor_that_of_a_loaded_matrix() -> None:
    run = Run("ldadam", capturable=True)
    run.step(0)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    with pytest.raises(RuntimeError, match="the first step of a matrix cannot be captured"):
        run.capture(1)


def test_nor_gradients_for_another_set_of_parameters() -> None:
    run = Run("sonew-tridiagonal", capturable=True)
    run.step(0)
    run.model.get_parameter(LATE).grad = None
    with pytest.raises(RuntimeError, match="another set of parameters than before cannot be captured"):
        run.capture(1)


def _mkor() -> Run:
    run = Run.__new__(Run)
    run.model = net()
    run.lr = torch.tensor(0.01, dtype=torch.float64)
    run.optimizer = MKOR(run.model.named_parameters(), lr=run.lr)
    run.optimizer.capture(run.model)
    run.model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    run.optimizer.step()
    return run


@pytest.mark.parametrize(
    ("build", "fix"),
    [
        (lambda: Run("mars-adamw"), "MARS.step.. cannot be captured .*; build it with capturable=True"),
        (lambda: Run("ldadam"), "LDAdam.step.. cannot be captured .*; build it with capturable=True"),
        (_mkor, "MKOR.step.. cannot be captured .*; leave step.. out of the graph"),
    ],
)
def test_steps_that_a_graph_would_repeat_are_refused(build: Callable[[], Run], fix: str) -> None:
    run = build()
    run.optimizer.step()
    start = run.everything()
    with capturing(), pytest.raises(RuntimeError, match=fix):
        run.optimizer.step()
    assert all(torch.equal(value, start[key]) for key, value in run.everything().items())


def test_a_learning_rate_elsewhere_is_refused() -> None:
    run = Run("mars-adamw", capturable=True)
    run.step(0)
    run.optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    with capturing(), pytest.raises(RuntimeError, match="lr is a tensor on another device .*; make it one on cpu"):
        run.optimizer.step()


@pytest.mark.parametrize("name", ["mars-adamw", "sonew-tridiagonal", "ldadam"])
def test_undone_steps_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match="capturable=True is invalid: it must be false with skip_nonfinite=True"):
        Run(name, capturable=True, skip_nonfinite=True)


def test_mkor_has_no_such_option() -> None:
    with pytest.raises(TypeError, match="capturable"):
        MKOR(net().named_parameters(), capturable=True)  # type: ignore[call-arg]


def test_a_cpu_is_never_captured() -> None:
    assert not graphs.is_capturing(torch.device("cpu"))
    graphs.refuse_capture(torch.device("cpu"), "nothing")
