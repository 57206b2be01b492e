"""The model card (`README.md`) of a model folder: its architecture, data, training, metrics and use.

It is Markdown with metadata for the Hugging Face Hub. Names of users' files are escaped and shown without folders.
"""

import posixpath
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import torch
from huggingface_hub import ModelCardData

from bert_pretrain import __version__
from bert_pretrain.config import duration
from bert_pretrain.examples.examples import with_error
from bert_pretrain.io.files import is_url
from bert_pretrain.metrics import perplexity
from bert_pretrain.model.architectures import ARCHITECTURES
from bert_pretrain.model.hub import name_of_folder
from bert_pretrain.model.huggingface import fine_tuning_rate
from bert_pretrain.report.diagnosis import Hint
from bert_pretrain.report.render import render
from bert_pretrain.report.use import expected_use
from bert_pretrain.train.resolved import MASKING, ResolvedRun
from bert_pretrain.train.state import TrainState

METRICS = (  # title, name, format
    ("MLM loss (nats per masked token)", "validation_mlm_loss", ".4f"),
    ("MLM perplexity", "perplexity", ",.2f"),
    ("MLM accuracy", "validation_mlm_accuracy", ".2%"),
    ("NSP loss (nats per pair)", "validation_nsp_loss", ".4f"),
    ("NSP accuracy", "validation_nsp_accuracy", ".2%"),
    ("loss of the discriminator (nats per token)", "validation_discriminator_loss", ".4f"),
    ("replaced tokens found", "validation_replaced_found", ".2%"),
    ("original tokens taken for replaced", "validation_originals_flagged", ".2%"),
)


def model_card(
    run: ResolvedRun,
    state: TrainState,
    validation: Mapping[str, Any] | None,
    *,
    is_final: bool = False,
    has_curves: bool = False,
    warning: Hint | None = None,
) -> str:
    """Return the card of a model.

    `validation` is the last validation line of `metrics.jsonl`. With `is_final`, the card has advice on fine-tuning.
    With `has_curves`, it shows the plot in the folder. `warning` is the hint that nothing was learned.
    """
    data = run.data.config
    line = dict(validation or {})
    loss = line.get("validation_mlm_loss")
    use = None
    if loss is not None:
        line["perplexity"] = perplexity(loss)
        if not run.config.model.is_electra:  # the loss of a small generator
            use = expected_use(loss, run.tokenizer.vocab_size, data.language, data.masked_lm_prob)
    body = render(
        "model_card.md",
        run=run,
        architecture=ARCHITECTURES[run.config.model.architecture],
        progress=state.progress,
        name=run.output.resolve().name,
        version=__version__,
        torch=torch.__version__,
        origin=name_of_folder(run.init_from) if run.init_from else None,
        teacher=name_of_folder(run.teacher) if run.teacher else None,
        objective=run.objective,
        masks=MASKING[data.masking],
        rate=f"{fine_tuning_rate(state.model.encoder, run.config.model.hidden_size):.0e}" if is_final else None,
        is_final=is_final,
        has_curves=has_curves,
        warning=warning,
        line=line,
        metrics=_metrics(run, line),
        use=use,
        inputs=[_public_name(source) for source in run.data.manifest["inputs"] if source["split"] == "train"],
        machine=torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "CPU",
        time=duration(state.progress.elapsed_seconds),
    )
    use_tag = "feature-extraction" if run.config.model.is_electra else "fill-mask"
    metadata = ModelCardData(  # without a license, which depends on the text
        language=data.language if re.fullmatch(r"[a-z]{2,3}", data.language) else None,
        library_name="transformers",
        pipeline_tag=use_tag,
        tags=["bert", use_tag, "pretraining", "bert-pretrain"],
    )
    return f"---\n{metadata}\n---\n\n{body}"


def _metrics(run: ResolvedRun, line: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the titles and texts of the metrics that have values."""
    rows = []
    for title, name, form in METRICS:
        value = line.get(name)
        if value is None:
            continue
        text = format(value, form)
        if name == "validation_nsp_accuracy":
            examples = line.get("validation_examples") or run.data.rows("validation")
            text = with_error(value, examples, run.data.num_documents("validation"), form)
        rows.append((title.replace("NSP", run.data.config.next_sentence.upper()), text))
    return rows


def _public_name(source: Mapping[str, Any]) -> str:
    """Return the name of an input without its folders, but keep `user/name` of a Hub dataset."""
    if is_url(source["location"]):  # user, password and query may be secret
        url = urlsplit(source["location"])
        return posixpath.basename(url.path.rstrip("/")) or url.hostname or ""
    name: str = source["name"].removeprefix("dataset:")
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return posixpath.basename(name.rstrip("/")) if is_path else name
