"""Lets ranks that each decide for themselves find out whether all of them did, without asking the others.

A rank that entered a collective alone would wait for ever. Ranks that vote meet in the store by which the process
groups were set up; after some patience the first to give up decides for all who vote on this matter.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

__all__ = ["PATIENCE", "all_vote"]

PATIENCE = timedelta(seconds=120)
"""Time that a rank waits for the others, which may be waiting for it in a collective meanwhile."""


def all_vote(matter: str, group: dist.ProcessGroup) -> bool:
    """Whether every rank of a group votes on a matter; the same answer on all that do.

    Args:
        matter: Name of the matter; no other matter of any ranks may have it.
        group: The ranks.
    """
    store = dist.PrefixStore(f"rankwise/{matter}", dist.distributed_c10d._get_default_store())
    if store.add("votes", 1) == dist.get_world_size(group):
        store.compare_set("decision", "", "all")
    try:
        store.wait(["decision"], PATIENCE)
    except (RuntimeError, dist.DistError):  # the store's timeouts differ between versions of torch
        store.compare_set("decision", "", "some")
    return store.get("decision") == b"all"
