"""Every key of the configuration with its value and meaning: for `bert-pretrain config`, docs/keys.md and messages."""

import functools
import operator
import re
import textwrap
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bert_pretrain.config import DURATIONS, Config
from bert_pretrain.config_values import duration_text, expected

SECTIONS = ("vocab", "data", "model", "train")
OTHER_NAMES = {
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
"""Keys by the names that other programs give them."""


class Key(NamedTuple):
    """A key, or a section with keys of its own."""

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def dotted(self) -> str:
        """The key as `--set` takes it."""
        return ".".join(self.path)

    @property
    def is_section(self) -> bool:
        return self.path[0] in SECTIONS and len(self.path) == 1

    @property
    def meaning(self) -> str:
        return " ".join((self.field.description or "").split())

    @property
    def values(self) -> str:
        """What the key may be, in words."""
        return expected(self.field.annotation, tuple(self.field.metadata))


def keys_of(section: type[BaseModel] = Config, path: tuple[str, ...] = ()) -> Iterator[Key]:
    """Yield the keys in the order of the file; a section comes before its keys."""
    for name, field in section.model_fields.items():
        yield (key := Key((*path, name), field))
        if section is Config and key.is_section:
            yield from keys_of(field.annotation, key.path)  # type: ignore[arg-type]


def as_values(config: Config) -> dict[str, Any]:
    """Return a configuration as plain values for YAML; durations have units."""
    tree = config.model_dump(mode="json")
    for *sections, name in DURATIONS:
        section = tree[sections[0]] if sections else tree
        section[name] = None if section[name] is None else duration_text(section[name])
    for phase in tree["phases"]:
        for section in ("data", "train"):
            phase[section] = {name: _plain_number(value) for name, value in phase[section].items()}
    return tree


def _plain_number(value: object) -> object:
    """Return a number for its text: overrides of phases are kept as written, and YAML would quote them."""
    is_number = isinstance(value, str) and re.fullmatch(r"(0|[1-9]\d*)(\.\d+)?", value)
    return yaml.safe_load(str(value)) if is_number else value


def dump_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that `load_config` reads back to the same values."""
    return yaml.safe_dump(as_values(config), sort_keys=False, allow_unicode=True)


def inline_yaml(value: object) -> str:
    """Return a value as YAML on one line."""
    return yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False)[1:-2]


def as_commented_yaml(config: Config) -> str:
    """Return every key with its value, and its meaning as a comment; YAML that `--config` takes."""
    tree, blocks = as_values(config), []
    for key in keys_of():
        comment = key.meaning if key.is_section else f"{key.meaning} Value: {key.values}."
        lines = textwrap.wrap(comment, 76, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
        value = functools.reduce(operator.getitem, key.path, tree)
        lines.append(f"{key.path[-1]}:" + ("" if key.is_section else f" {inline_yaml(value)}"))
        blocks.append(textwrap.indent("\n".join(lines), "  " * (len(key.path) - 1)))
    return "\n\n".join(blocks) + "\n"


def suggest_key(written: str) -> str | None:
    """Return the key that was probably meant: by another program's name, in another section, or misspelled.

    For example for `train.lr`, `train['steps']` or `max_steps`.
    """
    *sections, name = re.findall(r"\w+", written) or [""]
    keys = [key.dotted for key in keys_of()]
    names = {key.rpartition(".")[2]: key for key in keys} | {key: key for key in keys}
    names |= {other: key for key, others in OTHER_NAMES.items() for other in others.split()}
    section = f"{sections[-1]}." if sections else "."
    own = {key.removeprefix(section): key for key in keys if key.startswith(section)}
    misspelled = {} if not sections or sections[-1] in names else {key: key for key in keys}
    attempts = (
        (name, own, 1.0),
        (".".join((*sections, name)), misspelled, 0.8),
        (name, names, 1.0),
        (name, own, 0.7),
        (name, names, 0.75),
    )
    near = (known[match] for word, known, cutoff in attempts for match in get_close_matches(word, known, 1, cutoff))
    return next(near, None)
