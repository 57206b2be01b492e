"""An inspection as one HTML page that needs nothing else: no script, no font, no image, no address."""

from bert_pretrain.inspect import figures
from bert_pretrain.inspect.inspection import Inspection
from bert_pretrain.inspect.scan import Scan
from bert_pretrain.report.render import render

_TILES = ("mean_length_tokens", "is_next_share", "in_order_share", "masked_share", "unk_share")
_SHOWN_AS = (
    ("mask", "shown as [MASK]", "masked_shown_as_mask_share"),
    ("random", "as a random token", "masked_shown_as_random_share"),
    ("kept", "unchanged", "masked_shown_as_original_share"),
)


def render_page(inspection: Inspection) -> str:
    """Return the page."""
    return render(
        "inspect.html",
        name=inspection.folder.path.resolve().name,
        inspection=inspection,
        manifest=inspection.folder.manifest,
        tiles={name: _tiles(scan) for name, scan in inspection.scans.items()},
        shown_as={name: _shown_as(scan) for name, scan in inspection.scans.items()},
        histograms=figures.histograms(inspection),
        has_masks=any(scan.masks is not None for scan in inspection.scans.values()),
        origin=figures.origin(inspection),
        columns=[f"{name}, {of}" for name in inspection.scans for of in ("manifest", "measured")],
        compared=[(title, *values) for title, values in figures.compare(inspection)],
        config=inspection.config.model_dump(mode="json"),
        shards=[
            (record.path, f"{record.rows:,}", f"{record.tokens:,}", f"{record.bytes:,}", record.sha256)
            for name in inspection.folder.manifest["splits"]
            for record in inspection.folder.shards(name)
        ],
    )


def _tiles(scan: Scan) -> list[tuple[str, str]]:
    """Return the most important figures of a split."""
    statistics = scan.entry["statistics"]
    tiles = [(name, f"{scan.entry[key]:,}") for name, key in (("examples", "rows"), ("tokens", "tokens"))]
    return tiles + [
        (title, format(statistics[name], form))
        for title, name, form in figures.FIGURES
        if name in _TILES and statistics.get(name) is not None
    ]


def _shown_as(scan: Scan) -> list[tuple[str, str, float]]:
    """Return the class, title and share of what masked tokens are shown as; nothing where no masks are stored."""
    statistics = scan.entry["statistics"]
    return [(kind, title, statistics[name]) for kind, title, name in _SHOWN_AS if scan.masks is not None]
