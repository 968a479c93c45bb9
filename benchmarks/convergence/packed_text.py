"""The text in pieces, for machines that reach no registry: ``python -m benchmarks corpus --pack FOLDER``."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.convergence.corpus import END, NAME, facts_of, pairs_stem

__all__ = ["pack", "unpack"]

_PARTS = ("train", "held-out")
_LARGEST_MEMORY = 1 << 29  # bytes that a match may lie back: more than the whole text


def pack(folder: Path, output: Path, piece: int = 24_000_000) -> list[Path]:
    """Write the text compressed, in pieces; takes a quarter of an hour, and 6 GB of memory.

    Documents are compressed in the order of their bytes, where like lies beside like, with the numbers that bring them
    back. Byte pairs that were learned travel along: to learn them takes longer than to apply them.

    Args:
        folder: Folder of :func:`benchmarks.convergence.corpus.build`.
        output: Gets the pieces, and ``NAME.json`` with their checksums.
        piece: Most bytes of a piece.

    Returns:
        The files.

    Raises:
        ValueError: There is no text, or it is not what ``corpus.json`` says.
    """
    facts = facts_of(folder)
    texts = [(folder / f"{part}.txt").read_bytes() for part in _PARTS]
    _check(texts, facts)
    learned = {path.name: path.read_text("utf-8") for path in sorted(folder.glob(f"{pairs_stem('*', facts)}.json"))}
    documents = [document for text in texts for document in text.split(END)[:-1]]
    order = sorted(range(len(documents)), key=documents.__getitem__)
    head = {"train": texts[0].count(END), "documents": len(order), "learned": learned}
    stream = [json.dumps(head).encode() + b"\n", np.array(order, "<u4").tobytes()]
    stream += [documents[number] + END for number in order]
    output.mkdir(parents=True, exist_ok=True)
    paths, sums = [], []
    for number, data in enumerate(_cut(_compressed(stream), piece)):
        paths.append(output / f"{facts['name']}-{number:02d}.xz")
        paths[-1].write_bytes(data)
        sums.append(hashlib.sha256(data).hexdigest())
    index = output / f"{facts['name']}.json"
    index.write_text(json.dumps({"facts": facts, "pieces": sums}, indent=1) + "\n", encoding="utf-8")
    return [index, *paths]


def unpack(folders: Sequence[Path], output: Path) -> dict[str, Any]:
    """Write the text that :func:`pack` has packed: the same bytes.

    Args:
        folders: Where the pieces lie; all of them have to be somewhere.
        output: Gets what :func:`benchmarks.convergence.corpus.build` writes, without packages.

    Returns:
        What ``corpus.json`` says.

    Raises:
        ValueError: A piece is missing or has other bytes than it had, or the text has.
    """
    indices = [path for folder in folders if (path := folder / f"{NAME}.json").exists()]
    if not indices:
        raise ValueError(f"there is no {NAME}.json in {', '.join(map(str, folders))}: corpus --pack writes it")
    index = json.loads(indices[0].read_text(encoding="utf-8"))
    facts = index["facts"]
    names = {f"{facts['name']}-{number:02d}.xz": checksum for number, checksum in enumerate(index["pieces"])}
    there = {name: path for folder in folders for name in names if (path := folder / name).exists()}
    if missing := [name for name in names if name not in there]:
        raise ValueError(f"{', '.join(missing)} is not in {', '.join(map(str, folders))}: all pieces are needed")
    reader, parts = lzma.LZMADecompressor(), []
    for name, checksum in names.items():
        data = there[name].read_bytes()
        if hashlib.sha256(data).hexdigest() != checksum:
            raise ValueError(f"{there[name]} has other bytes than were packed: copy it again")
        parts.append(reader.decompress(data))
    first, _, rest = b"".join(parts).partition(b"\n")
    head = json.loads(first)
    order = np.frombuffer(rest, "<u4", head["documents"])
    documents = [b""] * len(order)
    for number, document in zip(order.tolist(), rest[order.nbytes :].split(END), strict=False):
        documents[number] = document + END
    texts = [b"".join(documents[: head["train"]]), b"".join(documents[head["train"] :])]
    _check(texts, facts)
    output.mkdir(parents=True, exist_ok=True)
    files = {f"{part}.txt": text for part, text in zip(_PARTS, texts, strict=True)}
    files |= {name: text.encode() for name, text in head["learned"].items()}
    for name, data in {**files, "corpus.json": (json.dumps(facts, indent=1) + "\n").encode()}.items():
        new = output / f"{name}.new"
        new.write_bytes(data)
        new.replace(output / name)
    return facts  # type: ignore[no-any-return]


def _check(texts: Sequence[bytes], facts: dict[str, Any]) -> None:
    for part, text in zip(_PARTS, texts, strict=True):
        found = hashlib.sha256(text).hexdigest()
        if found != facts[part]["sha256"]:
            raise ValueError(f"{part} has the checksum {found}: it must be {facts[part]['sha256']}")


def _compressed(stream: Sequence[bytes]) -> Iterator[bytes]:
    size = sum(map(len, stream))
    memory = min(_LARGEST_MEMORY, max(1 << 16, 1 << size.bit_length()))
    options = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": memory}
    # Text has no words of four bytes; what precedes a byte says more.
    writer = lzma.LZMACompressor(filters=[{**options, "lc": 4, "lp": 0, "pb": 0}])
    for data in stream:
        yield writer.compress(data)
    yield writer.flush()


def _cut(data: Iterator[bytes], size: int) -> Iterator[bytes]:
    held = b""
    for some in data:
        held += some
        while len(held) >= size:
            yield held[:size]
            held = held[size:]
    if held:
        yield held
