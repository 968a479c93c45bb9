"""What is decided for a parameter is decided alike wherever it is stored, and codes are saved as codes.

A tensor that a framework hands over may hold many parameters, or a part of one: no threshold may ask for its size. And
a run that fits into memory must be able to save: nothing opens more than a few states at a time.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from simulated import Case, Framework, run_of, world_group
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.checkpoint.named_vectors import restore, saved_vectors
from rankwise.layout.chunked_vectors import VectorFolder, save_vectors
from rankwise.states import optimizer_spec, packed_states

INT8: dict[str, Any] = {"state_dtype": "int8"}
LAYOUTS = ("flat", "cut", "narrowed", "views", "tensor", "tensor_copies")

# --- thresholds ------------------------------------------------------------------------------------------------------

# Every option whose effect depends on the size or the shape of a parameter, with a value between those of the model's.
THRESHOLDS = (
    Case("codes", MARS, INT8),
    Case("codes of matrices alone", MARS, {"variant": "muon", "clip": None, **INT8}),
    Case("codes beside bfloat16", SONew, {"graft": "rmsprop", **INT8}),
    Case("codes of every buffer", LDAdam, {"rank": 2, **INT8}),
    Case("what a rank saves", LDAdam, {"rank": 3}),
    Case("sides with a factor", MKOR, {"max_factor_dim": 16, **INT8}),
    Case("sides of sketches", MKOR, {"max_factor_dim": 11, "rule": "sketch"}),
    Case("rates by shape", MARS, {"variant": "muon", "scale": "rms"}),
)


def _decided(framework: Framework) -> dict[str, Any]:
    """For each parameter that this rank has any of: its rule, why, and the types of its states."""
    found = {}
    optimizer = framework.optimizer
    for unit in optimizer.planned_units:
        for entry in unit.stored_entries:
            name = entry.info.name
            if name.startswith("unused"):
                continue  # MKOR learns it from steps, of which some layouts take two
            types = {state: unit.states.type_of(state, entry) for state in optimizer.kept_states(name)}
            found[name] = (entry.route.rule, entry.route.reason, types)
    return found


def _decisions(rank: int, world: int, case: Case) -> list[dict[str, Any]]:
    optimizer_spec.FEWEST_CODED = 85
    found = []
    for layout in LAYOUTS:
        framework = Framework(layout, case, torch.float32, rank, world, world_group())
        framework.step()
        found.append(_decided(framework))
    return found


@pytest.mark.parametrize("case", THRESHOLDS, ids=lambda case: case.name)
def test_thresholds_ask_for_the_parameter(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_spec, "FEWEST_CODED", 85)
    alone = Framework("replicated", case, torch.float32)
    alone.step()
    expected = _decided(alone)
    assert len({str(found) for found in expected.values()}) > 1, "the threshold must divide the parameters"
    for found in run_ranks(2, _decisions, case):
        for layout, decided in zip(LAYOUTS, found, strict=True):
            assert decided == {name: expected[name] for name in decided}, layout


# --- codes in dictionaries and files ---------------------------------------------------------------------------------

KINDS: dict[str, Callable[..., Any]] = {
    "mars-adamw": MARS,
    "mars-lion": lambda params, **options: MARS(params, variant="lion", **options),
    "mars-m": lambda params, **options: MARS(params, variant="muon", ns_dtype="float32", **options),
    "mars-m, no clip": lambda params, **options: MARS(params, variant="muon", ns_dtype="float32", clip=None, **options),
    "sonew": SONew,
    "ldadam": lambda params, **options: LDAdam(params, rank=8, **options),
    "mkor": lambda params, **options: MKOR(params, update_interval=2, max_factor_dim=128, **options),
}
BUCKET = 1 << 12


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of what may be opened at a time: values in float32, and what the conversion takes."""
    monkeypatch.setattr(packed_states, "_AT_ONCE", BUCKET)
    return 64 * BUCKET


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a, self.b, self.c = nn.Linear(310, 523), nn.Linear(523, 301), nn.Linear(301, 7)
        for parameter in self.parameters():
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))  # type: ignore[no-any-return]


def _made(kind: str, steps: int, **options: Any) -> tuple[Net, Any]:
    model = Net()
    optimizer = KINDS[kind](model.named_parameters(), lr=1e-2, **options)
    optimizer.capture(model)
    _train(model, optimizer, range(steps))
    return model, optimizer


def _train(model: Net, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(16, 310, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


class _Live(TorchDispatchMode):
    """Bytes of the storages that are made inside and live at once, the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and not leaf.is_meta and self._key(leaf) not in self._known | given:
                self._enter(leaf.untyped_storage())
        return found

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _enter(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._leave, key, size)

    def _leave(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@contextmanager
def _counted() -> Iterator[_Live]:
    live = _Live()
    with live:
        yield live


def _bytes(state_dict: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(state_dict) if isinstance(leaf, Tensor))


def _bits(optimizer: Any) -> list[Tensor]:
    states = optimizer.state_dict()
    return [leaf for leaf in tree_leaves((states["state"], states["matrix_states"])) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_loading_take_a_bucket_more_than_holding(kind: str, bucket: int) -> None:
    model, optimizer = _made(kind, 2, **INT8)
    held = sum(optimizer.state_bytes().values())
    file = io.BytesIO()
    with _counted() as saving:
        torch.save(optimizer.state_dict(), file)
    assert saving.most <= bucket, "codes were opened"
    assert file.tell() <= 1.02 * held + (1 << 15), "the file is larger than the states"

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, other = _made(kind, 0, **INT8)
    with _counted() as loading:
        other.load_state_dict(saved)
    assert loading.most <= _bytes(saved["state"]) + _bytes(saved["matrix_states"]) + bucket
    again.load_state_dict(model.state_dict())
    assert all(torch.equal(one, two) for one, two in zip(_bits(optimizer), _bits(other), strict=True))
    _train(model, optimizer, range(2, 4))
    _train(again, other, range(2, 4))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_other_types_open_codes(kind: str, dtype: str | None, bucket: int) -> None:
    """The values of an optimizer with wide states are those that were kept, rounded to its type."""
    _, optimizer = _made(kind, 2, **INT8)
    _, other = _made(kind, 0, state_dtype=dtype)
    other.load_state_dict(optimizer.state_dict())
    theirs = optimizer.saved.opened(optimizer.param_groups, optimizer.state)
    for mine, tensor in zip(theirs, other.param_groups[0]["params"], strict=True):
        for name, value in theirs[mine].items():
            if isinstance(value, Tensor):
                found = other.state[tensor][name]
                assert torch.equal(found, value.to(found.dtype)), name


@pytest.mark.parametrize("kind", KINDS)
def test_wide_states_of_older_files_become_codes(kind: str) -> None:
    """Opened states, as earlier versions saved them and torch's functions take them, mean the same codes."""
    model, optimizer = _made(kind, 2, **INT8)
    again, other = _made(kind, 0, **INT8)
    saved = optimizer.state_dict()
    opened = optimizer.saved.opened(optimizer.param_groups, optimizer.state)
    states = [{name: value for name, value in state.items() if name != "matrix"} for state in opened.values()]
    for record in saved["layout"]:
        record.pop("packed", None)
    other.load_state_dict({**saved, "state": dict(enumerate(states))})
    again.load_state_dict(model.state_dict())
    _train(model, optimizer, range(2, 4))
    _train(again, other, range(2, 4))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))


def test_codes_without_their_layout_are_refused_by_name() -> None:
    _, optimizer = _made("mars-adamw", 1, **INT8)
    _, other = _made("mars-adamw", 0, **INT8)
    saved = optimizer.state_dict()
    del saved["layout"]
    with pytest.raises(ValueError, match=r"'exp_avg' of 'a.weight' is in codes.*'layout'"):
        other.load_state_dict(saved)
    assert not other.state


def test_hooks_after_loading_see_all_states() -> None:
    _, optimizer = _made("mars-adamw", 1, **INT8)
    _, other = _made("mars-adamw", 0, **INT8)
    seen: list[int] = []
    other.register_load_state_dict_post_hook(lambda found: seen.append(sum(map(len, found.state.values()))))
    other.load_state_dict(optimizer.state_dict())
    assert seen == [sum(map(len, optimizer.state.values()))]


def test_adamw_gets_opened_moments() -> None:
    model, optimizer = _made("mars-adamw", 2, **INT8)
    adamw = torch.optim.AdamW(model.parameters())
    optimizer.hand_over(adamw)
    opened = optimizer.saved.opened(optimizer.param_groups, optimizer.state)
    for parameter in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(adamw.state[parameter][name], opened[parameter][name].float())


# --- frameworks' tensors ---------------------------------------------------------------------------------------------

EXACT = (
    Case("mars-adamw", MARS, {"clip": None, "state_rounding": "stochastic", **INT8}),
    Case("mars-lion", MARS, {"variant": "lion", "clip": None, **INT8}),
    Case("sonew-diagonal", SONew, {"band": 0, "graft": "rmsprop", **INT8}),
)


def _units(optimizer: Any) -> list[list[tuple[Tensor, int]]]:
    return [[(tensor, at) for at, group in enumerate(optimizer.param_groups) for tensor in group["params"]]]


def _weights(framework: Framework) -> list[Tensor]:
    return [tensor for group in framework.optimizer.param_groups for tensor in group["params"]]


def _save(rank: int, world: int, folder: Path) -> list[Any]:
    """Two steps on joined tensors; what a rank saves of them, and whether codes are saved as codes."""
    optimizer_spec.FEWEST_CODED = 85
    extras = []
    for case in EXACT:
        framework = Framework("flat", case, torch.float32, rank, world, world_group())
        for _ in range(2):
            framework.step()
        optimizer = framework.optimizer
        with _counted() as saving:
            state = optimizer.state_dict()
        assert saving.most <= 64, "codes were opened"
        again = Framework("flat", case, torch.float32, rank, world, world_group())
        again.optimizer.load_state_dict(state)
        saved_again = again.optimizer.state_dict()["state"]
        for key, own in state["state"].items():
            assert {value.dtype for value in own.values()} & {torch.int8, torch.uint8}
            assert all(torch.equal(value, saved_again[key][name]) for name, value in own.items())
        save_vectors(saved_vectors(state, _weights(framework)), folder / case.name, world_group())
        extras.append(optimizer.extra_state())
    return extras


def _go_on(rank: int, world: int, folder: Path, extras: list[Any]) -> list[Any]:
    optimizer_spec.FEWEST_CODED = 85
    found = []
    for case, extra in zip(EXACT, extras, strict=True):
        for layout in ("cut", "views"):
            framework = Framework(layout, case, torch.float32, rank, world, world_group())
            framework.optimizer.plan_ahead(_units(framework.optimizer))
            restore(framework.optimizer, VectorFolder(folder / case.name), world_group(), extra)
            framework.count = 2
            for _ in range(2):
                framework.step()
            found.append(framework.pieces())
    return found


def test_codes_go_to_other_cuts_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_spec, "FEWEST_CODED", 85)
    expected = []
    for case in EXACT:
        alone = Framework("replicated", case, torch.float32)
        for _ in range(4):
            alone.step()
        expected += [{piece.key: values for piece, values in alone.pieces()}] * 2
    extras, *_ = run_ranks(2, _save, tmp_path)
    for outcomes in ([_go_on(0, 1, tmp_path, extras)], run_ranks(3, _go_on, tmp_path, extras)):
        for found in outcomes:
            for wanted, held in zip(expected, found, strict=True):
                for piece, values in held:
                    assert torch.equal(values, run_of(wanted[piece.key], piece))
