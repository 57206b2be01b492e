"""An inspection as one HTML page that needs nothing else: no script, no font, no image, no address.

All text is escaped by `markup.tag`; and should that ever fail, the page's own policy lets nothing run or load.
"""

from bert_pretrain.tools import figures
from bert_pretrain.tools.checks import Check
from bert_pretrain.tools.inspection import Inspection
from bert_pretrain.tools.markup import Markup, bar_chart, joined, stacked_bar, table, tag
from bert_pretrain.tools.view import ExampleView, Piece

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MEANINGS = {
    "mask": "hidden: the model sees [MASK]",
    "random": "replaced by a random piece",
    "kept": "left as it is, predicted all the same",
}

_STYLE = Markup("""
:root { color-scheme: light dark;
  --paper: #f6f5f1; --card: #ffffff; --ink: #1c2230; --soft: #636b7a; --line: #e3e1da;
  --train: #2f6f9f; --validation: #d08a2e; --good: #1d7a4c; --good-wash: #e4f3ea; --bad: #b3261e;
  --bad-wash: #fbe9e7; --mask: #0f766e; --mask-wash: #d5f0ec; --random: #b3364b; --random-wash: #fbe1e5;
  --kept: #8a5a00; --kept-wash: #fcefcf;
}
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171d; --card: #1d222b; --ink: #e7e9ee; --soft: #9aa3b2; --line: #313846;
  --train: #6fb1e0; --validation: #e8ae5e; --good: #6fd3a0; --good-wash: #17352a; --bad: #ff8f85;
  --bad-wash: #421d1b; --mask: #5fd3c6; --mask-wash: #123a37; --random: #ff9aaa; --random-wash: #451f27;
  --kept: #f0c265; --kept-wash: #3d3015;
} }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Noto Sans CJK SC", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 44px 0 14px; }
h3 { font-size: 14px; margin: 0 0 8px; font-weight: 600; }
p { margin: 0 0 12px; }
.eyebrow { color: var(--soft); font-size: 13px; margin-bottom: 4px; }
.soft, .eyebrow, .lead { color: var(--soft); }
.verdict { margin: 22px 0 0; padding: 14px 18px; border-radius: 10px; font-weight: 600; }
.verdict.good { background: var(--good-wash); color: var(--good); }
.verdict.bad { background: var(--bad-wash); color: var(--bad); }
.verdict ul { margin: 8px 0 0; padding-left: 20px; font-weight: 400; }
.grid-2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 16px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px; min-width: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); gap: 14px 18px; }
.tile b { display: block; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.stack { display: block; width: 100%; height: 12px; border-radius: 6px; margin: 16px 0 6px; }
.key { display: inline-block; margin-right: 16px; font-size: 13px; color: var(--soft); }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.grid { stroke: var(--line); stroke-width: 1; }
.tick { fill: var(--soft); font-size: 10.5px; }
.tick.end { text-anchor: end; } .tick.middle { text-anchor: middle; }
.bar.train { fill: var(--train); } .bar.validation { fill: var(--validation); }
.bar.mask { fill: var(--mask); } .bar.random { fill: var(--random); } .bar.original { fill: var(--kept); }
i.train { background: var(--train); } i.validation { background: var(--validation); }
i.mask { background: var(--mask); } i.random { background: var(--random); } i.kept { background: var(--kept); }
.expected { stroke: var(--ink); stroke-width: 1.5; }
.example { margin-bottom: 16px; }
.example header { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: baseline; margin-bottom: 10px;
  font-size: 13px; color: var(--soft); }
.label { color: var(--ink); font-weight: 600; font-size: 14px; }
.segment { display: grid; grid-template-columns: 30px 1fr; line-height: 2; padding: 2px 0; overflow-wrap: anywhere; }
.segment > b { color: var(--soft); font-weight: 600; }
.segment + .segment { border-top: 1px dashed var(--line); }
.token { padding: 2px 5px; border-radius: 5px; white-space: nowrap; }
.token small { margin-left: 5px; font-size: 12.5px; }
.token.mask { background: var(--mask-wash); color: var(--mask); }
.token.random { background: var(--random-wash); color: var(--random); }
.token.random > span { text-decoration: line-through; }
.token.kept { background: var(--kept-wash); color: var(--kept); border-bottom: 2px dotted; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
table.numbers td:not(:first-child), table.numbers th:not(:first-child) { text-align: right; }
td code { font-size: 12px; overflow-wrap: anywhere; }
.good-mark { color: var(--good); font-weight: 600; } .bad-mark { color: var(--bad); font-weight: 600; }
details summary { cursor: pointer; font-weight: 600; }
details[open] summary { margin-bottom: 12px; }
@media print { body { background: none; } .card { break-inside: avoid; } }
""")


def draw(inspection: Inspection) -> str:
    """Return the page."""
    name = inspection.folder.path.resolve().name
    sections = [
        _head(inspection, name),
        _splits(inspection),
        _histograms(inspection),
        _examples(inspection),
        _checks(inspection),
        _origin(inspection),
    ]
    head = tag(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", f"{name}: training data for BERT"),
        tag("style", _STYLE),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', tag('main', *sections)), lang='en')}\n"


def _head(inspection: Inspection, name: str) -> Markup:
    config, manifest = inspection.config, inspection.folder.manifest
    counts = " and ".join(f"{split['rows']:,} {split_name}" for split_name, split in manifest["splits"].items())
    documents = manifest["corpus"]["documents"]
    lead = f"{counts} examples of at most {config.max_seq_length} tokens, from {documents:,} documents"
    broken = inspection.violations
    if broken:
        says = f"{len(broken)} of {len(inspection.checks)} promises broken"
        verdict = tag("div", says, tag("ul", *(_broken(check) for check in broken)), class_="verdict bad")
    else:
        verdict = tag("div", f"All {len(inspection.checks)} promises kept", class_="verdict good")
    return tag(
        "header", tag("div", "Training data for BERT", class_="eyebrow"), tag("h1", name),
        tag("p", lead, class_="lead"), verdict,
    )  # fmt: skip


def _broken(check: Check) -> Markup:
    bounds = f" (tolerance: {check.tolerance})"
    return tag("li", tag("b", f"{check.split}, {check.name}: "), f"{check.measured}; expected {check.expected}{bounds}")


def _splits(inspection: Inspection) -> Markup:
    cards = []
    for name, survey in inspection.surveys.items():
        found = figures.measured(survey, inspection.config)
        shares = found["statistics"]
        tiles = [("examples", f"{found['rows']:,}"), ("tokens", f"{found['tokens']:,}")]
        forms = {entry[1]: (entry[0], entry[2]) for entry in figures.FIGURES}
        for key in ("mean_length_tokens", "is_next_share", "in_order_share", "masked_share", "unk_share"):
            if shares.get(key) is not None:
                title, form = forms[key]
                tiles.append((title, form.format(shares[key])))
        parts: list[Markup] = []
        if "predictions" in survey.faults:
            kinds = [(kind, shares[f"masked_shown_as_{kind}_share"]) for kind in ("mask", "random", "original")]
            titles = {"mask": "shown as [MASK]", "random": "as a random piece", "original": "as it is"}
            keys = [
                _key("kept" if kind == "original" else kind, f"{titles[kind]} {share:.1%}") for kind, share in kinds
            ]
            parts = [stacked_bar("what masked tokens are shown as", kinds), tag("div", *keys)]
        content = [tag("div", tag("b", value), tag("span", title), class_="tile") for title, value in tiles]
        cards.append(tag("section", tag("h3", name), tag("div", *content, class_="tiles"), *parts, class_="card"))
    return joined([tag("h2", "At a glance"), tag("div", *cards, class_="grid-2")])


def _histograms(inspection: Inspection) -> Markup:
    cards = []
    for histogram in figures.histograms(inspection):
        title = histogram.title[0].upper() + histogram.title[1:]
        chart = bar_chart(title, histogram.labels, histogram.shares, histogram.expected)
        note = [tag("span", "line: spread evenly", class_="key")] if histogram.expected else []
        cards.append(tag("figure", tag("h3", title), chart, *note, class_="card", style="margin:0"))
    notes = [tag("p", text) for text in _notes(inspection)]
    cards.append(tag("section", tag("h3", "How to read them"), *notes, class_="card soft"))
    keys = tag("p", *(_key(name, name) for name in inspection.surveys))
    return joined([tag("h2", "Shapes"), keys, tag("div", *cards, class_="grid-2")])


def _notes(inspection: Inspection) -> list[str]:
    config = inspection.config
    notes = [f"An example is filled up to {config.max_seq_length} tokens where its document is long enough."]
    if any("predictions" in survey.faults for survey in inspection.surveys.values()):
        notes.append(
            f"{config.masked_lm_prob:.0%} of the tokens of its text are predicted, rounded, and at least one; full "
            "examples therefore all have the same number."
        )
        notes.append("Masks should lie anywhere with the same chance: bars as high as the line, up to chance.")
    return notes


def _examples(inspection: Inspection) -> Markup:
    legend = tag("p", *(_key(kind, meaning) for kind, meaning in _MEANINGS.items()))
    return joined([tag("h2", "Examples"), legend, *(_example(example) for example in inspection.examples)])


def _example(example: ExampleView) -> Markup:
    label = [tag("span", example.label, class_="label")] if example.label else []
    facts = (f"{example.split} row {example.row}", f"{example.num_tokens} tokens", example.predictions)
    header = tag("header", *label, *(tag("span", fact) for fact in facts))
    segments = [
        tag("div", tag("b", segment.name), tag("div", *_text(segment.pieces)), class_="segment")
        for segment in example.segments
    ]
    return tag("article", header, *segments, class_="card example")


def _text(pieces: tuple[Piece, ...]) -> list[object]:
    content: list[object] = []
    for piece in pieces:
        content.append("" if piece.is_glued else " ")
        if piece.kind == "plain":
            content.append(piece.shown)
            continue
        # The marks are there for readers without colours, and for text that is copied.
        original = [] if piece.kind == "kept" else [tag("small", f"→ {piece.original}")]
        content.append(
            tag("span", tag("span", piece.shown), *original, class_=f"token {piece.kind}", title=_MEANINGS[piece.kind])
        )
    return content


def _checks(inspection: Inspection) -> Markup:
    rows = [
        (
            tag("span", "kept", class_="good-mark") if check.is_kept else tag("span", "broken", class_="bad-mark"),
            check.split,
            check.name,
            check.measured,
            check.expected,
            check.tolerance,
        )
        for check in inspection.checks
    ]
    header = ("", "split", "promise", "measured", "expected", "tolerance")
    note = "A sound folder breaks a statistical bound less than once in a million times."
    return joined(
        [tag("h2", "Promises"), tag("p", note, class_="soft"), tag("div", table(header, rows), class_="card")]
    )


def _origin(inspection: Inspection) -> Markup:
    manifest = inspection.folder.manifest
    compared = [
        (title.strip(), *(value for pair in values for value in pair)) for title, values in figures.table(inspection)
    ]
    header = ("", *(f"{name}, {of}" for name in inspection.surveys for of in ("manifest", "measured")))
    settings = inspection.config.model_dump(mode="json").items()
    shards = [
        (record.path, f"{record.rows:,}", f"{record.tokens:,}", f"{record.bytes:,}", tag("code", record.sha256))
        for name in manifest["splits"]
        for record in inspection.folder.shards(name)
    ]
    values = [(key, "null" if value is None else value) for key, value in settings]
    details = [
        ("Configuration", table(("key", "value"), values)),
        (f"Shards: {len(shards)}", table(("file", "examples", "tokens", "bytes", "SHA-256"), shards)),
    ]
    folded = [
        tag("details", tag("summary", title), content, class_="card", style="margin-top:16px")
        for title, content in details
    ]
    return joined(
        [
            tag("h2", "Where it comes from"),
            tag("div", table(("", ""), figures.origin(inspection)), class_="card"),
            tag("h2", "The manifest's figures, and those counted again"),
            tag("div", table(header, compared, class_="numbers"), class_="card"),
            *folded,
        ]
    )


def _key(kind: str, text: str) -> Markup:
    return tag("span", tag("i", class_=kind), text, class_="key")
