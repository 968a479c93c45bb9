"""This module turns text files into memory-mapped tokens: it splits by file, tokenizes once, and caches."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "Corpus",
    "Document",
    "Tokenizer",
    "find_documents",
    "is_validation",
    "load_corpus",
    "load_tokenizer",
    "unigram_entropy",
]

VALIDATION_FRACTION = 0.05
"""Share of the files that is held out."""

BLOCK_BYTES = 1 << 16
"""A single file is cut at line ends into documents of about this size."""

CACHE_FORMAT = 1
"""Number that is raised whenever the cached files change meaning, so that old caches are rebuilt."""

_DIRECTORIES_OF_OTHERS = {"site-packages", "dist-packages", "__pycache__", "node_modules"}


@dataclass(frozen=True)
class Document:
    """One unit of the train/validation split: a file, or a block ``[start, end)`` of a single file."""

    name: str
    path: Path
    start: int
    end: int

    def read(self) -> bytes:
        """Return the document's bytes."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.end - self.start)


@dataclass(frozen=True)
class Tokenizer:
    """A function from text to token ids, with the numbers a model and a cache need.

    Attributes:
        name: Name that the user asked for; part of the cache key.
        vocab_size: Number of ids, the end-of-document token included.
        end_of_document: Id after every document.
        encode: Turns UTF-8 bytes into a list or array of ids.
    """

    name: str
    vocab_size: int
    end_of_document: int
    encode: Callable[[bytes], Any]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest unsigned integer type that holds every id."""
        return np.min_scalar_type(self.vocab_size - 1)


@dataclass(frozen=True)
class Corpus:
    """Train and validation tokens, both one-dimensional and memory-mapped read-only.

    Attributes:
        train: Token ids of the training documents, with an end-of-document token after each.
        validation: Token ids of the held-out documents, with an end-of-document token after each.
        vocab_size: Number of token ids.
        unigram_entropy: Nats per validation token under the training set's token frequencies: the loss of the best
            model that ignores context.
        folder: Folder of the cached files, and of files made from them.
    """

    train: np.ndarray[Any, Any]
    validation: np.ndarray[Any, Any]
    vocab_size: int
    unigram_entropy: float
    folder: Path


def load_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer by name.

    Args:
        name: ``"bytes"`` for one token per byte (ids 0 to 255, 256 ends a document), otherwise the name or path of a
            Hugging Face tokenizer.

    Raises:
        ValueError: Hugging Face's transformers cannot load it.
    """
    if name == "bytes":
        return Tokenizer(name, 257, 256, lambda text: np.frombuffer(text, np.uint8))
    from transformers import AutoTokenizer

    try:
        pretrained = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"tokenizer is {name!r}, which transformers could not load ({str(error).splitlines()[0]}); it must be "
            "'bytes', the folder of a saved tokenizer or a model name on the Hugging Face hub"
        ) from error
    end = pretrained.eos_token_id
    size = len(pretrained)
    if end is None:
        end, size = size, size + 1
    return Tokenizer(
        name,
        size,
        int(end),
        lambda text: pretrained.encode(text.decode("utf-8", "replace"), add_special_tokens=False, verbose=False),
    )


def is_validation(name: str, fraction: float = VALIDATION_FRACTION) -> bool:
    """Whether the document of that name is held out.

    It depends on the name alone, so that adding files moves no other file to the other side.
    """
    return _position(name) < fraction


def find_documents(data: Path | None = None) -> list[Document]:
    """Return every text document below a path, in sorted order.

    Args:
        data: A text file, or a folder that is searched recursively for UTF-8 files (hidden ones and installed packages
            are skipped). None means the ``.py`` files of the Python standard library on this machine.

    Returns:
        Documents sorted by name; at least two.

    Raises:
        ValueError: The path does not exist or holds fewer than two documents.
    """
    root = Path(sysconfig.get_path("stdlib")) if data is None else Path(data)
    if not root.exists():
        raise ValueError(f"data is {str(root)!r}, which does not exist; pass a text file or a folder of text files")
    if root.is_file():
        documents = list(_blocks(root))
    else:
        names = sorted(_text_files(root, "*.py" if data is None else "*"))
        documents = [Document(name, root / name, 0, (root / name).stat().st_size) for name in names]
    if len(documents) < 2:
        raise ValueError(
            f"data is {str(root)!r} with {len(documents)} text document(s); the train/validation split needs at least "
            f"two files, or one file of more than {BLOCK_BYTES} bytes"
        )
    return documents


def load_corpus(data: Path | None, tokenizer: Tokenizer, cache: Path) -> Corpus:
    """Tokenize a text corpus, or map the tokens that an earlier call left in the cache.

    Several processes may call it at once.

    Args:
        data: Text file or folder, as for :func:`find_documents`.
        tokenizer: Tokenizer from :func:`load_tokenizer`.
        cache: Folder for the token files. Their key is the listing of the documents (names, sizes, times of change)
            and the tokenizer, so that an edited corpus is tokenized again.

    Raises:
        ValueError: The path does not exist or holds fewer than two documents.
    """
    documents = find_documents(data)
    folder = Path(cache) / _cache_key(documents, tokenizer)
    if not (folder / "corpus.json").exists():
        _build(documents, tokenizer, folder)
    facts = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    return Corpus(
        train=np.memmap(folder / "train.bin", tokenizer.dtype, "r"),
        validation=np.memmap(folder / "validation.bin", tokenizer.dtype, "r"),
        vocab_size=tokenizer.vocab_size,
        unigram_entropy=facts["unigram_entropy"],
        folder=folder,
    )


def unigram_entropy(train_counts: np.ndarray[Any, Any], validation_counts: np.ndarray[Any, Any]) -> float:
    """Return nats per validation token under the add-one smoothed token frequencies of the training set.

    Args:
        train_counts: Occurrences of each token id in the training set, shape (vocab,).
        validation_counts: Occurrences of each token id in the validation set, shape (vocab,).
    """
    smoothed = train_counts.astype(np.float64) + 1.0
    log_frequency = np.log(smoothed) - np.log(smoothed.sum())
    return float(-(validation_counts * log_frequency).sum() / validation_counts.sum())


def _position(name: str) -> float:
    """Return a number in [0, 1) for a name, equal on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2.0**64


def _text_files(root: Path, pattern: str) -> Iterator[str]:
    for path in root.rglob(pattern):
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") or part in _DIRECTORIES_OF_OTHERS for part in relative.parts)
        if not hidden and path.is_file() and _is_text(path):
            yield relative.as_posix()


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(4096)
    if not head or b"\0" in head:
        return False
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4 and len(head) == 4096  # the end of the sample has cut a character
    return True


def _blocks(path: Path) -> Iterator[Document]:
    text = path.read_bytes()
    start = 0
    while start < len(text):
        newline = text.find(b"\n", start + BLOCK_BYTES)
        end = len(text) if newline < 0 else newline + 1
        yield Document(f"{path.name}:{start}", path, start, end)
        start = end


def _cache_key(documents: list[Document], tokenizer: Tokenizer) -> str:
    listing = [(d.name, d.start, d.end, d.path.stat().st_mtime_ns) for d in documents]
    numbers = [CACHE_FORMAT, VALIDATION_FRACTION, tokenizer.name, tokenizer.vocab_size]
    return hashlib.sha256(json.dumps([numbers, listing]).encode()).hexdigest()[:16]


def _split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    held_out = {d.name for d in documents if is_validation(d.name)}
    if not held_out:
        held_out = {min(documents, key=lambda d: _position(d.name)).name}
    elif len(held_out) == len(documents):
        held_out.remove(max(documents, key=lambda d: _position(d.name)).name)
    return [d for d in documents if d.name not in held_out], [d for d in documents if d.name in held_out]


def _build(documents: list[Document], tokenizer: Tokenizer, folder: Path) -> None:
    """Write the token files of a corpus beside their final place, then move them there in one step."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        train, validation = _split(documents)
        train_counts = _write_tokens(train, tokenizer, partial / "train.bin")
        validation_counts = _write_tokens(validation, tokenizer, partial / "validation.bin")
        facts = {
            "tokenizer": tokenizer.name,
            "documents": {"train": len(train), "validation": len(validation)},
            "tokens": {"train": int(train_counts.sum()), "validation": int(validation_counts.sum())},
            "unigram_entropy": unigram_entropy(train_counts, validation_counts),
        }
        (partial / "corpus.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        try:
            os.rename(partial, folder)
        except OSError:
            if not (folder / "corpus.json").exists():  # otherwise another process finished first, with the same bytes
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tokens(documents: list[Document], tokenizer: Tokenizer, path: Path) -> np.ndarray[Any, Any]:
    """Write the documents' tokens, and return how often each id occurs."""
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    with path.open("wb") as file:
        for document in documents:
            ids = np.append(np.asarray(tokenizer.encode(document.read()), np.int64), tokenizer.end_of_document)
            counts += np.bincount(ids, minlength=tokenizer.vocab_size)
            file.write(ids.astype(tokenizer.dtype).tobytes())
    return counts
