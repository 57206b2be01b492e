"""YAML as plain dicts, lists and strings, with the file and line of every key for error messages.

Scalars stay strings: the sections of the configuration give them types. Only plain values are built.
"""

import json
from typing import Any

import yaml

from bert_pretrain.errors import ConfigError

KeyPath = tuple[str, ...]  # the path of a key in the tree, for example ("train", "peak_lr")
_PLAIN = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value")
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in _PLAIN}
MAX_DEPTH = 32
MAX_VALUES = 100_000
"""Of a file, with every alias (`*`) replaced by what it stands for: a few lines of aliases can stand for billions."""


def parse_yaml(text: str, name: str) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Parse YAML into plain dicts, lists, strings and None, and record the file and line of each key."""
    places: dict[KeyPath, str] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        tree: Any = {} if node is None else _construct(node, (), name, places)
        json.dumps(tree, ensure_ascii=False).encode()  # half a surrogate pair is not text
    except RecursionError as error:
        raise _too_deep(name) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(
            f"not valid YAML: {getattr(error, 'problem', None) or error}",
            where=where,
            remedy="correct the syntax there",
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            "the configuration is not a mapping of sections",
            where=name,
            remedy="start with sections such as 'train:'",
        )
    return tree, places


def parse_value(text: str, where: str) -> Any:
    """Parse the value of a `--set`, which may be a scalar, `[a, b]` or `{key: value}`."""
    return parse_yaml(f"value: {text}", where)[0].get("value") if text.strip() else ""


def inline_yaml(value: object) -> str:
    """Return a value as YAML on one line."""
    return yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False)[1:-2]


def _construct(node: yaml.Node, path: KeyPath, name: str, places: dict[KeyPath, str]) -> Any:
    places[path] = f"{name}:{node.start_mark.line + 1}"
    if len(path) > MAX_DEPTH:
        raise _too_deep(places[path])
    if len(places) > MAX_VALUES:
        what = f"the configuration has more than {MAX_VALUES:,} values"
        raise ConfigError(what, where=places[path], remedy="remove aliases (*) of aliases, or name a folder or a glob")
    if node.tag not in _TAGS:
        what = f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} asks for more than a plain value"
        raise ConfigError(what, where=places[path], remedy="remove it")
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in mapping:
                raise ConfigError(
                    f"the key '{key}' occurs twice",
                    where=f"{name}:{key_node.start_mark.line + 1}",
                    remedy="keep one of the two",
                )
            mapping[key] = _construct(value_node, (*path, key), name, places)
            places[(*path, key)] = f"{name}:{key_node.start_mark.line + 1}"
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, (*path, str(index)), name, places) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("", "~", "null", "Null", "NULL"):
        return None
    return node.value


def _too_deep(where: str) -> ConfigError:
    what = f"a value contains itself, or is nested more than {MAX_DEPTH} deep"
    return ConfigError(what, where=where, remedy="remove the alias (*) that leads in a circle, or some levels")
