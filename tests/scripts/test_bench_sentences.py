"""The benchmark of sentence vectors cuts passages as it says, and tells vectors that find from those that do not."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts import bench_sentences


def test_pairs_are_adjacent_spread_over_documents_and_never_overlap(tmp_path: Path) -> None:
    lengths = (3, 4, 9, 40)
    documents = [[f"d{number} s{line}." for line in range(length)] for number, length in enumerate(lengths)]
    (tmp_path / "t.txt").write_text("\n\n".join("\n".join(lines) for lines in documents) + "\n\n")
    pairs = bench_sentences.passage_pairs(tmp_path / "t.txt", " ")
    found = [pair.text + " " + str(pair.pair) for pair in pairs]
    counts = [sum(text.startswith(f"d{number} ") for text in found) for number in range(4)]
    assert counts == [0, 1, 2, 4]
    assert found[0] == " ".join(documents[1])
    assert [text.split(".")[0] for text in found[3:]] == ["d3 s0", "d3 s12", "d3 s24", "d3 s36"]
    assert len(bench_sentences.passages_of(pairs)) == 2 * len(pairs)


def test_vectors_that_name_their_document_find_it_and_equal_ones_do_not(bert_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n\n".join(f"a{n}\nb{n}\nc{n}\nd{n}" for n in range(5)) + "\n")
    pairs = bench_sentences.passage_pairs(tmp_path / "t.txt", " ")
    perfect = np.repeat(np.eye(5), 2, axis=0)
    assert bench_sentences.retrieval(pairs, perfect, bert_folder) == {"mrr": 1.0, "accuracy_at_1": 1.0}
    equal = bench_sentences.retrieval(pairs, np.ones((10, 5)), bert_folder)
    assert equal == {"mrr": pytest.approx(0.2), "accuracy_at_1": 0.0}
    runs = [{"mrr": 0.2, "accuracy_at_1": 0.1}, {"mrr": 0.4, "accuracy_at_1": 0.3}]
    assert bench_sentences.table({"x": runs}, 5)[-1] == "| x | 0.300 (0.200–0.400) | 20.0% (10.0%–30.0%) |"


@pytest.mark.slow  # trains, though little
def test_the_whole_benchmark_runs_and_continues(
    bert_folder: Path,
    english_documents: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    corpus = tmp_path / "corpus.txt"
    copies = ([f"{number}", *document] for number in range(12) for document in english_documents)
    corpus.write_text("\n\n".join("\n".join(document) for document in copies) + "\n", encoding="utf-8")
    words = [corpus, "--model", bert_folder, "--work", tmp_path / "work", "--texts", 40, "--seeds", 1, 2]
    monkeypatch.setattr(sys, "argv", ["bench_sentences.py", *map(str, words)])
    tables = []
    for _ in range(2):
        bench_sentences.main()
        shown = capsys.readouterr().out
        tables.append(re.findall(r"^\| .* \|$", shown, flags=re.MULTILINE))
    assert "up to date" in shown
    assert tables[0] == tables[1]
    assert len(tables[0]) == 7
    assert len(list((tmp_path / "work").glob("*-40-0.001-s*"))) == 4
