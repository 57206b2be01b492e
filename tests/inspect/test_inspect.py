"""`inspect` shows what is stored, passes sound folders however small, and names every way in which one is broken."""

import io
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from bert_pretrain.cli import app
from bert_pretrain.config_file import load_config
from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.examples.shards import DataFolder, ShardRecord, read_shard, write_shard
from bert_pretrain.inspect.checks import CHANCE, binomial_range
from bert_pretrain.inspect.inspection import Inspection, inspect_rows
from bert_pretrain.inspect.rendering import render_rows
from bert_pretrain.make_data.run import make_data
from bert_pretrain.storage.files import read_json, write_json
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.run import make_vocab

Change = Callable[[Examples, Tokenizer], Examples]


def inspected(path: Path) -> Inspection:
    folder = DataFolder.open(path)
    return inspect_rows(folder, "train", [0], everything=True, workers=1)


def failed_checks(path: Path) -> set[tuple[str, str]]:
    return {(check.split, check.name) for check in inspected(path).failed}


def rewritten(data: Path, place: Path, change: Change, split: str = "train", shard: int = 0) -> Path:
    """Copy a data folder with one shard changed, and its record in the manifest with it, so that all hashes fit."""
    shutil.copytree(data, place)
    manifest = read_json(place / "manifest.json")
    records = manifest["splits"][split]["shards"]
    record = ShardRecord(**records[shard])
    examples = change(read_shard(place, record), Tokenizer.load(place / "tokenizer"))
    records[shard] = write_shard(place, record.path, examples).as_json()
    write_json(place / "manifest.json", manifest)
    return place


@pytest.fixture(scope="module")
def whole_word_folder(tmp_path_factory: pytest.TempPathFactory, english_text: Path, vocab_folder: Path) -> Path:
    settings = ["data.max_seq_length=48", "data.dupe_factor=1", "data.whole_word_mask=true"]
    output = tmp_path_factory.mktemp("words") / "data"
    return make_data(load_config(settings=settings), [str(english_text)], vocab_folder, output, workers=1)


def test_sound_folders_pass_every_check(data_folder: Path, whole_word_folder: Path) -> None:
    for folder in (data_folder, whole_word_folder):
        found = inspected(folder)
        assert found.failed == []
        assert {check.split for check in found.checks} == {"train", "validation"}
        assert len(found.checks) > 30


def test_a_folder_of_a_few_examples_passes_every_check_whatever_the_seed(
    tmp_path: Path, vocab_folder: Path, english_documents: list[list[str]]
) -> None:
    text = tmp_path / "few.txt"
    text.write_text("\n\n".join("\n".join(document[:6]) for document in english_documents[:5]))
    for seed in range(8):
        settings = [f"data.seed={seed}", "data.dupe_factor=1", "data.max_seq_length=32"]
        settings += ["data.document_boundary=blank_line", f"data.whole_word_mask={str(seed % 2 == 0).lower()}"]
        folder = make_data(
            load_config(settings=settings), [str(text)], vocab_folder, tmp_path / f"data-{seed}", workers=1
        )
        assert DataFolder.open(folder).rows("train") < 60
        assert failed_checks(folder) == set()


def masks_of(examples: Examples) -> Masks:
    assert examples.masks is not None
    return examples.masks


def places(examples: Examples) -> np.ndarray:
    """Return where among all tokens the predicted ones are."""
    masks = masks_of(examples)
    return masks.positions + np.repeat(examples.offsets[:-1], np.diff(masks.offsets))


def with_tokens(examples: Examples, where: np.ndarray, ids: np.ndarray | int) -> Examples:
    input_ids = examples.input_ids.copy()
    input_ids[where] = ids
    return replace(examples, input_ids=input_ids)


def shown_with_shares(examples: Examples, tokenizer: Tokenizer, shares: tuple[float, float, float]) -> Examples:
    """Show the predicted tokens as [MASK], a random token and the original with other shares."""
    generator = np.random.default_rng(5)
    originals = masks_of(examples).original_ids
    kinds = generator.choice(3, len(originals), p=shares)
    pieces = generator.choice(tokenizer.word_piece_ids, len(kinds))
    return with_tokens(examples, places(examples), np.choose(kinds, [tokenizer.mask_id, pieces, originals]))


def unpredicted(examples: Examples, is_kept: np.ndarray) -> Examples:
    """Forget some predictions: the original is shown, and no longer predicted."""
    masks = masks_of(examples)
    rows = np.repeat(np.arange(len(examples)), np.diff(masks.offsets))[is_kept]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(examples)))])
    return replace(
        with_tokens(examples, places(examples)[~is_kept], masks.original_ids[~is_kept]),
        masks=Masks(masks.positions[is_kept], masks.original_ids[is_kept], offsets),
    )


def without_one(number: int) -> Change:
    """Forget the prediction of that number."""
    return lambda examples, _: unpredicted(examples, np.arange(len(masks_of(examples).positions)) != number)


def without_any(examples: Examples, _tokenizer: Tokenizer) -> Examples:
    return unpredicted(examples, np.zeros(len(masks_of(examples).positions), dtype=bool))


def masks_at_the_beginning(examples: Examples, tokenizer: Tokenizer) -> Examples:
    """Predict as many tokens of every example as before, but the first ones."""
    plain = without_any(examples, tokenizer)
    counts = np.diff(masks_of(examples).offsets)
    maskable = ~np.isin(plain.input_ids, [tokenizer.cls_id, tokenizer.sep_id])
    ranks = np.cumsum(maskable) - np.cumsum(maskable)[examples.offsets[:-1]].repeat(examples.lengths)
    where = np.flatnonzero(maskable & (ranks <= counts.repeat(examples.lengths)))
    positions = where - examples.offsets[:-1].repeat(examples.lengths)[where]
    masks = Masks(positions.astype(np.uint16), plain.input_ids[where], masks_of(examples).offsets)
    return shown_with_shares(replace(plain, masks=masks), tokenizer, (0.8, 0.1, 0.1))


def mask_column(name: str, number: int, value: int) -> Change:
    """Change one value of the columns of masks."""

    def change(examples: Examples, _tokenizer: Tokenizer) -> Examples:
        values = getattr(masks_of(examples), name).copy()
        values[number] = value
        return replace(examples, masks=replace(masks_of(examples), **{name: values}))

    return change


def on_the_last_token(examples: Examples, tokenizer: Tokenizer) -> Examples:
    return mask_column("positions", int(masks_of(examples).offsets[1]) - 1, int(examples.lengths[0]) - 1)(
        examples, tokenizer
    )


def column(name: str, row: int, value: int) -> Change:
    def change(examples: Examples, _tokenizer: Tokenizer) -> Examples:
        values = getattr(examples, name).copy()
        values[row] = value
        return replace(examples, **{name: values})

    return change


def without_b(examples: Examples, tokenizer: Tokenizer) -> Examples:
    """Let B begin at once in an example whose loss leaves labels even, and where no mask lies on the new [SEP]."""
    labels = examples.next_sentence_label
    assert labels is not None
    begins_masked = np.isin(examples.offsets[:-1] + 1, places(examples))
    row = np.flatnonzero((labels == np.bincount(labels).argmax()) & ~begins_masked)[0]
    return column("segment_b_start", int(row), 2)(examples, tokenizer)


def longer_than_allowed(examples: Examples, _tokenizer: Tokenizer) -> Examples:
    """Repeat the last token of text of the first example until it has 65."""
    end = int(examples.offsets[1]) - 1
    more = 65 - int(examples.lengths[0])
    longer = np.insert(examples.input_ids, [end] * more, examples.input_ids[end - 1])
    return replace(examples, input_ids=longer, offsets=examples.offsets + more * (np.arange(len(examples) + 1) > 0))


def a_random_piece_is(token: str) -> Change:
    """Let one predicted token be shown as `token`."""

    def change(examples: Examples, tokenizer: Tokenizer) -> Examples:
        return with_tokens(examples, places(examples)[3], tokenizer.tokens.index(token))

    return change


def a_plain_token_is(token: str) -> Change:
    def change(examples: Examples, tokenizer: Tokenizer) -> Examples:
        begin = int(examples.offsets[7])
        predicted = set() if examples.masks is None else set(places(examples).tolist())
        place = next(place for place in range(begin + 1, begin + 20) if place not in predicted)
        return with_tokens(examples, np.array([place]), tokenizer.tokens.index(token))

    return change


def an_original_is(token: str) -> Change:
    return lambda examples, tokenizer: mask_column("original_ids", 5, tokenizer.tokens.index(token))(
        examples, tokenizer
    )


def without_labels_of_one_kind(examples: Examples, _tokenizer: Tokenizer) -> Examples:
    """Drop a tenth of the examples with label 1."""
    assert examples.next_sentence_label is not None
    ones = np.flatnonzero(examples.next_sentence_label == 1)
    return examples.take(np.setdiff1d(np.arange(len(examples)), ones[::10]))


def first_token_is_text(examples: Examples, tokenizer: Tokenizer) -> Examples:
    return with_tokens(examples, examples.offsets[2:3], int(tokenizer.word_piece_ids[-1]))


DAMAGES: dict[str, tuple[Change, str]] = {
    "labels uneven": (without_labels_of_one_kind, "is-next"),
    "label out of range": (column("next_sentence_label", 3, 2), "label"),
    "too long": (longer_than_allowed, "length"),
    "no B": (without_b, "segments"),
    "B behind the end": (column("segment_b_start", 4, 60000), "segments"),
    "unknown id": (column("input_ids", 40, 60000), "token ids"),
    "unknown original": (mask_column("original_ids", 2, 60000), "token ids"),
    "position on [CLS]": (mask_column("positions", 0, 0), "masked positions"),
    "position on the last [SEP]": (on_the_last_token, "masked positions"),
    "position twice": (
        lambda examples, _: mask_column("positions", 1, masks_of(examples).positions[0])(examples, _),
        "masked positions",
    ),
    "[PAD] masked": (an_original_is("[PAD]"), "masked tokens"),
    "[SEP] masked": (an_original_is("[SEP]"), "masked tokens"),
    "unused slot masked": (an_original_is("[unused3]"), "masked tokens"),
    "[PAD] put in": (a_random_piece_is("[PAD]"), "random replacements"),
    "unused slot put in": (a_random_piece_is("[unused7]"), "random replacements"),
    "[UNK] put in": (a_random_piece_is("[UNK]"), "random replacements"),
    "[MASK] that nobody predicts": (a_plain_token_is("[MASK]"), "special tokens"),
    "[PAD] in the text": (a_plain_token_is("[PAD]"), "special tokens"),
    "[SEP] in the text": (a_plain_token_is("[SEP]"), "special tokens"),
    "no [CLS]": (first_token_is_text, "special tokens"),
    "one prediction too few": (without_one(17), "predictions"),
    "nothing predicted": (without_any, "masked"),
    "no masks": (lambda examples, _: replace(examples, masks=None), "columns"),
    "no labels": (lambda examples, _: replace(examples, next_sentence_label=None), "columns"),
    "70 % shown as [MASK]": (lambda *given: shown_with_shares(*given, (0.7, 0.15, 0.15)), "shown as mask"),
    "no random ones": (lambda *given: shown_with_shares(*given, (0.8, 0.0, 0.2)), "shown as random"),
    "none left": (lambda *given: shown_with_shares(*given, (0.8, 0.2, 0.0)), "shown as original"),
    "masks at the beginning": (masks_at_the_beginning, "spread of masks"),
}


LONE = ("is-next", "label", "length", "segments", "token ids", "masked tokens", "special tokens", "spread of masks")


@pytest.mark.parametrize(("change", "name"), DAMAGES.values(), ids=DAMAGES)
def test_a_failed_check_is_named(data_folder: Path, tmp_path: Path, change: Change, name: str) -> None:
    found = inspected(rewritten(data_folder, tmp_path / "data", change))
    assert ("train", name) in {(check.split, check.name) for check in found.failed}
    assert {check.split for check in found.failed} == {"train"}
    # The manifest's figures differ too; beyond that, one damage does not set off a row of others.
    assert len({check.name for check in found.failed} - {"manifest"}) <= (1 if name in LONE else 4)
    for check in found.failed:
        assert check.measured
        assert check.expected
        assert check.tolerance


def test_a_shard_that_holds_no_examples_is_named_with_the_reason(data_folder: Path, tmp_path: Path) -> None:
    found = inspected(rewritten(data_folder, tmp_path / "data", mask_column("positions", 0, 63)))
    (check,) = found.failed
    assert (check.split, check.name) == ("train", "SHA-256")
    assert "train/00000.parquet holds no examples: a position is beyond its example" in check.measured


def test_the_first_row_at_fault_is_named_by_its_number_in_the_split(data_folder: Path, tmp_path: Path) -> None:
    folder = rewritten(data_folder, tmp_path / "data", column("next_sentence_label", 5, 9), shard=1)
    row = DataFolder.open(folder).shards("train")[0].rows + 5
    check = next(check for check in inspected(folder).failed if check.name == "label")
    assert check.measured == f"1 example breaks it, the first is row {row}"
    (shown,) = render_rows(DataFolder.open(folder), "train", [row], Tokenizer.load(folder / "tokenizer"))
    assert shown.label == "label 9"


def test_half_a_word_is_noticed_where_words_are_masked_whole(
    whole_word_folder: Path, data_folder: Path, tmp_path: Path
) -> None:
    def half(examples: Examples, tokenizer: Tokenizer) -> Examples:
        """Predict, of the first word of several pieces that is predicted, one piece less."""
        continued = tokenizer.is_subword[masks_of(examples).original_ids[1:]] & (np.diff(places(examples)) == 1)
        return without_one(int(np.flatnonzero(continued)[0]) + 1)(examples, tokenizer)

    assert ("train", "whole words") in failed_checks(rewritten(whole_word_folder, tmp_path / "half", half))

    def a_word_less(examples: Examples, tokenizer: Tokenizer) -> Examples:
        """Leave a word out that the number of predictions has room for: all of the first example but one."""
        masks = masks_of(examples)
        return unpredicted(examples, np.arange(len(masks.positions)) >= masks.offsets[1] - 1)

    less = failed_checks(rewritten(whole_word_folder, tmp_path / "less", a_word_less))
    assert ("train", "words that fit") in less

    pieces = rewritten(data_folder, tmp_path / "pieces", lambda examples, _: examples)
    manifest = read_json(pieces / "manifest.json")
    manifest["config"]["data"]["whole_word_mask"] = True
    write_json(pieces / "manifest.json", manifest)
    assert ("train", "whole words") in failed_checks(pieces)


OBJECTIVES = {
    "sentence order": ["next_sentence=sop"],
    "no pairs": ["next_sentence=none"],
    "no pairs, whole words": ["next_sentence=none", "whole_word_mask=true"],
    "masks drawn later": ["masking=dynamic"],
    "no pairs, masks drawn later": ["next_sentence=none", "masking=dynamic"],
}


@pytest.fixture(scope="module", params=OBJECTIVES.values(), ids=OBJECTIVES)
def other_objective(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, english_text: Path, vocab_folder: Path
) -> Path:
    settings = [f"data.{setting}" for setting in (*request.param, "max_seq_length=64", "dupe_factor=1")]
    output = tmp_path_factory.mktemp("objective") / "data"
    return make_data(load_config(settings=settings), [str(english_text)], vocab_folder, output, workers=1)


def test_every_objective_is_shown_and_checked_by_its_own_rules(other_objective: Path, tmp_path: Path) -> None:
    found = inspected(other_objective)
    assert found.failed == []
    config = found.config
    names = {check.name for check in found.checks if check.split == "train"}
    assert ("predictions" in names) == (config.masking == "static")
    assert {"is-next", "in order"} & names == {"nsp": {"is-next"}, "sop": {"in order"}, "none": set()}[
        config.next_sentence
    ]
    assert "predictions" in {check.name for check in found.checks if check.split == "validation"}
    result = CliRunner().invoke(app, ["inspect", str(other_objective), "--stats", "--rows", "2"])
    assert result.exit_code == 0, result.output
    assert ("masks drawn in training" in result.stdout) == (config.masking == "dynamic")
    page = CliRunner().invoke(app, ["inspect", str(other_objective), "--html", str(tmp_path / "page.html")])
    assert page.exit_code == 0, page.output
    for token in ("[MASK]", "[PAD]"):
        folder = rewritten(other_objective, tmp_path / token, a_plain_token_is(token))
        assert ("train", "special tokens") in failed_checks(folder)


def test_words_of_a_segmenter_begin_where_segments_do(tmp_path: Path, chinese_text: Path) -> None:
    config = load_config(
        settings=["vocab.size=1500", "data.dupe_factor=1", "data.whole_word_mask=true", "data.word_segmenter=jieba"]
    )
    vocab = make_vocab(config, [str(chinese_text)], tmp_path / "vocab", workers=1)
    static = make_data(config, [str(chinese_text)], vocab, tmp_path / "static", workers=1)
    assert failed_checks(static) == set()
    dynamic = config.model_copy(update={"data": config.data.model_copy(update={"masking": "dynamic"})})
    folder = make_data(dynamic, [str(chinese_text)], vocab, tmp_path / "dynamic", workers=1)
    assert failed_checks(folder) == set()

    def inside_a_word(examples: Examples, _tokenizer: Tokenizer) -> Examples:
        assert examples.starts_word is not None
        starts_word = examples.starts_word.copy()
        starts_word[1] = False
        return replace(examples, starts_word=starts_word)

    assert ("train", "word starts") in failed_checks(rewritten(folder, tmp_path / "inside", inside_a_word))


def test_a_damaged_shard_is_named_and_the_others_are_still_counted(data_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(data_folder, folder)
    shard = folder / "train" / "00000.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    result = CliRunner().invoke(app, ["inspect", str(folder), "--stats"])
    assert result.exit_code == 1, result.output
    assert "train/00000.parquet is damaged: its SHA-256" in result.stdout
    assert "shown as mask" in result.stdout
    shard.unlink()
    result = CliRunner().invoke(app, ["inspect", str(folder), "--row", "0"])
    assert result.exit_code == 1, result.output
    assert "train/00000.parquet is missing" in result.stdout


def test_figures_that_are_not_those_of_the_shards_are_named(data_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(data_folder, folder)
    manifest = read_json(folder / "manifest.json")
    manifest["splits"]["train"]["statistics"]["unk_share"] = 0.25
    write_json(folder / "manifest.json", manifest)
    (check,) = inspected(folder).failed
    assert (check.split, check.name) == ("train", "manifest")
    assert "unk_share is 0.25 in the manifest" in check.measured


def test_figures_that_a_folder_of_an_older_version_lacks_are_not_compared(data_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(data_folder, folder)
    manifest = read_json(folder / "manifest.json")
    for split in manifest["splits"].values():
        del split["statistics"]["unigram_entropy"]
    write_json(folder / "manifest.json", manifest)
    assert not inspected(folder).failed


def test_bounds_hold_whatever_the_number_of_trials_and_are_not_loose() -> None:
    for trials in (1, 2, 7, 40, 1000, 10**6):
        for share in (0.0001, 0.1, 0.5, 0.8, 0.9999):
            low, high = binomial_range(trials, share)
            coin = stats.binom(trials, share)
            assert low <= trials * share <= high
            assert coin.cdf(low - 1) <= CHANCE / 2
            assert coin.sf(high) <= CHANCE / 2
    low, high = binomial_range(10**6, 0.1)
    sigma = (0.09 * 10**6) ** 0.5
    assert high - 10**5 < 6 * sigma
    assert 10**5 - low < 6 * sigma


def test_what_is_shown_is_what_is_stored(data_folder: Path) -> None:
    folder = DataFolder.open(data_folder)
    tokenizer = folder.tokenizer()
    record = folder.shards("train")[1]
    examples = read_shard(data_folder, record)
    first = folder.shards("train")[0].rows
    rows = [first + 2, first, 1]
    shown = render_rows(folder, "train", rows, tokenizer)
    assert [example.row for example in shown] == rows
    originals = with_tokens(examples, places(examples), masks_of(examples).original_ids)
    for example in shown[:2]:
        place = example.row - first
        span = slice(examples.offsets[place], examples.offsets[place + 1])
        split = int(examples.segment_b_start[place])
        for table, name in ((examples, "shown"), (originals, "original")):
            ids = table.input_ids[span].tolist()
            for segment, part in zip(example.segments, (ids[1 : split - 1], ids[split:-1]), strict=True):
                assert [getattr(token, name).removeprefix("##") for token in segment.tokens] == [
                    tokenizer.tokens[token_id].removeprefix("##") for token_id in part
                ]
        kinds = [token.kind for segment in example.segments for token in segment.tokens]
        assert len(kinds) - kinds.count("plain") == example.num_masked == np.diff(masks_of(examples).offsets)[place]
        assert examples.next_sentence_label is not None
        is_next = examples.next_sentence_label[place] == 0
        assert example.label == ("B follows A" if is_next else "B is from another document")
    assert {token.kind for example in shown for segment in example.segments for token in segment.tokens} >= {
        "plain",
        "mask",
    }


def test_rows_are_chosen_by_number_or_by_seed(data_folder: Path) -> None:
    def rows(*arguments: str) -> list[str]:
        result = CliRunner().invoke(app, ["inspect", str(data_folder), *arguments])
        assert result.exit_code == 0, result.output
        return [line.split(":")[0] for line in result.stdout.splitlines() if " row " in line]

    assert rows("--row", "7", "--row", "3") == ["train row 7", "train row 3"]
    assert len(rows()) == 3
    assert rows("--rows", "5") == rows("--rows", "5", "--seed", "0") != rows("--rows", "5", "--seed", "1")
    assert all(row.startswith("validation row") for row in rows("--rows", "2", "--split", "validation"))
    assert rows("--stats") == []


def test_without_colours_marks_say_the_same(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bert_pretrain.inspect.inspect import inspect

    def output() -> str:
        assert inspect(data_folder, rows=4)
        return capsys.readouterr().out

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    plain = output()
    assert "\x1b" not in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    coloured = output()
    assert {f"\x1b[{code}m" in coloured for code in ("36", "31", "33")} == {True}
    monkeypatch.setenv("NO_COLOR", "1")
    assert output() == plain
    for mark in ("⟨[MASK]→", "⟨="):
        assert mark in plain


def test_characters_that_the_terminal_lacks_become_question_marks(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bert_pretrain.inspect.inspect import inspect

    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    assert inspect(data_folder, rows=2, stats=True)
    sys.stdout.flush()
    text = output.getvalue().decode("ascii")
    assert "?[MASK]?" in text
    assert "##########" in text  # bars


class _Tags(HTMLParser):
    """Collects what a browser would see, and insists on well-formed nesting."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">'


def test_the_page_needs_nothing_and_lets_no_text_become_code(
    data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "<b onclick=alert(3)>data"
    shutil.copytree(data_folder, folder)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    tokens = list(tokenizer.tokens)
    tokens[tokens.index("the")], tokens[tokens.index("of")] = EVIL, "\u009b2J\u202e"
    evil = Tokenizer(tokens, lowercase=True, strip_accents=None, handle_chinese_chars=True)
    evil.save(folder / "tokenizer")
    manifest = read_json(folder / "manifest.json")
    manifest["tokenizer"]["hash"] = evil.hash
    manifest["inputs"][0]["location"] = f"{EVIL}.txt"
    manifest["splits"]["train"]["statistics"]["drops"] = {EVIL: 1}
    write_json(folder / "manifest.json", manifest)
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["inspect", str(folder), "--html", str(page), "--rows", "12"])
    assert result.exit_code == 0, result.output
    assert "\u009b" not in result.stdout
    assert "\u202e" not in result.stdout
    content = page.read_text(encoding="utf-8")
    parser = _Tags()
    parser.feed(content)
    parser.close()
    assert parser.open == []
    assert parser.seen.isdisjoint({"script", "img", "link", "iframe", "object", "base", "b onclick=alert(3)"})
    assert parser.seen >= {"svg", "rect", "table", "article", "style"}
    assert not {name for name in parser.attributes if name.startswith("on") or name in ("src", "href")}
    assert "default-src 'none'" in content
    assert "url(" not in content
    assert "@import" not in content
    assert "".join(parser.text).count(EVIL) >= 3
    assert "\u009b" not in content


def test_the_page_shows_what_is_broken(data_folder: Path, tmp_path: Path) -> None:
    folder = rewritten(data_folder, tmp_path / "data", a_random_piece_is("[PAD]"))
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["inspect", str(folder), "--html", str(page)])
    assert result.exit_code == 1
    assert "failed check: train, random replacements" in result.stdout
    assert "1 example breaks it" in page.read_text(encoding="utf-8")


MISTAKES = {
    "no folder": (["nosuch"], "DATA_DIR"),
    "no such split": (["{data}", "--split", "test"], "--split"),
    "no such row": (["{data}", "--row", "99999999"], "--row"),
    "not a page": (["{data}", "--html", "notes.txt"], "--html"),
    "page in a file": (["{data}", "--html", "{data}/manifest.json/x.html"], "x.html"),
}


@pytest.mark.parametrize(("arguments", "where"), MISTAKES.values(), ids=MISTAKES)
def test_a_user_error_ends_with_exit_code_2(data_folder: Path, arguments: list[str], where: str) -> None:
    result = CliRunner().invoke(app, ["inspect", *(word.format(data=data_folder) for word in arguments)])
    assert result.exit_code == 2, result.output
    assert where in result.stderr.split("\n  where: ")[1].split("\n  hint: ")[0]


def test_without_a_standard_output_nothing_is_shown(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bert_pretrain.inspect.inspect import inspect

    monkeypatch.setattr(sys, "stdout", None)
    assert inspect(data_folder, rows=1)
