"""What type checkers know of the constructors, whose keywords are the fields of the option classes.

Run by no test: mypy reads it among the sources, and complains of an ignored error that is none any more.
"""
# mypy: warn-unused-ignores

from torch import nn

from rankwise import MARS, MKOR, LDAdam, SONew


def right(model: nn.Module) -> None:
    """By position and by keyword, with params as the first or by name as in torch.optim."""
    LDAdam(model.parameters(), 1e-3, 16, 0.9, (0.9, 0.99), exclude=["*gate*"], error_dtype=None)
    MARS(params=model.named_parameters(), lr=1e-3, variant="muon", clip=None)
    SONew([{"params": [*model.parameters()], "lr": 1e-4}], band=0).step()
    optimizer: MKOR = MKOR(model.parameters(), stabilizer=None, rescale=None)
    interval: int | None = optimizer.options.update_interval
    print(interval)


def wrong(model: nn.Module) -> None:
    """An unknown keyword, values of another type, no parameters."""
    LDAdam(model.parameters(), rnak=4)  # type: ignore[call-arg]
    LDAdam(model.parameters(), rank="4")  # type: ignore[arg-type]
    MARS(model.parameters(), capturable=1)  # type: ignore[arg-type]
    MKOR(model.parameters(), capturable=True)  # type: ignore[call-arg]
    SONew()  # type: ignore[call-arg]
    print(MKOR(model.parameters()).options.rank)  # type: ignore[attr-defined]
