"""Detection of text encodings, and conversion to UTF-8.

UTF-8 is expected unless the configuration names another encoding or says `auto`. Text in an unexpected encoding raises
an error that names the likely encoding.
"""

import codecs
import io
from typing import Any, BinaryIO, cast

from bert_pretrain.errors import InputError

AUTO, UTF8 = "auto", "utf-8"
# The error handler _MARKING decodes an invalid byte sequence to the lone surrogate _INVALID. `surrogateescape` encodes
# _INVALID as the byte 0xFF, which is invalid in UTF-8.
_INVALID, _MARKING = "\udcff", "bert_pretrain.marking"
codecs.register_error(_MARKING, lambda error: (_INVALID, cast(UnicodeDecodeError, error).end))
_GUESS_BYTES, _PIECE_BYTES = 1 << 16, 1 << 13
# Text is damaged, rather than in another encoding, if at most _MAX_INVALID of its characters or at most a share of its
# non-ASCII characters are invalid. The share is _MAX_INVALID_UTF8 for UTF-8. For other encodings, it is
# _MAX_INVALID_OTHERS, which is low because Shift-JIS decodes 98 % of GB18030 text.
_MAX_INVALID, _MAX_INVALID_UTF8, _MAX_INVALID_OTHERS = 1e-3, 0.1, 0.01
_MAX_DAMAGED = 9  # if more non-ASCII characters are invalid UTF-8, and none is valid, the text is in another encoding
_MIN_UTF8_CHARACTERS = 10  # fewer non-ASCII characters may be valid UTF-8 by chance
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: UTF8,
    codecs.BOM_UTF32_LE: "utf-32",  # precedes UTF-16 because this mark starts with the mark of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# The encodings that are detected. If several decode a sample to the same text, the first of them is chosen.
_DETECTED = (
    *("gb18030", "cp950", "cp932", "euc_jp", "cp949", "koi8_r", "koi8_u", "cp1251", "cp866", "cp1252", "cp1250"),
    *("iso8859_2", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp874"),
    *("utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be"),
)
# Western European text sometimes scores up to _TIE better in these than in cp1252; Czech or Polish text scores more.
_CENTRAL_EUROPEAN, _TIE = ("cp1250", "iso8859_2", "cp1257"), 0.03
_SUPERSETS = {"gb2312": "gb18030", "gbk": "gb18030"}  # files declared as the subset often use the superset
# GB18030 and Big5 decode most of each other's text, but to rare characters.
_OTHER_CHINESE = {"gb18030": "cp950", "cp950": "gb18030", "big5": "gb18030", "big5hkscs": "gb18030"}
# These are 40 % of the characters of Chinese text, but almost none of the characters of wrongly decoded text.
_COMMON_CHARACTERS = frozenset(
    "的一是不了個个在你有用這这來来我以可人道中他到上如為为要下時时行們们說说使大件得能之和會会將将它子也數数那出於于文過过就此去"
    "後后些面發发本多同作裡里開开器所見见看自進进程方只事好何並并對对前果其而定應应"
)


def encoding_of(sample: bytes, expected: str, location: str) -> str:
    """Return the encoding of a file from a sample of its first bytes.

    `expected` is the name of an encoding, or `auto` to detect it. Text in another encoding raises an InputError.
    """
    likely = None
    if expected == AUTO:
        if likely := likely_encoding(sample):
            return likely
        what = "no known encoding fits the text"
    else:
        expected = codecs.lookup(expected).name.removesuffix("-sig")
        expected = _SUPERSETS.get(expected, expected)
        likely = _other_chinese(sample, expected)
        is_utf8 = expected != UTF8 and _is_surely_utf8(sample, expected)
        if not (likely or is_utf8 or _is_foreign(sample, expected)):
            return expected
        likely = likely or likely_encoding(sample)
        what = f"the text is not {expected.upper()}"
    before, invalid, _ = _marked(sample, UTF8 if expected == AUTO else expected).partition(_INVALID)
    where = f"{location}: line {before.count(chr(10)) + 1}" if invalid else location
    if likely is None:
        raise InputError(what, where=where, remedy="convert it to UTF-8 (iconv), or leave it out if it is not text")
    raise InputError(
        f"{what}, but probably {likely}",
        where=where,
        remedy=f"pass --encoding {likely} (or auto to detect it for each file), or convert it to UTF-8 (iconv)",
    )


def likely_encoding(sample: bytes) -> str | None:
    """Return the most likely encoding of a sample, or None if no encoding fits."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if sample.startswith(mark):
            return encoding
    is_utf8 = not _is_foreign(sample, UTF8)
    text = _marked(sample, UTF8)
    num_invalid = text.count(_INVALID)
    if is_utf8 and (num_invalid <= _MAX_DAMAGED or num_invalid < _num_beyond_ascii(text)):
        return UTF8
    # If damaged bytes fit no encoding, try smaller pieces.
    pieces = [sample[begin : begin + _PIECE_BYTES] for begin in range(0, _GUESS_BYTES, _PIECE_BYTES)]
    for name in map(_guess, [sample[:_GUESS_BYTES], *pieces]):
        if name is not None and not _is_foreign(sample, name):
            return _other_chinese(sample, name) or name
    return UTF8 if is_utf8 else None


def _other_chinese(sample: bytes, encoding: str) -> str | None:
    """Return Big5 for GB18030 or the reverse if it decodes far more common characters, otherwise None."""
    other = _OTHER_CHINESE.get(encoding)
    if other is None or _is_surely_utf8(sample, encoding) or _is_foreign(sample, other):
        return None
    share = _common_share(sample, other)
    return other if share > 0.1 and share > 3 * _common_share(sample, encoding) else None


def _common_share(sample: bytes, encoding: str) -> float:
    """Return the share of common characters among the Chinese characters. Fewer than 20 characters count as 20."""
    chinese = [character for character in _marked(sample, encoding) if "\u4e00" <= character <= "\u9fff"]
    return sum(character in _COMMON_CHARACTERS for character in chinese) / max(len(chinese), 20)


def _guess(sample: bytes) -> str | None:
    from charset_normalizer import from_bytes

    if b"\0" not in sample:  # not UTF-16 or UTF-32: cut after ASCII, so that the last character is complete
        sample = sample[: max(map(sample.rfind, (b"\n", b" ", b",", b".", b'"'))) + 1] or sample
    matches = from_bytes(sample, cp_isolation=list(_DETECTED))
    best = matches.best()
    names = set(best.could_be_from_charset).intersection(_DETECTED) if best else ()
    if best is None or not names:
        return None
    name = min(names, key=_DETECTED.index)
    western = next((match for match in matches if match.encoding == "cp1252"), None)
    is_tie = western and western.chaos - western.coherence <= best.chaos - best.coherence + _TIE
    return codecs.lookup("cp1252" if is_tie and name in _CENTRAL_EUROPEAN else name).name


def as_utf8(file: BinaryIO, encoding: str) -> BinaryIO:
    """Convert a file to UTF-8. An invalid byte sequence becomes the byte 0xFF, which is invalid in UTF-8."""
    if encoding == UTF8:
        return file
    return cast(BinaryIO, io.BufferedReader(_Recoded(file, encoding), 1 << 16))


class _Recoded(io.RawIOBase):
    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self._text = io.TextIOWrapper(file, encoding, _MARKING, newline="\n")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        text = self._text.read(len(buffer) // 4)  # a character has at most four bytes
        content = text.encode("utf-8", "surrogateescape")
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._text.close()
        super().close()


def decode(sample: bytes, encoding: str) -> str:
    """Decode the first bytes of a file. Replace invalid bytes by U+FFFD, and remove the byte order mark."""
    return _marked(sample, encoding).replace(_INVALID, "\ufffd")


def _marked(sample: bytes, encoding: str) -> str:
    """Decode like `decode`, but replace invalid bytes by `_INVALID`. An incomplete last character is dropped."""
    try:
        return codecs.getincrementaldecoder(encoding)(_MARKING).decode(sample).removeprefix("\ufeff")
    except UnicodeError:  # UTF-16 and UTF-32 need a byte order mark
        return _INVALID


def _is_foreign(sample: bytes, encoding: str) -> bool:
    """Return whether a sample is in another encoding than `encoding`, rather than damaged."""
    if encoding == UTF8 and sample.startswith(tuple(mark for mark, name in _BYTE_ORDER_MARKS.items() if name != UTF8)):
        return True
    text = _marked(sample, encoding)
    if text.count("\0") > 0.2 * len(text):  # UTF-16 or UTF-32
        return True
    invalid = text.count(_INVALID)
    share = _MAX_INVALID_UTF8 if encoding == UTF8 else _MAX_INVALID_OTHERS
    return invalid > _MAX_INVALID * len(text) and invalid > share * _num_beyond_ascii(text)


def _is_surely_utf8(sample: bytes, expected: str) -> bool:
    """Return whether a sample is UTF-8, even if the expected encoding can decode it too."""
    text = _marked(sample, UTF8)
    if _INVALID in text:
        return False
    if expected.startswith(("utf-16", "utf-32")):
        return "\0" not in text
    return _num_beyond_ascii(text) >= _MIN_UTF8_CHARACTERS


def _num_beyond_ascii(text: str) -> int:
    return len(text) - len(text.encode("ascii", "ignore"))
