"""Configuration files: presets and YAML, `--set` and flags, later ones winning; mistakes explained; written as YAML.

YAML files are layers: `small,paper` puts the second over the first, `extends: short` puts a file over another one.
Layers are merged key by key; lists such as `phases` are replaced as a whole. YAML scalars are read as text and get
their type from the field they belong to: `1e-4` is a number where a number is expected, `no` is false where a truth
value is and Norwegian where a language is.
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

KeyPath = tuple[str, ...]  # the path of a key in the tree, for example ("train", "peak_lr")
Tree = dict[str, Any]
Places = dict[KeyPath, str]
"""Where each key is written: the file and line, or the flag."""
Layer = tuple[Tree, Places]
"""Values from a file or the command line."""
MAX_VALUES = 100_000  # with every alias (`*`) expanded: a few lines can stand for billions of values


def load_config(
    source: str | Path | None = None,
    settings: Sequence[str] = (),
    flags: Mapping[str, tuple[str, object]] | None = None,
    *,
    with_phases: bool = True,
) -> Config:
    """Build the configuration from defaults, presets and files, `--set` pairs and flags, later ones winning.

    `source` is the path of a YAML file or the name of a preset; in a string, several joined by commas. `flags` are
    dotted key -> (the flag's name for messages, its value); a value of None counts as not given. Without `with_phases`,
    phases may contradict the rest, for example in the run's length.
    """
    sources = [] if source is None else source.split(",") if isinstance(source, str) else [source]
    layers = [layer for each in sources for layer in _layers_of(each, "--config")]
    layers.append(_command_line(settings, flags or {}))
    tree, places = _merged(layers)
    path: KeyPath = ()
    try:
        config = Config.model_validate(tree)
        stages: list[tuple[KeyPath, TrainConfig]] = []
        for index, phase in enumerate(config.phases if with_phases else ()):
            path = ("phases", str(index))
            stages.append((path, config.for_phase(phase).train))
    except ValidationError as error:
        raise _explain(error, path, places) from error
    if stages:
        _refuse_overruled(config, layers)
    _check_warmup(stages or [((), config.train)], places, by_clock=with_phases and config.time is not None)
    for name, text in (("time", tree.get("time")), ("time_budget", tree.get("train", {}).get("time_budget"))):
        if isinstance(text, str) and text.replace(".", "").isdecimal() and is_first_rank():
            read = f"{name} {text} is {duration_text(float(text))}"  # minutes or hours may have been meant
            print(f"note: {read}; with a unit it is plain, such as {text}m", file=sys.stderr)
    return config


def _layers_of(source: str | Path, where: str, inside: tuple[Path, ...] = ()) -> Iterator[Layer]:
    """Yield the content of a file, after that of the files it extends; `inside` are those extending it."""
    path = find_config(source, where)
    if path.resolve() in inside:
        raise ConfigError(f"'{source}' extends itself", where=where, remedy="remove it from 'extends'")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot read the configuration: {error}"
        raise ConfigError(what, where=str(path), remedy="give a readable YAML file") from error
    places: Places = {}
    tree = _parse(text, str(path), places) or {}
    if not isinstance(tree, dict):
        what = "the configuration is not a mapping of sections"
        raise ConfigError(what, where=str(path), remedy="start with sections such as 'train:'")
    extended = tree.pop("extends", None) or []
    names = extended.split(",") if isinstance(extended, str) else extended
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        remedy = "give the name of a preset or the path of a YAML file, or a list of them"
        raise ConfigError(f"extends is {reprlib.repr(extended)}", where=places["extends",], remedy=remedy)
    for name in names:
        source = path.parent / name if _is_path(name) else name
        yield from _layers_of(source, places["extends",], (*inside, path.resolve()))
    yield tree, places


def _parse(text: str, name: str, places: Places) -> Any:
    """Parse YAML into plain dicts, lists, strings and None, and note where each key is."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return "" if node is None else _construct(node, name, (), places, itertools.count(1))
    except RecursionError as error:
        what = "a value contains itself, or is nested too deep"
        raise ConfigError(what, where=name, remedy="remove the alias (*) that leads in a circle") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        what = f"not valid YAML: {getattr(error, 'problem', None) or error}"
        where = _line(name, getattr(error, "problem_mark", None))
        raise ConfigError(what, where=where, remedy="correct the syntax there") from error


def _line(name: str, mark: Any) -> str:
    return name if mark is None or name.startswith("--") else f"{name}:{mark.line + 1}"


def _construct(node: yaml.Node, name: str, path: KeyPath, places: Places, count: Iterator[int]) -> Any:
    where = _line(name, node.start_mark)
    places.setdefault(path, where)
    if next(count) > MAX_VALUES:
        what = f"the configuration has more than {MAX_VALUES:,} values"
        raise ConfigError(what, where=where, remedy="remove aliases (*) of aliases, or name a folder or a glob")
    if not node.tag.startswith("tag:yaml.org,2002:") or "python/" in node.tag:
        what = f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} asks for more than a plain value"
        raise ConfigError(what, where=where, remedy="remove it")
    if isinstance(node, yaml.MappingNode):
        mapping: Tree = {}
        for key_node, value_node in node.value:
            key, where = str(key_node.value), _line(name, key_node.start_mark)
            if key in mapping:
                raise ConfigError(f"the key '{key}' occurs twice", where=where, remedy="keep one of the two")
            places[*path, key] = where
            mapping[key] = _construct(value_node, name, (*path, key), places, count)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        items = enumerate(node.value)
        return [_construct(item, name, (*path, str(number)), places, count) for number, item in items]
    node.value.encode()  # half a surrogate pair is not text
    return None if node.tag.endswith(":null") else node.value


def _command_line(settings: Sequence[str], flags: Mapping[str, tuple[str, object]]) -> Layer:
    """Return the layer of `--set` pairs, whose values are scalars, `[a, b]` or `{key: value}`, and flags."""
    given = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            what = f"'{setting}' is not of the form section.key=value"
            raise ConfigError(what, where="--set", remedy="write for example --set train.peak_lr=2e-4")
        given.append((key, _parse(text, f"--set {key}", {}), f"--set {key}"))
    given += [(key, value, flag) for key, (flag, value) in flags.items() if value is not None]
    layers: list[Layer] = []
    for dotted, value, where in given:
        name, *inner = path = tuple(dotted.split("."))
        if len(inner) > 1 or (inner and name in ("inputs", "time", "phases")):
            what = f"'{dotted.rpartition('.')[0]}' holds no keys"
            raise ConfigError(what, where=where, remedy="name a key of a section, for example train.peak_lr")
        keys = value if isinstance(value, dict) else ()
        places = {path[:1]: where, path: where} | {(*path, str(key)): where for key in keys}
        layers.append(({name: {inner[0]: value} if inner else value}, places))
    return _merged(layers, one_length=False)


def _merged(layers: Sequence[Layer], *, one_length: bool = True) -> Layer:
    """Put each layer over those before it, key by key; with `one_length`, the last key for a run's length stays.

    What is left empty at the top level changes nothing.
    """
    tree: Tree = {}
    places: Places = {}
    for layer, written in layers:
        if one_length and _has_length(layer):
            tree["train"] = {key: value for key, value in tree.get("train", {}).items() if key not in LENGTHS}
        if "phases" in layer:
            places = {path: where for path, where in places.items() if path[:1] != ("phases",)}
        places |= written
        for name, value in layer.items():
            if value is None:
                continue
            if name in SECTIONS:
                if not isinstance(value, dict):
                    what, remedy = f"{name} is {reprlib.repr(value)}", "give a section with keys, such as {seed: 1}"
                    raise ConfigError(what, where=_place(places, (name,)), remedy=remedy)
                value = {**tree.get(name, {}), **value}
            tree[name] = value
    return tree, places


def _has_length(layer: Tree) -> bool:
    """Whether a layer gives the length of the run, or of a phase."""
    phases = layer.get("phases")
    holders = [layer, *phases] if isinstance(phases, list) else [layer]
    sections = [holder.get("train") for holder in holders if isinstance(holder, dict)]
    return any(isinstance(each, dict) and any(each.get(name) is not None for name in LENGTHS) for each in sections)


def _is_path(source: str | Path) -> bool:
    path = Path(source)
    return path.suffix in (".yaml", ".yml") or path.parent != Path(".")


def find_config(source: str | Path, where: str = "--config") -> Path:
    """Return the file behind a path or a preset's name; `where` is what names it."""
    presets = preset_paths()
    names = ", ".join(sorted(presets))
    if _is_path(source):
        if not (path := Path(source)).is_file():
            what = f"there is no configuration file '{path}'"
            raise ConfigError(what, where=where, remedy=f"check the path, or name a preset: {names}")
        return path
    if str(source) not in presets:
        near = next(iter(get_close_matches(str(source), presets, n=1)), None)
        what = f"there is no preset '{source}'{_did_you_mean(near)}"
        raise ConfigError(what, where=where, remedy=f"name one of {names}, or give the path of a .yaml file")
    return presets[str(source)]


def preset_paths() -> dict[str, Path]:
    """Return the shipped presets: name -> file. In a checkout they are in `configs/`, in a wheel in this folder."""
    here = Path(__file__).resolve().parent
    folder = next((path for path in (here / "configs", here.parent / "configs") if path.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def _check_warmup(stages: Sequence[tuple[KeyPath, TrainConfig]], places: Places, *, by_clock: bool) -> None:
    """Refuse a warm-up that is known to be longer than the schedule, which phases share."""
    steps = [train.planned_steps for _, train in stages]
    known = sum(each for each in steps if each is not None) if None not in steps else None
    for path, train in stages:
        key = ("train", "warmup_steps")
        where = places.get((*path, *key)) or _place(places, key)
        if by_clock or train.time_budget is not None:
            train.check_warmup(None, where)
        elif known is not None:
            train.check_warmup(max(known, train.schedule_steps or 0), where)


def _refuse_overruled(config: Config, layers: Sequence[Layer]) -> None:
    """Refuse a key of the command line, or of a layer over the phases', that every phase sets: it changes nothing."""
    last = max(number for number, (layer, _) in enumerate(layers) if layer.get("phases") is not None)
    for layer, places in layers[last + 1 :] or layers[-1:]:
        for section in ("data", "train"):
            common = set.intersection(*(set(getattr(phase, section)) for phase in config.phases))
            for key in common & set(layer.get(section) or ()):
                raise ConfigError(
                    f"every phase sets {section}.{key} itself, so that this changes nothing",
                    where=_place(places, (section, key)),
                    remedy="add --set 'phases=[]' to do without phases, or give phases of your own in a YAML file",
                )


def _place(places: Places, path: KeyPath) -> str:
    """Return where a key was written, or what it is in."""
    outward = (path[:length] for length in range(len(path), 0, -1))
    return next((places[each] for each in outward if each in places), "the configuration")


def _explain(error: ValidationError, prefix: KeyPath, places: Places) -> ConfigError:
    """Turn pydantic's first complaint into our three parts; `prefix` is the phase it is about."""
    problem = error.errors()[0]
    location = tuple(map(str, problem["loc"]))
    # Pydantic adds members of unions and items of lists, which are no keys.
    depth = 3 if location[:1] == ("phases",) else 2 if location and location[0] in SECTIONS else 1
    path = (*prefix, *location[:depth])
    dotted, where = ".".join(path), _place(places, path)
    if problem["type"] == "extra_forbidden":
        return _unknown_key(dotted, where)
    if problem["type"] == "value_error":
        message = problem["msg"].removeprefix("Value error, ")
        found = (places.get((*path, word)) for word in re.findall(r"\w+", message))
        named = " and ".join(dict.fromkeys(filter(None, found)))
        remedy = "change one of the two" if " and " in named else "correct it"
        return ConfigError(": ".join(filter(None, (dotted, message))), where=named or where, remedy=remedy)
    if problem["type"] == "missing" and path[-1] == location[-1]:  # else of a list that is too short
        return ConfigError(f"'{dotted}' is missing", where=where, remedy="add it")
    value = "empty" if problem["input"] is None else reprlib.repr(problem["input"])
    is_item = isinstance(problem["loc"][-1], int) and path[-1] != location[-1] and problem["type"] != "missing"
    own = path[2:] if prefix else (path[0], *path[2:]) if path[0] == "phases" else path
    schema = key_schemas().get(".".join(own))
    remedy = f"give {values_of(schema)}" if schema else "remove it"
    return ConfigError(f"{dotted} {'contains' if is_item else 'is'} {value}", where=where, remedy=remedy)


def _unknown_key(dotted: str, where: str) -> ConfigError:
    """Refuse a key, and name the one that was probably meant."""
    parts = dotted.split(".")
    head = ".".join(parts[:2]) + "." if parts[0] == "phases" and len(parts) > 2 else ""
    meant = suggest_key(dotted.removeprefix(head)) if dotted != "extends" else None
    remedy = "'bert-pretrain config' shows every key with its meaning"
    if head and (meant is None or not meant.startswith(("data.", "train."))):
        keys = (key.removeprefix("phases.") for key in key_schemas() if key.startswith("phases."))
        meant, remedy = None, f"a phase has the keys {', '.join(keys)}"
    return ConfigError(f"unknown key '{dotted}'{_did_you_mean(meant and head + meant)}", where=where, remedy=remedy)


def _did_you_mean(word: str | None) -> str:
    return f"; did you mean '{word}'?" if word else ""
