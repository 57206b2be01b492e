"""Templates escape every value, for HTML and for Markdown, and refuse to render without one."""

import jinja2
import pytest

from bert_pretrain.report.render import escaped, render

EVIL = "<b>|`*_[x](y)\n# &amp;"
FINETUNED = {
    "task": "tag",
    "kind": "token classification",
    "model_class": "BertForTokenClassification",
    "base": EVIL,
    "rows": {"train": 1000, "validation": 50},
    "splits": ["validation"],
    "scores": [("f1", "0.9000")],
    "settings": {"epochs": 3, "dropout": 0.0, "stride": None, "regression": False, "text_field": EVIL},
    "best_epoch": 2,
    "metric": "f1",
    "baselines": {"words alone": "0.5000"},
    "warning": "",
}


def test_values_in_markdown_are_escaped_on_one_line() -> None:
    text = render("finetuned_card.md", **FINETUNED)
    assert text.startswith(f"# {escaped(EVIL)}, fine-tuned for token classification\n")
    assert f"* `text_field`: {escaped(EVIL)}\n" in text
    assert EVIL not in text
    assert "<b>" not in text.replace(r"\<b\>", "")
    assert "Rows: train 1,000, validation 50." in text
    assert "| metric | validation |\n| --- | --- |\n| f1 | 0.9000 |" in text


def test_settings_that_are_zero_are_shown_and_those_not_given_are_not() -> None:
    text = render("finetuned_card.md", **FINETUNED)
    assert "* `dropout`: 0.0\n" in text
    assert "stride" not in text
    assert "regression" not in text


def test_values_in_html_are_escaped() -> None:
    run = {
        "name": EVIL,
        "use": None,
        "normal": [(EVIL, EVIL)],
        "cells": [EVIL],
        "settings": {EVIL: EVIL},
        "hints": [{"cause": EVIL, "observed": EVIL, "remedy": EVIL}],
    }
    text = render("report.html", runs=[run], columns=[EVIL], pictures=[], settings=[EVIL])
    assert "<b>" not in text
    # Title, heading, name and hint, column, name and cell, name of the run and setting, normal values.
    assert text.count("&lt;b&gt;") == 14


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="base"):
        render("finetuned_card.md", **{name: value for name, value in FINETUNED.items() if name != "base"})
