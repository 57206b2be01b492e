"""What a sample tells of a corpus."""

import gzip
from pathlib import Path

import pytest

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import InputError
from bert_pretrain.plan.text_facts import SAMPLE_BYTES, TextFacts, measure_text


def test_a_small_corpus_is_known_exactly(tmp_path: Path) -> None:
    documents = [[f"Sentence {number} of document {place}." for number in range(place + 1)] for place in range(1, 6)]
    text = "\n\n".join("\n".join(lines) for lines in documents) + "\n"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    facts = measure_text([str(tmp_path / "a.txt")], DataConfig())
    assert facts == TextFacts(len(text), 5, 4, 0.0, 0.0, is_divisible=True)
    assert measure_text([str(tmp_path / "a.txt.gz")], DataConfig()).vocab_reads_all


def test_script_and_single_sentences_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        "国家图书馆在北京。\n\nabcd.\n\n" + "这是一个很长的句子,它在每一页的下面都出现一次。\n\n" * 8
    )
    facts = measure_text([str(tmp_path / "a.txt")], DataConfig())
    assert facts.single_sentence_share == 1.0
    assert 0.9 < facts.cjk_share < 1.0


def test_a_large_archive_is_sampled_and_scaled(tmp_path: Path) -> None:
    document = "A sentence like many others.\n" * 40 + "\n"
    number = 3 * SAMPLE_BYTES // len(document)
    with gzip.open(tmp_path / "a.txt.gz", "wt", compresslevel=1) as file:
        for place in range(number):
            file.write(f"Number {place} {place * 7919 % 10007}.\n{document}")
    facts = measure_text([str(tmp_path / "a.txt.gz")], DataConfig())
    assert facts.documents == pytest.approx(number, rel=0.2)
    assert facts.num_bytes == pytest.approx(3 * SAMPLE_BYTES, rel=0.2)
    assert facts.sentences_per_document == 41


def test_inputs_without_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n\n")
    with pytest.raises(InputError, match="no text"):
        measure_text([str(tmp_path / "a.txt")], DataConfig())


PARAGRAPH = "It began in the morning. The train was late, as it often was. Nobody minded, and so we waited."


@pytest.mark.parametrize(("between", "boundary"), [("\n\n", "blank_line"), ("\n", "line")])
def test_for_large_files_of_running_text_another_boundary_is_found(tmp_path: Path, between: str, boundary: str) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(between.join(f"{number} {place}. {PARAGRAPH}" for place in range(40)))
    facts = measure_text([str(tmp_path)], DataConfig())
    assert (facts.boundary, facts.documents_as_configured, facts.documents) == (boundary, 3, 120)
    as_configured = measure_text([str(tmp_path)], DataConfig(document_boundary="file"))
    assert (as_configured.boundary, as_configured.documents, as_configured.is_divisible) == ("", 3, False)


def test_lines_that_may_be_wrapped_are_no_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(["a line without its end, as in a book that was"] * 100))
    assert measure_text([str(tmp_path / "a.txt")], DataConfig()).boundary == ""


def test_a_file_that_is_one_document_counts_as_one_however_little_of_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{PARAGRAPH} " * (3 * SAMPLE_BYTES // len(PARAGRAPH)))
    facts = measure_text([str(tmp_path / "a.txt")], DataConfig())
    assert facts.documents == 1
    assert facts.sentences_per_document == pytest.approx(3 * facts.num_bytes / len(PARAGRAPH), rel=0.2)
