"""Write the files that are made from `bert_pretrain/config.py`: configs/schema.json and docs/keys.md.

    python scripts/write_reference.py

A test checks that both are up to date.
"""

import json
from collections.abc import Callable
from pathlib import Path

from bert_pretrain.config import Config, PhaseConfig
from bert_pretrain.config_keys import SECTIONS, as_values, inline_yaml, key_schemas, values_of

ROOT = Path(__file__).resolve().parents[1]
INTRODUCTION = """# Keys of the configuration

`bert-pretrain config` prints these keys, with the values of a preset if you name one, as a YAML file that `--config`
and `run` take. How files, presets and flags are combined: [Configuration](configuration.md). (This page is generated
from the code by `scripts/write_reference.py`.)
"""


def keys_page() -> str:
    """Return docs/keys.md: a table for each section."""
    tree = as_values(Config())
    sections = {"": tree, **{name: tree[name] for name in SECTIONS}}
    sections["phases"] = PhaseConfig(name="first").model_dump(exclude={"name"})
    pages = []
    for section, defaults in sections.items():
        meaning = key_schemas()[section]["description"] if section in SECTIONS else ""
        meaning = "Each phase in the list `phases` has these keys." if section == "phases" else meaning
        lines = [f"## {section}\n\n{meaning}\n"] if section else []
        lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
        for key, schema in key_schemas().items():
            holder, _, name = key.rpartition(".")
            if holder == section and key not in SECTIONS:
                default = f"`{inline_yaml(defaults[name])}`" if name in defaults else "none: must be given"
                lines.append(f"| `{name}` | {values_of(schema)} | {default} | {schema['description']} |")
        pages.append("\n".join(lines) + "\n")
    return "\n".join([INTRODUCTION, *pages])


def schema() -> str:
    """Return configs/schema.json, for editors."""
    schema = Config.model_json_schema()
    kinds = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
    meaning = "Presets or YAML files that this file is put over."
    schema["properties"]["extends"] = {"anyOf": kinds, "description": meaning}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


FILES: dict[Path, Callable[[], str]] = {
    ROOT / "configs" / "schema.json": schema,
    ROOT / "docs" / "keys.md": keys_page,
}

if __name__ == "__main__":
    for path, text in FILES.items():
        path.write_text(text(), encoding="utf-8")
