"""Original benchmark files are read. Repaired and skipped rows are counted by reason."""

import json
import re
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain.cli import app
from bert_pretrain.errors import InputError
from bert_pretrain.finetune.answer import Answer
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tag import to_bio
from bert_pretrain.text.tokenizer import Tokenizer
from tests.pages import ROOT

COLA = "own1\t1\t\tthe day was fine .\nown1\t0\t*\tday the fine was .\nown2\t1\t\tthe film is good .\n"
STS_B = (
    'main-news\tMSRpar\t2012test\t0000\t4.400\tThe "film.\tA "good" book.\n'
    "main-forums\tanswers-forums\t2016\t0001\t0\tWho is Anna?\tParis.\thttp://a.b\tCC BY-SA\n"
)
LCQMC = "天气 怎样\t今天 天气\t1\n天气 怎样\t你 是 谁\t0\n"
CONLL_2003 = """-DOCSTART- -X- O O

Paris NNP I-NP I-LOC
Berlin NNP B-NP B-LOC
wins VBZ I-VP O

Anna NNP I-NP I-PER
Lee NNP I-NP I-PER
"""


ENTITIES = st.lists(st.tuples(st.sampled_from(["PER", "LOC", "O"]), st.integers(1, 4)), min_size=1, max_size=8)
SCHEMES = {"IOBES": "BIES", "BMES": "BMES", "BILOU": "BILU", "BMEWO": "BMEW"}


@given(ENTITIES, st.sampled_from(sorted(SCHEMES)))
def test_every_scheme_is_converted_to_bio(entities: list[tuple[str, int]], scheme: str) -> None:
    first, inner, last, single = SCHEMES[scheme]
    ours, theirs = [], []
    for kind, length in entities:
        prefixes = [single] if length == 1 else [first, *inner * (length - 2), last]
        ours += ["O"] if kind == "O" else [f"B-{kind}", *[f"I-{kind}"] * (length - 1)]
        theirs += ["O"] if kind == "O" else [f"{prefix}-{kind}" for prefix in prefixes]
    assert to_bio(theirs) == ours
    # IOB1 writes B- only between two entities of one kind.
    iob1 = [
        f"I-{tag[2:]}" if tag[0] == "B" and before[2:] != tag[2:] else tag
        for before, tag in zip(["O", *ours], ours, strict=False)
    ]
    assert to_bio(iob1) == ours
    assert to_bio(ours) == ours
    assert to_bio(["NOUN", "I-PER"]) == ["NOUN", "B-PER"]  # a plain tag is unchanged


def test_tables_without_a_header_need_column_names(read) -> None:
    examples, notes = read("classify", "in_domain_train.tsv", COLA, columns=("source", "label", "star", "text"))
    assert [each.inputs["text"] for each in examples[:2]] == ["the day was fine .", "day the fine was ."]
    assert [each.label for each in examples] == ["1", "0", "1"]
    assert not notes
    with pytest.raises(InputError, match=r"(?s)no column 'text'.*--columns"):
        read("classify", "in_domain_train.tsv", COLA)
    with pytest.raises(InputError, match="only for CSV and TSV"):
        read("classify", "a.jsonl", "{}", columns=("text", "label"))


def test_unusable_rows_are_skipped_and_counted(read) -> None:
    lines = ["good\ta", "bad\tb", "\ta", " \tb", "fine\t", "poor", "book\tb\tmore", "", "film\ta"]
    text = "\n".join(["text\tlabel", *lines, *["day\ta"] * 10])
    examples, notes = read("classify", "a.tsv", text)
    assert [example.row for example in examples[:3]] == [0, 1, 7]
    reasons = [
        "1 rows skipped because the row has 1 fields but the header has 2 (first: line 7)",
        "1 rows skipped because the row has 3 fields but the header has 2 (first: line 8)",
        "2 rows skipped because 'text' is empty (first: line 4)",
        "1 rows skipped because 'label' has no label (empty, null or negative) (first: line 6)",
    ]
    assert notes == "; ".join(reasons) + "\n"
    # Rows without a label may be predicted.
    assert len(read("classify", "a.tsv", "text\tlabel\nfine\t\ngood\ta\n", flag="--test")[0]) == 2


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ("day,a\n" * 9 + "good, but long,b\n", "(?s)the row has 3 fields.*line 11\n"),
        (",a\n,b\nfine,a\n", "(?s)'text' is empty; 2 of 3 rows cannot be used.*line 2\n"),
    ],
)
def test_an_unquoted_comma_and_mostly_unusable_rows_are_errors(read, rows, what) -> None:
    with pytest.raises(InputError, match=what):
        read("classify", "a.csv", f"text,label\n{rows}")


QUORA = "id\tquestion1\tquestion2\tis_duplicate\n0\twho ?\twhere ?\t0\n1\twho\n2\tgood\tfine\t1\n"
GLUE_STS_B = (
    "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    '0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\tThe film is "good\t"A" book.\t5.000\n'
)
CMRC = json.dumps([{"context_text": "天 气", "qas": [{"query_text": "？", "answers": ["气"]}]}])
FILES = {  # name: content, number of examples
    "eng.train": (CONLL_2003, 2),
    "example.train": ("人 B-PER\n民 E-PER\n日 I-ORG\n\n报 O\n", 2),
    "in_domain_train.tsv": (COLA, 3),
    "lcqmc.txt": (LCQMC, 2),
    "train.tsv": (QUORA, 2),
    "sts-train.csv": (STS_B, 2),
    "STS-B/train.tsv": (GLUE_STS_B, 1),
    "cmrc2018_train.json": (CMRC, 1),
}


@pytest.mark.parametrize("name", FILES)
def test_commands_in_the_documentation_read_their_files(read, name: str) -> None:
    commands = re.findall(r"^\| .* \| `(finetune .*)` \|$", (ROOT / "docs" / "finetuning.md").read_text(), re.MULTILINE)
    assert len(commands) == len(FILES)
    (command,) = (each.split() for each in commands if f"--train {name} " in each)
    options = typer.main.get_command(app).commands["finetune"].make_context(*command[:1], command[1:]).params
    settings = {name: options[name] for name in ("text_field", "pair_field", "label_field", "regression")}
    columns = options["columns"].split(",") if options["columns"] else ()
    content, num_examples = FILES[name]
    examples, _ = read(
        options["task"],
        name,
        content,
        settings=settings,
        format=options["file_format"],
        columns=columns,
    )
    assert len(examples) == num_examples


CONTEXT = "北京 是 首都 。 北京 大学 在 北京 。"


def squad(answers: list[Any], context: str = CONTEXT, **more: Any) -> str:
    asked = [{"id": str(number), "question": "谁 ？", "answers": each, **more} for number, each in enumerate(answers)]
    return json.dumps({"version": "own", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": asked}]}]})


FORMS = [  # of answers, and where the answer starts
    ({"text": ["anna"]}, 4),
    (["anna"], 4),
    ("anna", 4),
    ({"text": "anna", "answer_start": 13.0}, 13),
    ([{"text": "anna", "answer_start": 13.0}], 13),
    *(({"text": ["anna"], "answer_start": [start]}, 13) for start in (13, 13.0, "13", "13.0")),
]


def test_wrong_answer_positions_are_corrected_and_missing_answers_skipped(read) -> None:
    text = squad(
        [
            [{"text": "首都", "answer_start": CONTEXT.index("首都")}],
            [{"text": "首都", "answer_start": -1}],
            [{"text": "北京", "answer_start": len(CONTEXT) - 3}],  # nearest to the third
            [{"text": " 大学", "answer_start": 3}],
            [{"text": "上海", "answer_start": -1}],
            [{"text": "上海", "answer_start": -1}, {"text": "首都", "answer_start": 5}],
            [{"text": "", "answer_start": -1}],
        ]
    )
    train, notes = read("answer", "cmrc2018_train.json", text)
    texts = [[CONTEXT[start : start + len(answer)] for answer, start in each.label if start >= 0] for each in train]
    assert texts == [["首都"], ["首都"], ["北京"], ["大学"], ["首都"], []]
    assert train[2].label[0][1] == CONTEXT.rindex("北京")
    assert [each.row for each in train] == [0, 1, 2, 3, 5, 6]
    assert "2 questions with a wrong answer_start, which was corrected (" in notes
    assert "1 questions with an answer that is not in the context (" in notes
    # Validation keeps all questions, because the metric needs only the text.
    validation, _ = read("answer", "cmrc2018_dev.json", text, flag="--validation")
    assert len(validation) == 7
    assert validation[4].label == [("上海", -1)]


def test_a_validation_label_is_the_first_answer_in_the_context(read, tokenizer: Tokenizer) -> None:
    text = squad([[{"text": "who", "answer_start": -1}, {"text": "anna", "answer_start": 4}], []], "the anna")
    examples, _ = read("answer", "a.json", text, flag="--validation")
    task = Answer(Settings().resolve("answer", 32), tokenizer)
    windows = task.windows_of(examples, "validation")
    assert [window.labels["start_positions"] > 0 for window in windows] == [True, False]
    first, last = windows[0].labels["start_positions"], windows[0].labels["end_positions"]
    assert "the anna"[windows[0].positions[first][0] : windows[0].positions[last][1]] == "anna"


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_flat_rows_with_all_forms_of_answers_are_read(read, name: str) -> None:
    rows = [{"question": "who ?", "context": "the anna and anna", "answers": answers} for answers, _ in FORMS]
    examples, _ = read("answer", name, json.dumps(rows) if name == "a.json" else rows)
    assert [example.label for example in examples] == [[("anna", start)] for _, start in FORMS]


def test_the_maximum_answer_length_follows_the_training_answers(read, tokenizer: Tokenizer) -> None:
    """CMRC's answers are longer than the 30 tokens of SQuAD's code."""
    context = "天气" * 50
    text = squad([[{"text": context[:60], "answer_start": 0}]] * 3, context)
    questions, _ = read("answer", "cmrc2018_trial.json", text)
    task = Answer(Settings().resolve("answer", 32), tokenizer)
    task.set_labels(questions, [])
    assert task.settings.max_answer_length == 60


def test_rows_without_agreement_are_skipped(read) -> None:
    """As in OCNLI. With the classes `+` and `-`, the rows are kept."""
    rows = [{"text": "天气", "label": label} for label in ("entailment", "neutral", "-", "contradiction", "-")]
    examples, notes = read("classify", "train.jsonl", rows)
    assert [example.label for example in examples] == ["entailment", "neutral", "contradiction"]
    assert notes.startswith("2 rows skipped because")
    assert "'-' (annotators disagree) (first: line 3)" in notes
    rows[1]["label"] = "+"
    examples, _ = read("classify", "train.jsonl", rows)
    assert [example.label for example in examples].count("-") == 2


def test_the_format_of_fasttext_is_an_error_with_the_columns_to_write(read) -> None:
    with pytest.raises(InputError, match=r"(?s)not supported.*--columns label,text"):
        read("classify", "fast.txt", "__label__good fine day\n")
