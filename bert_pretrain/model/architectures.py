"""Hugging Face's names of weights and settings, for each architecture.

Our networks have the same names of parameters where they have the same part. BERT's fused matrix of query, key and
value is three matrices in Hugging Face's format; ModernBERT's is fused there, too.
"""

import re
from collections.abc import Mapping
from typing import Any

from bert_pretrain.config import ModelConfig
from bert_pretrain.text.tokenizer import Tokenizer

WORD_EMBEDDINGS = "embeddings.word_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"
OUTPUT_BIAS = "mlm_head.bias"
DECODERS = {  # tied to the word embeddings
    "bert": "cls.predictions.decoder.weight",
    "modernbert": "decoder.weight",
    "albert": "predictions.decoder.weight",
    "electra": "generator_lm_head.weight",
}

CLASSES = {  # of `transformers`
    "bert": "BertForPreTraining",
    "modernbert": "ModernBertForMaskedLM",
    "albert": "AlbertForPreTraining",
    "electra": "ElectraForPreTraining",
}
GENERATOR_CLASS = "ElectraForMaskedLM"
GENERATOR_PARTS = ("generator.", "mlm_head.")  # of the parameters of an ELECTRA in training
_ALBERT_LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.{}"

# Module names: ours -> Hugging Face's. {} is the number of the layer.
_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "bert": {
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
    },
    "modernbert": {
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
    },
    "albert": {
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
    },
}
_NAMES["electra"] = {
    **{
        ours: tuple(name.replace("bert.", "electra.", 1) for name in names)
        for ours, names in _NAMES["bert"].items()
        if ours.startswith(("embeddings.", "encoder."))
    },
    "encoder.projection": ("electra.embeddings_project",),
    "mlm_head.dense": ("generator_predictions.dense",),
    "mlm_head.layer_norm": ("generator_predictions.LayerNorm",),
    "mlm_head": ("generator_lm_head",),
    "discriminator_head.dense": ("discriminator_predictions.dense",),
    "discriminator_head.output": ("discriminator_predictions.dense_prediction",),
}
_PREFIXES = {
    "bert": ("bert.", "cls."),
    "modernbert": ("model.", "head.", "decoder."),
    "albert": ("albert.", "predictions.", "sop_classifier."),
    "electra": ("electra.", "generator_", "discriminator_"),
}
# Settings of `ModelConfig` with another name in ModernBERT's configuration; the first name is read.
_MODERN_SETTINGS = {
    "hidden_act": ("hidden_activation", "classifier_activation"),
    "hidden_dropout_prob": ("mlp_dropout", "embedding_dropout"),
    "attention_probs_dropout_prob": ("attention_dropout",),
    "layer_norm_eps": ("norm_eps",),
    "biases": ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"),
}
# Settings of `transformers` for dropout in fine-tuning.
DROPOUTS = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "modernbert": ("mlp_dropout", "embedding_dropout", "attention_dropout", "classifier_dropout"),
    "albert": ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"),
    "electra": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}
_BERT_ONLY = ("type_vocab_size",)
_MODERN_ONLY = ("biases", "global_attn_every_n_layers", "local_attention", "global_rope_theta", "local_rope_theta")
_ONE_LAYER = {"num_hidden_groups": 1, "inner_group_num": 1}  # ALBERT's numbers of layers with their own weights


def huggingface_names(name: str, architecture: str) -> list[str]:
    """Return Hugging Face's names of a parameter: three for a fused query, key and value, but one in ModernBERT.

    Those of ELECTRA's generator are names of its own folder.
    """
    module, _, leaf = re.sub(r"^generator\.", "encoder.", name).rpartition(".")
    layer = "".join(re.findall(r"\.layers\.(\d+)\.", name))
    pattern = re.sub(r"\.layers\.\d+\.", ".layers.{}.", module)
    return [f"{part.format(layer)}.{leaf}" for part in _NAMES[architecture][pattern]]


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
    if architecture == "modernbert":
        return f"model.{name}" if re.match(r"(embeddings|layers|final_norm)\.", name) else name
    name = re.sub(r"\bLayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"\bLayerNorm\.beta$", "LayerNorm.bias", name)
    is_bare = re.match(r"(embeddings|embeddings_project|encoder|pooler)\.", name)
    return f"{architecture}.{name}" if is_bare else name


def is_own_weight(name: str, architecture: str) -> bool:
    """Return whether a tensor belongs to the encoder or the pretraining heads."""
    return name.startswith(_PREFIXES[architecture])


def huggingface_settings(config: ModelConfig) -> dict[str, Any]:
    """Return the content of `config.json` that describes the network."""
    settings = config.model_dump(mode="json", exclude={"architecture", "embedding_size", "generator_size"})
    if config.is_albert:
        settings |= {"embedding_size": config.embedding_width, **_ONE_LAYER}
    elif config.is_electra:
        settings |= {"embedding_size": config.embedding_width, "generator_size": config.generator_size}
    if not config.is_modern:
        for key in _MODERN_ONLY:
            del settings[key]
        return {**settings, "position_embedding_type": "absolute"}
    for key in _BERT_ONLY:
        del settings[key]
    for key, names in _MODERN_SETTINGS.items():
        value = settings.pop(key)
        settings |= dict.fromkeys(names, value)
    return {**settings, "decoder_bias": True}


def special_token_ids(tokenizer: Tokenizer, architecture: str) -> dict[str, int]:
    """Return the ids of special tokens that `config.json` must have, because the defaults are of another vocabulary."""
    if architecture in ("bert", "electra"):
        return {"pad_token_id": tokenizer.pad_id}
    return {
        "pad_token_id": tokenizer.pad_id,
        "cls_token_id": tokenizer.cls_id,
        "sep_token_id": tokenizer.sep_id,
        "bos_token_id": tokenizer.cls_id,
        "eos_token_id": tokenizer.sep_id,
    }


def model_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `ModelConfig` from the content of a `config.json`.

    Raise `ValueError` for a network that differs from those of this package.
    """
    architecture = content.get("model_type", "bert")
    required = {"model_type": "bert", "position_embedding_type": "absolute", "is_decoder": False}
    if architecture == "modernbert":
        required = {"model_type": "modernbert", "decoder_bias": True, "tie_word_embeddings": True}
        content = _with_our_names(content)
    elif architecture == "albert":
        required |= {"model_type": "albert", **_ONE_LAYER}
        content = {"hidden_act": "gelu_new", "embedding_size": 128, **content}
    elif architecture == "electra":
        required |= {"model_type": "electra"}
        content = {"embedding_size": 128, **content}
    for key, value in {**required, "hidden_act": "gelu"}.items():
        if content.get(key, value) != value:
            raise ValueError(f"{key} is {str(content[key])[:80]!r}; only {value!r} is supported")
    settings = {key: content[key] for key in ModelConfig.model_fields if key in content}
    if architecture not in ("albert", "electra"):
        settings.pop("embedding_size", None)
    return {**settings, "architecture": architecture}


def _with_our_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the settings of ModernBERT, and derive those that newer versions of `transformers` write as lists."""
    defaults = {"hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "biases": False}
    settings = {**defaults, "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, **content}
    for key, names in _MODERN_SETTINGS.items():
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
