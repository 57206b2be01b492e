"""HTML that was left in a text: its tags and entities, counted by name, so that a command can name them.

Only names that HTML has are counted, so that `<int>` in a text on C++ or `a < b` is none. A tag that is cut by the end
of a block of text is missed.
"""

import re
from collections import Counter
from html.entities import html5

_TAGS = frozenset(
    re.findall(
        r"\w+",
        "a abbr address area article aside audio b base big blockquote body br button caption center cite code col dd "
        "del details dfn div dl dt em embed fieldset figcaption figure font footer form frame h1 h2 h3 h4 h5 h6 head "
        "header hr html i iframe img input ins kbd label legend li link main map mark menu meta nav noscript object ol "
        "option p param picture pre q s samp script section select small source span strike strong style sub summary "
        "sup svg table tbody td textarea tfoot th thead time title tr tt u ul var video wbr",
    )
)
_TAG = re.compile(r"</?([A-Za-z][A-Za-z0-9]*)(?:\s[^<>]*)?/?>")
_ENTITY = re.compile(r"&(#[0-9]+|#[xX][0-9A-Fa-f]+|[A-Za-z][A-Za-z0-9]*);")  # of its own: one literal is found fastest
NUMERIC = "&#…;"
"""The name of all entities that are numbers."""
MAX_MARKUP_SHARE = 0.001
"""HTML tags and entities per word; plain text has none."""
REMOVE_MARKUP = (
    "remove tags and resolve entities before: docs/cleaning.md has a program for text, JSON lines and tables"
)


def count_markup(text: str) -> Counter[str]:
    """Return how often each tag and entity occurs; `<br>` is also `<BR/>` and `</br>`, `&#…;` any number."""
    tags = (f"<{name}>" for tag in _TAG.findall(text) if (name := tag.lower()) in _TAGS)
    entities = (NUMERIC if name[0] == "#" else f"&{name};" for name in _ENTITY.findall(text))
    return Counter(tags) + Counter(name for name in entities if name == NUMERIC or name[1:] in html5)


def markup_warning(markup: dict[str, int], num_words: int) -> str:
    """Return a warning with the most frequent names if a text of so many words holds much HTML, otherwise ""."""
    number = sum(markup.values())
    if number <= MAX_MARKUP_SHARE * num_words:
        return ""
    return f"the text holds {number:,} HTML tags and entities, such as {most_common(markup)}; {REMOVE_MARKUP}"


def most_common(markup: dict[str, int]) -> str:
    """Return the most frequent names with their counts, for a message."""
    return ", ".join(f"{name} ({count:,})" for name, count in Counter(markup).most_common(5))
