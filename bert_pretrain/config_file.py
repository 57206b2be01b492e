"""Reading a configuration: presets and files, `--set` pairs, flags, later ones winning; and explaining what is wrong.

YAML files are layers: `small,paper` puts the second over the first, `extends: short` puts a file over another one.
YAML scalars are taken as text and given their meaning by the field they belong to, so `1e-4` is a number where a number
is expected, `no` is false where a truth value is and Norwegian where a language is.
"""

import difflib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from bert_pretrain.config import LENGTHS, Config, PhaseConfig, TrainConfig
from bert_pretrain.config_keys import DURATIONS, as_values, suggest_key
from bert_pretrain.config_values import duration_text, expected
from bert_pretrain.errors import ConfigError
from bert_pretrain.parallel.cores import is_first_rank
from bert_pretrain.yaml_text import KeyPath, parse_value, parse_yaml


def load_config(
    source: str | Path | None = None,
    settings: Sequence[str] = (),
    flags: Mapping[str, tuple[str, object]] | None = None,
    *,
    with_phases: bool = True,
) -> Config:
    """Build the configuration from defaults, presets and files, `--set` pairs and flags, later ones winning.

    `source` is the path of a YAML file or the name of a preset; in a string, several joined by commas. `flags` are
    dotted key -> (the flag's name for messages, its value); a value of None counts as not given. Phases that will not
    be run may contradict the rest, for example in the run's length.
    """
    tree: dict[str, Any] = {}
    places: dict[KeyPath, str] = {}
    sources = [] if source is None else source.split(",") if isinstance(source, str) else [source]
    layers = [layer for each in sources for layer in _layers_of(each, "--config")]
    for layer in layers:
        _put_over(tree, places, layer)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"'{setting}' is not of the form section.key=value",
                where="--set",
                remedy="write for example --set train.peak_lr=2e-4",
            )
        _assign(tree, places, key, parse_value(value, f"--set {key}"), f"--set {key}")
    for key, (flag, given) in (flags or {}).items():
        if given is not None:
            _assign(tree, places, key, given, flag)
    order = {layer.file: number for number, layer in enumerate(layers)}

    def age(place: str) -> int:
        """Return the number of the layer that a place is in; the command line is the last one."""
        return order.get(place.rpartition(":")[0], len(layers))

    _drop_replaced_lengths(tree, places, age)
    return _validated(tree, places, age, with_phases)


class _Layer(NamedTuple):
    """What one file says."""

    file: str
    tree: dict[str, Any]
    places: dict[KeyPath, str]


def _layers_of(source: str | Path, where: str, inside: tuple[Path, ...] = ()) -> Iterator[_Layer]:
    """Yield a file as a layer, after those that it extends; `inside` are the files that extend this one."""
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
    yield _Layer(str(path), tree, places)


def _put_over(tree: dict[str, Any], places: dict[KeyPath, str], layer: _Layer) -> None:
    """Put a layer over those before it: keys of a section one by one, everything else whole.

    A section left empty says nothing.
    """
    empty = {section for section, value in layer.tree.items() if value is None and section in tree}
    for section, value in layer.tree.items():
        below = tree.get(section)
        if section in empty:
            continue
        replaced: list[KeyPath] = [(section,)]
        if isinstance(value, dict) and isinstance(below, dict):
            value, replaced = {**below, **value}, [(section, key) for key in value]
        tree[section] = value
        for path in replaced:
            _forget(places, path)
    places.update({path: place for path, place in layer.places.items() if empty.isdisjoint(path[:1])})


def _drop_replaced_lengths(tree: dict[str, Any], places: Mapping[KeyPath, str], age: Callable[[str], int]) -> None:
    """Drop a length of the run where a later layer gives it by another key: a run has one length."""
    train, phases = tree.get("train"), tree.get("phases")
    if not isinstance(train, dict):
        return
    ages = {key: age(places.get(("train", key), places["train",])) for key in LENGTHS if train.get(key) is not None}
    latest = max(ages.values(), default=0)
    if isinstance(phases, list) and any(isinstance(phase, dict) and _gives_length(phase) for phase in phases):
        latest = max(latest, age(places["phases",]))
    tree["train"] = {key: value for key, value in train.items() if ages.get(key, latest) == latest}


def _gives_length(phase: dict[str, Any]) -> bool:
    own = phase.get("train")
    return isinstance(own, dict) and not own.keys().isdisjoint(LENGTHS)


def _is_path(source: str | Path) -> bool:
    path = Path(source)
    return path.suffix in (".yaml", ".yml") or path.parent != Path(".")


def find_config(source: str | Path, where: str = "--config") -> Path:
    """Return the file behind a path or a preset's name; `where` is what names it."""
    if _is_path(source):
        path = Path(source)
        if not path.is_file():
            raise ConfigError(
                f"there is no configuration file '{path}'",
                where=where,
                remedy="check the path, or name a preset: " + ", ".join(sorted(preset_paths())),
            )
        return path
    presets = preset_paths()
    if str(source) not in presets:
        near = next(iter(difflib.get_close_matches(str(source), presets, n=1)), None)
        raise ConfigError(
            f"there is no preset '{source}'{_did_you_mean(near)}",
            where=where,
            remedy="name one of " + ", ".join(sorted(presets)) + ", or give the path of a .yaml file",
        )
    return presets[str(source)]


def preset_paths() -> dict[str, Path]:
    """Return the shipped presets: name -> file. In a checkout they lie in `configs/`, in a wheel beside this module."""
    here = Path(__file__).resolve().parent
    folder = next((path for path in (here / "configs", here.parent / "configs") if path.is_dir()), None)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder else {}


def dump_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that `load_config` reads back to the same values."""
    return yaml.safe_dump(as_values(config), sort_keys=False, allow_unicode=True)


def _assign(tree: dict[str, Any], places: dict[KeyPath, str], dotted: str, value: object, where: str) -> None:
    """Put `value` at a dotted key, which replaces what an earlier source said there."""
    *parents, last = path = tuple(dotted.split("."))
    for depth, parent in enumerate(parents):
        if tree.get(parent) is None:  # a section left empty counts as one without keys
            tree[parent] = {}
        if not isinstance(tree[parent], dict):
            raise ConfigError(
                f"'{'.'.join(path[: depth + 1])}' holds no keys",
                where=where,
                remedy="name a key of a section, for example train.peak_lr",
            )
        tree = tree[parent]
    tree[last] = value
    _forget(places, path)
    for depth in range(1, len(path) + 1):
        places.setdefault(path[:depth], where)


def _forget(places: dict[KeyPath, str], path: KeyPath) -> None:
    """Forget where a key and all below it stood."""
    for replaced in [place for place in places if place[: len(path)] == path]:
        del places[replaced]


def _validated(
    tree: dict[str, Any], places: dict[KeyPath, str], age: Callable[[str], int], with_phases: bool
) -> Config:
    # A section left empty (`train:`) means its defaults.
    tree = {key: value for key, value in tree.items() if value is not None}
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, (), places) from error
    names = [phase.name for phase in config.phases]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two phases share a name: {', '.join(names)}",
            where=places.get(("phases",), "phases"),
            remedy="give each phase a name of its own",
        )
    stages: list[tuple[KeyPath, TrainConfig]] = [(("train",), config.train)]
    if with_phases and config.phases:
        stages = []
        for index, phase in enumerate(config.phases):
            try:
                stages.append((("phases", str(index), "train"), config.for_phase(phase).train))
            except ValidationError as error:
                raise _explain(error, ("phases", str(index)), places) from error
        _refuse_overruled(config.phases, places, age)
    _check_warmup(stages, places, config.time if with_phases else None)
    _explain_bare_durations(config, tree)
    return config


def _explain_bare_durations(config: Config, tree: Mapping[str, Any]) -> None:
    """Say that a number without a unit was read as seconds, for minutes or hours may have been meant."""
    for *sections, name in DURATIONS:
        given, read = tree, config
        for section in sections:
            given, read = given.get(section) or {}, getattr(read, section)
        text = given.get(name)
        if isinstance(text, str) and text.replace(".", "").isdecimal() and is_first_rank():
            seconds = duration_text(getattr(read, name))
            print(f"note: {name} {text} is {seconds}; with a unit it is plain, such as {text}m", file=sys.stderr)


def _check_warmup(
    stages: Sequence[tuple[KeyPath, TrainConfig]], places: Mapping[KeyPath, str], time: float | None
) -> None:
    """Refuse a warm-up that is known to be longer than the schedule, which phases share."""
    steps = [train.planned_steps for _, train in stages]
    known = sum(each for each in steps if each is not None) if None not in steps else None
    for path, train in stages:
        spanned = max(known, train.schedule_steps or 0) if known is not None else None
        keys = ("warmup_steps", "max_steps", "schedule_steps", "time_budget")
        of_keys = [places.get((*path, key)) or places.get(("train", key)) for key in keys]
        of_keys += [places.get(("time",))] if time is not None else []
        where = " and ".join(dict.fromkeys(filter(None, of_keys))) or "train.warmup_steps"
        train.check_warmup(spanned, where, time)


def _refuse_overruled(phases: Sequence[PhaseConfig], places: Mapping[KeyPath, str], age: Callable[[str], int]) -> None:
    """Refuse a key of the command line, or of a layer over the phases', that every phase sets: it changes nothing."""
    for section in ("data", "train"):
        for key in set.intersection(*(set(getattr(phase, section)) for phase in phases)):
            place = places.get((section, key))
            if place is not None and (place.startswith("--") or age(place) > age(places["phases",])):
                raise ConfigError(
                    f"every phase sets {section}.{key} itself, so that this changes nothing",
                    where=place,
                    remedy="add --set 'phases=[]' to do without phases, or give phases of your own in a YAML file",
                )


def _explain(error: ValidationError, prefix: KeyPath, places: dict[KeyPath, str]) -> ConfigError:
    """Turn pydantic's first complaint into our three parts."""
    problem = error.errors()[0]
    # Pydantic adds the member of a union to the place; only what is in the configuration's own tree counts.
    location = tuple(str(part) for part in problem["loc"])
    path: KeyPath = prefix

    def is_key(inner: KeyPath) -> bool:
        return _field_at(inner[len(prefix) :]) is not _field_at(inner[len(prefix) : -1])

    for part in location:
        if (*path, part) in places or problem["type"] == "extra_forbidden" or is_key((*path, part)):
            path = (*path, part)
    dotted = ".".join(path)
    where = next((places[path[:end]] for end in range(len(path), 0, -1) if path[:end] in places), "the configuration")
    field = _field_at(path[len(prefix) :])
    if problem["type"] == "extra_forbidden":
        return _unknown_key(dotted, where, of_file=len(path) == 1 and not where.startswith("--"))
    if problem["type"] == "value_error":
        message = problem["msg"].removeprefix("Value error, ")
        named = [places[key] for key in places if key[:-1] == path and key[-1] in message]
        where = " and ".join(dict.fromkeys(named)) or where
        return ConfigError(f"{dotted}: {message}", where=where, remedy="change one of the two")
    if problem["type"] == "missing" and path[-1] == location[-1]:  # else of a list that is too short
        return ConfigError(f"'{dotted}' is missing", where=where, remedy="add it")
    given = "empty" if problem["input"] is None else repr(problem["input"])
    is_item = isinstance(problem["loc"][-1], int) and path[-1] != location[-1] and problem["type"] != "missing"
    remedy = f"give {expected(field.annotation, tuple(field.metadata))}" if field else "remove it"
    if problem["type"] == "finite_number":
        remedy = remedy.replace("a number", "a finite number")
    return ConfigError(f"{dotted} {'contains' if is_item else 'is'} {given}", where=where, remedy=remedy)


def _unknown_key(dotted: str, where: str, *, of_file: bool) -> ConfigError:
    """Refuse a key, and name the one that was probably meant; `of_file` says that `extends` would be a key there."""
    head, name = re.fullmatch(r"(phases\.\d+\.)?(.*)", dotted, re.DOTALL).groups("")  # type: ignore[union-attr]
    meant = "extends" if of_file and difflib.get_close_matches(name, ["extends"]) else suggest_key(name)
    remedy = "'bert-pretrain config' shows every key with its meaning"
    if head and (meant is None or not meant.startswith(("data.", "train."))):
        meant, remedy = None, "a phase has the keys " + ", ".join(PhaseConfig.model_fields)
    return ConfigError(f"unknown key '{dotted}'{_did_you_mean(meant and head + meant)}", where=where, remedy=remedy)


def _did_you_mean(word: str | None) -> str:
    return f"; did you mean '{word}'?" if word else ""


def _field_at(path: KeyPath) -> FieldInfo | None:
    """Return the key that a path of the configuration leads to, or the one that it leads into."""
    section: Any = Config
    field = None
    for part in path:
        inner = getattr(section, "model_fields", {}).get(part)
        if inner is not None:
            field, section = inner, PhaseConfig if part == "phases" else inner.annotation
    return field
