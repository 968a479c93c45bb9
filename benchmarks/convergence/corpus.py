"""Text of packages alone, natural language beside code, the same bytes everywhere: ``python -m benchmarks corpus``.

Every package has a version and a checksum. A document is a file of a package; it is trained on or held out by the
checksum of its name. Documents are in the order of that checksum, each followed by a byte of zero.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import html
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.performance import markdown
from rankwise.launch.data import Corpus, is_validation

__all__ = [
    "END",
    "FOLDER",
    "NAME",
    "SOURCES",
    "Source",
    "build",
    "facts_of",
    "fetched",
    "licences",
    "load",
    "pairs_stem",
]

NAME = "packages-1"
"""A change of sources or of what is taken from them changes the name: losses on other text are others."""
FOLDER = Path("build/corpus")
CHECKSUMS = {
    "train": "ee7929bb32efeceddaa18fc76fb216b27e9c10de1acb27be52c1a85e7a0fc2af",
    "held-out": "2b980001f787a470372cbcf2ef59d0948cccddb00052c238f8221a4db59af55f",
}
"""Of the two files, wherever they are built."""
HELD_OUT = 0.02
"""Share of the documents."""
_SHORTEST, _LONGEST = 200, 400_000  # bytes of a document
END = b"\0"
_PAIRS_LEARN_FROM = 8  # one document in so many


@dataclass(frozen=True)
class Source:
    """A package and what is taken from it.

    Attributes:
        kind: "debian", or "wheel": a pure Python package.
        package: Name of the package.
        version: Version of the package.
        sha256: Checksum of the file that holds it.
        licence: Licence of the text.
        take: Patterns of names in the package, with "!" of those that are left; a "*" matches slashes, too.
        language: "natural" or "code", for counts.
    """

    kind: Literal["debian", "wheel"]
    package: str
    version: str
    sha256: str
    licence: str
    take: tuple[str, ...]
    language: Literal["natural", "code"]


SOURCES: tuple[Source, ...] = (
    Source(
        "debian",
        "linux-doc-6.1",
        "6.1.176-1",
        "0d843674607703b9ef8c1db5e715c38ed52ff23574feabfe0d961d552126859f",
        "GPL-2.0",
        ("usr/share/doc/linux-doc-6.1/html/_sources/*.txt",),
        "natural",
    ),
    Source(
        "debian",
        "python3.11-doc",
        "3.11.2-6+deb12u8",
        "50eb63e7f636c4281e9ce1b8f10386f1def42159eddce34fc1f41c46261df71b",
        "PSF-2.0",
        ("usr/share/doc/python3.11/html/_sources/*.txt",),
        "natural",
    ),
    Source(
        "debian",
        "postgresql-doc-15",
        "15.18-0+deb12u1",
        "3c598277a463c44d672daa2c335deb8d8252e1852fb025fd4578ea2d9a1b90f0",
        "PostgreSQL",
        ("*.html",),
        "natural",
    ),
    Source(
        "debian",
        "openjdk-17-doc",
        "17.0.19+10-1~deb12u2",
        "e94dbb2d3663db00888536aba970489ebec932058eba02f038587cbc805e0007",
        "GPL-2.0 with classpath exception",
        ("*.html", "!*/class-use/*", "!*-use.html", "!*/index-files/*", "!*-tree.html", "!*/src-html/*"),
        "natural",
    ),
    Source(
        "debian",
        "rust-doc",
        "1.63.0+dfsg1-2",
        "96ef96fe6df87d939ca713bd7df3d15c2b778ccb892eca025c4ee504146f697b",
        "MIT or Apache-2.0",
        (
            "*/html/book/*.html",
            "*/html/reference/*.html",
            "*/html/rust-by-example/*.html",
            "*/html/cargo/*.html",
            "*/html/rustc/*.html",
            "*/html/nomicon/*.html",
            "*/html/edition-guide/*.html",
            "!*/print.html",
        ),
        "natural",
    ),
    Source(
        "debian",
        "perl-doc",
        "5.36.0-7+deb12u3",
        "e9e3564ff5ade27de0585835f2acad769bcc545c0a0045a9f55d5401f27f7591",
        "Artistic-1.0 or GPL-1.0+",
        ("*.pod",),
        "natural",
    ),
    Source(
        "debian",
        "git-doc",
        "1:2.39.5-0+deb12u3",
        "3c89668a11053a6bafade3de1f611f4613db31e082af63f43d8c5b69ad8795ec",
        "GPL-2.0",
        ("*.txt",),
        "natural",
    ),
    Source(
        "debian",
        "manpages",
        "6.03-2",
        "efa1ba4cd19ad7baeae959c9209a7eb74be2ebb858bcabb412597bfc9f588c91",
        "of each page, free",
        ("usr/share/man/*.gz",),
        "natural",
    ),
    Source(
        "debian",
        "manpages-dev",
        "6.03-2",
        "96f55cb5e26231d5567c89b692bced63825a14a2d5bd18fdf16ea2ed44eb9838",
        "of each page, free",
        ("usr/share/man/*.gz",),
        "natural",
    ),
    Source(
        "debian",
        "dict-gcide",
        "0.48.5+nmu2",
        "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f",
        "GPL-3.0+",
        ("*.dict.dz",),
        "natural",
    ),
    Source(
        "debian",
        "dict-jargon",
        "4.4.7-3.1",
        "405f8168d7994ed2cb71407bb95493daec2e9aa66fc0461dafa74a9d6728a8c1",
        "public domain",
        ("*.dict.dz",),
        "natural",
    ),
    Source(
        "debian",
        "wordnet-base",
        "1:3.0-37",
        "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
        "WordNet 3.0",
        ("usr/share/wordnet/data.*",),
        "natural",
    ),
    Source(
        "debian",
        "fortunes",
        "1:1.99.1-7.3",
        "41d0551dc0ff52f875a2ecef7c39da2f672ab468c37e170119f7e0245a9d63c5",
        "public domain",
        ("usr/share/games/fortunes/*", "!*.dat", "!*.u8"),
        "natural",
    ),
    Source(
        "wheel",
        "ansible",
        "12.3.0",
        "cd156f82fa87f7a899212b0efa9f7ca3a24d609212de9f78428a572eb01e5414",
        "GPL-3.0+",
        ("*.py", "*.rst", "*.md", "*.txt"),
        "code",
    ),
    Source(
        "debian",
        "rust-doc",
        "1.63.0+dfsg1-2",
        "96ef96fe6df87d939ca713bd7df3d15c2b778ccb892eca025c4ee504146f697b",
        "MIT or Apache-2.0",
        ("*/html/src/*.html",),
        "code",
    ),
    Source(
        "wheel",
        "django",
        "5.2.19",
        "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00",
        "BSD-3-Clause",
        ("*.py", "*.html", "*.txt", "*.js"),
        "code",
    ),
    Source(
        "wheel",
        "sympy",
        "1.14.0",
        "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
        "BSD-3-Clause",
        ("*.py",),
        "code",
    ),
    Source(
        "wheel",
        "networkx",
        "3.6.1",
        "d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762",
        "BSD-3-Clause",
        ("*.py",),
        "code",
    ),
    Source(
        "wheel",
        "twisted",
        "26.10.0",
        "3732f42af218925a0fe78d6668db55853f7fb532245a89a2669babe7d3000fa8",
        "MIT",
        ("*.py",),
        "code",
    ),
    Source(
        "wheel",
        "sqlalchemy",
        "2.1.9",
        "449fed5c2caa3b278cc57499d09db001fb3f28dc7f18affc48142aee4dcc0cdf",
        "MIT",
        ("*.py",),
        "code",
    ),
)


def build(
    folder: Path, sources: Sequence[Source] = SOURCES, fetch: Callable[[Source, Path], Path] | None = None
) -> dict[str, Any]:
    """Fetch the packages and write the text.

    Args:
        folder: Gets ``train.txt``, ``held-out.txt`` and ``corpus.json``; packages are kept in ``packages`` in it.
        sources: The packages.
        fetch: Puts a package into a folder and returns the file; by default :func:`fetched`.

    Returns:
        What ``corpus.json`` says: name, sources with documents and bytes, bytes and checksums of both files.

    Raises:
        ValueError: A package or the whole text has another checksum than it should, or nothing of a package was taken.
    """
    (folder / "packages").mkdir(parents=True, exist_ok=True)
    documents: dict[bytes, tuple[str, bytes, Source]] = {}
    for source in sources:
        path = (fetch or fetched)(source, folder / "packages")
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != source.sha256:
            raise ValueError(
                f"{source.package} {source.version} has the checksum {found}: it must be {source.sha256}; "
                f"delete {path.name} and try again"
            )
        for name, text in _documents(source, path):
            # Of equal documents the first counts, so that none is trained on and held out.
            documents.setdefault(hashlib.sha256(text).digest(), (f"{source.package}/{name}", text, source))
    facts: dict[str, Any] = {"name": NAME, "sources": _counted(sources, documents.values())}
    ordered = sorted(documents.values(), key=lambda one: hashlib.sha256(one[0].encode()).digest())
    for part, held in (("train", False), ("held-out", True)):
        path, digest, size = folder / f"{part}.txt", hashlib.sha256(), 0
        with path.with_suffix(".new").open("wb") as file:
            for name, text, _ in ordered:
                if is_validation(name, HELD_OUT) == held:
                    digest.update(text + END)
                    size += file.write(text + END)
        path.with_suffix(".new").replace(path)
        facts[part] = {"bytes": size, "sha256": digest.hexdigest()}
    if sources is SOURCES and (changed := [part for part in CHECKSUMS if facts[part]["sha256"] != CHECKSUMS[part]]):
        raise ValueError(
            f"the text has other bytes than {NAME} has ({', '.join(changed)}): the packages are the same, so what "
            "reads them is not; give the text another name before anything is trained on it"
        )
    (folder / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return facts


def _counted(sources: Sequence[Source], documents: Iterable[tuple[str, bytes, Source]]) -> list[dict[str, Any]]:
    taken: dict[Source, list[int]] = {source: [] for source in sources}
    for _, text, source in documents:
        taken[source].append(len(text))
    for source, sizes in taken.items():
        if not sizes:
            raise ValueError(f"nothing of {source.package} {source.version} matches {list(source.take)}")
    names = ("kind", "package", "version", "licence", "language")
    return [
        {name: getattr(source, name) for name in names} | {"documents": len(sizes), "bytes": sum(sizes)}
        for source, sizes in taken.items()
    ]


def fetched(source: Source, folder: Path) -> Path:
    """The file of a package, from the registry that this machine's package manager knows, unless it is there.

    Args:
        source: Which.
        folder: Where it is kept.

    Raises:
        ValueError: The package manager does not have that version.
    """
    pattern = f"{source.package}_*.deb" if source.kind == "debian" else f"{source.package.replace('-', '_')}-*.whl"
    known = [path for path in folder.glob(pattern) if _has_version(path, source)]
    if not known:
        pure = ("--platform", "any", "--python-version", "3.11", "--implementation", "py", "--abi", "none")
        wheel = ("-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *pure)
        command = {
            "debian": ("apt-get", "-q", "download", f"{source.package}={source.version}"),
            "wheel": (sys.executable, *wheel, f"{source.package}=={source.version}"),
        }[source.kind]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            told = getattr(error, "stderr", "") or str(error)
            raise ValueError(
                f"{source.package} {source.version} could not be had ({told.strip().splitlines()[-1]}); it needs "
                f"{command[0]} and a registry that has this version; another version would be other text"
            ) from error
        known = [path for path in folder.glob(pattern) if _has_version(path, source)]
    return known[0]


def _has_version(path: Path, source: Source) -> bool:
    version = source.version.replace(":", "%3a")
    return path.name.replace("_", "-").startswith(f"{source.package}-{version}".replace("_", "-"))


# --- documents -------------------------------------------------------------------------------------------------------


def _documents(source: Source, path: Path) -> Iterator[tuple[str, bytes]]:
    members = _of_debian(path) if source.kind == "debian" else _of_wheel(path)
    for name, data in members:
        if not _is_taken(name, source):
            continue
        if name.endswith((".gz", ".dz")):
            data = gzip.decompress(data)
        text = _plain(data) if name.endswith(".html") else data
        for number, start in enumerate(range(0, len(text), _LONGEST)):
            part = text[start : start + _LONGEST]
            if len(part) >= _SHORTEST and END not in part:
                yield f"{name}:{number}" if len(text) > _LONGEST else name, part


def _is_taken(name: str, source: Source) -> bool:
    wanted = [pattern for pattern in source.take if not pattern.startswith("!")]
    left = [pattern[1:] for pattern in source.take if pattern.startswith("!")]
    return any(fnmatch(name, one) for one in wanted) and not any(fnmatch(name, one) for one in left)


def _of_debian(path: Path) -> Iterator[tuple[str, bytes]]:
    with subprocess.Popen(("dpkg-deb", "--fsys-tarfile", path), stdout=subprocess.PIPE) as unpacking:
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive:
            for member in archive:
                if member.isfile():
                    yield member.name.removeprefix("./"), archive.extractfile(member).read()  # type: ignore[union-attr]
    if unpacking.returncode:
        raise ValueError(f"{path.name} cannot be unpacked")


def _of_wheel(path: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        for name in sorted(archive.namelist()):
            yield name, archive.read(name)


_HIDDEN = re.compile(r"<(script|style|head|nav|header|footer)\b.*?</\1\s*>", re.S | re.I)
_TAG = re.compile(r"<[^<>]*>")
_SPACES = (re.compile(r"[ \t\r\f\v\xa0]+"), re.compile(r" ?\n[ \n]*\n"))


def _plain(page: bytes) -> bytes:
    """The words of a page, without marks; what is between them stays where it was."""
    words = html.unescape(_TAG.sub("", _HIDDEN.sub("", page.decode("utf-8", "replace"))))
    words = _SPACES[1].sub("\n\n", _SPACES[0].sub(" ", words))
    return words.strip().encode()


# --- reading ---------------------------------------------------------------------------------------------------------


def load(folder: Path, name: str = NAME, tokens: str = "bytes") -> Corpus:
    """The text as tokens.

    Args:
        folder: Folder of :func:`build`.
        name: Name that the text must have.
        tokens: "bytes", or "bpe" and the number of tokens, which are learned from the text at the first call.

    Raises:
        ValueError: There is no such text, or there are no such tokens.
    """
    facts = facts_of(folder)
    if facts["name"] != name:
        raise ValueError(f"the text in {folder} is {facts['name']!r} and must be {name!r}: build it again")
    kind, _, number = tokens.partition(" ")
    if tokens == "bytes":
        parts, vocabulary, dtype = [folder / f"{part}.txt" for part in ("train", "held-out")], 256, np.uint8
    elif kind == "bpe" and number.isdecimal():
        parts, vocabulary, dtype = _pairs(folder, int(number), facts), int(number), np.uint16
    else:
        raise ValueError(f"tokens are {tokens!r}: they must be 'bytes' or 'bpe' and a number, as 'bpe 50257'")
    train, held_out = (np.memmap(part, dtype, "c") for part in parts)
    return Corpus(train, held_out, vocabulary, float("nan"), folder)


def facts_of(folder: Path) -> dict[str, Any]:
    """What ``corpus.json`` says of the text in a folder.

    Raises:
        ValueError: There is no text.
    """
    path = folder / "corpus.json"
    if not path.exists():
        raise ValueError(f"there is no text in {folder}: python -m benchmarks corpus builds it")
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def pairs_stem(number: int | str, facts: dict[str, Any]) -> str:
    """What the names of the files of byte pairs begin with; "*" for any number of them."""
    return f"bpe-{number}-{facts['train']['sha256'][:8]}"


def _pairs(folder: Path, number: int, facts: dict[str, Any]) -> list[Path]:
    """Files of tokens, made once for this text, by one process: token 0 ends a document."""
    if not 257 <= number <= 1 << 16:
        raise ValueError(f"bpe has {number} tokens: it must have 257 to 65536")
    stem = pairs_stem(number, facts)
    paths = [folder / f"{stem}-{part}.bin" for part in ("train", "held-out")]
    with (folder / f"{stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(path.exists() for path in paths):
            _write_pairs(folder, folder / f"{stem}.json", number, paths)
    return paths


def _write_pairs(folder: Path, learned: Path, number: int, paths: Sequence[Path]) -> None:
    from tokenizers import Tokenizer

    if not learned.exists():
        _learn_pairs(folder, number, learned)
    tokenizer = Tokenizer.from_file(str(learned))
    for path, part in zip(paths, ("train", "held-out"), strict=True):
        with path.with_suffix(".new").open("wb") as file:
            texts = _texts(folder / f"{part}.txt")
            while some := list(islice(texts, 512)):
                for encoded in tokenizer.encode_batch_fast(some):
                    file.write(np.array([*encoded.ids, 0], np.uint16).tobytes())
        path.with_suffix(".new").replace(path)


def _learn_pairs(folder: Path, number: int, learned: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=number,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for place, text in enumerate(_texts(folder / "train.txt")) if place % _PAIRS_LEARN_FROM == 0)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(learned.with_suffix(".new")))
    learned.with_suffix(".new").replace(learned)


def _texts(path: Path) -> Iterator[str]:
    for document in path.read_bytes().split(END)[:-1]:
        yield document.decode("utf-8", "replace")


def licences(facts: dict[str, Any]) -> str:
    """A table of what the text consists of.

    Args:
        facts: What :func:`build` returned.
    """
    rows = [
        (each["package"], each["version"], each["language"], each["licence"], f"{each['bytes'] / 1e6:.1f}")
        for each in facts["sources"]
    ]
    return markdown(("package", "version", "language", "licence", "MB"), rows)
