"""The README for package indexes: its relative links lead to the repository."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class AbsoluteLinks(MetadataHookInterface):
    """Sets the `readme` of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        url = metadata["urls"]["Repository"]
        text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:|#)", rf"\1{url}/raw/main/", text)  # images
        text = re.sub(r"\]\((?!\w+:|#)", f"]({url}/blob/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
