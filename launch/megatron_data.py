"""This module writes the reference run's text as Megatron's indexed data set, and reads samples of it."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch import Tensor

from rankwise.launch.data import Tokenizer

__all__ = ["MegatronSampler", "write_indexed"]


def write_indexed(tokens: np.ndarray[Any, Any], tokenizer: Tokenizer, prefix: Path) -> Path:
    """Write a token stream as ``PREFIX.bin`` and ``PREFIX.idx``, with a document for each document of ours.

    Args:
        tokens: Token ids, one-dimensional, with an end-of-document token after each document.
        tokenizer: Tokenizer that made the ids.
        prefix: Path without the two endings. Nothing is written if the index exists.

    Returns:
        The prefix, which Megatron's ``--data-path`` takes.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    if index.exists():
        return prefix
    wide = tokenizer.vocab_size > np.iinfo(np.uint16).max + 1
    builder = IndexedDatasetBuilder(str(data), dtype=np.int32 if wide else np.uint16)
    ends = np.flatnonzero(np.asarray(tokens) == tokenizer.end_of_document) + 1
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        document = torch.from_numpy(tokens[start:end].astype(np.int64))
        builder.add_document(document, [len(document)])
    # The index appears last and at once, which says that the other file is complete.
    builder.finalize(f"{index}.part")
    Path(f"{index}.part").rename(index)
    return prefix


class _Vocabulary:
    """The part of a tokenizer that Megatron's data sets ask for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.eod = self.eos = tokenizer.end_of_document
        self.pad = tokenizer.vocab_size  # no text has this id
        self.special_tokens_dict = {"eod_token": self.eod}
        self.unique_identifiers = OrderedDict(name=tokenizer.name, vocab_size=tokenizer.vocab_size)


class MegatronSampler:
    """Micro-batches from a ``GPTDataset``, whose samples do not depend on the number of data-parallel ranks.

    Args:
        prefix: Result of :func:`write_indexed`.
        tokenizer: Tokenizer that made the tokens.
        window: Tokens that a sample predicts.
        samples: Number of samples that the run draws.
        seed: Decides the order of documents and windows.
    """

    def __init__(self, prefix: Path, tokenizer: Tokenizer, window: int, samples: int, seed: int) -> None:
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=window,
            blend_per_split=[([str(prefix)], None), None, None],
            path_to_cache=str(prefix.parent / "megatron"),
            tokenizer=_Vocabulary(tokenizer),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        built = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], _every_rank, config).build()
        self._samples = built[0]

    def batch(self, first: int, size: int) -> dict[str, Tensor]:
        """Return some consecutive samples, each entry of shape (size, window).

        Args:
            first: Number of the first sample in the run.
            size: Number of samples.
        """
        chosen = [self._samples[index] for index in range(first, first + size)]
        return {key: torch.stack([sample[key] for sample in chosen]) for key in ("tokens", "labels", "position_ids")}


def _every_rank() -> bool:
    return dist.is_initialized()
