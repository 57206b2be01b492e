"""Encodings of text: detected from the beginning of a file, and its content as UTF-8.

UTF-8 is expected unless the configuration names another encoding or says `auto`. Text that is not what it is expected
to be is refused with the likely encoding, never read as something else without a word.
"""

import codecs
from collections.abc import Iterator
from typing import BinaryIO, cast

from bert_pretrain.errors import InputError
from bert_pretrain.io.inputs import stream_of

AUTO, UTF8 = "auto", "utf-8"
_INVALID, _MARKING = "\udcff", "bert_pretrain.marking"
"""What stands for a sequence of bytes that is invalid, and the name of the error handler that sets it: half a surrogate
pair, which becomes 0xFF, a byte that UTF-8 never has."""
codecs.register_error(_MARKING, lambda error: (_INVALID, cast(UnicodeDecodeError, error).end))
_BLOCK_BYTES = 1 << 15
_GUESS_BYTES, _PIECE_BYTES = 1 << 16, 1 << 13
_MAX_INVALID, _MAX_INVALID_UTF8, _MAX_INVALID_OTHERS = 1e-3, 0.1, 0.01
"""Shares of all characters, and of those beyond ASCII: above both, text is in another encoding rather than damaged.
Other encodings read more of a foreign text than UTF-8 does: GB18030 is Shift-JIS by all but 2 %."""
_MAX_NUL = 0.2  # text has none, but in UTF-16 and UTF-32 each ASCII character holds some
_MIN_UTF8_CHARACTERS = 10  # of several bytes, from which on valid UTF-8 is no chance
_MARKS = {
    codecs.BOM_UTF8: UTF8,
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Those looked for. Of several that read a sample alike, the first is meant: the common one, or one that has all others.
_COMMON = (
    *("gb18030", "cp950", "cp932", "euc_jp", "cp949", "koi8_r", "koi8_u", "cp1251", "cp866", "cp1252", "cp1250"),
    *("iso8859_2", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp874"),
    *("utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be"),
)
_CENTRAL, _TIE = ("cp1250", "iso8859_2", "cp1257"), 0.03
"""Western European text fits these better than cp1252 at times, by so little; Czech or Polish text by more."""
_SUPERSETS = {"gb2312": "gb18030", "gbk": "gb18030"}
"""Text that is called by the first often holds characters of the second, which reads all else alike."""
_CHINESE = {"gb18030": "cp950", "cp950": "gb18030", "big5": "gb18030", "big5hkscs": "gb18030"}
"""Encodings that read most of each other's text, as rare characters, and the other of each."""
_COMMON_CHARACTERS = frozenset(
    "的一是不了個个在你有用這这來来我以可人道中他到上如為为要下時时行們们說说使大件得能之和會会將将它子也數数那出於于文過过就此去"
    "後后些面發发本多同作裡里開开器所見见看自進进程方只事好何並并對对前果其而定應应"
)
"""Four of ten in running text are among these; misread, nearly none."""


def encoding_of(sample: bytes, expected: str, location: str) -> str:
    """Return the encoding of a file, given its beginning; `expected` is the name of one, or `auto` to detect it."""
    if expected != AUTO:
        expected = codecs.lookup(expected).name.removesuffix("-sig")
        expected = _SUPERSETS.get(expected, expected)
        if other := _other_chinese(sample, expected):
            raise _foreign(sample, expected, other, location)
        if not _is_foreign(sample, expected) and (expected == UTF8 or not _is_surely_utf8(sample, expected)):
            return expected
    likely = likely_encoding(sample)
    if expected != AUTO or likely is None:
        raise _foreign(sample, expected, likely, location)
    return likely


def likely_encoding(sample: bytes) -> str | None:
    """Return the name of the encoding that a text is most likely in, None where none fits."""
    for mark, encoding in _MARKS.items():
        if sample.startswith(mark):
            return encoding
    if not _is_foreign(sample, UTF8):
        return UTF8
    # All at once, or piece by piece where damaged bytes fit no encoding.
    for begin, size in ((0, _GUESS_BYTES), *((begin, _PIECE_BYTES) for begin in range(0, _GUESS_BYTES, _PIECE_BYTES))):
        name = _guess(sample[begin : begin + size])
        if name is not None and not _is_foreign(sample, name):
            return _other_chinese(sample, name) or name
    return None


def _other_chinese(sample: bytes, encoding: str) -> str | None:
    """Return Big5 for GB18030, or the reverse, if the text has far more common characters in it."""
    other = _CHINESE.get(encoding)
    if other is None or _is_surely_utf8(sample, encoding) or _is_foreign(sample, other):
        return None
    own_share, other_share = _common_share(sample, encoding), _common_share(sample, other)
    return other if other_share > 0.1 and other_share > 3 * own_share else None


def _common_share(sample: bytes, encoding: str) -> float:
    """Return the share of common characters among the Chinese ones, 0 where there are few."""
    found = [character for character in _marked(sample, encoding) if "\u4e00" <= character <= "\u9fff"]
    return sum(character in _COMMON_CHARACTERS for character in found) / max(len(found), 20)


def _guess(sample: bytes) -> str | None:
    from charset_normalizer import from_bytes

    if b"\0" not in sample:  # else UTF-16 or UTF-32; elsewhere, no character of several bytes holds one of these
        sample = sample[: max(map(sample.rfind, (b"\n", b" ", b",", b".", b'"'))) + 1] or sample
    found = from_bytes(sample, cp_isolation=list(_COMMON))
    best = found.best()
    alike = set(best.could_be_from_charset).intersection(_COMMON) if best else ()
    if best is None or not alike:
        return None
    name = min(alike, key=_COMMON.index)
    western = next((match for match in found if match.encoding == "cp1252"), None)
    if western and name in _CENTRAL and western.chaos - western.coherence <= best.chaos - best.coherence + _TIE:
        name = "cp1252"
    return codecs.lookup(name).name


def as_utf8(file: BinaryIO, encoding: str) -> BinaryIO:
    """Return the content of a file as UTF-8; a sequence of bytes that is invalid becomes one that is invalid there."""
    return file if encoding == UTF8 else stream_of(file, _recoded(file, encoding))


def _recoded(file: BinaryIO, encoding: str) -> Iterator[bytes]:
    decoder, block = codecs.getincrementaldecoder(encoding)(_MARKING), b"more"
    while block:
        block = file.read(_BLOCK_BYTES)
        yield decoder.decode(block, final=not block).encode("utf-8", "surrogateescape")


def decode(sample: bytes, encoding: str) -> str:
    """Return the text of the beginning of a file, with U+FFFD for what is invalid, without a byte order mark."""
    return _marked(sample, encoding).replace(_INVALID, "\ufffd")


def _marked(sample: bytes, encoding: str) -> str:
    try:  # a last character that is not complete is left out
        return codecs.getincrementaldecoder(encoding)(_MARKING).decode(sample).removeprefix("\ufeff")
    except UnicodeError:  # UTF-16 or UTF-32 without the mark that tells the order
        return _INVALID


def _is_foreign(sample: bytes, encoding: str) -> bool:
    """Whether text is in another encoding."""
    if encoding == UTF8 and sample.startswith(tuple(mark for mark, name in _MARKS.items() if name != UTF8)):
        return True
    text = _marked(sample, encoding)
    if text.count("\0") > _MAX_NUL * len(text):
        return True
    invalid = text.count(_INVALID)
    share = _MAX_INVALID_UTF8 if encoding == UTF8 else _MAX_INVALID_OTHERS
    return invalid > _MAX_INVALID * len(text) and invalid > share * _num_beyond_ascii(text)


def _is_surely_utf8(sample: bytes, expected: str) -> bool:
    """Whether text is UTF-8 although another encoding is expected, which may read it, as something else."""
    try:
        text = codecs.getincrementaldecoder(UTF8)().decode(sample)
    except UnicodeError:
        return False
    if expected.startswith(("utf-16", "utf-32")):
        return "\0" not in text
    return _num_beyond_ascii(text) >= _MIN_UTF8_CHARACTERS


def _num_beyond_ascii(text: str) -> int:
    return len(text) - len(text.encode("ascii", "ignore"))


def _foreign(sample: bytes, expected: str, likely: str | None, location: str) -> InputError:
    what = "no known encoding fits the text" if expected == AUTO else f"the text is not {expected.upper()}"
    before, invalid, _ = _marked(sample, UTF8 if expected == AUTO else expected).partition(_INVALID)
    where = f"{location}: line {1 + before.count(chr(10))}" if invalid else location
    if likely is None:
        return InputError(what, where=where, remedy="convert it to UTF-8 (iconv), or leave it out if it is no text")
    remedy = f"name its encoding: --encoding {likely} (auto: each file has its own), or convert it to UTF-8 (iconv)"
    return InputError(f"{what}, but probably {likely}", where=where, remedy=remedy)
