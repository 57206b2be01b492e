"""Pseudo-log-likelihoods equal a plain loop over masked copies with `transformers`."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_pretrain.config import Config, TrainConfig
from bert_pretrain.errors import InputError, OutputError
from bert_pretrain.tools import score as score_module
from bert_pretrain.tools.score import METRICS, Scorer, score_pairs, score_texts

CPU = Config(train=TrainConfig(device="cpu", precision="fp32"))


@pytest.fixture(scope="module")
def short(sentences: list[str], bert_folder: Path) -> list[str]:
    from bert_pretrain.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(bert_folder)
    short = [sentence for sentence in sentences if len(tokenizer.encode_text(sentence)) <= 30][:5]
    assert any(tokenizer.is_subword[tokenizer.encode_text(sentence)].any() for sentence in short)
    return [*short, "antidisestablishmentarianism", "the"]


@pytest.fixture(scope="module")
def their_tokens(bert_folder: Path) -> Any:
    """A function that scores the tokens of a text as the papers describe."""
    from transformers import AutoTokenizer, BertForMaskedLM

    tokenizer = AutoTokenizer.from_pretrained(str(bert_folder))
    model = BertForMaskedLM.from_pretrained(str(bert_folder), attn_implementation="eager").eval()

    @functools.cache
    def token_scores(text: str, metric: str) -> list[float]:
        encoded = tokenizer(text, return_tensors="pt")
        ids = encoded["input_ids"][0]
        tokens = tokenizer.convert_ids_to_tokens(ids)
        scores = []
        for place in range(1, len(ids) - 1):
            masked = ids.clone()
            masked[place] = tokenizer.mask_token_id
            after = place + 1
            while metric == "word-l2r" and tokens[after].startswith("##"):
                masked[after] = tokenizer.mask_token_id
                after += 1
            with torch.no_grad():
                logits = model(**{**encoded, "input_ids": masked[None]}).logits[0, place]
            scores.append(float(logits.log_softmax(dim=-1)[ids[place]]))
        return scores

    return token_scores


def test_accuracy_on_pairs_follows_from_scores(bert_folder, short, their_tokens, tmp_path) -> None:
    pairs = list(zip(short, reversed(short), strict=True))  # one sentence is paired with itself, which counts as wrong
    lines = [
        json.dumps({"sentence_good": good, "sentence_bad": bad, "UID": f"set{index % 2}", "kind": "x"})
        for index, (good, bad) in enumerate(pairs)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    output = tmp_path / "scores.jsonl"
    metrics, groups = score_pairs(bert_folder, [str(tmp_path / "pairs.jsonl")], config=CPU, output=output)
    scores = [[sum(their_tokens(text, "original")) for text in pair] for pair in pairs]
    expected = [good > bad + 1e-3 for good, bad in scores]
    assert 0 < sum(expected) < len(expected)
    assert metrics == {"accuracy": sum(expected) / len(pairs), "pairs": len(pairs)}
    assert {name: group["accuracy"] for name, group in groups.items()} == {
        f"set{number}": sum(expected[number::2]) / len(expected[number::2]) for number in range(2)
    }
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["correct"] for record in records] == expected
    assert [record["UID"] for record in records] == [f"set{index % 2}" for index in range(len(pairs))]
    _, by_kind = score_pairs(bert_folder, [str(tmp_path / "pairs.jsonl")], config=CPU, by="kind")
    assert by_kind == {"x": metrics}


GOOD = '{"sentence_good": "the one", "sentence_bad": "one the"}'
MISTAKES = {
    "empty sentence": ('\n{"sentence_good": " ", "sentence_bad": "the"}\n', "no text in 'sentence_good'", "line 2"),
    "removed characters": ('{"sentence_good": "a", "sentence_bad": "\u200b"}', "no text in 'sentence_bad'", "line 1"),
    "too long": (f'{GOOD}\n{{"sentence_good": "the", "sentence_bad": "{"the " * 50}"}}', "52 tokens", "line 2"),
    "blank lines alone": ("\n\n", "no pairs", "pairs.jsonl"),
}


@pytest.mark.parametrize(("content", "what", "where"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_pairs_raise_before_scoring(bert_folder, tmp_path, monkeypatch, content, what, where) -> None:
    monkeypatch.setattr(Scorer, "scored", None)
    path = tmp_path / "pairs.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=what) as refused:
        score_pairs(bert_folder, [str(path)], config=CPU, output=tmp_path / "scores.jsonl")
    assert str(path) in refused.value.where
    assert refused.value.where.endswith(where)
    assert [found.name for found in tmp_path.iterdir()] == ["pairs.jsonl"]


def test_input_as_output_and_missing_group_field_are_refused(bert_folder: Path, tmp_path: Path) -> None:
    for score, name, content in ((score_texts, "a.txt", "the one\n"), (score_pairs, "pairs.jsonl", GOOD)):
        (tmp_path / name).write_text(content)
        with pytest.raises(OutputError, match="is an input"):
            score(bert_folder, [str(tmp_path / name)], config=CPU, output=tmp_path / name)
        with pytest.raises(OutputError, match="is an input"):  # found by its pattern
            score(bert_folder, [f"{tmp_path}/*{name[1:]}"], config=CPU, json_file=tmp_path / name)
        with pytest.raises(OutputError, match="is a file"):
            score(bert_folder, [str(tmp_path / name)], config=CPU, output=tmp_path / name / "scores.jsonl")
    with pytest.raises(InputError, match="'UID'"):
        score_pairs(bert_folder, [str(tmp_path / "pairs.jsonl")], config=CPU, by="UID")


@pytest.mark.parametrize("metric", METRICS)
def test_token_scores_equal_a_plain_loop(bert_folder, short, their_tokens, tmp_path, metric, monkeypatch) -> None:
    monkeypatch.setattr(score_module, "DECODED_ROWS", 3)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in short) + "\n")
    options: dict[str, Any] = {"metric": metric, "per_token": True, "batch_tokens": 100, "output": tmp_path / "s.jsonl"}
    metrics = score_texts(bert_folder, [str(tmp_path / "a.jsonl")], config=CPU, **options)
    records = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    total = 0.0
    for text, record in zip(short, records, strict=True):
        expected = their_tokens(text, metric)
        total += sum(expected)
        assert record["token_plls"] == pytest.approx(expected, abs=1e-4)
        assert record["pll"] == pytest.approx(sum(expected), abs=1e-4)
        assert record["pll_per_token"] == pytest.approx(sum(expected) / len(expected), abs=1e-4)
        assert record["text"] == text
        assert record["tokens"] == len(record["token_texts"]) == len(expected)
    tokens = sum(record["tokens"] for record in records)
    assert (metrics["texts"], metrics["tokens"]) == (len(short), tokens)
    assert metrics["pll"] == pytest.approx(total, abs=1e-3)
    assert metrics["pseudo_perplexity"] == pytest.approx(math.exp(-total / tokens), rel=1e-4)
    assert records[0]["token_texts"][0] == short[0].partition(" ")[0].lower()
