"""The fault table: what is done to a run, what must come of it, and where to see what does."""

from __future__ import annotations

from dataclasses import dataclass

from engine_faults import OTHER_VERSION, OVERFLOWS

PLAIN, ENGINES, FILES, KILLED, MEGATRON = "plain", "engines", "files", "killed", "megatron"


@dataclass(frozen=True)
class Row:
    """A fault.

    Attributes:
        fault: What is done.
        where: In which framework.
        expected: What must be seen, in the words of the scenario; of another test, in one's own.
        source: Which processes provoke it; or the id of another test that does.
        name: The scenario's.
    """

    fault: str
    where: str
    expected: str
    source: str
    name: str = ""

    @property
    def label(self) -> str:
        """For the test's id."""
        return f"{self.fault}, {self.where}".replace("::", " ")

    @property
    def elsewhere(self) -> bool:
        """Whether another test provokes it."""
        return "::" in self.source


CUT, ZERO, CORE = (
    "plain PyTorch, parameters cut over 2 ranks",
    "DeepSpeed, ZeRO-2, 2 ranks",
    "megatron-core, distributed optimizer, 2 ranks",
)
DDP = "plain PyTorch, `DistributedDataParallel` over 2 ranks"
SKIPPED = (
    "every weight and state keeps its bits on all ranks; later steps are those of a run that never met it; "
    "`skipped_steps` counts it"
)
FACTOR = (
    "weights stay finite in every step; the factor starts again from the identity at the next factor step; other "
    "factors keep the bits of a run without it"
)
ENDED = "the other rank ends with an error within 60 s; the last checkpoint continues bit for bit"
NO_ROOM = (
    "all ranks raise; `latest` names the previous checkpoint; the run still holds its states; the previous checkpoint "
    "continues bit for bit"
)
PARTED = (
    "nothing is said, as with torch.optim: weights part from there on; `refuse_other_rates` (below) raises on all ranks"
)
LATE = "the others wait; every bit is that of a run without it"


def _refused(words: str, rest: str = "nothing has changed") -> str:
    return f"all ranks raise, naming {words}; {rest}"


def _versions(rest: str = "nothing has changed") -> str:
    return _refused(f"“the version of rankwise is 0.1.0 on ranks [0], {OTHER_VERSION} on ranks [1]”", rest)


_FILE = _refused("“zero_pp_rank_1_mp_rank_00_optim_states.pt”")
_RANKS = "“rank is 3 on ranks [0], 4 on ranks [1]”"

TABLE = [
    Row("NaN in a gradient, with `skip_nonfinite`", CUT, SKIPPED, PLAIN, "NaN skipped"),
    Row("Inf in a gradient, with `skip_nonfinite`", CUT, SKIPPED, PLAIN, "Inf skipped"),
    Row("NaN in a gradient of one rank, with `skip_nonfinite`", CUT, SKIPPED, PLAIN, "one rank skipped"),
    Row(
        "NaN in a gradient, without `skip_nonfinite`",
        CUT,
        "the step is taken, as by torch.optim; no rank raises or waits",
        PLAIN,
        "NaN let through",
    ),
    Row("NaN in one factor of MKOR, before a factor step", CUT, FACTOR, PLAIN, "factor before it moves"),
    Row("NaN in one factor of MKOR, between two factor steps", CUT, FACTOR, PLAIN, "factor between"),
    Row(
        f"{OVERFLOWS} fp16 overflows in a row",
        ZERO,
        "every state byte is as it was; the scale is halved each time; training goes on as in a run that only has the "
        "smaller scale",
        ENGINES,
        "storm",
    ),
    *(
        Row(f"a rank is killed in {where}", ZERO, ENDED, KILLED, event)
        for event, where in (
            ("backward", "its backward pass"),
            ("exchange", "the exchange of matrices"),
            ("step", "its step"),
            ("save", "saving"),
        )
    ),
    Row("full disk: the optimizer file of rank 1", ZERO, NO_ROOM, FILES, "full disk, optimizer file of rank 1"),
    Row("full disk: the model file", ZERO, NO_ROOM, FILES, "full disk, model file of rank 0"),
    Row("full disk: `latest`", ZERO, NO_ROOM, FILES, "full disk, latest"),
    Row("full disk: `zero_to_fp32.py`", ZERO, NO_ROOM, FILES, "full disk, recovery script"),
    Row("full disk: the optimizer file, same tag", ZERO, NO_ROOM, FILES, "full disk, optimizer file, same tag"),
    Row("full disk: the model file, same tag", ZERO, NO_ROOM, FILES, "full disk, model file, same tag"),
    Row("a kill while a tag's files are replaced", ZERO, _refused("“was being replaced”"), FILES, "half replaced"),
    Row("a truncated optimizer file", ZERO, _FILE, FILES, "truncated"),
    Row("an emptied optimizer file", ZERO, _FILE, FILES, "emptied"),
    Row("64 bytes of an optimizer file zeroed", ZERO, _FILE, FILES, "corrupted"),
    Row(
        "full disk: the file of rank 1",
        CORE,
        "all ranks raise; the run still holds its states; the previous checkpoint continues bit for bit",
        MEGATRON,
        "full disk, Megatron",
    ),
    *(
        Row(
            f"{name} checkpoint file",
            CORE,
            "all ranks raise, naming whichever file it is; nothing has changed",
            MEGATRON,
            scenario,
        )
        for name, scenario in (
            ("a truncated", "truncated, Megatron"),
            ("an emptied", "emptied, Megatron"),
            ("a missing", "gone, Megatron"),
        )
    ),
    Row(
        "another optimizer's checkpoint",
        ZERO,
        "the weights are kept; the states start afresh",
        FILES,
        "another optimizer",
    ),
    Row(
        "another optimizer's checkpoint",
        CORE,
        "all ranks raise, with both names and the flag that helps; nothing has changed",
        "tests/megatron_engine/test_megatron_resuming.py::test_what_cannot_fit_is_refused_with_the_way_out",
    ),
    Row(
        "another rank's, band's or optimizer's states",
        CORE,
        "all ranks raise, with the option, both values and the way out; nothing has changed",
        "tests/megatron_engine/test_megatron_resuming.py::test_what_cannot_fit_is_refused_with_the_way_out",
    ),
    Row("another model's checkpoint", ZERO, _refused("“'unused.weight' has 42 elements”"), FILES, "another model"),
    Row(
        "another model's checkpoint",
        "plain PyTorch, one process",
        "an error with the name and both shapes; nothing has changed",
        "tests/step/test_checkpoint_fit.py::test_other_shapes_are_refused",
    ),
    Row("an older version's checkpoint", ZERO, "it continues bit for bit", FILES, "older version"),
    Row(
        "a newer version's checkpoint: one rank's file has a state we do not know",
        ZERO,
        _refused("“'curvature'”, “load it with the version that wrote it”"),
        FILES,
        "newer version",
    ),
    Row("ranks disagree on an option", CUT, _refused(_RANKS), PLAIN, "options"),
    Row("ranks disagree on an option", ZERO, _refused(_RANKS, "no weight has changed"), ENGINES, "options of engines"),
    Row("ranks disagree on the model", CUT, _refused("“'d.bias' has shape (11,) on rank 1 and (9,)”"), PLAIN, "model"),
    Row(
        "ranks disagree on a weight's shape, not on its size",
        ZERO,
        _refused("“'unused.weight' has shape”", "no weight has changed"),
        ENGINES,
        "models of engines",
    ),
    Row("ranks disagree on the version of rankwise", CUT, _versions(), PLAIN, "version"),
    Row(
        "ranks disagree on the version of rankwise",
        ZERO,
        _versions("no weight has changed"),
        ENGINES,
        "versions of engines",
    ),
    Row("ranks disagree on the learning rate, from the third step on", DDP, PARTED, PLAIN, "rates"),
    Row("a rank is seconds late", CUT, LATE, PLAIN, "late"),
    Row("a rank is seconds late, in its backward pass", ZERO, LATE, ENGINES, "late engine"),
    Row(
        "SIGTERM with grace, on one rank",
        ZERO,
        "all ranks save at the next step boundary and end; the resumed run is bitwise that of one that was not stopped",
        ENGINES,
        "signal",
    ),
]
