"""Descriptions and valid values of configuration keys, suggestions for misspelled keys, and output as YAML."""

import functools
import re
import textwrap
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import yaml

from bert_pretrain.config import Config, duration_text

SECTIONS = ("vocab", "data", "model", "train")
OTHER_NAMES = {  # the names of keys in other programs
    "train.peak_lr": "lr learning_rate max_lr",
    "train.global_batch_size": "bs batch batch_size train_batch_size per_device_train_batch_size",
    "train.micro_batch_tokens": "micro_batch_size",
    "train.max_steps": "steps num_steps train_steps num_train_steps total_steps max_iters iterations",
    "train.max_epochs": "epochs epoch num_epochs num_train_epochs",
    "train.time_budget": "time_limit max_time hours",
    "train.warmup_steps": "warmup num_warmup_steps",
    "train.max_grad_norm": "grad_clip clip_grad gradient_clip_val",
    "train.schedule": "scheduler lr_schedule lr_scheduler lr_scheduler_type",
    "train.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "train.eps": "adam_epsilon epsilon",
    "train.precision": "dtype amp mixed_precision fp16 bf16",
    "train.compile": "torch_compile",
    "train.activation_checkpointing": "gradient_checkpointing",
    "train.log_every": "logging_steps log_interval",
    "train.eval_every": "eval_steps eval_interval",
    "train.save_every": "save_steps save_interval",
    "train.keep_checkpoints": "save_total_limit",
    "data.max_seq_length": "max_length seq_len seq_length max_seq_len block_size",
    "data.masked_lm_prob": "mlm_probability mlm_prob mask_prob",
    "data.whole_word_mask": "wwm whole_word_masking",
    "data.next_sentence": "nsp sop objective",
    "model.hidden_size": "dim d_model n_embd",
    "model.num_hidden_layers": "layers num_layers n_layer depth",
    "model.num_attention_heads": "heads num_heads n_head",
    "model.intermediate_size": "d_ff ffn_size",
    "model.hidden_dropout_prob": "dropout",
    "vocab.size": "vocab_size",
    "vocab.lowercase": "do_lower_case uncased",
}


@functools.cache
def key_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of every section and key by dotted name, in the order of `Config`."""
    root = Config.model_json_schema()
    keys: dict[str, dict[str, Any]] = {}
    for name, schema in root["properties"].items():
        reference = schema.get("$ref") or schema.get("items", {}).get("$ref", "")
        section = root["$defs"].get(reference.rpartition("/")[2], {})
        keys[name] = {"description": section.get("description"), **schema}
        keys |= {f"{name}.{key}": inner for key, inner in section.get("properties", {}).items()}
    return {key: {**schema, "description": " ".join(schema["description"].split())} for key, schema in keys.items()}


_LIMITS = {
    "exclusiveMinimum": "greater than", "minimum": "of at least", "exclusiveMaximum": "less than", "maximum": "at most",
}  # fmt: skip
_KINDS = {"integer": "a whole number", "number": "a number", "string": "a text", "null": "null"}


def values_of(schema: Mapping[str, Any]) -> str:
    """Describe the valid values of a key in words, such as `a whole number greater than 0, or null`."""
    *others, last = _alternatives(schema)
    if not others:
        return last
    separator = ", or " if " " in others[0] else " or "
    return ", ".join(others) + separator + last


def _alternatives(schema: Mapping[str, Any]) -> list[str]:
    examples, members, kind = schema.get("examples"), schema.get("anyOf"), schema.get("type")
    if "const" in schema or "enum" in schema:
        return schema.get("enum") or [schema["const"]]
    if members and not examples:
        return [word for member in members for word in _alternatives(member)]
    if kind == "boolean":
        return ["true", "false"]
    if examples:
        shown = [each if isinstance(each, str) else inline_yaml(each) for each in examples]
        values = f"a value such as {', '.join(shown)}"
    elif kind == "array":
        length = f"of {schema['minItems']} values " if "prefixItems" in schema else ""
        values = f"a list {length}in brackets, each {values_of(schema.get('items') or schema['prefixItems'][0])}"
    else:
        values = _KINDS.get(str(kind), "keys with values, such as {seed: 1}")
    limits = [f"{words} {schema[name]:,}".removesuffix(".0") for name, words in _LIMITS.items() if name in schema]
    return [f"{values} {' and '.join(limits)}".rstrip()]


def suggest_key(written: str) -> str | None:
    """Return the key that was probably meant by `train.lr`, `train['steps']`, `max_steps` or a misspelled name."""
    *sections, name = re.findall(r"\w+", written) or [""]
    keys = [key for key in key_schemas() if not key.startswith("phases.")]
    names = {key.rpartition(".")[2]: key for key in keys} | {key: key for key in [*keys, "extends"]}
    names |= {other: key for key, others in OTHER_NAMES.items() for other in others.split()}
    section = f"{sections[-1]}." if sections else "."
    in_section = {key.removeprefix(section): key for key in keys if key.startswith(section)}
    dotted = {} if not sections or sections[-1] in names else {key: key for key in keys}
    # Each attempt: the text to look up, the known names, and the minimum similarity. The most certain come first.
    attempts = (
        (name, in_section, 1.0), (".".join((*sections, name)), dotted, 0.8), (name, names, 1.0),
        (name, in_section, 0.7), (name, names, 0.75),
    )  # fmt: skip
    near = (known[match] for word, known, cutoff in attempts for match in get_close_matches(word, known, 1, cutoff))
    return next(near, None)


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
    tree, blocks = as_values(config), []
    for key, schema in key_schemas().items():
        *section, name = key.split(".")
        if section == ["phases"]:
            continue
        comment = schema["description"] if key in SECTIONS else f"{schema['description']} Value: {values_of(schema)}."
        lines = textwrap.wrap(comment, 76, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        value = (tree[section[0]] if section else tree)[name]
        lines.append(f"{name}:" + ("" if key in SECTIONS else f" {inline_yaml(value)}"))
        blocks.append(textwrap.indent("\n".join(lines), "  " * len(section)))
    return "\n\n".join(blocks) + "\n"
