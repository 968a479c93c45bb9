"""The layers: who may import whom, read from the source without running it."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwise.names import CLASSES

ROOT = Path(__file__).resolve().parents[1]
OURS = ("rankwise", "deepspeed_plugin", "megatron_patches")
FRAMEWORKS = ("deepspeed", "megatron", "transformers", "accelerate", "transformer_engine", "torchtitan")
PARTS = ("rankwise", "deepspeed_plugin", "megatron_patches", "launch", "configs", "benchmarks")


def module_name(path: Path) -> str:
    """Dotted name under which a file is installed: launch and configs lie below rankwise."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in ("launch", "configs"):
        parts.insert(0, "rankwise")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax of a file, which nobody changes."""
    return ast.parse(path.read_text())


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Absolute names of everything a file imports, wherever in it; also by importlib with a literal name."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


@functools.cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    return list(imports(parsed(path), module_name(path), path.name == "__init__.py"))


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


# Part of the tree: what of ours it may import. The longest matching key counts.
# A paper's room is a folder with an optimizer of its own.
PAPERS = tuple(
    f"rankwise.{path.parent.name}"
    for path in sources("rankwise")
    if path.parts[-2:] != ("step", "optimizer.py") and path.name == "optimizer.py"
)
# From below: each may import what stands before it, and is named with what of that it does.
ROOMS = tuple(
    f"rankwise.{room}"
    for room in "version intervals options updates kernels routing layout comm".split()
    + "states plan saving step checkpoint statistics".split()
)


def rooms_up_to(room: str) -> tuple[str, ...]:
    return ROOMS[: ROOMS.index(f"rankwise.{room}") + 1]


ALLOWED: dict[str, tuple[str, ...]] = {
    "rankwise.options": ("rankwise.options",),
    "rankwise.updates": ("rankwise.updates",),
    "rankwise.kernels": ("rankwise.kernels", "rankwise.intervals", "rankwise.updates"),
    "rankwise.routing": ("rankwise.routing", "rankwise.options"),
    "rankwise.layout": ("rankwise.layout", "rankwise.intervals", "rankwise.options", "rankwise.routing"),
    "rankwise.comm": ("rankwise.comm", "rankwise.intervals", "rankwise.layout", "rankwise.kernels"),
    **{f"rankwise.{room}": rooms_up_to(room) for room in ("states", "plan", "saving", "step", "checkpoint")},
    "rankwise.statistics": ROOMS,
    # A paper's room knows no other paper's.
    **{paper: (paper, *ROOMS) for paper in PAPERS},
    "rankwise": (*PAPERS, *ROOMS, "rankwise.estimate", "rankwise.frameworks", "rankwise.fsdp"),
    # A front end, for what torch itself does: imported by its users, and once so that the core can call it.
    "rankwise.fsdp": ("rankwise.fsdp", *ROOMS),
    # Finds optimizers of users' own, before names are read.
    "rankwise.rule_modules": ("rankwise.options",),
    # The one table of names.
    "rankwise.names": (*PAPERS, "rankwise.options", "rankwise.rule_modules", "rankwise.step"),
    # What optimizers of users' own may import.
    "rankwise.extension": ("rankwise.names", *ROOMS),
    # For one framework; imported by nobody but its users.
    "rankwise.hf": (*PAPERS, "rankwise.names", *ROOMS),
    "rankwise.torchtitan": ("rankwise.names", *ROOMS),
    # ``python -m rankwise``: imported by nobody.
    "rankwise.__main__": ("rankwise.launch",),
    "deepspeed_plugin": ("deepspeed_plugin", "rankwise"),
    "megatron_patches": ("megatron_patches", "rankwise"),
    "rankwise.launch": OURS,
    "rankwise.configs": ("rankwise.configs", "rankwise.names"),
    "benchmarks": ("benchmarks", *OURS),
}
# Never, whatever the above says: the core and the framework packages do not know the command line.
NOT_THE_COMMAND_LINE = ("rankwise.launch", "rankwise.configs")


def layer_of(module: str) -> str:
    return max((key for key in ALLOWED if within(module, key)), key=len)


def violations(module: str, names: list[tuple[int, str]]) -> list[str]:
    """Imports of ours that the layer of ``module`` may not make, and of frameworks it may not know."""
    layer = layer_of(module)
    found = []
    for line, name in names:
        allowed = within(name, *ALLOWED[layer])
        if layer not in ("rankwise.launch", "rankwise.configs", "rankwise.__main__", "benchmarks"):
            allowed = allowed and not within(name, *NOT_THE_COMMAND_LINE)
        if within(name, *OURS) and not allowed:
            found.append(f"{module}:{line} imports {name}")
        if within(name, *FRAMEWORKS):
            home = {
                "deepspeed_plugin": ("deepspeed",),
                "megatron_patches": ("megatron", "transformer_engine"),
                "rankwise.hf": ("transformers",),
                "rankwise.torchtitan": ("torchtitan",),
            }
            free = ("rankwise.launch", "rankwise.configs", "benchmarks")
            if layer not in free and not within(name, *home.get(layer, ())):
                found.append(f"{module}:{line} imports {name}")
    return found


@pytest.mark.parametrize("part", PARTS)
def test_imports_point_downwards(part: str) -> None:
    if not (ROOT / part).is_dir():
        pytest.skip(f"there is no {part}/")
    files = sources(part)
    assert files or part in ("configs", "benchmarks")
    assert [line for path in files for line in violations(module_name(path), imports_of(path))] == []


def circles(imported: dict[str, set[str]]) -> set[str]:
    """Modules from which imports lead back to themselves: what is left once all that import nothing left are gone."""
    left = {module: set(names) for module, names in imported.items()}
    while gone := [module for module, names in left.items() if not names & left.keys()]:
        for module in gone:
            del left[module]
    return set(left)


def test_no_module_of_the_core_imports_itself_in_a_circle() -> None:
    """Not for types alone either."""
    paths = {module_name(path): path for path in sources("rankwise")}
    imported = {}
    for module, path in paths.items():
        names = {name for _, name in imports_of(path)}
        imported[module] = {name if name in paths else name.rpartition(".")[0] for name in names}
    assert circles(imported) == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("module", "source", "forbidden"),
    [
        ("rankwise.updates.lamb", "from rankwise.layout.layout import Layout", True),
        ("rankwise.updates.lamb", "from .adamw import Scalar", False),
        ("rankwise.updates.lamb", "from ..kernels import lists", True),
        ("rankwise.comm.owner_plan", "import rankwise.step.optimizer", True),
        ("rankwise.comm.owner_plan", "from .layout import Layout", False),
        ("rankwise.kernels.lists", "from rankwise.updates.adamw import Scalar", False),
        ("rankwise.kernels.lists", "from rankwise.plan import step_unit as unit", True),
        ("rankwise.kernels.dispatch", "from rankwise.mkor import cpu", True),
        ("rankwise.plan.step_unit", "from rankwise.layout.layout import Layout", False),
        ("rankwise.plan.step_unit", "from rankwise.step.undo import Undo", True),
        ("rankwise.step.optimizer", "from rankwise.plan.step_unit import StepUnit", False),
        ("rankwise.step.optimizer", "from rankwise.layout.layout import Layout", False),
        ("rankwise.step.optimizer", "from rankwise.mkor.formulas import guarded", True),
        ("rankwise.step.optimizer", "from rankwise.statistics import hooks", True),
        ("rankwise.step.optimizer", "def f():\n    import deepspeed_plugin", True),
        ("rankwise.step.optimizer", "def f():\n    import deepspeed", True),
        ("rankwise.mars.optimizer", "from rankwise.ldadam import formulas", True),
        ("rankwise.mars.optimizer", "from .formulas import clip", False),
        ("rankwise.mkor.optimizer", "from rankwise.statistics import hooks", False),
        ("rankwise.statistics.hooks", "from transformers.pytorch_utils import Conv1D", True),
        ("rankwise.step.optimizer", "import rankwise.launch.cli", True),
        ("rankwise.step.optimizer", "importlib.import_module('megatron.core')", True),
        ("deepspeed_plugin.registry", "import megatron_patches", True),
        ("deepspeed_plugin.registry", "import deepspeed.ops", False),
        ("deepspeed_plugin.registry", "import megatron", True),
        ("deepspeed_plugin.registry", "from rankwise.launch import cli", True),
        ("megatron_patches.registry", "from deepspeed_plugin import layouts", True),
        ("megatron_patches.registry", "from megatron.core import parallel_state", False),
        ("rankwise.launch.cli", "import deepspeed_plugin", False),
        ("rankwise.launch.cli", "import megatron_patches", False),
    ],
)
def test_the_check_itself(module: str, source: str, forbidden: bool) -> None:
    found = violations(module, list(imports(ast.parse(source), module, is_package=False)))
    assert bool(found) == forbidden, found


def test_the_core_imports_without_any_framework() -> None:
    """In a process in which importing one fails; and without torch's compiler, which takes as long as torch."""
    program = (
        "import sys\n"
        f"for name in {FRAMEWORKS!r}: sys.modules[name] = None\n"
        "import rankwise, rankwise.statistics.hooks, rankwise.comm\n"
        "[getattr(rankwise, name) for name in rankwise.__all__]\n"
        f"assert not [n for n in sys.modules if n.split('.')[0] in {OURS[1:]!r} or n.startswith('rankwise.launch')]\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def named_frameworks(tree: ast.AST) -> list[str]:
    """Frameworks that have an adapter, in names and in texts the program uses; docstrings may speak of them."""
    homes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [statement for node in ast.walk(tree) if isinstance(node, homes) for statement in node.body]
    said = {id(text.value) for text in texts if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)}
    found = []
    for node in ast.walk(tree):
        words = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
        if isinstance(node, ast.Constant) and id(node) not in said:
            words.append(node.value)
        found += [word for word in words if isinstance(word, str) and re.search("deepspeed|megatron", word, re.I)]
    return found


@pytest.mark.parametrize("path", sources("rankwise"), ids=module_name)
def test_the_core_names_no_framework_but_in_one_table(path: Path) -> None:
    named = named_frameworks(parsed(path))
    assert bool(named) == (path == ROOT / "rankwise/frameworks.py"), named


@pytest.mark.parametrize(
    ("source", "count"),
    [("'a DeepSpeed engine'", 0), ("x = 'deepspeed'", 1), ("def f():\n    'Megatron'\n    return megatron.core", 1)],
)
def test_names_of_frameworks_are_seen(source: str, count: int) -> None:
    assert len(named_frameworks(ast.parse(source))) == count


# --- host reads in the kernels ---------------------------------------------------------------------------------------


def host_reads(tree: ast.AST) -> list[str]:
    """Calls that read a tensor back, as far as the source shows them."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("item", "tolist", "cpu", "nonzero", "numpy"):
            found.append(f"line {node.lineno}: .{node.func.attr}()")
        if isinstance(node.func, ast.Name) and node.func.id == "bool":
            found.append(f"line {node.lineno}: bool()")
    return found


def is_for_cpus_or_before(path: Path) -> bool:
    """Whether a file runs on CPUs only, where reading is free, or before a step."""
    return path.name.startswith(("cpu", "native", "spec", "options")) or path.parent.name == "native"


STEP_PATH = [
    path
    for path in sources("rankwise/kernels", "rankwise/step", *(paper.replace(".", "/") for paper in PAPERS))
    if not is_for_cpus_or_before(path)
]
STEP_PATH += [ROOT / "rankwise" / name for name in ("comm/parameter_sums.py", "comm/halo.py", "comm/exchange.py")]
READS = {
    "ldadam/formulas.py": ["bool()"],  # whether a factorisation failed, where the device cannot go on by itself
    "ldadam/sliced_matrices.py": ["bool()"],  # the same
    "mkor/optimizer.py": ["bool()"],  # of a list
    "mkor/hybrid_switch.py": ["bool()"],  # of a number
    "kernels/host_copies.py": [".tolist()"],  # of the host's own copy
    "step/health.py": [".tolist()", ".tolist()"],  # where users ask for it
}
"""What is read nevertheless."""


@pytest.mark.parametrize("path", STEP_PATH, ids=lambda path: "/".join(path.parts[-2:]))
def test_the_step_reads_nothing_back(path: Path) -> None:
    found = [read.split(": ")[1] for read in host_reads(parsed(path))]
    assert sorted(found) == sorted(READS.get("/".join(path.parts[-2:]), []))


def test_every_room_is_watched() -> None:
    """A room that is none by its files would be checked by nothing here."""
    assert {cls.__module__.rpartition(".")[0] for cls in CLASSES} == set(PAPERS)
    watched = {path.parent.name for path in STEP_PATH if path.name == "optimizer.py"}
    assert watched == {"step", *(paper.rpartition(".")[2] for paper in PAPERS)}


@pytest.mark.parametrize("source", ["x.item()", "bool(x)", "x.sum().tolist()", "x.cpu()"])
def test_host_reads_are_seen(source: str) -> None:
    assert len(host_reads(ast.parse(source))) == 1


# --- what an optimizer is made of -----------------------------------------------------------------------------------

MOST_METHODS = 56


def own_classes(kind: type) -> list[type]:
    return [cls for cls in kind.__mro__ if within(cls.__module__, *OURS)]


def methods(kind: type) -> set[str]:
    """Methods and properties of all own classes."""
    members = [(name, value) for cls in own_classes(kind) for name, value in vars(cls).items()]
    return {name for name, value in members if isinstance(value, property) or inspect.isfunction(value)}


@pytest.mark.parametrize("kind", CLASSES)
def test_an_optimizer_holds_what_it_needs(kind: type) -> None:
    assert len(own_classes(kind)) == 2
    assert len(methods(kind)) <= MOST_METHODS


def set_early(tree: ast.AST) -> list[str]:
    """Attributes of ``self`` that constructors set before they have called the one of the base class."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
            called = [call.lineno for call in calls if ast.unparse(call.func) == "super().__init__"]
            found += [
                ast.unparse(part)
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and ast.unparse(part.value) == "self"
                and part.lineno < max(called, default=0)
            ]
    return found


CORE = sources(
    *(room.replace(".", "/") for room in (*ROOMS[ROOMS.index("rankwise.states") :], *PAPERS)),
)


@pytest.mark.parametrize("path", CORE, ids=lambda path: "/".join(path.parts[-2:]))
def test_nothing_is_set_before_the_base_class_is_built(path: Path) -> None:
    assert set_early(parsed(path)) == []


def reached_into(tree: ast.AST, own: frozenset[str]) -> list[str]:
    """Private attributes of ours that a file reads of another object."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in own]
    return [ast.unparse(node) for node in attributes if ast.unparse(node.value) not in ("self", "cls", "super()")]


def private_names() -> frozenset[str]:
    """Of attributes and methods in the core."""
    found = set()
    for path in CORE:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                found.add(node.attr)
    return frozenset(name for name in found if name.startswith("_") and not name.startswith("__"))


def test_no_held_object_reaches_into_another() -> None:
    own = private_names()
    assert "_update" in own
    found = {str(path): reached_into(parsed(path), own) for path in CORE}
    assert {path: names for path, names in found.items() if names} == {}


def test_these_checks_themselves() -> None:
    early = "def __init__(self):\n    self.a = 1\n    super().__init__()\n    self.b = 2"
    assert set_early(ast.parse(early)) == ["self.a"]
    assert reached_into(ast.parse("optimizer._update(self._update)"), frozenset({"_update"})) == ["optimizer._update"]


# --- matrix rules ----------------------------------------------------------------------------------------------------

BACKENDS = ("native", "triton", "cpu", "cuda")
CHOICES = ("kernels_for", "is_for_cpus", "MatrixExchange", "HaloExchange")


def is_matrix_rule(tree: ast.AST) -> bool:
    """Whether a file has a class that the driver of the exchange steps matrices by."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return any(getattr(base, "id", "") == "MatrixRule" for node in classes for base in node.bases)


def rule_files() -> list[Path]:
    """The papers' rules, and what steps matrices by them."""
    return [path for path in sources("rankwise") if path.name == "rule.py" or is_matrix_rule(parsed(path))]


def backends_known(names: list[tuple[int, str]]) -> list[str]:
    """Imports by which a rule would know the form that runs, or the exchange that moves its matrices."""
    found = []
    for line, name in names:
        words = name.split(".")
        if words[0] == "rankwise" and (set(words).intersection(BACKENDS + CHOICES) or words[:3][-1] == "exchange"):
            found.append(f"{line} imports {name}")
    return found


def test_rules_know_neither_backend_nor_exchange() -> None:
    rooms = [path.parent.name for path in rule_files() if path.name != "rule.py"]
    assert {"ldadam", "mars", "mkor"} <= set(rooms)
    for path in rule_files():
        assert backends_known(imports_of(path)) == [], path
        assert not {"kernels", "exchange", "one_by_one"} & {
            node.attr for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)
        }, path


@pytest.mark.parametrize(
    ("source", "forbidden"),
    [
        ("from rankwise.kernels import native", True),
        ("from rankwise.kernels.native.compiled_passes import run", True),
        ("from rankwise.kernels.dispatch import kernels_for", True),
        ("from rankwise.kernels.dispatch import newton_schulz_for", False),
        ("from rankwise.ldadam.cuda.low_rank_step import low_rank_step_", True),
        ("from rankwise.comm.exchange import MatrixExchange", True),
        ("from rankwise.comm.exchange import Gather", True),
        ("from rankwise.comm.owner_plan import Batch", False),
    ],
)
def test_the_check_of_rules_itself(source: str, forbidden: bool) -> None:
    found = backends_known(list(imports(ast.parse(source), "rankwise.mars.orthogonal_matrices", is_package=False)))
    assert bool(found) == forbidden, found


# --- rules as their papers have them ---------------------------------------------------------------------------------

LONGEST_RULE = 150
RULE_IMPORTS = ("rankwise.updates",)
MACHINERY = re.compile(
    r"\b(buckets?|units?|shards?|layouts?|portions?|kernels?|kernel forms?|ranks hold|owners?|launch(es)?|triton|cuda|"
    r"cpus?|deepspeed|megatron|fsdp|zero-[123]|bfloat16|float16|precision)\b"
)


def beyond_the_paper(path: Path) -> list[str]:
    """What a rule's file has that its reader need not know: other rooms, classes with methods, words of machinery."""
    text, room = path.read_text(), f"rankwise.{path.parent.name}"
    own = [f"{room}.{name}" for name in ("formulas", "basis", "banded")]
    inner = [name for _, name in imports_of(path) if within(name, "rankwise") and not within(name, *RULE_IMPORTS, *own)]
    methods = [
        node.name
        for kind in ast.walk(ast.parse(text))
        if isinstance(kind, ast.ClassDef)
        for node in kind.body
        if isinstance(node, ast.FunctionDef)
    ]
    return [*inner, *methods, *(found.group() for found in MACHINERY.finditer(text.lower()))]


@pytest.mark.parametrize("paper", PAPERS)
def test_a_rule_reads_like_its_paper(paper: str) -> None:
    path = ROOT / paper.replace(".", "/") / "rule.py"
    assert len(path.read_text().splitlines()) <= LONGEST_RULE
    assert beyond_the_paper(path) == []


# --- names ----------------------------------------------------------------------------------------------------------

ROLES = ("optimizer", "options", "rule", "spec", "formulas", "dispatch", "native", "cuda", "cpu")
"""Files that every paper's room may have."""
ADAPTERS = ("layouts", "losses", "monitor", "registry", "support")
"""Files that every framework's adapter has."""
PACKAGES = ("rankwise", "deepspeed_plugin", "megatron_patches", "launch", "configs")


def shared_names(names: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that stand in several places."""
    places: dict[str, list[str]] = {}
    for name, place in names:
        places.setdefault(name, []).append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_a_name_means_one_file() -> None:
    allowed = ("__init__", "__main__", *ROLES, *ADAPTERS)
    paths = [path for path in sources(*PACKAGES) if path.stem not in allowed]
    assert shared_names([(path.stem, module_name(path)) for path in paths]) == {}
    adapters = [path.parent.name for path in sources(*PACKAGES) if path.stem in ADAPTERS]
    assert set(adapters) == {"deepspeed_plugin", "megatron_patches"}


def test_a_name_means_one_class() -> None:
    trees = [(module_name(path), parsed(path)) for path in sources(*PACKAGES)]
    classes = [(n.name, module) for module, tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    assert shared_names(classes) == {}
    assert shared_names([("Side", "a"), ("Other", "a"), ("Side", "b")]) == {"Side": ["a", "b"]}


# --- size ------------------------------------------------------------------------------------------------------------


def test_long_files_are_reported(record_property: pytest.RecordProperty) -> None:
    """Not an error: a reason to look whether a file does one thing."""
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(*PARTS)}
    long = {path: length for path, length in sorted(lengths.items()) if length > 400}
    record_property("files above 400 lines", long)
    for path, length in long.items():
        print(f"{path}: {length} lines")
    assert lengths and max(lengths.values()) < 1000, long


# --- sizes -----------------------------------------------------------------------------------------------------------

LONGEST, MOST_ARGUMENTS = 80, 13


def too_large(tree: ast.Module) -> list[str]:
    """Functions with more lines, or more arguments, than somebody can keep in mind; kernels name every address."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        arguments = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
        is_kernel = any(isinstance(one, ast.Name) and one.id == "jit" for one in node.decorator_list)
        if lines > LONGEST or (arguments > MOST_ARGUMENTS and not is_kernel):
            found.append(f"{node.name}: {lines} lines, {arguments} arguments")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_are_small(package: str) -> None:
    found = {str(path.relative_to(ROOT)): too_large(parsed(path)) for path in sources(package)}
    assert {path: functions for path, functions in found.items() if functions} == {}


def test_the_check_of_sizes_itself() -> None:
    long = "def long() -> None:\n" + "    pass\n" * LONGEST
    wide = f"def wide({', '.join(f'a{index}' for index in range(MOST_ARGUMENTS + 1))}): ..."
    assert too_large(ast.parse(long)) == ["long: 81 lines, 0 arguments"]
    assert too_large(ast.parse(wide)) == ["wide: 1 lines, 14 arguments"]
    assert too_large(ast.parse(f"@jit\n{wide}")) == []


# --- what documentation refers to ------------------------------------------------------------------------------------


def referred_to(text: str) -> list[str]:
    """Targets of the roles of a source's docstrings."""
    return re.findall(r":(?:func|class|meth|mod|data|attr):`~?([\w.]+)`", text)


def defined_in(path: Path) -> set[str]:
    """Names that a module defines or imports, with its classes' members, and its own."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found.update(alias.asname or alias.name for alias in node.names)
    return found


@functools.cache
def definitions() -> dict[str, set[str]]:
    return {module_name(path): defined_in(path) for path in sources(*PARTS)}


def is_defined(target: str, module: str, is_package: bool) -> bool:
    """Whether a reference from a module leads to a module of ours or to a name in one, or out of our packages."""
    if target.startswith("."):
        package = module if is_package else module.rpartition(".")[0]
        target = f"{package}{target}"
    parts, anywhere = target.split("."), set().union(*definitions().values())
    if parts[0] in definitions()[module]:
        return parts[0] in ("torch", "np") or set(parts[1:]) <= anywhere
    if not within(target, *OURS, "benchmarks"):
        return len(parts) > 1  # another package's
    length = max(n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in definitions())
    first, rest = parts[length : length + 1], parts[length + 1 :]
    return set(first) <= definitions()[".".join(parts[:length])] and set(rest) <= anywhere


@pytest.mark.parametrize("part", PARTS)
def test_references_lead_somewhere(part: str) -> None:
    dead = [
        f"{module_name(path)}: {target}"
        for path in sources(part)
        for target in referred_to(path.read_text())
        if not is_defined(target, module_name(path), path.name == "__init__.py")
    ]
    assert not dead, "\n".join(dead)


def test_dead_references_are_seen() -> None:
    module = "rankwise.mkor.cpu"
    assert is_defined("rankwise.mkor.formulas.stabilize", module, False) and is_defined(
        "update_factors_", module, False
    )
    assert not is_defined("rankwise.mkor.formulas.gone", module, False)
    assert not is_defined("rankwise.mkor.gone.stabilize", module, False)
    assert not is_defined(".gone", module, False) and not is_defined("gone", module, False)
    assert referred_to("See :func:`~a.b`, :class:`C`.") == ["a.b", "C"]


# --- where tensors are made ------------------------------------------------------------------------------------------

FACTORIES = {
    *("zeros", "ones", "empty", "full", "eye", "tensor", "as_tensor", "asarray", "scalar_tensor", "sparse_coo_tensor"),
    *("arange", "range", "linspace", "logspace", "tril_indices", "triu_indices", "empty_strided", "empty_permuted"),
    *("rand", "randn", "randint", "randperm", "normal", "hann_window", "hamming_window", "bartlett_window"),
}
"""Functions of torch whose result lies on the default device, or has the default type, unless they are told."""


def made_by_default(tree: ast.AST) -> list[str]:
    """Calls that leave device or type of a tensor to what surrounds them, and other uses of such functions."""
    called, found = set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [f"{node.lineno}: imports {a.name}" for a in node.names if a.name in FACTORIES]
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            missing = {"device", "dtype"} - {keyword.arg for keyword in node.keywords}
            if name.startswith("torch.") and name[6:] in FACTORIES:
                called.add(node.func)
                found += [f"{node.lineno}: {name} without {' and '.join(sorted(missing))}"] if missing else []
            # The old constructors take neither.
            if name == "Tensor" or re.fullmatch(r"torch\.(cuda\.)?\w*Tensor", name):
                found.append(f"{node.lineno}: calls {name}")
    others = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node not in called]
    names = [
        (node.lineno, ast.unparse(node).removeprefix("torch.")) for node in others if ast.unparse(node.value) == "torch"
    ]
    return found + [f"{line}: hands on torch.{name}" for line, name in names if name in FACTORIES]


@pytest.mark.parametrize("package", OURS)
def test_tensors_are_made_with_device_and_type(package: str) -> None:
    """Scripts set another default device than the weights', and another default type; a table of addresses that lands
    elsewhere ends the process."""
    found = {str(path.relative_to(ROOT)): made_by_default(parsed(path)) for path in sources(package)}
    assert {path: places for path, places in found.items() if places} == {}


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("torch.zeros(3, dtype=x.dtype, device=x.device)", False),
        ("torch.zeros_like(x)", False),
        ("x.new_zeros(3)", False),
        ("isinstance(x, torch.Tensor)", False),
        ("torch.zeros(3)", True),
        ("torch.zeros(3, dtype=torch.int64)", True),
        ("torch.arange(3, device=x.device)", True),
        ("torch.tensor(1.0, **like)", True),
        ("torch.Tensor([1.0])", True),
        ("torch.cuda.FloatTensor(3)", True),
        ("make(torch.empty)", True),
        ("from torch import zeros", True),
    ],
)
def test_the_check_of_factories_itself(source: str, wrong: bool) -> None:
    assert bool(made_by_default(ast.parse(source))) == wrong


def addresses_taken(tree: ast.AST) -> list[str]:
    """Where it is read at which address a tensor lies."""
    return [str(n.lineno) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "data_ptr"]


def test_compiled_functions_get_their_addresses_from_one_place() -> None:
    """It looks on which device they lie."""
    ours = [path for path in sources("rankwise") if path.name == "native.py" or path.parent.name == "native"]
    assert {path.parent.name for path in ours} >= {"native", "mkor", "sonew"}
    found = {path.name: addresses_taken(parsed(path)) for path in ours}
    assert len(found.pop("arrays.py")) == 2
    assert not any(found.values()), found
    assert addresses_taken(ast.parse("x.data_ptr()\nmap(Tensor.data_ptr, y)")) == ["1", "2"]


def test_nobody_walks_through_all_objects() -> None:
    """Other threads fail when what they are about to make gets one more reference, see the module named."""
    found = [path.name for package in OURS for path in sources(package) if "get_objects(" in path.read_text()]
    assert found == []


# A rank may look at a sample, drop a batch, load and end alone: whatever else it calls of MKOR's sends no message.
MAY_COMMUNICATE = {
    "rankwise.statistics.backward_reduction": {"_all_reduce", "twin_group"},  # a last micro-batch, and steps; capture
    "rankwise.statistics.collector": {"join_replicas"},  # steps
    "rankwise.statistics.factor_vectors": {"reduce_statistics"},  # steps
    "rankwise.mkor.hybrid_switch": {"take_sum"},  # steps
}
MESSAGES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "reduce_scatter", "local_group")


def communicating(tree: ast.AST) -> set[str]:
    """Functions that call a collective or make a group."""
    found = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            names = {getattr(call, "attr", getattr(call, "id", "")) for call in called}
            if names.intersection(MESSAGES):
                found.add(function.name)
    return found


def test_what_may_communicate_of_statistics_is_listed() -> None:
    found = {}
    for path in [*sources("rankwise/statistics"), *sources("rankwise/mkor")]:
        if names := communicating(parsed(path)):
            found[module_name(path)] = names
    assert found == MAY_COMMUNICATE
