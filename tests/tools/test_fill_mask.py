"""`fill-mask` predicts the same as `transformers`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import InputError
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.fill_mask import as_json, as_table, encode_with_masks, fill_mask, filled

CPU = TrainConfig(device="cpu", precision="fp32")
WORDS = ["the", "river", "was", "old", ".", "river", "##s", "中", "国", "[", "]", "sep", "mask"]


@pytest.fixture(scope="module")
def folder(make_bert: Callable[..., Path]) -> Path:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(WORDS)]
    tokenizer = Tokenizer(tokens, lowercase=True, strip_accents=None, handle_chinese_chars=True)
    return make_bert(tokenizer, num_hidden_layers=1, max_position_embeddings=12, initializer_range=0.5)


@pytest.mark.parametrize("text", ["the [MASK] was old .", "The river[MASK]was [MASK]", "中[MASK]"])
def test_words_and_probabilities_equal_transformers(folder: Path, text: str) -> None:
    from transformers import pipeline

    theirs = pipeline("fill-mask", model=str(folder), top_k=4)(text)
    theirs = theirs if isinstance(theirs[0], list) else [theirs]
    ours = fill_mask(folder, text, top_k=4, config=CPU)
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert [token for token, _ in mine] == [answer["token_str"].replace(" ", "") for answer in other]
        assert [share for _, share in mine] == pytest.approx([answer["score"] for answer in other], abs=1e-5)


def test_other_special_tokens_are_text_and_top_k_may_exceed_the_vocabulary(folder: Path) -> None:
    (words,) = fill_mask(folder, "[MASK]", top_k=1000, config=CPU)
    assert sum(share for _, share in words) == pytest.approx(1.0, abs=1e-5)
    tokenizer = Tokenizer.load(folder)
    ids = encode_with_masks("the [SEP] [MASK]", tokenizer)
    assert [tokenizer.tokens[token] for token in ids] == ["[CLS]", "the", "[", "sep", "]", "[MASK]", "[SEP]"]


def test_long_texts_and_texts_without_a_mask_are_refused(folder: Path) -> None:
    for text, what in (("[MASK] " * 20, "22 tokens, the model is trained for 12"), ("the [mask]", "no ")):
        with pytest.raises(InputError, match=what):
            fill_mask(folder, text, config=CPU)


def test_filled_text_has_the_most_likely_tokens_without_hashes() -> None:
    answers = [[("river", 0.5), ("old", 0.25)], [("##s", 0.75), ("中", 0.25)]]
    assert filled("the [MASK] [MASK] was.", answers) == "the rivers was."
    table = as_table("the [MASK] [MASK] was.", answers).splitlines()
    assert table[1].split() == ["1", "river", "50.00%"]
    assert table[4].split() == ["中", "25.00%"]
    assert table[-1] == "the rivers was."
    # A Chinese character takes two columns.
    assert len({len(line) + line.count("中") for line in table[:5]}) == 1
    assert json.loads(as_json("[MASK] [MASK]", answers))["masks"][1][0] == {"token": "##s", "probability": 0.75}


def test_only_unknown_words_cause_a_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill_mask(folder, "Die Straße [MASK]", config=CPU)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("warning: 2 of 2 tokens are [UNK]: 'Die', 'Straße'")
    fill_mask(folder, "the [MASK] was rivers .", config=CPU)
    assert capsys.readouterr().err == ""
