"""Load the configuration from presets, YAML files, `--set` and flags, and explain mistakes.

Each source is a layer over the sources before it, as in `small,paper` or with `extends: short` in a file. Layers are
merged key by key; lists such as `phases` are replaced completely. YAML scalars are read as text and converted to the
type of their field: `no` is false as a boolean and Norwegian as a language.
"""

import itertools
import re
import reprlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from bert_pretrain.config import LENGTHS, Config, TrainConfig, duration_text
from bert_pretrain.config_keys import SECTIONS, key_schemas, suggest_key, values_of
from bert_pretrain.errors import ConfigError
from bert_pretrain.io.cores import is_first_rank

KeyPath = tuple[str, ...]  # for example ("train", "peak_lr")
Tree = dict[str, Any]
Places = dict[KeyPath, str]  # the file and line, or the flag, where each key is set
Layer = tuple[Tree, Places]  # the values of one file or of the command line
MAX_VALUES = 100_000  # with aliases (`*`) expanded, because a few lines of aliases can mean billions of values


def load_config(
    source: str | Path | None = None,
    settings: Sequence[str] = (),
    flags: Mapping[str, tuple[str, object]] | None = None,
    *,
    with_phases: bool = True,
    where: str = "--config",
) -> Config:
    """Build the configuration from defaults, presets and files, `--set` pairs and flags; later sources win.

    `source` is a YAML file or the name of a preset; a string may join several by commas. `flags` maps dotted keys to
    (name of the flag for messages, value); the value None means not set. `where` is the option of `source`.
    Without `with_phases`, phases are not checked against the other keys, for example the length of the run.
    """
    sources: Sequence[str | Path] = ()
    if source is not None:
        sources = source.split(",") if isinstance(source, str) else [source]
    layers = [layer for each in sources for layer in _read_layers(each, where)]
    layers.append(_command_line_layer(settings, flags or {}))
    tree, places = _merged(layers)
    path: KeyPath = ()
    try:
        config = Config.model_validate(tree)
        sections: list[tuple[KeyPath, TrainConfig]] = []  # the path of each phase, and its section `train`
        for index, phase in enumerate(config.phases if with_phases else ()):
            path = ("phases", str(index))
            sections.append((path, config.for_phase(phase).train))
    except ValidationError as error:
        raise _explain(error, path, places) from error
    if sections:
        _check_overrides(config, layers)
    _check_warmup(sections or [((), config.train)], places, by_clock=with_phases and config.time is not None)
    for name, text in (("time", tree.get("time")), ("time_budget", tree.get("train", {}).get("time_budget"))):
        if isinstance(text, str) and text.replace(".", "").isdecimal() and is_first_rank():
            duration = duration_text(float(text))  # the user may have meant minutes or hours
            print(f"note: {name} {text} is {duration}; add a unit to be clear, such as {text}m", file=sys.stderr)
    return config


def _read_layers(source: str | Path, where: str, extended_by: tuple[Path, ...] = ()) -> Iterator[Layer]:
    """Yield the layers of a file: first those that it extends, then its content."""
    path = _find_config(source, where)
    if path.resolve() in extended_by:
        raise ConfigError(f"'{source}' extends itself", where=where, remedy="remove it from 'extends'")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read the configuration: {error}"
        raise ConfigError(what, where=str(path), remedy="name a preset or a YAML file in UTF-8") from error
    places: Places = {}
    tree = _parse(text, str(path), places) or {}
    if not isinstance(tree, dict):
        what = "the configuration is not a mapping of sections"
        raise ConfigError(what, where=str(path), remedy="start with sections such as 'train:'")
    extends = tree.pop("extends", None) or []
    names = extends.split(",") if isinstance(extends, str) else extends
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        remedy = "give the name of a preset or the path of a YAML file, or a list of them"
        raise ConfigError(f"extends is {reprlib.repr(extends)}", where=places["extends",], remedy=remedy)
    for name in names:
        source = path.parent / name if _is_path(name) else name
        yield from _read_layers(source, places["extends",], (*extended_by, path.resolve()))
    yield tree, places


def _parse(text: str, name: str, places: Places) -> Any:
    """Parse YAML into dicts, lists, strings and None, and record in `places` where each key is."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return "" if node is None else _construct(node, name, (), places, itertools.count(1))
    except RecursionError as error:
        what = "a value contains itself or is nested too deeply"
        raise ConfigError(what, where=name, remedy="remove the alias (*) that refers to itself") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        what = f"invalid YAML: {getattr(error, 'problem', None) or error}"
        where = _line(name, getattr(error, "problem_mark", None))
        remedy = "correct the syntax, or name a preset or a YAML file, such as base"
        raise ConfigError(what, where=where, remedy=remedy) from error


def _line(name: str, mark: Any) -> str:
    return name if mark is None or name.startswith("--") else f"{name}:{mark.line + 1}"


def _construct(node: yaml.Node, name: str, path: KeyPath, places: Places, count: Iterator[int]) -> Any:
    where = _line(name, node.start_mark)
    places.setdefault(path, where)
    if next(count) > MAX_VALUES:
        what = f"the configuration has more than {MAX_VALUES:,} values"
        raise ConfigError(what, where=where, remedy="remove nested aliases (*), or give a folder or a glob as input")
    if not node.tag.startswith("tag:yaml.org,2002:") or "python/" in node.tag:
        what = f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not allowed"
        raise ConfigError(what, where=where, remedy="remove it and write a plain value")
    if isinstance(node, yaml.MappingNode):
        mapping: Tree = {}
        for key_node, value_node in node.value:
            key, where = str(key_node.value), _line(name, key_node.start_mark)
            if key in mapping:
                raise ConfigError(f"the key '{key}' occurs twice", where=where, remedy="remove one of the two")
            places[*path, key] = where
            mapping[key] = _construct(value_node, name, (*path, key), places, count)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        items = enumerate(node.value)
        return [_construct(item, name, (*path, str(number)), places, count) for number, item in items]
    node.value.encode()  # raises an error for half a surrogate pair
    return None if node.tag.endswith(":null") else node.value


def _command_line_layer(settings: Sequence[str], flags: Mapping[str, tuple[str, object]]) -> Layer:
    """Return the layer of flags and `--set` pairs. Values of pairs are scalars, `[a, b]` or `{key: value}`."""
    assignments = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            what = f"'{setting}' does not have the form section.key=value"
            raise ConfigError(what, where="--set", remedy="write for example --set train.peak_lr=2e-4")
        assignments.append((key, _parse(text, f"--set {key}", {}), f"--set {key}"))
    assignments += [(key, value, flag) for key, (flag, value) in flags.items() if value is not None]
    layers: list[Layer] = []
    for dotted, value, where in assignments:
        name, *inner = path = tuple(dotted.split("."))
        if len(inner) > 1 or (inner and name in ("inputs", "time", "phases")):
            what = f"'{dotted.rpartition('.')[0]}' has no keys"
            raise ConfigError(what, where=where, remedy="give a key of a section, for example train.peak_lr")
        keys = value if isinstance(value, dict) else ()
        places = {path[:1]: where, path: where} | {(*path, str(key)): where for key in keys}
        tree: Tree = {name: {inner[0]: value}} if inner else {name: value}
        layers.append((tree, places))
    return _merged(layers, one_length=False)


def _merged(layers: Sequence[Layer], *, one_length: bool = True) -> Layer:
    """Merge layers key by key; later layers win. Top-level keys without a value change nothing, except `time`.

    With `one_length`, a later key for the length of the run replaces earlier ones.
    """
    tree: Tree = {}
    places: Places = {}
    for layer, layer_places in layers:
        if one_length and _has_length(layer):
            tree["train"] = {key: value for key, value in tree.get("train", {}).items() if key not in LENGTHS}
        if "phases" in layer:
            places = {path: where for path, where in places.items() if path[:1] != ("phases",)}
        places |= layer_places
        for name, value in layer.items():
            if value is None and name != "time":
                continue
            if name in SECTIONS:
                if not isinstance(value, dict):
                    what, remedy = f"{name} is {reprlib.repr(value)}", "give keys with values, such as {seed: 1}"
                    raise ConfigError(what, where=_place(places, (name,)), remedy=remedy)
                value = {**tree.get(name, {}), **value}
            tree[name] = value
    return tree, places


def _has_length(layer: Tree) -> bool:
    """Return whether a layer sets the length of the run or of a phase."""
    phases = layer.get("phases")
    parents = [layer, *phases] if isinstance(phases, list) else [layer]
    sections = [parent.get("train") for parent in parents if isinstance(parent, dict)]
    return any(isinstance(each, dict) and any(each.get(name) is not None for name in LENGTHS) for each in sections)


def _is_path(source: str | Path) -> bool:
    path = Path(source)
    return path.suffix in (".yaml", ".yml") or path.parent != Path(".")


def _find_config(source: str | Path, where: str) -> Path:
    """Return the file of a path or preset name that is given at `where`."""
    presets = preset_paths()
    path = Path(source) if _is_path(source) else presets.get(str(source))
    if path is not None and path.is_file():
        return path
    what, names = f"there is no configuration file '{path}'", ", ".join(sorted(presets))
    if path is None:
        near = next(iter(get_close_matches(str(source), presets, n=1)), None)
        what = f"there is no preset '{source}'{_did_you_mean(near)}"
    raise ConfigError(what, where=where, remedy=f"use the path of a .yaml file, or a preset: {names}")


def preset_paths() -> dict[str, Path]:
    """Return the files of the presets by name. A checkout has them in `configs/`, a wheel inside the package."""
    here = Path(__file__).resolve().parent
    folder = next((path for path in (here / "configs", here.parent / "configs") if path.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def _check_warmup(sections: Sequence[tuple[KeyPath, TrainConfig]], places: Places, *, by_clock: bool) -> None:
    """Raise ConfigError for `warmup_steps` with a time limit, or more of them than the steps of all phases together."""
    steps = [train.planned_steps for _, train in sections]
    total = sum(each for each in steps if each is not None) if None not in steps else None
    for path, train in sections:
        key = ("train", "warmup_steps")
        where = places.get((*path, *key)) or _place(places, key)
        if by_clock or train.time_budget is not None:
            train.check_warmup(None, where)
        elif total is not None:
            train.check_warmup(max(total, train.schedule_steps or 0), where)


def _check_overrides(config: Config, layers: Sequence[Layer]) -> None:
    """Raise ConfigError if the command line or a layer after the phases sets a key that every phase overrides."""
    last = max(number for number, (layer, _) in enumerate(layers) if layer.get("phases") is not None)
    for layer, places in layers[last + 1 :] or layers[-1:]:
        for section in ("data", "train"):
            common = set.intersection(*(set(getattr(phase, section)) for phase in config.phases))
            for key in common & set(layer.get(section) or ()):
                what = f"this has no effect, because every phase sets {section}.{key}"
                remedy = "add --set 'phases=[]' to train without phases, or write other phases in a YAML file"
                raise ConfigError(what, where=_place(places, (section, key)), remedy=remedy)


def _place(places: Places, path: KeyPath) -> str:
    """Return where a key, or the section or list around it, is set."""
    parents = (path[:length] for length in range(len(path), 0, -1))
    return next((places[each] for each in parents if each in places), "the configuration")


def _explain(error: ValidationError, prefix: KeyPath, places: Places) -> ConfigError:
    """Convert the first validation error to a ConfigError. `prefix` is the path of its phase, if any."""
    problem = error.errors()[0]
    location = tuple(map(str, problem["loc"]))
    # Keep only keys, and the index of a phase. Pydantic appends union members and other list indices.
    depth = 1
    if location[:1] == ("phases",):
        depth = 3
    elif location and location[0] in SECTIONS:
        depth = 2
    path = (*prefix, *location[:depth])
    dotted, where = ".".join(path), _place(places, path)
    if problem["type"] == "extra_forbidden":
        return _unknown_key(dotted, where)
    if problem["type"] == "value_error":
        message = problem["msg"].removeprefix("Value error, ")
        mentioned = (places.get((*path, word)) for word in re.findall(r"\w+", message))
        sources = " and ".join(dict.fromkeys(filter(None, mentioned)))
        remedy = "change one of the two" if " and " in sources else "correct it"
        return ConfigError(": ".join(filter(None, (dotted, message))), where=sources or where, remedy=remedy)
    if problem["type"] == "missing" and path[-1] == location[-1]:  # otherwise a list is too short
        return ConfigError(f"'{dotted}' is missing", where=where, remedy="add it")
    value = "empty" if problem["input"] is None else reprlib.repr(problem["input"])
    is_item = isinstance(problem["loc"][-1], int) and path[-1] != location[-1] and problem["type"] != "missing"
    schema_path = path
    if path[0] == "phases":  # without the index; an override of a phase has the schema of its section
        schema_path = path[2:] if prefix else ("phases", *path[2:])
    schema = key_schemas().get(".".join(schema_path))
    remedy = f"give {values_of(schema)}" if schema else "remove it"
    return ConfigError(f"{dotted} {'contains' if is_item else 'is'} {value}", where=where, remedy=remedy)


def _unknown_key(dotted: str, where: str) -> ConfigError:
    """Return the error for an unknown key, with the key that was probably meant."""
    parts = dotted.split(".")
    head = ".".join(parts[:2]) + "." if parts[0] == "phases" and len(parts) > 2 else ""
    meant = suggest_key(dotted.removeprefix(head)) if dotted != "extends" else None
    remedy = "run 'bert-pretrain config' to see all keys"
    if head and (meant is None or not meant.startswith(("data.", "train."))):
        keys = (key.removeprefix("phases.") for key in key_schemas() if key.startswith("phases."))
        meant, remedy = None, f"a phase has the keys {', '.join(keys)}"
    return ConfigError(f"unknown key '{dotted}'{_did_you_mean(meant and head + meant)}", where=where, remedy=remedy)


def _did_you_mean(word: str | None) -> str:
    return f"; did you mean '{word}'?" if word else ""
