"""Tokenizers of a `tokenizer.json`, such as the byte-level BPE of ModernBERT, give the ids of `transformers`."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.shards import read_shard
from bert_pretrain.inspect.inspect import inspect
from bert_pretrain.make_data.run import make_data
from bert_pretrain.model.folder import match_vocabulary
from bert_pretrain.text.fast_tokenizer import make_encoder
from bert_pretrain.text.tokenizer import JsonTokenizer, Tokenizer
from bert_pretrain.tools.fill_mask import encode_with_masks
from bert_pretrain.vocab.run import make_vocab

TEXTS = ["The café isn't\n  open; naïve 中文 [MASK] <s>", "the", " the", "x" * 300, "½ ﬁ I 🙂"]
SPECIAL = ("[UNK]", "[CLS]", "[SEP]", "[PAD]")


def byte_level(text: str) -> tokenizers.Tokenizer:
    """Return a tokenizer with the parts of ModernBERT's, trained on a text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([text], trainer)
    backend.add_tokens(["  "])
    backend.add_special_tokens([*SPECIAL, AddedToken("[MASK]", lstrip=True), "[unused0]"])
    return backend


def sentence_piece(text: str) -> tokenizers.Tokenizer:
    """Return a Unigram tokenizer with the parts and names of XLM-RoBERTa's, trained on a text."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=names, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator([text[:200_000]], trainer)
    return backend


NAMES = {
    byte_level: {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"},
    sentence_piece: {"unk": "<unk>", "cls": "<s>", "sep": "</s>", "pad": "<pad>", "mask": "<mask>"},
}


def write_folder(make: Any, text: str, path: Path) -> Path:
    """Write a tokenizer folder with `transformers`."""
    from transformers import PreTrainedTokenizerFast

    names = NAMES[make]
    backend = make(text)
    ids = {name: backend.token_to_id(name) for name in names.values()}
    backend.post_processor = processors.TemplateProcessing(
        single=f"{names['cls']} $A {names['sep']}",
        pair=f"{names['cls']} $A {names['sep']} $B {names['sep']}",
        special_tokens=[(name, ids[name]) for name in (names["cls"], names["sep"])],
    )
    tokens = {f"{role}_token": name for role, name in names.items()}
    PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=99, **tokens).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=NAMES, ids=lambda each: each.__name__)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, english_text: Path) -> Path:
    return write_folder(request.param, english_text.read_text(), tmp_path_factory.mktemp("json"))


def test_ids_equal_transformers_and_survive_a_copy(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours = Tokenizer.load(folder)
    assert isinstance(ours, JsonTokenizer)
    ours.save(tmp_path / "copy", 64)
    copy = Tokenizer.load(tmp_path / "copy")
    assert copy.hash == ours.hash
    theirs = AutoTokenizer.from_pretrained(folder)
    saved = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert saved.model_max_length == 64
    encoded = make_encoder(copy).encode_texts(TEXTS)
    for index, text in enumerate(TEXTS):
        expected = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode_text(text) == expected
        assert encoded.ids[encoded.offsets[index] : encoded.offsets[index + 1]].tolist() == expected
        assert saved(text)["input_ids"] == theirs(text)["input_ids"]
    special = (ours.pad_id, ours.unk_id, ours.cls_id, ours.sep_id, ours.mask_id)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    assert special == tuple(getattr(theirs, f"{name}_id") for name in names)


def test_names_of_special_tokens_in_a_file_of_their_own_survive_a_copy(folder: Path, tmp_path: Path) -> None:
    old = shutil.copytree(folder, tmp_path / "old")
    (old / "tokenizer_config.json").rename(old / "special_tokens_map.json")
    Tokenizer.load(old).save(tmp_path / "copy")
    assert Tokenizer.load(tmp_path / "copy").mask_id == Tokenizer.load(folder).mask_id


def test_words_are_those_of_the_pre_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    encoded = make_encoder(tokenizer, with_words=True).encode_texts(TEXTS)
    assert encoded.continues_word is not None
    for index, text in enumerate(TEXTS):
        own = slice(encoded.offsets[index], encoded.offsets[index + 1])
        words = tokenizer.backend.encode(text, add_special_tokens=False).word_ids
        assert (~encoded.continues_word[own]).sum() == len(set(words))


def make(text: Path, vocab: Path, output: Path, **settings: Any) -> DataFolder:
    values = {"max_seq_length": 64, "dupe_factor": 1, "next_sentence": "none", "validation_fraction": 0.1, **settings}
    config = load_config(settings=[f"data.{key}={json.dumps(value)}" for key, value in values.items()])
    return DataFolder.open(make_data(config, [str(text)], vocab, output, workers=1))


@pytest.mark.parametrize("masking", ["static", "dynamic"])
def test_examples_have_the_ids_of_the_documents_and_whole_words(
    masking: str,
    folder: Path,
    english_text: Path,
    tmp_path: Path,
) -> None:
    blocks = english_text.read_text().split("\n\n")[:30]
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(blocks))
    data = make(text, folder, tmp_path / "data", whole_word_mask=True, masking=masking)
    tokenizer = data.tokenizer()
    examples = read_shard(data.path, data.shards("validation")[0])
    encodings = [
        tokenizer.backend.encode(block.strip().replace("\n", " "), add_special_tokens=False) for block in blocks
    ]
    documents = {" ".join(map(str, encoding.ids)) for encoding in encodings}
    words = set()
    for encoding in encodings:
        bounds = np.flatnonzero(np.diff([-1, *encoding.word_ids, -1]))
        ids = encoding.ids
        words |= {tuple(ids[begin:end]) for begin, end in itertools.pairwise(bounds.tolist())}
    assert examples.masks is not None
    num_whole = 0
    for row in range(len(examples)):
        one = examples.take(np.array([row]))
        ids = one.original_ids.tolist()
        first_document = " ".join(map(str, ids[1 : ids.index(tokenizer.sep_id)]))
        assert any(first_document in document for document in documents)
        masked = one.masked_indices
        runs = np.split(masked, np.flatnonzero(np.diff(masked) > 1) + 1)
        num_whole += sum(tuple(ids[index] for index in run) in words for run in runs)
    assert num_whole > 0.5 * len(examples)
    inspect(data.path, stats=True)


def test_models_accept_copies_and_refuse_others(folder: Path, vocab_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.load(folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "copy")
    extension = match_vocabulary(tmp_path / "copy", tokenizer, "MODEL")
    assert extension is not None
    assert not extension.pieces
    with pytest.raises(DataError, match="differs from the vocabulary"):
        match_vocabulary(vocab_folder, tokenizer, "MODEL")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "copy" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="treat text differently"):
        match_vocabulary(tmp_path / "copy", tokenizer, "MODEL")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"added_tokens": []}, "lacks"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}, "tokenizers cannot read"),
        ({"model": {"type": "Unheard"}}, "tokenizers cannot read"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_broken_folders_are_refused(change: dict[str, Any], message: str, tmp_path: Path, english_text: Path) -> None:
    content = json.loads(byte_level(english_text.read_text()).to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(DataError, match=message):
        Tokenizer.load(tmp_path)


def test_what_needs_word_pieces_is_refused(folder: Path, english_text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only a vocabulary of word pieces can be extended"):
        make_vocab(load_config(), [str(english_text)], tmp_path / "vocab", extend=folder)
    with pytest.raises(ConfigError, match="need a segmenter"):
        make(english_text, folder, tmp_path / "data", whole_word_mask=True, word_segmenter="jieba")


def test_a_mask_replaces_a_word_with_its_blank(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = encode_with_masks("in the [MASK] of", tokenizer)
    assert ids.tolist() == [
        tokenizer.cls_id,
        *tokenizer.encode_text("in the"),
        tokenizer.mask_id,
        *tokenizer.encode_text(" of"),
        tokenizer.sep_id,
    ]
    assert tokenizer.text_of(tokenizer.encode_text("in the")[-1])[:2] != "##"
