"""Configuration files: presets and YAML files, `--set` pairs and flags, later ones winning; and explaining mistakes.

YAML files are layers: `small,paper` puts the second over the first, `extends: short` puts a file over another one.
Layers are merged key by key; lists such as `phases` are replaced as a whole. YAML scalars are read as text and get
their type from the field they belong to: `1e-4` is a number where a number is expected, `no` is false where a truth
value is and Norwegian where a language is.
"""

import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from bert_pretrain.config import DURATIONS, LENGTHS, Config, PhaseConfig, TrainConfig
from bert_pretrain.config_keys import SECTIONS, keys_of, suggest_key
from bert_pretrain.config_values import duration_text
from bert_pretrain.errors import ConfigError
from bert_pretrain.io.cores import is_first_rank

KeyPath = tuple[str, ...]  # the path of a key in the tree, for example ("train", "peak_lr")
Places = dict[KeyPath, str]  # the file and line, or the flag, of each key and of what is inside it
Layer = tuple[dict[str, Any], Places]
_PLAIN = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value")
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in _PLAIN}
MAX_DEPTH, MAX_VALUES = 32, 100_000  # with every alias (`*`) expanded: a few lines can stand for billions of values


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
    return _validated(*_merged([*layers, _command_line(settings, flags or {})]), with_phases)


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
    tree, places = parse_yaml(text, str(path))
    extended = tree.pop("extends", None) or []
    names = extended.split(",") if isinstance(extended, str) else extended
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        remedy = "give the name of a preset or the path of a YAML file, or a list of them"
        raise ConfigError(f"extends is {extended!r}", where=places["extends",], remedy=remedy)
    for name in names:
        below = path.parent / name if _is_path(name) else name
        yield from _layers_of(below, places["extends",], (*inside, path.resolve()))
    yield tree, places


def parse_yaml(text: str, name: str) -> Layer:
    """Parse YAML into plain dicts, lists, strings and None, and record the file and line of each key."""
    places: Places = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        tree: Any = {} if node is None else _construct(node, (), name, places)
        json.dumps(tree, ensure_ascii=False).encode()  # half a surrogate pair is not text
    except RecursionError as error:
        raise _too_deep(name) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        what = f"not valid YAML: {getattr(error, 'problem', None) or error}"
        raise ConfigError(what, where=where, remedy="correct the syntax there") from error
    if not isinstance(tree, dict):
        what = "the configuration is not a mapping of sections"
        raise ConfigError(what, where=name, remedy="start with sections such as 'train:'")
    return tree, places


def _construct(node: yaml.Node, path: KeyPath, name: str, places: Places) -> Any:
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
            place = f"{name}:{key_node.start_mark.line + 1}"
            if key in mapping:
                raise ConfigError(f"the key '{key}' occurs twice", where=place, remedy="keep one of the two")
            mapping[key] = _construct(value_node, (*path, key), name, places)
            places[(*path, key)] = place
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, (*path, str(index)), name, places) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode) and node.style is None and node.value in ("", "~", "null", "Null", "NULL"):
        return None
    return node.value


def _too_deep(where: str) -> ConfigError:
    what = f"a value contains itself, or is nested more than {MAX_DEPTH} deep"
    return ConfigError(what, where=where, remedy="remove the alias (*) that leads in a circle, or some levels")


def _command_line(settings: Sequence[str], flags: Mapping[str, tuple[str, object]]) -> Layer:
    """Return the layer of `--set` pairs, whose values are scalars, `[a, b]` or `{key: value}`, and flags."""
    given = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            what = f"'{setting}' is not of the form section.key=value"
            raise ConfigError(what, where="--set", remedy="write for example --set train.peak_lr=2e-4")
        value = parse_yaml(f"value: {text}", f"--set {key}")[0].get("value") if text.strip() else ""
        given.append((key, value, f"--set {key}"))
    given += [(key, value, flag) for key, (flag, value) in flags.items() if value is not None]
    tree: dict[str, Any] = {}
    places: Places = {}
    for dotted, value, where in given:
        name, *inner = dotted.split(".")
        if len(inner) > 1 or (inner and name in ("inputs", "time", "phases")):
            what = f"'{dotted.rpartition('.')[0]}' holds no keys"
            raise ConfigError(what, where=where, remedy="name a key of a section, for example train.peak_lr")
        layer = {name: {inner[0]: value} if inner else value}
        _put(tree, places, layer, {(name,): where, (name, *inner): where})
    return tree, places


def _merged(layers: Sequence[Layer]) -> tuple[dict[str, Any], Places, dict[KeyPath, int]]:
    """Put each layer over those before it, key by key; returns the layer of each key, too: 0 for the last one."""
    merged: dict[str, Any] = {}
    places: Places = {}
    numbers: dict[KeyPath, int] = {}
    for number, (tree, its_places) in enumerate(layers, start=1 - len(layers)):
        for name in LENGTHS if _has_length(tree) else ():  # a run has one, whichever key gives it
            merged.get("train", {}).pop(name, None)
            places.pop(("train", name), None)
        numbers.update(dict.fromkeys(_put(merged, places, tree, its_places), number))
    return merged, places, numbers


def _put(tree: dict[str, Any], places: Places, over: Mapping[str, Any], places_over: Places) -> set[KeyPath]:
    """Put a layer over others, and return its keys; what is left empty at the top level changes nothing."""
    keys: set[KeyPath] = set()
    for name, value in over.items():
        if name not in SECTIONS and value is not None:
            tree[name] = value
            keys.add((name,))
        elif isinstance(value, dict):
            tree.setdefault(name, {}).update(value)
            keys.update((name, key) for key in value)
        elif value is not None:
            remedy = "give a section with keys, such as {seed: 1}"
            raise ConfigError(f"{name} is {value!r}", where=places_over[name,], remedy=remedy)
    for path in [path for path in places if not keys.isdisjoint((path[:1], path[:2]))]:
        del places[path]
    places.update({path: where for path, where in places_over.items() if path and over.get(path[0]) is not None})
    return keys


def _has_length(layer: dict[str, Any]) -> bool:
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
        near = next(iter(difflib.get_close_matches(str(source), presets, n=1)), None)
        what = f"there is no preset '{source}'{_did_you_mean(near)}"
        raise ConfigError(what, where=where, remedy=f"name one of {names}, or give the path of a .yaml file")
    return presets[str(source)]


def preset_paths() -> dict[str, Path]:
    """Return the shipped presets: name -> file. In a checkout they are in `configs/`, in a wheel beside this module."""
    here = Path(__file__).resolve().parent
    folder = next((path for path in (here / "configs", here.parent / "configs") if path.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def _validated(tree: dict[str, Any], places: Places, layers: Mapping[KeyPath, int], with_phases: bool) -> Config:
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, (), places) from error
    names = [phase.name for phase in config.phases]
    if len(set(names)) < len(names):
        what = f"two phases share a name: {', '.join(names)}"
        raise ConfigError(what, where=_place(places, ("phases",)), remedy="give each phase a name of its own")
    stages: list[tuple[KeyPath, TrainConfig]] = [(("train",), config.train)]
    if with_phases and config.phases:
        stages = []
        for index, phase in enumerate(config.phases):
            try:
                stages.append((("phases", str(index), "train"), config.for_phase(phase).train))
            except ValidationError as error:
                raise _explain(error, ("phases", str(index)), places) from error
        _refuse_overruled(config.phases, places, layers)
    _check_warmup(stages, places, config.time if with_phases else None)
    for path in DURATIONS:
        text = tree.get(path[0]) if len(path) == 1 else tree.get(path[0], {}).get(path[1])
        if isinstance(text, str) and text.replace(".", "").isdecimal() and is_first_rank():
            read = f"{path[-1]} {text} is {duration_text(float(text))}"  # minutes or hours may have been meant
            print(f"note: {read}; with a unit it is plain, such as {text}m", file=sys.stderr)
    return config


def _check_warmup(stages: Sequence[tuple[KeyPath, TrainConfig]], places: Places, time: float | None) -> None:
    """Refuse a warm-up that is known to be longer than the schedule, which phases share."""
    steps = [train.planned_steps for _, train in stages]
    known = sum(each for each in steps if each is not None) if None not in steps else None
    for path, train in stages:
        spanned = max(known, train.schedule_steps or 0) if known is not None else None
        keys = ("warmup_steps", "max_steps", "schedule_steps", "time_budget")
        found = [places.get((*path, key)) or places.get(("train", key)) for key in keys]
        found += [places.get(("time",))] if time is not None else []
        train.check_warmup(spanned, " and ".join(dict.fromkeys(filter(None, found))) or "train.warmup_steps", time)


def _refuse_overruled(phases: Sequence[PhaseConfig], places: Places, layers: Mapping[KeyPath, int]) -> None:
    """Refuse a key of the command line, or of a layer over the phases', that every phase sets: it changes nothing."""
    over = min(layers["phases",] + 1, 0)
    for section in ("data", "train"):
        for key in set.intersection(*(set(getattr(phase, section)) for phase in phases)):
            if layers.get((section, key), over - 1) >= over:
                raise ConfigError(
                    f"every phase sets {section}.{key} itself, so that this changes nothing",
                    where=_place(places, (section, key)),
                    remedy="add --set 'phases=[]' to do without phases, or give phases of your own in a YAML file",
                )


def _place(places: Places, path: KeyPath) -> str:
    """Return where a key was given, or what it is in."""
    found = (places.get(path[:end]) for end in range(len(path), 0, -1))
    return next(filter(None, found), "the configuration")


def _explain(error: ValidationError, prefix: KeyPath, places: Places) -> ConfigError:
    """Turn pydantic's first complaint into our three parts; `prefix` is the phase it is about."""
    problem = error.errors()[0]
    location = tuple(map(str, problem["loc"]))
    # Pydantic adds members of unions and items of lists, which are no keys.
    path = (*prefix, *location[: 2 if location[0] in SECTIONS else 3 if location[0] == "phases" else 1])
    dotted, where = ".".join(path), _place(places, path)
    if problem["type"] == "extra_forbidden":
        return _unknown_key(dotted, where, of_file=len(path) == 1 and not where.startswith("--"))
    if problem["type"] == "value_error":
        message = problem["msg"].removeprefix("Value error, ")
        named = [key.path[1] for key in keys_of() if key.path[:-1] == path[-1:] and key.path[1] in message]
        found = dict.fromkeys(filter(None, (places.get((*path, name)) for name in named)))
        return ConfigError(f"{dotted}: {message}", where=" and ".join(found) or where, remedy="change one of the two")
    if problem["type"] == "missing" and path[-1] == location[-1]:  # else of a list that is too short
        return ConfigError(f"'{dotted}' is missing", where=where, remedy="add it")
    value = "empty" if problem["input"] is None else repr(problem["input"])
    is_item = isinstance(problem["loc"][-1], int) and path[-1] != location[-1] and problem["type"] != "missing"
    of_phase = path[0] == "phases" and len(path) == 3
    own = path[2:] if path[0] == "phases" and len(path) > 2 else path
    remedy = next((f"give {key.values}" for key in keys_of(PhaseConfig if of_phase else Config) if key.path == own), "")
    if problem["type"] == "finite_number":
        remedy = remedy.replace("a number", "a finite number")
    what = f"{dotted} {'contains' if is_item else 'is'} {value}"
    return ConfigError(what, where=where, remedy=remedy or "remove it")


def _unknown_key(dotted: str, where: str, *, of_file: bool) -> ConfigError:
    """Refuse a key, and name the one that was probably meant; `of_file` says that `extends` would be a key there."""
    parts = dotted.split(".")
    head = ".".join(parts[:2]) + "." if parts[0] == "phases" and len(parts) > 2 else ""
    name = dotted.removeprefix(head)
    meant = "extends" if of_file and difflib.get_close_matches(name, ["extends"]) else suggest_key(name)
    remedy = "'bert-pretrain config' shows every key with its meaning"
    if head and (meant is None or not meant.startswith(("data.", "train."))):
        meant, remedy = None, "a phase has the keys " + ", ".join(PhaseConfig.model_fields)
    return ConfigError(f"unknown key '{dotted}'{_did_you_mean(meant and head + meant)}", where=where, remedy=remedy)


def _did_you_mean(word: str | None) -> str:
    return f"; did you mean '{word}'?" if word else ""
