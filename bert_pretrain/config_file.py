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
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from bert_pretrain.config import DURATIONS, LENGTHS, Config, PhaseConfig, TrainConfig
from bert_pretrain.config_keys import SECTIONS, suggest_key
from bert_pretrain.config_values import duration_text, expected
from bert_pretrain.errors import ConfigError
from bert_pretrain.io.cores import is_first_rank

KeyPath = tuple[str, ...]  # the path of a key in the tree, for example ("train", "peak_lr")
COMMAND_LINE = sys.maxsize  # number of the layer that holds `--set` pairs and flags
_PLAIN = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value")
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in _PLAIN}
MAX_DEPTH, MAX_VALUES = 32, 100_000  # with every alias (`*`) expanded: a few lines can stand for billions of values


class Given(NamedTuple):
    """The value of a key, and where it was given."""

    value: Any
    places: Mapping[KeyPath, str]
    """File and line, or the flag, of the key and of what is inside it."""
    layer: int


Settings = dict[KeyPath, Given]
"""By key: `(name,)` at the top level, `(section, name)` inside a section."""


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
    given: Settings = {}
    sources = [] if source is None else source.split(",") if isinstance(source, str) else [source]
    layers = [layer for each in sources for layer in _layers_of(each, "--config")]
    for number, (tree, places) in enumerate(layers):
        _put(given, tree, places, number)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"'{setting}' is not of the form section.key=value",
                where="--set",
                remedy="write for example --set train.peak_lr=2e-4",
            )
        _set(given, key, parse_value(text, f"--set {key}"), f"--set {key}")
    for key, (flag, value) in (flags or {}).items():
        if value is not None:
            _set(given, key, value, flag)
    _drop_replaced_lengths(given)
    return _validated(given, with_phases)


def _layers_of(
    source: str | Path, where: str, inside: tuple[Path, ...] = ()
) -> Iterator[tuple[dict[str, Any], dict[KeyPath, str]]]:
    """Yield the content and places of a file, after those of the files it extends; `inside` are those extending it."""
    path = find_config(source, where)
    if path.resolve() in inside:
        raise ConfigError(f"'{source}' extends itself", where=where, remedy="remove it from 'extends'")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the configuration: {error}", where=str(path), remedy="give a readable YAML file"
        ) from error
    tree, places = parse_yaml(text, str(path))
    extended = tree.pop("extends", None) or []
    names = extended.split(",") if isinstance(extended, str) else extended
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"extends is {extended!r}",
            where=places["extends",],
            remedy="give the name of a preset or the path of a YAML file, or a list of them",
        )
    for name in names:
        below = path.parent / name if _is_path(name) else name
        yield from _layers_of(below, places["extends",], (*inside, path.resolve()))
    yield tree, places


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
        what = f"not valid YAML: {getattr(error, 'problem', None) or error}"
        raise ConfigError(what, where=where, remedy="correct the syntax there") from error
    if not isinstance(tree, dict):
        what = "the configuration is not a mapping of sections"
        raise ConfigError(what, where=name, remedy="start with sections such as 'train:'")
    return tree, places


def parse_value(text: str, where: str) -> Any:
    """Parse the value of a `--set`, which may be a scalar, `[a, b]` or `{key: value}`."""
    return parse_yaml(f"value: {text}", where)[0].get("value") if text.strip() else ""


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


def _put(given: Settings, tree: Mapping[str, Any], places: Mapping[KeyPath, str], layer: int) -> None:
    """Put a layer over those before it; what is left empty at the top level changes nothing."""
    for name, value in tree.items():
        if name not in SECTIONS and value is not None:
            given[name,] = Given(value, places, layer)
        elif isinstance(value, dict):
            given.update({(name, key): Given(inner, places, layer) for key, inner in value.items()})
        elif value is not None:
            remedy = "give a section with keys, such as {seed: 1}"
            raise ConfigError(f"{name} is {value!r}", where=places[name,], remedy=remedy)


def _set(given: Settings, dotted: str, value: object, where: str) -> None:
    """Put the value of a dotted key over all layers."""
    path = tuple(dotted.split("."))
    places = {path[:end]: where for end in range(1, len(path) + 1)}
    if len(path) == 1:
        _put(given, {dotted: value}, places, COMMAND_LINE)
    elif len(path) == 2 and path[0] not in ("inputs", "time", "phases"):
        given[path] = Given(value, places, COMMAND_LINE)
    else:
        what = f"'{'.'.join(path[:-1])}' holds no keys"
        raise ConfigError(what, where=where, remedy="name a key of a section, for example train.peak_lr")


def _drop_replaced_lengths(given: Settings) -> None:
    """Drop a length of the run where a later layer gives it by another key: a run has one length."""
    lengths = {key: given[key] for key in (("train", name) for name in LENGTHS) if key in given}
    layers = [one.layer for one in lengths.values() if one.value is not None]
    phases = given.get(("phases",))
    own = [phase.get("train") for phase in _as_dicts(phases.value)] if phases is not None else []
    if phases is not None and any(isinstance(train, dict) and not train.keys().isdisjoint(LENGTHS) for train in own):
        layers.append(phases.layer)
    for key, one in lengths.items():
        if one.value is not None and one.layer < max(layers):
            del given[key]


def _as_dicts(phases: object) -> list[dict[str, Any]]:
    return [phase for phase in phases if isinstance(phase, dict)] if isinstance(phases, list) else []


def _is_path(source: str | Path) -> bool:
    path = Path(source)
    return path.suffix in (".yaml", ".yml") or path.parent != Path(".")


def find_config(source: str | Path, where: str = "--config") -> Path:
    """Return the file behind a path or a preset's name; `where` is what names it."""
    presets = preset_paths()
    if _is_path(source):
        if not (path := Path(source)).is_file():
            raise ConfigError(
                f"there is no configuration file '{path}'",
                where=where,
                remedy="check the path, or name a preset: " + ", ".join(sorted(presets)),
            )
        return path
    if str(source) not in presets:
        near = next(iter(difflib.get_close_matches(str(source), presets, n=1)), None)
        raise ConfigError(
            f"there is no preset '{source}'{_did_you_mean(near)}",
            where=where,
            remedy="name one of " + ", ".join(sorted(presets)) + ", or give the path of a .yaml file",
        )
    return presets[str(source)]


def preset_paths() -> dict[str, Path]:
    """Return the shipped presets: name -> file. In a checkout they are in `configs/`, in a wheel beside this module."""
    here = Path(__file__).resolve().parent
    folder = next((path for path in (here / "configs", here.parent / "configs") if path.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def _validated(given: Settings, with_phases: bool) -> Config:
    tree: dict[str, Any] = {}
    for path, one in given.items():
        (tree if len(path) == 1 else tree.setdefault(path[0], {}))[path[-1]] = one.value
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, (), given) from error
    names = [phase.name for phase in config.phases]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two phases share a name: {', '.join(names)}",
            where=_place(given, ("phases",)),
            remedy="give each phase a name of its own",
        )
    stages: list[tuple[KeyPath, TrainConfig]] = [(("train",), config.train)]
    if with_phases and config.phases:
        stages = []
        for index, phase in enumerate(config.phases):
            try:
                stages.append((("phases", str(index), "train"), config.for_phase(phase).train))
            except ValidationError as error:
                raise _explain(error, ("phases", str(index)), given) from error
        _refuse_overruled(config.phases, given)
    _check_warmup(stages, given, config.time if with_phases else None)
    _explain_bare_durations(config, given)
    return config


def _explain_bare_durations(config: Config, given: Settings) -> None:
    """Say that a number without a unit was read as seconds, for minutes or hours may have been meant."""
    for path in DURATIONS:
        text = given[path].value if path in given else None
        if isinstance(text, str) and text.replace(".", "").isdecimal() and is_first_rank():
            seconds = config.time if path == ("time",) else config.train.time_budget
            read = duration_text(seconds or 0.0)
            print(f"note: {path[-1]} {text} is {read}; with a unit it is plain, such as {text}m", file=sys.stderr)


def _check_warmup(stages: Sequence[tuple[KeyPath, TrainConfig]], given: Settings, time: float | None) -> None:
    """Refuse a warm-up that is known to be longer than the schedule, which phases share."""
    steps = [train.planned_steps for _, train in stages]
    known = sum(each for each in steps if each is not None) if None not in steps else None
    for path, train in stages:
        spanned = max(known, train.schedule_steps or 0) if known is not None else None
        keys = ("warmup_steps", "max_steps", "schedule_steps", "time_budget")
        places = [_own_place(given, (*path, key)) or _own_place(given, ("train", key)) for key in keys]
        places += [_own_place(given, ("time",))] if time is not None else []
        train.check_warmup(spanned, " and ".join(dict.fromkeys(filter(None, places))) or "train.warmup_steps", time)


def _refuse_overruled(phases: Sequence[PhaseConfig], given: Settings) -> None:
    """Refuse a key of the command line, or of a layer over the phases', that every phase sets: it changes nothing."""
    for section in ("data", "train"):
        for key in set.intersection(*(set(getattr(phase, section)) for phase in phases)):
            one = given.get((section, key))
            if one is not None and (one.layer == COMMAND_LINE or one.layer > given["phases",].layer):
                raise ConfigError(
                    f"every phase sets {section}.{key} itself, so that this changes nothing",
                    where=_place(given, (section, key)),
                    remedy="add --set 'phases=[]' to do without phases, or give phases of your own in a YAML file",
                )


def _own_place(given: Settings, path: KeyPath) -> str | None:
    """Return where exactly this key was given."""
    one = given.get(path[:2]) or given.get(path[:1])
    return one.places.get(path) if one is not None else None


def _place(given: Settings, path: KeyPath) -> str:
    """Return where a key was given, or what it is in."""
    places = (_own_place(given, path[:end]) for end in range(len(path), 0, -1))
    inside = (one.places[path[:1]] for key, one in given.items() if key[:1] == path[:1])
    return next((place for place in places if place), None) or next(inside, "the configuration")


def _explain(error: ValidationError, prefix: KeyPath, given: Settings) -> ConfigError:
    """Turn pydantic's first complaint into our three parts; `prefix` is the phase it is about."""
    problem = error.errors()[0]
    location = tuple(map(str, problem["loc"]))
    # Pydantic adds members of unions and items of lists, which are no keys.
    path = (*prefix, *location[: 2 if location[0] in SECTIONS else 3 if location[0] == "phases" else 1])
    dotted, where = ".".join(path), _place(given, path)
    if problem["type"] == "extra_forbidden":
        return _unknown_key(dotted, where, of_file=len(path) == 1 and not where.startswith("--"))
    if problem["type"] == "value_error":
        message = problem["msg"].removeprefix("Value error, ")
        keys = [(*path, key) for key in _keys_at(path) if key in message]
        places = dict.fromkeys(place for key in keys if (place := _own_place(given, key)))
        return ConfigError(f"{dotted}: {message}", where=" and ".join(places) or where, remedy="change one of the two")
    if problem["type"] == "missing" and path[-1] == location[-1]:  # else of a list that is too short
        return ConfigError(f"'{dotted}' is missing", where=where, remedy="add it")
    value = "empty" if problem["input"] is None else repr(problem["input"])
    is_item = isinstance(problem["loc"][-1], int) and path[-1] != location[-1] and problem["type"] != "missing"
    field = _field_at(path)
    remedy = f"give {expected(field.annotation, tuple(field.metadata))}" if field else "remove it"
    if problem["type"] == "finite_number":
        remedy = remedy.replace("a number", "a finite number")
    return ConfigError(f"{dotted} {'contains' if is_item else 'is'} {value}", where=where, remedy=remedy)


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


def _keys_at(path: KeyPath) -> list[str]:
    """Return the keys of the section at a path."""
    return list(Config.model_fields[path[-1]].annotation.model_fields) if path[-1] in SECTIONS else []  # type: ignore[union-attr]


def _field_at(path: KeyPath) -> FieldInfo | None:
    """Return the field of a key, or of the section itself."""
    if path[0] == "phases" and len(path) > 2:
        path = path[2:] if path[2] in SECTIONS else path
        if len(path) == 3:
            return PhaseConfig.model_fields.get(path[2])
    field = Config.model_fields.get(path[0])
    return getattr(field.annotation, "model_fields", {}).get(path[1]) if field and len(path) > 1 else field
