"""Descriptions and valid values of configuration keys, suggestions for misspelled keys, and output as YAML."""

import functools
import re
import textwrap
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import yaml
from pydantic import BaseModel

from bert_pretrain.config import (
    Config,
    DataConfig,
    Flag,
    ModelConfig,
    PhaseConfig,
    TrainConfig,
    VocabConfig,
    duration_text,
)

SECTIONS: dict[str, type[BaseModel]] = {
    "vocab": VocabConfig,
    "data": DataConfig,
    "model": ModelConfig,
    "train": TrainConfig,
}
_PARTS: dict[str, type[BaseModel]] = {**SECTIONS, "phases": PhaseConfig}


def flag_keys() -> dict[str, str]:
    """Return the key that each command-line option sets."""
    keys = {}
    for section, fields in SECTIONS.items():
        for name, field in fields.model_fields.items():
            for flag in field.metadata:
                if isinstance(flag, Flag):
                    keys[flag.name] = f"{section}.{name}"
    return keys


@functools.cache
def key_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of every section and key by dotted name, in the order of `Config`."""
    root = Config.model_json_schema()
    keys = {}
    for name, schema in root["properties"].items():
        keys[name] = schema
        if section := _PARTS.get(name):
            section_schema = root["$defs"][section.__name__]
            schema.setdefault("description", section_schema["description"])
            for key, key_schema in section_schema["properties"].items():
                keys[f"{name}.{key}"] = key_schema
    for schema in keys.values():
        schema["description"] = " ".join(schema["description"].split())
    return keys


_KINDS = {"integer": "a whole number", "number": "a number", "string": "a text", "null": "null"}
_LIMITS = {
    "exclusiveMinimum": "greater than",
    "minimum": "of at least",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
}


def values_of(schema: Mapping[str, Any]) -> str:
    """Describe the valid values of a key in words, such as `a whole number greater than 0, or null`."""
    *others, last = _alternatives(schema)
    if not others:
        return last
    separator = ", or " if " " in others[0] else " or "
    return ", ".join(others) + separator + last


def _alternatives(schema: Mapping[str, Any]) -> list[str]:
    if "enum" in schema:
        return schema["enum"]
    if "const" in schema:
        return [schema["const"]]
    if schema.get("type") == "boolean":
        return ["true", "false"]
    if "examples" in schema:
        examples = [each if isinstance(each, str) else inline_yaml(each) for each in schema["examples"]]
        values = f"a value such as {', '.join(examples)}"
    elif "anyOf" in schema:
        return [words for member in schema["anyOf"] for words in _alternatives(member)]
    else:
        values = _KINDS[schema["type"]]
    limits = [f"{words} {schema[name]:,.10g}" for name, words in _LIMITS.items() if name in schema]
    return [f"{values} {' and '.join(limits)}".rstrip()]


def suggest_key(written: str) -> str | None:
    """Return the key that was probably meant by `train.lr`, `train['steps']`, `max_steps` or a misspelled name."""
    *sections, name = re.findall(r"\w+", written) or [""]
    section = "".join(sections)
    keys = [key for key in key_schemas() if not key.startswith("phases.")]
    if section and section not in SECTIONS and (near := get_close_matches(f"{section}.{name}", keys, 1, 0.8)):
        return near[0]
    keys.sort(key=lambda key: key.startswith(f"{section}."))  # of equal names, the last key in this order is meant
    names = {"extends": "extends"}
    for flag, key in flag_keys().items():
        names[flag.removeprefix("--").replace("-", "_")] = key
    for key in keys:
        names[key.rpartition(".")[2]] = key
    words = set(name.split("_"))
    longer = [other for other in names if words <= set(other.split("_"))]  # such as `max_steps` for `steps`
    near = [name] if name in names else longer or get_close_matches(name, names, 1, 0.75)
    return names[near[0]] if near else None


def as_values(config: Config) -> dict[str, Any]:
    """Return a configuration as plain values for YAML, with units for durations."""
    tree = config.model_dump(mode="json")
    for parent, name in ((tree, "time"), (tree["train"], "time_budget")):
        parent[name] = None if parent[name] is None else duration_text(parent[name])
    for phase in tree["phases"]:
        for section in ("data", "train"):
            phase[section] = {name: _plain_number(value) for name, value in phase[section].items()}
    return tree


def _plain_number(value: object) -> object:
    """Convert the text of a number to a number. Overrides of phases are text, which YAML would quote."""
    is_number = isinstance(value, str) and re.fullmatch(r"(0|[1-9]\d*)(\.\d+)?", value)
    return yaml.safe_load(str(value)) if is_number else value


class _Dumper(yaml.SafeDumper):
    """Writes Unicode line separators as escapes, because PyYAML reads them as blanks."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, '"' if re.search("[\x85\u2028\u2029]", text) else None
    ),
)


def dump_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML from which `load_config` restores the same values."""
    return yaml.dump(as_values(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def inline_yaml(value: object) -> str:
    """Return a value as YAML on one line."""
    return yaml.dump(
        [value], Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False
    )[1:-2]


def as_commented_yaml(config: Config) -> str:
    """Return a YAML file for `--config` with every key, its value, and its description as a comment."""
    tree = as_values(config)
    blocks = []
    for key, schema in key_schemas().items():
        section, _, name = key.rpartition(".")
        if section == "phases":
            continue
        if key in SECTIONS:
            comment = schema["description"]
            line = f"{name}:"
        else:
            comment = f"{schema['description']} Value: {values_of(schema)}."
            value = (tree[section] if section else tree)[name]
            line = f"{name}: {inline_yaml(value)}"
        lines = textwrap.wrap(comment, 76, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        blocks.append(textwrap.indent("\n".join([*lines, line]), "  " if section else ""))
    return "\n\n".join(blocks) + "\n"
