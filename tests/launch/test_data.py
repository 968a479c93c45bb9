from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from rankwise.launch.data import (
    BLOCK_BYTES,
    Tokenizer,
    find_documents,
    is_validation,
    load_corpus,
    load_tokenizer,
    unigram_entropy,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "text"
    (root / "sub").mkdir(parents=True)
    for number in range(60):
        (root / ("sub" if number % 2 else ".") / f"{number:02d}.txt").write_text(f"document {number}\n" * 20)
    return root


def documents_of(tokens: np.ndarray, end: int) -> list[bytes]:
    pieces = np.split(np.asarray(tokens), np.flatnonzero(tokens == end) + 1)
    return [piece[:-1].astype(np.uint8).tobytes() for piece in pieces if len(piece)]


def test_whole_files_go_to_one_side_in_sorted_order(folder: Path, tmp_path: Path) -> None:
    corpus = load_corpus(folder, load_tokenizer("bytes"), tmp_path / "cache")
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.txt"))
    for tokens, held_out in ((corpus.train, False), (corpus.validation, True)):
        expected = [(folder / name).read_bytes() for name in names if is_validation(name) is held_out]
        assert documents_of(tokens, 256) == expected
        assert expected


def test_split_depends_on_the_name_alone(folder: Path, tmp_path: Path) -> None:
    before = load_corpus(folder, load_tokenizer("bytes"), tmp_path / "cache")
    added = next(f"new{number}.txt" for number in range(100) if not is_validation(f"new{number}.txt"))
    (folder / added).write_text("one more")
    after = load_corpus(folder, load_tokenizer("bytes"), tmp_path / "cache")
    np.testing.assert_array_equal(before.validation, after.validation)
    assert len(after.train) == len(before.train) + len("one more") + 1


def test_about_a_twentieth_is_held_out() -> None:
    share = np.mean([is_validation(f"file{number}.py") for number in range(4000)])
    assert 0.03 < share < 0.07


def test_split_is_the_same_on_every_machine() -> None:
    names = [f"file{number}.py" for number in range(100)]
    assert [name for name in names if is_validation(name)] == ["file0.py", "file11.py", "file69.py", "file90.py"]


def test_cache_is_reused_until_a_file_changes(folder: Path, tmp_path: Path) -> None:
    calls = 0

    def encode(text: bytes) -> np.ndarray:
        nonlocal calls
        calls += 1
        return np.frombuffer(text, np.uint8)

    tokenizer = Tokenizer("counting", 257, 256, encode)
    first = load_corpus(folder, tokenizer, tmp_path / "cache")
    assert calls == 60 and isinstance(first.train, np.memmap) and first.train.dtype == np.uint16
    second = load_corpus(folder, tokenizer, tmp_path / "cache")
    assert calls == 60 and second.unigram_entropy == first.unigram_entropy
    path = folder / "00.txt"
    path.write_bytes(path.read_bytes().swapcase())  # the same size
    os.utime(path, ns=(0, 1))
    third = load_corpus(folder, tokenizer, tmp_path / "cache")
    assert calls == 120 and not np.array_equal(third.train, first.train)
    assert not list((tmp_path / "cache").glob("*/*.partial")) and len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_smallest_integer_type_that_holds_every_token(vocab: int, dtype: type) -> None:
    assert Tokenizer("x", vocab, vocab - 1, list).dtype == dtype


def test_one_file_is_cut_at_line_ends(tmp_path: Path) -> None:
    text = b"".join(b"line %d\n" % number for number in range(30000))
    path = tmp_path / "one.txt"
    path.write_bytes(text)
    blocks = [document.read() for document in find_documents(path)]
    assert b"".join(blocks) == text and len(blocks) > 2
    assert all(block.endswith(b"\n") and len(block) >= BLOCK_BYTES for block in blocks[:-1])
    corpus = load_corpus(path, load_tokenizer("bytes"), tmp_path / "cache")
    assert len(corpus.train) + len(corpus.validation) == len(text) + len(blocks)
    assert 0 < len(corpus.validation) < len(corpus.train)


def test_binary_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.md").write_text("x" + "ä" * 5000)  # the sample that is looked at ends inside a character
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    (tmp_path / "d.latin").write_bytes("\xe4\xe4\xe4 text".encode("latin-1"))
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "empty").write_text("")
    assert [document.name for document in find_documents(tmp_path)] == ["a.txt", "b.md"]


def test_default_is_the_standard_library() -> None:
    documents = find_documents()
    names = {document.name for document in documents}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any("site-packages" in name for name in names)
    assert sum(document.end for document in documents) > 5_000_000


@pytest.mark.parametrize("files", [[], ["only.txt"]])
def test_too_little_text_is_refused(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).write_text("text")
    with pytest.raises(ValueError, match="at least two files"):
        find_documents(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        find_documents(tmp_path / "missing")


def test_unigram_entropy_of_known_frequencies() -> None:
    counts = np.array([8, 4, 2, 1]) * 10**9
    expected = -(counts / counts.sum() * np.log(counts / counts.sum())).sum()
    assert unigram_entropy(counts, counts) == pytest.approx(expected, rel=1e-8)
    unseen = unigram_entropy(np.array([3, 0]), np.array([0, 1]))  # smoothed: (3 + 1) and (0 + 1) of 5
    assert unseen == pytest.approx(np.log(5), rel=1e-12)
    assert unigram_entropy(counts, counts[::-1]) > expected


def test_unknown_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="tokenizer is .*'bytes'"):
        load_tokenizer(str(tmp_path))


def test_hugging_face_tokenizer_from_a_folder(tmp_path: Path, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"document": 0, "[UNK]": 1}, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]").save_pretrained(tmp_path / "tok")
    tokenizer = load_tokenizer(str(tmp_path / "tok"))
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (3, 2)
    corpus = load_corpus(folder, tokenizer, tmp_path / "cache")
    assert corpus.train.dtype == np.uint8
    np.testing.assert_array_equal(corpus.validation[:41], [0, 1] * 20 + [2])
