"""Descriptions and valid values of configuration keys, and output as YAML."""

import functools
import re
import textwrap
from collections.abc import Mapping
from typing import Any

import yaml

from bert_pretrain.config import PHASE_SECTIONS, Config, duration_text

SECTIONS = ("vocab", "data", "model", "train")
_CLASSES = {"phases": "PhaseConfig", **{name: f"{name.title()}Config" for name in SECTIONS}}


@functools.cache
def key_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of every section and key by dotted name, in the order of `Config`."""
    root = Config.model_json_schema()
    keys: dict[str, dict[str, Any]] = {}
    for name, schema in root["properties"].items():
        keys[name] = schema
        if name in _CLASSES:
            section = root["$defs"][_CLASSES[name]]
            schema.setdefault("description", section["description"])
            keys.update({f"{name}.{key}": key_schema for key, key_schema in section["properties"].items()})
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
        values = f"a value such as {', '.join(map(_example, schema['examples']))}"
    elif "anyOf" in schema:
        return [words for member in schema["anyOf"] for words in _alternatives(member)]
    else:
        values = _KINDS[schema["type"]]
    limits = [f"{words} {schema[name]:,.10g}" for name, words in _LIMITS.items() if name in schema]
    return [f"{values} {' and '.join(limits)}".rstrip()]


def _example(value: object) -> str:
    return value if isinstance(value, str) else inline_yaml(value)


def as_values(config: Config) -> dict[str, Any]:
    """Return a configuration as plain values for YAML, with units for durations."""
    tree = config.model_dump(mode="json")
    for parent, name in ((tree, "time"), (tree["train"], "time_budget")):
        if parent[name] is not None:
            parent[name] = duration_text(parent[name])
    for phase in tree["phases"]:
        for section in PHASE_SECTIONS:
            phase[section] = {name: _plain_number(value) for name, value in phase[section].items()}
    return tree


def _plain_number(value: object) -> object:
    """Convert the text of a number to a number. Overrides of phases are text, which YAML would quote."""
    is_number = isinstance(value, str) and re.fullmatch(r"(0|[1-9]\d*)(\.\d+)?", value)
    return yaml.safe_load(str(value)) if is_number else value


class _Dumper(yaml.SafeDumper):
    """Writes Unicode line separators as escapes, because PyYAML reads them as blanks."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _dump(value: object, **options: Any) -> str:
    return str(
        yaml.dump(
            value,
            Dumper=_Dumper,
            sort_keys=False,
            allow_unicode=True,
            **options,
        )
    )


def dump_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML from which `load_config` restores the same values."""
    return _dump(as_values(config))


def inline_yaml(value: object) -> str:
    """Return a value as YAML on one line."""
    return _dump([value], default_flow_style=True, width=10**6)[1:-2]


def as_commented_yaml(config: Config) -> str:
    """Return a YAML file for `--config` with every key, its value, and its description as a comment."""
    tree = as_values(config)
    blocks: list[str] = []
    for key, schema in key_schemas().items():
        section, _, name = key.rpartition(".")
        if section == "phases":
            continue
        comment = schema["description"]
        line = f"{name}:"
        if key not in SECTIONS:
            values = tree[section] if section else tree
            comment += f" Value: {values_of(schema)}."
            line += f" {inline_yaml(values[name])}"
        lines = textwrap.wrap(
            comment,
            76,
            initial_indent="# ",
            subsequent_indent="# ",
            break_on_hyphens=False,
        )
        blocks.append(textwrap.indent("\n".join([*lines, line]), "  " if section else ""))
    return "\n\n".join(blocks) + "\n"
