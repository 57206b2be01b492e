"""The token store matches the tokenizer for any blocks, and slices of documents are read correctly."""

import itertools
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import DataError
from bert_pretrain.make_data import ingest
from bert_pretrain.make_data.ingest import MAX_SENTENCE_TOKENS, GrowingArray, ensure_store_shard
from bert_pretrain.make_data.token_store import Slices, TokenStore, store_key, store_shard_folder
from bert_pretrain.text import documents, sources, text_files
from bert_pretrain.text.tokenizer import Tokenizer

LINES = DataConfig(document_boundary="blank_line", sentence_splitter="lines")


def fill(text: Path, vocab: Path, folder: Path, config: DataConfig = LINES) -> tuple[TokenStore, list[dict]]:
    (source,) = sources.resolve([str(text)], config)
    parts = documents.cut(source, documents.PART_BYTES)
    tokenizer = Tokenizer.load(vocab)
    summaries = []
    for number, part in enumerate(parts):
        summaries.append(ensure_store_shard(tokenizer, config, ([part], store_shard_folder(folder, number))))
    return TokenStore(folder, len(parts), tokenizer.id_dtype), summaries


def sentences_of(store: TokenStore) -> list[list[list[int]]]:
    """Return the ids of all documents, as lists of sentences."""
    numbers = np.arange(store.num_documents)
    text = store.read(Slices(numbers, np.zeros_like(numbers), np.ones_like(numbers)), 0)
    found = [text.ids[begin:end].tolist() for begin, end in itertools.pairwise(text.sentence_starts)]
    return [found[first:last] for first, last in itertools.pairwise(text.slice_offsets)]


def test_the_store_matches_the_tokenizer(english_text, english_documents, vocab_folder, tmp_path) -> None:
    store, (summary,) = fill(english_text, vocab_folder, tmp_path)
    tokenizer, found = Tokenizer.load(vocab_folder), sentences_of(store)
    expected = [[tokenizer.encode_text(sentence) for sentence in document] for document in english_documents]
    for ours, theirs in zip(found, expected, strict=True):
        assert [*itertools.chain(*ours)] == [*itertools.chain(*theirs)]
        assert ours == theirs or max(map(len, theirs)) > MAX_SENTENCE_TOKENS
    (part,) = summary["parts"]
    counts = (len(expected), sum(map(len, expected)), sum(len(ids) for document in expected for ids in document))
    assert (part["documents"], part["sentences"], part["tokens"]) == counts
    assert sum(number * documents for number, documents in summary["sentences_a_document"]) == part["sentences"]
    sentences, tokens = store.sizes_of(np.arange(len(found)))
    assert sentences.tolist() == [len(document) for document in found]
    assert tokens.tolist() == [sum(map(len, document)) for document in found]


@pytest.mark.parametrize("look_ahead", [0, 50])
def test_slices_of_a_document_are_its_text(english_text, vocab_folder: Path, tmp_path: Path, look_ahead: int) -> None:
    store, _ = fill(english_text, vocab_folder, tmp_path)
    _, tokens = store.sizes_of(np.arange(store.num_documents))
    longest = int(np.argmax(tokens))
    assert store.documents_longer_than(int(tokens[longest]) - 1).tolist() == [longest]
    whole = [*itertools.chain(*sentences_of(store)[longest])]
    for number in (2, 7, 50):
        slices = Slices(np.full(number, longest), np.arange(number), np.full(number, number))
        text = store.read(slices, look_ahead)
        begin, starts = 0, text.sentence_starts
        spans = itertools.pairwise(text.slice_offsets)
        for (first, last), num_sentences in zip(spans, text.num_slice_sentences, strict=True):
            slice_end = first + num_sentences
            span = text.ids[starts[first] : starts[last]].tolist()
            assert span == whole[begin : begin + len(span)]
            begin += int(starts[slice_end] - starts[first])
            assert starts[last] - starts[slice_end] >= min(look_ahead, len(whole) - begin)
        assert begin == len(whole)


def test_a_store_shard_is_written_once_and_atomically(english_text, vocab_folder, tmp_path, monkeypatch) -> None:
    fill(english_text, vocab_folder, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    fill(english_text, vocab_folder, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    shutil.rmtree(tmp_path / "part-00000")
    monkeypatch.setattr(GrowingArray, "append", lambda *_, **__: os.open("/nowhere/file", os.O_RDONLY))
    with pytest.raises(OSError):
        fill(english_text, vocab_folder, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_key_depends_on_all_that_decides_ids(english_text: Path, chinese_text: Path, vocab_folder: Path) -> None:
    tokenizer = Tokenizer.load(vocab_folder)
    cased = Tokenizer(tokenizer.tokens, lowercase=False, strip_accents=None, handle_chinese_chars=True)

    def key(text: Path = english_text, using: Tokenizer = tokenizer, **settings: object) -> str:
        config = DataConfig.model_validate({"document_boundary": "blank_line", **settings})
        return store_key(sources.resolve([str(text)], config), using, config)

    keys = [key(), key(chinese_text), key(using=cased), key(language="de"), key(sentence_splitter="sentencex")]
    keys += [key(document_boundary="file"), key(text_field="body"), key(strict=True)]
    assert len(set(keys)) == len(keys)
    assert key(max_seq_length=512, dupe_factor=1, seed=5, masked_lm_prob=0.3) == key()


@pytest.mark.parametrize("settings", [{"document_boundary": "file"}, {"sentence_splitter": "lines"}])
def test_the_store_does_not_depend_on_block_sizes(monkeypatch, english_text, vocab_folder, tmp_path, settings) -> None:
    config = LINES.model_copy(update=settings)
    _, whole = fill(english_text, vocab_folder, tmp_path / "whole", config)
    monkeypatch.setattr(ingest, "BLOCK_CHARACTERS", 1000)
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 3000)
    _, in_blocks = fill(english_text, vocab_folder, tmp_path / "blocks", config)
    assert in_blocks == whole
    for path in (tmp_path / "whole").rglob("*.npy"):
        assert (tmp_path / "blocks" / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes()


def test_a_segmenter_marks_characters_that_continue_a_word(vocab_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("我们喜欢自然语言处理。\nThe 我们 and 我, 们.\n\n北京大学 words\n")
    config = LINES.model_copy(update={"whole_word_mask": True, "word_segmenter": "jieba"})
    fill(tmp_path / "a.txt", vocab_folder, tmp_path / "store", config)
    tokenizer, continues = Tokenizer.load(vocab_folder), []
    for word in re.findall(r"\S+", "我们 喜欢 自然语言 处理 。 The 我们 and 我 , 们 . 北京大学 words"):
        length = len(tokenizer.encode_text(word))
        continues += [place > 0 and not word.isascii() for place in range(length)]
    found = np.load(store_shard_folder(tmp_path / "store", 0) / "continues_word.npy")
    assert found.tolist() == continues


@pytest.mark.parametrize("name", ["ids", "sentence_offsets", "is_continuation", "document_offsets"])
def test_a_truncated_store_shard_is_an_error(english_text, vocab_folder, tmp_path, name) -> None:
    store, _ = fill(english_text, vocab_folder, tmp_path)
    sentences_of(store)
    file = store_shard_folder(tmp_path, 0) / f"{name}.npy"
    for size in (file.stat().st_size - 1, 200, 4, 0):
        os.truncate(file, size)
        with pytest.raises(DataError, match=rf"too early: {name}\.npy"):
            sentences_of(TokenStore(tmp_path, 1, store.id_dtype) if name == "document_offsets" else store)
