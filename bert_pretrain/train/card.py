"""The `README.md` of a model folder: what the model is, what it learnt from and how, how well it does, how to load it.

In: what a run knows of itself. Out: Markdown with the metadata that the Hugging Face Hub reads. Names that a person
gave are written so that they cannot become markup, and without the folders they lie in.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from bert_pretrain import __version__
from bert_pretrain.config import Config
from bert_pretrain.curves import draw_curves
from bert_pretrain.shards import DataFolder
from bert_pretrain.tokenizer import Tokenizer
from bert_pretrain.train.metrics import perplexity
from bert_pretrain.train.schedule import duration, spanned_steps, warmup_steps
from bert_pretrain.train.setting import MASKING, OBJECTIVES, Setting
from bert_pretrain.train.state import Progress

CURVES = "curves.png"
_MOST_INPUTS = 20

# (what it says, its name in a line of metrics, what the Hub calls such a figure, how it is written)
_FIGURES = (
    ("MLM loss (nats a masked token)", "validation_mlm_loss", "loss", "{:.4f}"),
    ("MLM perplexity", "validation_mlm_perplexity", "perplexity", "{:,.2f}"),
    ("MLM accuracy", "validation_mlm_accuracy", "accuracy", "{:.2%}"),
)
_PAIR_FIGURES = (
    ("NSP loss (nats a pair)", "validation_nsp_loss", "loss", "{:.4f}"),
    ("NSP accuracy", "validation_nsp_accuracy", "accuracy", "{:.2%}"),
)
_SECOND_TASK = {"nsp": "next sentence prediction", "sop": "sentence order prediction"}


@dataclass(frozen=True)
class About:
    """What all cards of one run say."""

    name: str
    config: Config
    folder: DataFolder
    tokenizer: Tokenizer
    setting: Setting
    num_parameters: int
    origin: str | None
    """The name of the model whose weights it began with, None if they were drawn."""


def model_card(
    about: About, progress: Progress, validation: Mapping[str, Any] | None, *, is_final: bool, has_curves: bool = False
) -> str:
    """Return the card of a model.

    Args:
        about: the run.
        progress: how far it is.
        validation: the newest line of `metrics.jsonl` with held-out figures, if there is one.
        is_final: whether the run ends here.
        has_curves: whether the picture of its curves lies beside the card.
    """
    figures = _with_perplexity(validation)
    sections = [
        f"# {_escaped(about.name)}\n\n{_summary(about, progress, is_final=is_final)}",
        f"## Use\n\n{_USE}",
        f"## Figures\n\n{_figures(about, figures, is_final=is_final, has_curves=has_curves)}",
        f"## Data\n\n{_data(about)}",
        f"## Training\n\n{_training(about, progress)}",
        f"## Limits\n\n{_limits(about)}",
    ]
    metadata = yaml.safe_dump(_metadata(about, figures), sort_keys=False, allow_unicode=True)
    return f"---\n{metadata}---\n\n" + "\n\n".join(sections) + "\n"


def draw_beside_card(run: Path, folder: Path) -> bool:
    """Draw the curves of a run into its model folder; says whether there is a picture now.

    A picture is not worth a model: whatever prevents it is told, and no more.
    """
    try:
        draw_curves([run], folder / CURVES)
    except Exception as error:
        print(f"no curves in the model's card: {(str(error) or type(error).__name__).splitlines()[0]}")
        return False
    return True


_USE = """```python
from transformers import AutoModelForPreTraining, AutoTokenizer
model = AutoModelForPreTraining.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

`AutoModel`, `AutoModelForMaskedLM` and the classes for fine-tuning open it in the same way, and so do the commands of
`bert-pretrain`:

```bash
bert-pretrain fill-mask path/to/this/folder "Text with a [MASK] in it."
bert-pretrain evaluate path/to/this/folder --data path/to/data
```"""


def _summary(about: About, progress: Progress, *, is_final: bool) -> str:
    model, config = about.config.model, about.folder.config
    begun = f"beginning with the weights of {_escaped(about.origin)}" if about.origin else "from random weights"
    text = (
        f"A BERT of {model.num_hidden_layers} layers, hidden size {model.hidden_size}, "
        f"{model.num_attention_heads} heads and {about.num_parameters:,} parameters, pretrained {begun} by "
        f"bert-pretrain {__version__}. Objective: {OBJECTIVES[config.next_sentence]}."
    )
    return text if is_final else f"{text}\n\nThis is the checkpoint of step {progress.step:,}."


def _figures(about: About, figures: Mapping[str, Any] | None, *, is_final: bool, has_curves: bool) -> str:
    if figures is None:
        is_held_out = about.folder.rows("validation")
        text = "Not evaluated yet." if is_held_out else "Nothing was held out, so there are no figures."
    else:
        rows = [(what, form.format(figures[name])) for what, name, _, form in _figures_of(about, figures)]
        text = (
            f"On the {about.folder.rows('validation'):,} held-out examples, with the masks stored there, after step "
            f"{figures['step']:,}:\n\n{_table(('figure', 'value'), rows)}"
        )
    if has_curves:
        return f"{text}\n\n![losses and accuracies, in training and held out]({CURVES})"
    if is_final:
        how = "`bert-pretrain report RUN_FOLDER --output curves.png` (with the extra `[plot]`)"
        return f"{text}\n\nThe curves are drawn by {how}."
    return text


def _figures_of(about: About, figures: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return those figures that there are, as `_FIGURES` has them; NSP is SOP where sentence order was asked for."""
    name = "SOP" if about.folder.config.next_sentence == "sop" else "NSP"
    return [
        (what.replace("NSP", name), key, metric, form)
        for what, key, metric, form in (*_FIGURES, *_PAIR_FIGURES)
        if figures.get(key) is not None
    ]


def _data(about: About) -> str:
    manifest, config = about.folder.manifest, about.folder.config
    rows = [("vocabulary", f"{about.tokenizer.vocab_size:,} WordPiece tokens, {_casing(about.tokenizer)}")]
    corpus = manifest.get("corpus")
    if corpus:
        rows += [(name, f"{corpus[name]:,}") for name in ("documents", "sentences", "tokens")]
        rows.append(("[UNK] among the tokens", f"{corpus['unk_share']:.3%}"))
    for split, what in (("train", "training examples"), ("validation", "held-out examples")):
        if about.folder.rows(split):
            rows.append((what, f"{about.folder.rows(split):,}"))
    statistics = manifest["splits"]["train"].get("statistics", {})
    if "mean_length_tokens" in statistics:
        rows.append(("tokens of an example, on average", f"{statistics['mean_length_tokens']:.1f}"))
    whole = f", whole words{f' by {config.word_segmenter}' if config.word_segmenter else ''}" * config.whole_word_mask
    rows += [
        ("tokens of an example, at most", f"{config.max_seq_length:,}"),
        ("copies of the corpus", f"{config.dupe_factor}"),
        ("masked", f"{config.masked_lm_prob:.0%} of the tokens{whole}, masks {MASKING[config.masking]}"),
        ("language of the sentence rules", config.language),
    ]
    table = _table(("", ""), rows)
    inputs = [_public_name(one["name"]) for one in manifest.get("inputs", ()) if one.get("split") != "validation"]
    if not inputs:
        return table
    more = f" and {len(inputs) - _MOST_INPUTS:,} more" if len(inputs) > _MOST_INPUTS else ""
    return f"{table}\n\nInputs: {', '.join(map(_escaped, inputs[:_MOST_INPUTS]))}{more}."


def _casing(tokenizer: Tokenizer) -> str:
    return "lower case" if tokenizer.settings["do_lower_case"] else "cased"


def _training(about: About, progress: Progress) -> str:
    train, setting = about.config.train, about.setting
    device = setting.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    if setting.length.steps is None and train.warmup_steps is None:
        warmup = f"{train.warmup_ratio:.1%} of the time"
    else:
        spanned = spanned_steps(train, setting.length.steps or progress.step)
        warmup = f"{warmup_steps(train, spanned):,} steps"
    rows = [
        ("steps", f"{progress.step:,}"),
        ("examples and tokens seen", f"{progress.examples:,} and {progress.tokens:,}"),
        ("global batch", f"{train.global_batch_size:,} examples"),
        ("optimizer", f"{train.optimizer}, betas {train.betas[0]:g} and {train.betas[1]:g}, epsilon {train.eps:g}"),
        ("peak learning rate", f"{train.peak_lr:g}"),
        ("schedule", f"{train.schedule}, warm-up {warmup}"),
        ("weight decay", f"{train.weight_decay:g}"),
        ("longest gradient", f"{train.max_grad_norm:g}"),
        ("dropout", f"{about.config.model.hidden_dropout_prob:g}"),
        ("dropout of attention", f"{about.config.model.attention_probs_dropout_prob:g}"),
        ("precision", f"{setting.precision.name} products, fp32 weights"),
        ("seed", f"{train.seed}"),
        ("hardware", f"{setting.team.size} × {machine}"),
        ("time in training steps", duration(progress.elapsed_seconds)),
        ("torch", torch.__version__),
    ]
    return _table(("", ""), rows)


def _limits(about: About) -> str:
    trained, positions = about.folder.max_seq_length, about.config.model.max_position_embeddings
    limits = [
        "It fills blanks and gives features; for a task it has to be fine-tuned. It does not write text.",
        "It knows what its data says, with the errors and prejudices that stand there.",
    ]
    if trained < positions:
        limits.append(
            f"Examples had at most {trained:,} tokens: this run has not trained the positions from {trained:,} to "
            f"{positions - 1:,}."
        )
    if about.folder.config.next_sentence == "none":
        limits.append("Pooler and next-sentence head are untrained.")
    if about.tokenizer.settings["do_lower_case"]:
        limits.append("Its vocabulary is in lower case: it does not see capitals.")
    return "\n".join(f"* {limit}" for limit in limits)


def _metadata(about: About, figures: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what the Hub reads; a licence is for the owner of the text to name, so there is none."""
    language = about.folder.config.language
    known = {"language": language} if re.fullmatch(r"[a-z]{2,3}", language) else {}
    metadata = {
        **known,
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["bert", "fill-mask", "pretraining", "bert-pretrain"],
    }
    results = [] if figures is None else list(_results(about, figures))
    return {**metadata, "model-index": [{"name": about.name, "results": results}]} if results else metadata


def _results(about: About, figures: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    dataset = {"type": "held-out", "name": "held-out documents of the training corpus", "split": "validation"}
    second = _SECOND_TASK.get(about.folder.config.next_sentence, "")
    for kind, name, names in (
        ("fill-mask", "masked language modelling", {each[1] for each in _FIGURES}),
        ("text-classification", second, {each[1] for each in _PAIR_FIGURES}),
    ):
        metrics = [
            {"type": metric, "name": what, "value": figures[key]}
            for what, key, metric, _ in _figures_of(about, figures)
            if key in names
        ]
        if metrics:
            yield {"task": {"type": kind, "name": name}, "dataset": dict(dataset), "metrics": metrics}


def _with_perplexity(validation: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if validation is None or validation.get("validation_mlm_loss") is None:
        return None
    return {**validation, "validation_mlm_perplexity": perplexity(validation["validation_mlm_loss"])}


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([_escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _public_name(name: str) -> str:
    """Return the name of an input without the folders of a machine; `user/name` on the Hub stays whole."""
    bare = name.removeprefix("dataset:")
    is_path = bare.startswith(("/", ".", "~")) or bare.count("/") > 1
    return bare.rstrip("/").rsplit("/", 1)[-1] if is_path else bare


def _escaped(text: str) -> str:
    """Return text that Markdown shows as it is, in a table too."""
    return re.sub(r"([\\`*_\[\]<>|#~$&])", r"\\\1", " ".join(text.split()))
