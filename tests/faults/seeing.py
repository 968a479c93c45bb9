"""What was seen of a fault, in the words of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Sentences = dict[str, str]
"""By name of the fault."""


def told(facts: Mapping[str, bool]) -> str:
    """The facts that hold, and those that do not with a word before them that no expectation has."""
    return "; ".join(fact if holds else f"NOT {fact}" for fact, holds in facts.items())


def alike(ranks: Sequence[Sentences]) -> Sentences:
    """What all ranks saw; where they differ, what each did."""
    found = {}
    for name in ranks[0]:
        seen = [sentences[name] for sentences in ranks]
        each = " / ".join(f"rank {rank}: {sentence}" for rank, sentence in enumerate(seen))
        found[name] = seen[0] if len(set(seen)) == 1 else each
    return found
