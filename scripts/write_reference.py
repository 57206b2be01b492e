"""Write the files that are made from `bert_pretrain/config.py`: configs/schema.json and docs/keys.md.

    python scripts/write_reference.py

A test checks that both are up to date.
"""

import json
from collections.abc import Callable
from pathlib import Path

from bert_pretrain.config import Config, PhaseConfig
from bert_pretrain.config_keys import Key, as_values, inline_yaml, keys_of

ROOT = Path(__file__).resolve().parents[1]
INTRODUCTION = """# Keys of the configuration

`bert-pretrain config` prints these keys, with the values of a preset if you name one, as a YAML file that `--config`
and `run` take. How files, presets and flags are combined: [Configuration](configuration.md). (This page is generated
from the code by `scripts/write_reference.py`.)
"""


def keys_page() -> str:
    """Return docs/keys.md: a table for each section."""
    tree, keys = as_values(Config()), list(keys_of())
    top = [key for key in keys if len(key.path) == 1 and not key.is_section]
    lines = [INTRODUCTION, *_table(top, tree)]
    for section in (key for key in keys if key.is_section):
        own = [key for key in keys if key.path[:-1] == section.path]
        lines += [f"\n## {section.dotted}\n\n{section.meaning}\n", *_table(own, tree[section.dotted])]
    meaning = "Each phase in the list `phases` has these keys."
    defaults = PhaseConfig(name="first").model_dump(exclude={"name"})
    return "\n".join([*lines, f"\n## phases\n\n{meaning}\n", *_table(list(keys_of(PhaseConfig)), defaults)]) + "\n"


def _table(keys: list[Key], defaults: dict[str, object]) -> list[str]:
    rows = [(key.path[-1], key.values, _default(key, defaults), key.meaning) for key in keys]
    cells = [f"| `{name}` | {values} | {default} | {meaning} |" for name, values, default, meaning in rows]
    return ["| key | value | default | meaning |", "|---|---|---|---|", *cells]


def _default(key: Key, defaults: dict[str, object]) -> str:
    name = key.path[-1]
    return f"`{inline_yaml(defaults[name])}`" if name in defaults else "none: must be given"


def schema() -> str:
    """Return configs/schema.json, for editors."""
    return json.dumps(Config.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


FILES: dict[Path, Callable[[], str]] = {
    ROOT / "configs" / "schema.json": schema,
    ROOT / "docs" / "keys.md": keys_page,
}

if __name__ == "__main__":
    for path, text in FILES.items():
        path.write_text(text(), encoding="utf-8")
