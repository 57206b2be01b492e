"""Hugging Face's names of weights and settings: one `Architecture` for each.

Our networks have the same names of parameters where they have the same part. BERT's fused matrix of query, key and
value is three matrices in Hugging Face's format; ModernBERT's is fused there, too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bert_pretrain.config import ModelConfig
from bert_pretrain.text.tokenizer import Tokenizer

WORD_EMBEDDINGS = "embeddings.word_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"
OUTPUT_BIAS = "mlm_head.bias"
GENERATOR_CLASS = "ElectraForMaskedLM"
GENERATOR_PARTS = ("generator.", "mlm_head.")  # of the parameters of an ELECTRA in training

_Names = dict[str, tuple[str, ...]]
_MODERN_KEYS = ("biases", "global_attn_every_n_layers", "local_attention", "global_rope_theta", "local_rope_theta")
_ONE_LAYER = {"num_hidden_groups": 1, "inner_group_num": 1}  # ALBERT's numbers of layers with their own weights


@dataclass(frozen=True)
class Architecture:
    """What `transformers` calls the class, the weights and the settings of a network."""

    title: str
    class_name: str  # for pretraining
    encoder: str  # the module of the encoder
    heads: tuple[str, ...]  # prefixes of the pretraining heads
    decoder: str  # the matrix that is tied to the word embeddings
    names: _Names  # of modules, ours -> Hugging Face's; {} is the number of the layer
    without: tuple[str, ...] = ()  # keys of `ModelConfig` that are not in `config.json`
    renamed: _Names = field(default_factory=dict)  # keys of `ModelConfig` with other names; the first name is read
    written: dict[str, Any] = field(default_factory=dict)  # more settings of `config.json`; other values are refused
    required: dict[str, Any] = field(default_factory=dict)  # settings that are not written; other values are refused
    defaults: dict[str, Any] = field(default_factory=dict)  # of `transformers`, for settings that a file lacks
    special_tokens: tuple[str, ...] = ("pad",)  # whose ids `config.json` has: the defaults are of another vocabulary
    dropouts: tuple[str, ...] = ("hidden_dropout_prob", "attention_probs_dropout_prob")  # settings in fine-tuning

    @property
    def auto_class(self) -> str:
        return f"AutoModel{self.class_name[self.class_name.index('For') :]}"


_BERT_NAMES: _Names = {
    "embeddings.word_embeddings": ("bert.embeddings.word_embeddings",),
    "embeddings.position_embeddings": ("bert.embeddings.position_embeddings",),
    "embeddings.token_type_embeddings": ("bert.embeddings.token_type_embeddings",),
    "embeddings.layer_norm": ("bert.embeddings.LayerNorm",),
    "encoder.layers.{}.attention.query_key_value": (
        "bert.encoder.layer.{}.attention.self.query",
        "bert.encoder.layer.{}.attention.self.key",
        "bert.encoder.layer.{}.attention.self.value",
    ),
    "encoder.layers.{}.attention.output": ("bert.encoder.layer.{}.attention.output.dense",),
    "encoder.layers.{}.attention_norm": ("bert.encoder.layer.{}.attention.output.LayerNorm",),
    "encoder.layers.{}.intermediate": ("bert.encoder.layer.{}.intermediate.dense",),
    "encoder.layers.{}.output": ("bert.encoder.layer.{}.output.dense",),
    "encoder.layers.{}.output_norm": ("bert.encoder.layer.{}.output.LayerNorm",),
    "pooler.dense": ("bert.pooler.dense",),
    "mlm_head.dense": ("cls.predictions.transform.dense",),
    "mlm_head.layer_norm": ("cls.predictions.transform.LayerNorm",),
    "mlm_head": ("cls.predictions",),
    "nsp_head.dense": ("cls.seq_relationship",),
}
_MODERN_NAMES: _Names = {
    "embeddings.word_embeddings": ("model.embeddings.tok_embeddings",),
    "embeddings.layer_norm": ("model.embeddings.norm",),
    "encoder.layers.{}.attention.query_key_value": ("model.layers.{}.attn.Wqkv",),
    "encoder.layers.{}.attention.output": ("model.layers.{}.attn.Wo",),
    "encoder.layers.{}.attention_norm": ("model.layers.{}.attn_norm",),
    "encoder.layers.{}.wide_and_gate": ("model.layers.{}.mlp.Wi",),
    "encoder.layers.{}.output": ("model.layers.{}.mlp.Wo",),
    "encoder.layers.{}.output_norm": ("model.layers.{}.mlp_norm",),
    "encoder.final_norm": ("model.final_norm",),
    "mlm_head.dense": ("head.dense",),
    "mlm_head.layer_norm": ("head.norm",),
    "mlm_head": ("decoder",),
}
_ALBERT_LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.{}"
_ALBERT_NAMES: _Names = {
    "embeddings.word_embeddings": ("albert.embeddings.word_embeddings",),
    "embeddings.position_embeddings": ("albert.embeddings.position_embeddings",),
    "embeddings.token_type_embeddings": ("albert.embeddings.token_type_embeddings",),
    "embeddings.layer_norm": ("albert.embeddings.LayerNorm",),
    "encoder.projection": ("albert.encoder.embedding_hidden_mapping_in",),
    "encoder.layers.{}.attention.query_key_value": (
        f"{_ALBERT_LAYER}.attention.query",
        f"{_ALBERT_LAYER}.attention.key",
        f"{_ALBERT_LAYER}.attention.value",
    ),
    "encoder.layers.{}.attention.output": (f"{_ALBERT_LAYER}.attention.dense",),
    "encoder.layers.{}.attention_norm": (f"{_ALBERT_LAYER}.attention.LayerNorm",),
    "encoder.layers.{}.intermediate": (f"{_ALBERT_LAYER}.ffn",),
    "encoder.layers.{}.output": (f"{_ALBERT_LAYER}.ffn_output",),
    "encoder.layers.{}.output_norm": (f"{_ALBERT_LAYER}.full_layer_layer_norm",),
    "pooler.dense": ("albert.pooler",),
    "mlm_head.dense": ("predictions.dense",),
    "mlm_head.layer_norm": ("predictions.LayerNorm",),
    "mlm_head": ("predictions",),
    "nsp_head.dense": ("sop_classifier.classifier",),
}
_ELECTRA_NAMES: _Names = {
    **{
        ours: tuple(name.replace("bert.", "electra.", 1) for name in names)
        for ours, names in _BERT_NAMES.items()
        if ours.startswith(("embeddings.", "encoder."))
    },
    "encoder.projection": ("electra.embeddings_project",),
    "mlm_head.dense": ("generator_predictions.dense",),
    "mlm_head.layer_norm": ("generator_predictions.LayerNorm",),
    "mlm_head": ("generator_lm_head",),
    "discriminator_head.dense": ("discriminator_predictions.dense",),
    "discriminator_head.output": ("discriminator_predictions.dense_prediction",),
}

_BERT = Architecture(
    title="BERT",
    class_name="BertForPreTraining",
    encoder="bert",
    heads=("cls.",),
    decoder="cls.predictions.decoder.weight",
    names=_BERT_NAMES,
    without=(*_MODERN_KEYS, "embedding_size", "generator_size"),
    written={"position_embedding_type": "absolute"},
    required={"is_decoder": False},
)
ARCHITECTURES = {
    "bert": _BERT,
    "modernbert": Architecture(
        title="ModernBERT",
        class_name="ModernBertForMaskedLM",
        encoder="model",
        heads=("head.", "decoder."),
        decoder="decoder.weight",
        names=_MODERN_NAMES,
        without=("type_vocab_size", "embedding_size", "generator_size"),
        renamed={
            "hidden_act": ("hidden_activation", "classifier_activation"),
            "hidden_dropout_prob": ("mlp_dropout", "embedding_dropout"),
            "attention_probs_dropout_prob": ("attention_dropout",),
            "layer_norm_eps": ("norm_eps",),
            "biases": ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"),
        },
        written={"decoder_bias": True},
        required={"tie_word_embeddings": True},
        defaults={
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "biases": False,
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
        },
        special_tokens=("pad", "cls", "sep", "bos", "eos"),
        dropouts=("mlp_dropout", "embedding_dropout", "attention_dropout", "classifier_dropout"),
    ),
    "albert": Architecture(
        title="ALBERT",
        class_name="AlbertForPreTraining",
        encoder="albert",
        heads=("predictions.", "sop_classifier."),
        decoder="predictions.decoder.weight",
        names=_ALBERT_NAMES,
        without=(*_MODERN_KEYS, "generator_size"),
        written={**_BERT.written, **_ONE_LAYER},
        required=_BERT.required,
        defaults={"hidden_act": "gelu_new", "embedding_size": 128},
        special_tokens=("pad", "cls", "sep", "bos", "eos"),
        dropouts=(*_BERT.dropouts, "classifier_dropout_prob"),
    ),
    "electra": Architecture(
        title="ELECTRA",
        class_name="ElectraForPreTraining",
        encoder="electra",
        heads=("generator_", "discriminator_"),
        decoder="generator_lm_head.weight",
        names=_ELECTRA_NAMES,
        without=_MODERN_KEYS,
        written=_BERT.written,
        required=_BERT.required,
        defaults={"embedding_size": 128},
    ),
}


def huggingface_names(name: str, architecture: str) -> list[str]:
    """Return Hugging Face's names of a parameter: three for a fused query, key and value, but one in ModernBERT.

    Those of ELECTRA's generator are names of its own folder.
    """
    module, _, leaf = re.sub(r"^generator\.", "encoder.", name).rpartition(".")
    layer = "".join(re.findall(r"\.layers\.(\d+)\.", name))
    pattern = re.sub(r"\.layers\.\d+\.", ".layers.{}.", module)
    return [f"{part.format(layer)}.{leaf}" for part in ARCHITECTURES[architecture].names[pattern]]


def expected_shapes(config: ModelConfig, vocab_size: int, num_layers: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of the embeddings and of two matrices of each layer, by Hugging Face's names."""
    hidden = config.hidden_size
    width = config.embedding_width
    shapes = {WORD_EMBEDDINGS: (vocab_size, width)}
    if not config.is_modern:
        shapes[POSITIONS] = (config.max_position_embeddings, width)
        shapes["embeddings.token_type_embeddings.weight"] = (config.type_vocab_size, width)
    for number in range(1 if config.is_albert else num_layers):
        layer = f"encoder.layers.{number}"
        shapes[f"{layer}.attention.query_key_value.weight"] = (3 * hidden, hidden)
        if config.is_modern:
            shapes[f"{layer}.wide_and_gate.weight"] = (2 * config.intermediate_size, hidden)
        else:
            shapes[f"{layer}.intermediate.weight"] = (config.intermediate_size, hidden)
    expected: dict[str, tuple[int, int]] = {}
    for name, (height, width) in shapes.items():
        parts = huggingface_names(name, config.architecture)
        expected |= dict.fromkeys(parts, (height // len(parts), width))
    return expected


def current_name(name: str, architecture: str) -> str:
    """Convert a tensor name of an older version, or of a bare encoder, to its name in the class for pretraining."""
    name = re.sub(r"\bLayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"\bLayerNorm\.beta$", "LayerNorm.bias", name)
    is_bare = re.match(r"(embeddings|embeddings_project|encoder|pooler|layers|final_norm)\.", name)
    return f"{ARCHITECTURES[architecture].encoder}.{name}" if is_bare else name


def is_own_weight(name: str, architecture: str) -> bool:
    """Return whether a tensor belongs to the encoder or the pretraining heads."""
    own = ARCHITECTURES[architecture]
    return name.startswith((f"{own.encoder}.", *own.heads))


def huggingface_settings(config: ModelConfig) -> dict[str, Any]:
    """Return the content of `config.json` that describes the network."""
    architecture = ARCHITECTURES[config.architecture]
    settings = config.model_dump(mode="json", exclude={"architecture", *architecture.without})
    if "embedding_size" in settings:
        settings["embedding_size"] = config.embedding_width
    for key, names in architecture.renamed.items():
        value = settings.pop(key)
        settings |= dict.fromkeys(names, value)
    return {**settings, **architecture.written}


def special_token_ids(tokenizer: Tokenizer, architecture: str) -> dict[str, int]:
    """Return the ids of special tokens that `config.json` must have."""
    ids = {"pad": tokenizer.pad_id, "cls": tokenizer.cls_id, "sep": tokenizer.sep_id}
    ids |= {"bos": tokenizer.cls_id, "eos": tokenizer.sep_id}
    return {f"{name}_token_id": ids[name] for name in ARCHITECTURES[architecture].special_tokens}


def model_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `ModelConfig` from the content of a `config.json`.

    Raise `ValueError` for a network that differs from those of this package.
    """
    name = str(content.get("model_type", "bert"))
    if name not in ARCHITECTURES:
        raise ValueError(f"model_type is {name[:80]!r}; only {', '.join(map(repr, ARCHITECTURES))} are supported")
    architecture = ARCHITECTURES[name]
    content = {**architecture.defaults, **content}
    if name == "modernbert":
        content = _with_our_names(content)
    for key, value in {**architecture.written, **architecture.required, "hidden_act": "gelu"}.items():
        if content.get(key, value) != value:
            raise ValueError(f"{key} is {str(content[key])[:80]!r}; only {value!r} is supported")
    keys = ModelConfig.model_fields.keys() - set(architecture.without)
    return {key: content[key] for key in keys & content.keys()} | {"architecture": name}


def _with_our_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the settings of ModernBERT, and derive those that newer versions of `transformers` write as lists."""
    settings = dict(content)
    for key, names in ARCHITECTURES["modernbert"].renamed.items():
        values = {name: content.get(name, settings.get(key)) for name in names}
        if len(set(map(str, values.values()))) > 1:
            different = ", ".join(f"{name} {value}" for name, value in values.items())
            raise ValueError(f"the network has {different}; only equal values are supported")
        settings[key] = values[names[0]]
    if isinstance(kinds := content.get("layer_types"), list):
        every = next((index for index in range(1, len(kinds)) if kinds[index] == "full_attention"), len(kinds))
        expected = ["sliding_attention" if index % every else "full_attention" for index in range(len(kinds))]
        if kinds != expected:
            raise ValueError("layer_types does not repeat one pattern that starts with full_attention")
        settings["global_attn_every_n_layers"] = every
    if isinstance(rope := content.get("rope_parameters"), dict):
        for kind, key in (("full_attention", "global_rope_theta"), ("sliding_attention", "local_rope_theta")):
            parameters = rope.get(kind) or {}
            if parameters.get("rope_type", "default") != "default":
                raise ValueError(f"rope_type is {str(parameters['rope_type'])[:80]!r}; only 'default' is supported")
            settings[key] = float(parameters.get("rope_theta", settings.get(key, 0.0)))
    return settings
