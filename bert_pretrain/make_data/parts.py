"""Inputs are read as byte ranges (`ByteRange`): large files are cut at document boundaries, small ones are grouped.

A few large archives, or files that are not UTF-8, would keep only as many cores busy: they are first unpacked into the
token store, as UTF-8, and removed when all of it is tokenised. Where the inputs were cut is recorded in the store, for
it must not change between runs.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from bert_pretrain.io.files import atomic_path, read_json, write_checked_json
from bert_pretrain.io.pool import Pool, run_each
from bert_pretrain.text import documents
from bert_pretrain.text.sources import FEW_SOURCES, READ_ERRORS, Source, damaged
from bert_pretrain.text.text_files import ByteRange

LARGE_ARCHIVE_BYTES = 4 << 20
_CUTS = "parts.json"


def cut_inputs(sources: Sequence[Source], store: Path, pool: Pool) -> list[tuple[ByteRange, ...]]:
    """Return the byte ranges of all inputs, in order and in groups, the same in every run with this store."""
    part_bytes = documents.part_bytes_of(sources)
    archives = [
        source for source in sources if source.is_local and source.has_documents_at_lines and source.needs_decoding
    ]
    large = [source for source in archives if (source.size or 0) >= LARGE_ARCHIVE_BYTES]
    unpacked = {source.location: store / f"unpacked-{number}" for number, source in enumerate(large)}
    if len(archives) > FEW_SOURCES:
        unpacked = {}
    remedy = f"remove the folder {store}: it is a cache, and is made again"
    cuts = read_json(store / _CUTS, remedy) if (store / _CUTS).exists() else None
    if cuts is None:
        if unpacked:
            tasks = [ByteRange(source, unpacked=unpacked[source.location]) for source in large]
            weights = [float(source.size or 1) for source in large]
            list(run_each(ensure_unpacked, tasks, workers=pool, description="unpack", unit="B", weights=weights))
        parts = [documents.cut(source, part_bytes, unpacked.get(source.location)) for source in sources]
        bounds = [[(part.start, part.stop) for part in of_source] for of_source in parts]
        cuts = {"part_bytes": part_bytes, "parts": bounds}
        write_checked_json(store / _CUTS, cuts)
    parts_of_all = (
        ByteRange(source, start, stop, unpacked.get(source.location))
        for source, bounds in zip(sources, cuts["parts"], strict=True)
        for start, stop in bounds
    )
    return documents.group(parts_of_all, cuts["part_bytes"])


def ensure_unpacked(part: ByteRange) -> None:
    """Unpack the archive of a byte range, if it is needed and not there."""
    if part.unpacked is None or part.unpacked.exists():
        return
    with (
        ByteRange(part.source).open() as packed,
        atomic_path(part.unpacked) as temporary,
        temporary.open("wb") as file,
    ):
        try:
            shutil.copyfileobj(packed, file, 1 << 20)
        except READ_ERRORS as error:
            raise damaged(part.source, error) from error


def remove_unpacked(parts: Iterable[ByteRange]) -> None:
    """Remove what was unpacked for byte ranges that are all tokenised."""
    for file in {part.unpacked for part in parts if part.unpacked is not None}:
        file.unlink(missing_ok=True)
