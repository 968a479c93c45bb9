"""What apply() replaces, that revert() puts it back, and what is refused."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron.core.optimizer as core
import megatron.core.package_info as package_info
import pytest
from megatron_harness import Cell, opened
from ranks import run_ranks

import megatron_patches
from megatron_patches.cpu import cpu_megatron
from megatron_patches.patches import PATCHES, PatchError, apply, check, revert
from rankwise import MARS

# Two modules of a checkout as far as the patches see them; the wheel of megatron-core 0.16 does not have them.
ARGUMENTS = """
import argparse

def add_megatron_arguments(parser):
    parser.add_argument("--optimizer", default="adam", choices=["adam", "sgd"])
    parser.add_argument("--lr", type=float, default=0.5)
    return parser

def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser()).parse_args()
"""
TRAINING = """
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

def get_megatron_optimizer_config(args):
    return OptimizerConfig(optimizer=args.optimizer, lr=args.lr), {"some": "overrides"}

def training_log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale):
    return iteration
"""
CHECKPOINTING = """
def load_checkpoint(ddp_model, optimizer, opt_param_scheduler, load_arg="load", strict=True):
    return 0, 0
"""


@pytest.fixture(autouse=True)
def _reverted() -> Iterator[None]:
    yield
    revert()


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "megatron" / "training"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "arguments.py").write_text(ARGUMENTS)
    (folder / "training.py").write_text(TRAINING)
    (folder / "checkpointing.py").write_text(CHECKPOINTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("", ".arguments", ".checkpointing", ".training"):
        monkeypatch.delitem(sys.modules, f"megatron.training{name}", raising=False)
    yield folder
    revert()
    for name in ("", ".arguments", ".checkpointing", ".training"):
        sys.modules.pop(f"megatron.training{name}", None)


def module_with_the_factory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As a training framework that imported the function before we came."""
    module = ModuleType("some_framework")
    module.get_megatron_optimizer = core.get_megatron_optimizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_framework", module)
    return module


def test_importing_the_package_changes_nothing() -> None:
    program = (
        "import sys, megatron_patches\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('megatron', 'apex')]\n"
        "import megatron.core.optimizer as core\n"
        "before = core.get_megatron_optimizer\n"
        "megatron_patches.get_megatron_optimizer, megatron_patches.NAMES, megatron_patches.RankwiseConfig\n"
        "assert core.get_megatron_optimizer is before and before.__module__ == 'megatron.core.optimizer'\n"
        "assert 'megatron.training' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_the_factory_is_replaced_wherever_it_was_imported_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = core.get_megatron_optimizer
    user = module_with_the_factory(monkeypatch)
    assert [state.applied for state in check()] == [False] * 5
    apply()
    apply()
    assert core.get_megatron_optimizer is user.get_megatron_optimizer is megatron_patches.get_megatron_optimizer
    assert [state.applied for state in check()] == [True] * 5
    revert()
    revert()
    assert core.get_megatron_optimizer is user.get_megatron_optimizer is stock
    assert [state.applied for state in check()] == [False] * 5


def test_what_was_imported_after_apply_is_put_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = core.get_megatron_optimizer
    apply()
    user = module_with_the_factory(monkeypatch)
    revert()
    assert user.get_megatron_optimizer is stock


def test_the_command_line_reaches_the_optimizer_config(training: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(command_line=True)
    from megatron.training import arguments
    from megatron.training import training as module

    assert [state.applied for state in check()] == [True] * 9
    monkeypatch.setattr(sys, "argv", "train.py --lr 0.1 --optimizer ldadam --ldadam-rank 8".split())
    args = arguments.parse_args()
    config, overrides = module.get_megatron_optimizer_config(args)
    assert (config.optimizer, config.rankwise, config.rankwise_layer_wise) == ("ldadam", {"rank": 8}, False)
    assert config.lr == 0.1 and overrides == {"some": "overrides"}
    assert module.get_megatron_optimizer is megatron_patches.get_megatron_optimizer

    monkeypatch.setattr(sys, "argv", ["train.py", "--optimizer", "sgd"])
    config, _ = module.get_megatron_optimizer_config(arguments.parse_args())
    assert config.optimizer == "sgd" and not hasattr(config, "rankwise")


def test_the_command_line_is_put_back(training: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(command_line=True)
    revert()
    from megatron.training import arguments

    monkeypatch.setattr(sys, "argv", ["train.py", "--optimizer", "ldadam"])
    with pytest.raises(SystemExit):
        arguments.parse_args()


def test_the_command_line_waits_until_it_is_asked_for(training: Path) -> None:
    apply()
    assert "megatron.training" not in sys.modules
    from megatron.training import arguments
    from megatron.training import training as module

    assert arguments.add_megatron_arguments.__module__ == arguments.__name__
    apply()  # Now that it is imported.
    assert [state.applied for state in check()] == [True] * 9
    assert module.get_megatron_optimizer_config.__wrapped__.__module__ == module.__name__


@pytest.mark.skipif(importlib.util.find_spec("megatron.training") is not None, reason="this Megatron has it")
def test_without_megatron_training_the_command_line_is_refused() -> None:
    with pytest.raises(ModuleNotFoundError, match="megatron.training"):
        apply(command_line=True)
    assert core.get_megatron_optimizer.__module__ == "megatron.core.optimizer"


@pytest.mark.parametrize("version", ["0.15.3", "0.21.0", "1.16.0"])
def test_untested_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = core.get_megatron_optimizer
    monkeypatch.setattr(package_info, "__version__", version)
    for call in (apply, check):
        with pytest.raises(PatchError, match=rf"megatron-core {version} is not supported: .* tested with 0\.16\.\*"):
            call()
    assert core.get_megatron_optimizer is stock


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_changed_function_is_refused_and_nothing_is_replaced(
    patch: Any, training: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = core.get_megatron_optimizer
    check(command_line=True)
    monkeypatch.setattr(sys.modules[patch.module], patch.name, lambda config, model_chunks, new: None)
    with pytest.raises(PatchError, match=r"takes \(config, model_chunks, new\), expected \("):
        apply(command_line=True)
    monkeypatch.undo()
    assert core.get_megatron_optimizer is before


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_new_last_parameter_is_refused_unless_it_is_passed_on(
    patch: Any, training: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(command_line=True)
    changed = eval(f"lambda {', '.join(patch.parameters)}, new: None")
    monkeypatch.setattr(sys.modules[patch.module], patch.name, changed)
    if patch.open_end:
        assert patch.name in ("load", "load_checkpoint", "training_log", "OptimizerParamScheduler")
        assert check(command_line=True)
    else:
        with pytest.raises(PatchError, match="new"):
            check(command_line=True)
    monkeypatch.undo()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_missing_function_is_refused(patch: Any, training: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(command_line=True)
    monkeypatch.delattr(sys.modules[patch.module], patch.name)
    with pytest.raises(PatchError, match=f"has no {patch.symbol}"):
        apply(command_line=True)
    monkeypatch.undo()


def test_another_package_s_replacement_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    import functools

    stock = core.get_megatron_optimizer

    @functools.wraps(stock)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    with monkeypatch.context() as before:
        before.setattr(core, "get_megatron_optimizer", theirs)
        with pytest.raises(PatchError, match=r"was replaced by another package"):
            apply()
    apply()
    with monkeypatch.context() as after:
        after.setattr(core, "get_megatron_optimizer", theirs)
        with pytest.raises(PatchError, match=r"was replaced by another package after apply\(\); undo that first"):
            revert()
    revert()
    assert core.get_megatron_optimizer is stock


def test_every_patch_says_why_and_with_what_it_was_tested() -> None:
    assert len({patch.symbol for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        assert patch.reason and "0.16" in patch.tested


def test_reverting_leaves_alone_who_imported_ours() -> None:
    from megatron_patches import registry

    ours = registry.get_megatron_optimizer
    megatron_patches.apply()
    megatron_patches.revert()
    assert registry.get_megatron_optimizer is ours


def _in_stock_wrappers(rank: int, world: int) -> str:
    """Put into Megatron's own wrappers, which keep fp32 copies of the weights, without our factory."""
    build = lambda groups, **_: MARS(groups)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch, cpu_megatron():
        patch.setattr("megatron.core.optimizer.SGD", build)
        with opened(Cell(precision="bf16", optimizer={"optimizer": "sgd"})) as trainer:
            try:
                trainer.train_step()
            except RuntimeError as failure:
                return str(failure)
    return "stepped"


def test_an_optimizer_in_stock_wrappers_says_how_to_be_told() -> None:
    (message,) = run_ranks(1, _in_stock_wrappers)
    where = r"MARS: param group 0 has a tensor of shape \(64, 64\) in the place of 'group0\.param0'"
    assert re.match(where + " that the optimizer was not built on: .*; build a new optimizer", message), message
    assert "let Megatron build the optimizer after megatron_patches.apply()" in message
