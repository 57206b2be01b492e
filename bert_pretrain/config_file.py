"""Load the configuration from presets, YAML files, `--set` and flags, and explain mistakes.

Each source is a layer over the sources before it, as in `small,paper` or with `extends: short` in a file. Layers are
merged key by key; lists such as `phases` are replaced completely. YAML scalars are read as text and converted to the
type of their field: `no` is false as a boolean and Norwegian as a language.
"""

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from bert_pretrain.config import LENGTHS, PHASE_SECTIONS, Config, TrainConfig
from bert_pretrain.config_keys import SECTIONS, key_schemas, values_of
from bert_pretrain.errors import ConfigError

MAX_VALUES = 100_000  # with aliases (`*`) expanded, because a few lines of aliases can mean billions of values


class Layer(NamedTuple):
    """The values of one file or of the command line, or of several layers."""

    tree: dict[str, Any]
    places: dict[str, str]  # the file and line, or the flag, where each key such as `train.peak_lr` is set

    def set(
        self,
        key: str,
        value: object,
        where: str,
    ) -> None:
        """Set a key, or all keys of a section."""
        section, _, name = key.partition(".")
        self.places.setdefault(section, where)
        self.places[key] = where
        if name:
            values = self.tree.get(section)
            self.tree[section] = {**values, name: value} if isinstance(values, dict) else {name: value}
        elif section in SECTIONS and isinstance(value, dict):
            for name in value:
                self.set(f"{section}.{name}", value[name], where)
        else:
            self.tree[section] = value

    def place(self, key: str) -> str:
        """Return where a key, or the section or list around it, is set."""
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places.get(key, "the configuration")


def load_config(
    source: str | Path | None = None,
    settings: Sequence[str] | None = None,
    flags: Mapping[str, tuple[str, object]] | None = None,
    *,
    with_phases: bool = True,
    where: str = "--config",
) -> Config:
    """Build the configuration from defaults, presets and files, `--set` pairs and flags; later sources win.

    `source` is a YAML file or the name of a preset; a string may join several by commas. `flags` maps dotted keys to
    (name of the flag for messages, value). `where` is the option of `source`.
    Without `with_phases`, phases are not checked against the other keys, for example the length of the run.
    """
    layers: list[Layer] = []
    for name in source.split(",") if isinstance(source, str) else filter(None, [source]):
        layers.extend(_read_layers(name, where))
    layers.append(_command_line_layer(settings or (), flags or {}))
    merged = _merged(layers)
    phase_key = ""
    trainings: list[TrainConfig] = []
    try:
        config = Config.model_validate(merged.tree)
        for index, phase in enumerate(config.phases if with_phases else ()):
            phase_key = f"phases.{index}."
            trainings.append(config.for_phase(phase).train)
    except ValidationError as error:
        raise _explain(error, phase_key, merged) from error
    if trainings:
        _check_overrides(config, layers)
    _check_warmup(trainings or [config.train], merged, by_clock=with_phases and config.time is not None)
    return config


def _read_layers(source: str | Path, where: str, extended_by: tuple[Path, ...] = ()) -> Iterator[Layer]:
    """Yield the layers of a file: first those that it extends, then its content."""
    path = _find_config(source, where)
    if path.resolve() in extended_by:
        raise ConfigError(f"'{source}' extends itself", where=where, remedy="remove it from 'extends'")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the configuration: {error}",
            where=str(path),
            remedy="name a preset or a YAML file in UTF-8",
        ) from error
    reader = _YamlReader(str(path))
    tree = reader.parse(text) or {}
    if not isinstance(tree, dict):
        raise ConfigError(
            "the configuration is not a mapping of sections",
            where=str(path),
            remedy="start with sections such as 'train:'",
        )
    extends = tree.pop("extends", None) or ""
    if not isinstance(extends, str):
        raise ConfigError(
            f"extends is {reprlib.repr(extends)}",
            where=reader.places["extends"],
            remedy="give presets or paths of YAML files, joined by commas",
        )
    for name in filter(None, extends.split(",")):
        extended = path.parent / name if _is_path(name) else name
        yield from _read_layers(extended, reader.places["extends"], (*extended_by, path.resolve()))
    yield Layer(tree, reader.places)


def _is_path(source: str | Path) -> bool:
    path = Path(source)
    return path.suffix in (".yaml", ".yml") or path.parent != Path(".")


def _find_config(source: str | Path, where: str) -> Path:
    """Return the file of a path or preset name that is given at `where`."""
    presets = preset_paths()
    path = Path(source) if _is_path(source) else presets.get(str(source))
    if path is not None and path.is_file():
        return path
    raise ConfigError(
        f"there is no preset or configuration file '{source}'",
        where=where,
        remedy=f"use the path of a .yaml file, or a preset: {', '.join(presets)}",
    )


def preset_paths() -> dict[str, Path]:
    """Return the files of the presets by name. A checkout has them in `configs/`, a wheel inside the package."""
    here = Path(__file__).resolve().parent
    folder = here / "configs" if (here / "configs").is_dir() else here.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


class _YamlReader:
    """Reads YAML as dicts, lists, strings and None, and records in `places` where each key is.

    The loaders of PyYAML convert scalars without knowing the type of their key, and keep the last of equal keys.
    """

    def __init__(self, name: str) -> None:
        self.places: dict[str, str] = {}
        self._name = name
        self._num_values = 0

    def parse(self, text: str) -> Any:
        """Return the content of a file, or of a `--set` pair."""
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            return "" if node is None else self._value(node, "")
        except RecursionError as error:
            raise ConfigError(
                "a value contains itself or is nested too deeply",
                where=self._name,
                remedy="remove the alias (*) that refers to itself",
            ) from error
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"invalid YAML: {getattr(error, 'problem', None) or error}",
                where=self._line(getattr(error, "problem_mark", None)),
                remedy="correct the syntax, or name a preset or a YAML file, such as base",
            ) from error

    def _line(self, mark: Any) -> str:
        return self._name if mark is None or self._name.startswith("--") else f"{self._name}:{mark.line + 1}"

    def _value(self, node: yaml.Node, key: str) -> Any:
        """Return the plain value of a node and of all nodes inside it."""
        self.places.setdefault(key, self._line(node.start_mark))
        prefix = f"{key}." if key else ""
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise _invalid(node, f"there are more than {MAX_VALUES:,} values; use fewer aliases (*)")
        if not node.tag.startswith("tag:yaml.org,2002:") or "python/" in node.tag:
            raise _invalid(node, f"the tag {node.tag} is not allowed")
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, f"{prefix}{index}") for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            node.value.encode()  # raises an error for half a surrogate pair
            return None if node.tag.endswith(":null") else node.value
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            name = str(key_node.value)
            if name in mapping:
                raise _invalid(key_node, f"the key '{name}' occurs twice")
            self.places[prefix + name] = self._line(key_node.start_mark)
            mapping[name] = self._value(value_node, prefix + name)
        return mapping


def _invalid(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _command_line_layer(settings: Sequence[str], flags: Mapping[str, tuple[str, object]]) -> Layer:
    """Return the layer of flags and `--set` pairs. Values of pairs are scalars, `[a, b]` or `{key: value}`."""
    layer = Layer({}, {})
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"'{setting}' does not have the form section.key=value",
                where="--set",
                remedy="write for example --set train.peak_lr=2e-4",
            )
        where = f"--set {key}"
        layer.set(key, _YamlReader(where).parse(text), where)
    for key, (flag, value) in flags.items():
        layer.set(key, value, flag)
    return layer


def _merged(layers: Sequence[Layer]) -> Layer:
    """Merge layers key by key; later layers win. Top-level keys without a value change nothing, except `time`.

    A later key for the length of the run replaces earlier ones.
    """
    merged = Layer({}, {})
    for layer in layers:
        if _has_length(layer.tree):
            for name in LENGTHS:
                merged.tree.get("train", {}).pop(name, None)
        merged.places.update(layer.places)
        for name, value in layer.tree.items():
            if value is None and name != "time":
                continue
            if name not in SECTIONS:
                merged.tree[name] = value
            elif isinstance(value, dict):
                merged.tree[name] = {**merged.tree.get(name, {}), **value}
            else:
                raise ConfigError(
                    f"{name} is {reprlib.repr(value)}",
                    where=layer.place(name),
                    remedy="give keys with values, such as {seed: 1}",
                )
    return merged


def _has_length(tree: Mapping[str, Any]) -> bool:
    """Return whether a layer sets the length of the run or of a phase."""
    phases = tree.get("phases")
    for parent in [tree, *phases] if isinstance(phases, list) else [tree]:
        section = parent.get("train") if isinstance(parent, dict) else None
        if isinstance(section, dict) and any(section.get(name) is not None for name in LENGTHS):
            return True
    return False


def _check_warmup(trainings: Sequence[TrainConfig], merged: Layer, *, by_clock: bool) -> None:
    """Raise ConfigError for `warmup_steps` with a time limit, or more of them than the steps of all phases together."""
    steps = [train.planned_steps for train in trainings]
    total = None if None in steps else sum(filter(None, steps))
    mentions = [key for key in merged.places if key.endswith(".warmup_steps")]
    where = merged.places[mentions[-1]] if mentions else "train.warmup_steps"
    for train in trainings:
        if by_clock or train.time_budget is not None:
            train.check_warmup(None, where)
        elif total is not None:
            train.check_warmup(max(total, train.schedule_steps or 0), where)


def _check_overrides(config: Config, layers: Sequence[Layer]) -> None:
    """Raise ConfigError if a layer after the phases, such as the flags, sets a key that every phase overrides."""
    num_replaced = max(number for number, layer in enumerate(layers) if layer.tree.get("phases") is not None)
    for layer in layers[num_replaced + 1 :]:
        for section in PHASE_SECTIONS:
            keys_of_phases = [set(getattr(phase, section)) for phase in config.phases]
            for key in set.intersection(*keys_of_phases, layer.tree.get(section) or ()):
                raise ConfigError(
                    f"this has no effect, because every phase sets {section}.{key}",
                    where=layer.place(f"{section}.{key}"),
                    remedy="add --set 'phases=[]' to train without phases, or write other phases in a YAML file",
                )


def _explain(error: ValidationError, phase_key: str, merged: Layer) -> ConfigError:
    """Convert the first validation error to a ConfigError. `phase_key` is the prefix of its phase, if any."""
    problem = error.errors()[0]
    location = list(map(str, problem["loc"]))
    # Keep only keys, and the index of a phase. Pydantic appends union members and other list indices.
    depth = 1
    if location[:1] == ["phases"]:
        depth = 3
    elif location and location[0] in SECTIONS:
        depth = 2
    key = phase_key + ".".join(location[:depth])
    where = merged.place(key)
    if problem["type"] == "extra_forbidden":
        section = location[0] if len(location) > 1 else ""
        names = [name for parent, _, name in (known.rpartition(".") for known in key_schemas()) if parent == section]
        return ConfigError(f"unknown key '{key}'", where=where, remedy=f"the keys here are {', '.join(names)}")
    if problem["type"] == "value_error":
        message = problem["msg"].removeprefix("Value error, ")
        mentioned = [merged.places.get(f"{key}.{word}") for word in re.findall(r"\w+", message)]
        sources = " and ".join(dict.fromkeys(filter(None, mentioned)))
        return ConfigError(
            f"{key}: {message}".removeprefix(": "),
            where=sources or where,
            remedy="change one of the two" if " and " in sources else "correct it",
        )
    if problem["type"] == "missing" and len(location) <= depth:  # otherwise a list is too short
        return ConfigError(f"'{key}' is missing", where=where, remedy="add it")
    if location[0] == "phases":
        del location[1:2]  # the index
    schema = key_schemas().get(".".join(location[:2]))
    value = "empty" if problem["input"] is None else reprlib.repr(problem["input"])
    return ConfigError(
        f"{key} is {value}",
        where=where,
        remedy=f"give {values_of(schema)}" if schema else "remove it",
    )
