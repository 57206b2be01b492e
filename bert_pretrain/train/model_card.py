"""The model card (`README.md`) of a model folder: its architecture, data, training, metrics and use.

It is Markdown with metadata for the Hugging Face Hub. Names of users' files are escaped and shown without folders.
"""

import posixpath
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import torch
from huggingface_hub import EvalResult, ModelCardData

from bert_pretrain import __version__
from bert_pretrain.config import duration
from bert_pretrain.examples.examples import with_error
from bert_pretrain.io.files import is_url
from bert_pretrain.metrics import perplexity
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.hub import name_of_folder
from bert_pretrain.model.huggingface import fine_tuning_rate
from bert_pretrain.report.diagnosis import Hint
from bert_pretrain.report.render import render
from bert_pretrain.report.use import expected_use
from bert_pretrain.train.resolved import MASKING, OBJECTIVES, ResolvedRun
from bert_pretrain.train.schedule import schedule_steps, warmup_steps
from bert_pretrain.train.state import Progress

MAX_INPUTS = 20
METRICS = (  # title, name in an evaluation, type on the Hub
    ("MLM loss (nats per masked token)", "mlm_loss", "loss"),
    ("MLM perplexity", "mlm_perplexity", "perplexity"),
    ("MLM accuracy", "mlm_accuracy", "accuracy"),
    ("NSP loss (nats per pair)", "nsp_loss", "loss"),
    ("NSP accuracy", "nsp_accuracy", "accuracy"),
)


def model_card(
    run: ResolvedRun,
    progress: Progress,
    validation: Mapping[str, Any] | None,
    *,
    model: BertForPreTraining,
    is_final: bool,
    has_curves: bool = False,
    warning: Hint | None = None,
) -> str:
    """Return the card of a model.

    `validation` is the last validation line of `metrics.jsonl`. With `is_final`, the card has advice on fine-tuning.
    With `has_curves`, it shows the plot in the folder. `warning` is the hint that nothing was learned.
    """
    data, manifest, held_out = run.data.config, run.data.manifest, run.data.rows("validation")
    train, results, name = run.config.train, _results(run, validation or {}), run.output.resolve().name
    evaluated = (validation or {}).get("validation_examples") or held_out
    documents = run.data.num_documents("validation")
    loss = next((result.metric_value for result in results), None)
    inputs = [_public_name(source) for source in manifest["inputs"] if source["split"] == "train"]
    if run.length.steps is None:
        warmup = f"{train.warmup_ratio:.1%} of the time"
    else:
        warmup = f"{warmup_steps(train, schedule_steps(train, run.length.steps)):,} steps"
    body = render(
        "model_card.md",
        run=run, name=name, model=run.config.model, train=train, data=data, manifest=manifest, progress=progress,
        origin=name_of_folder(run.init_from) if run.init_from else None,
        teacher=name_of_folder(run.teacher) if run.teacher else None,
        version=__version__, torch=torch.__version__,
        objective=OBJECTIVES[data.next_sentence], masks=MASKING[data.masking], warmup=warmup,
        is_final=is_final,
        rate=f"{fine_tuning_rate(model.encoder, run.config.model.hidden_size):.0e}" if is_final else None,
        has_curves=has_curves, warning=warning, held_out=held_out, evaluated=evaluated,
        metrics=[(result.metric_name, _formatted(result, evaluated, documents)) for result in results],
        use=None if loss is None else expected_use(loss, run.tokenizer.vocab_size, data.language, data.masked_lm_prob),
        evaluated_step=validation["step"] if results and validation else None,
        inputs=inputs[:MAX_INPUTS], more_inputs=max(0, len(inputs) - MAX_INPUTS),
        is_lower_case=run.tokenizer.settings["do_lower_case"],
        machine=torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "CPU",
        time=duration(progress.elapsed_seconds),
    )  # fmt: skip
    metadata = ModelCardData(  # without a license, which depends on the text
        language=data.language if re.fullmatch(r"[a-z]{2,3}", data.language) else None,
        library_name="transformers",
        pipeline_tag="fill-mask",
        tags=["bert", "fill-mask", "pretraining", "bert-pretrain"],
        model_name=name if results else None,
        eval_results=results or None,
    )
    return f"---\n{metadata}\n---\n\n{body}"


def _results(run: ResolvedRun, validation: Mapping[str, Any]) -> list[EvalResult]:
    """Return the metrics that have values, in the format of the Hub, with the MLM loss first."""
    if (loss := validation.get("validation_mlm_loss")) is None:
        return []
    objective = run.data.config.next_sentence
    pair_task = {"nsp": "next sentence prediction", "sop": "sentence order prediction", "none": ""}[objective]
    values = {**validation, "validation_mlm_perplexity": perplexity(loss)}
    return [
        EvalResult(
            task_type="fill-mask" if name.startswith("mlm") else "text-classification",
            task_name="masked language modeling" if name.startswith("mlm") else pair_task,
            dataset_type="held-out", dataset_name="held-out documents",
            dataset_split="validation", metric_type=metric,
            metric_name=title.replace("NSP", objective.upper()), metric_value=values[f"validation_{name}"],
        )
        for title, name, metric in METRICS
        if values.get(f"validation_{name}") is not None
    ]  # fmt: skip


def _formatted(result: EvalResult, evaluated: int, documents: int | None) -> str:
    form = {"loss": ".4f", "perplexity": ",.2f", "accuracy": ".2%"}[result.metric_type]
    if result.task_type == "text-classification" and result.metric_type == "accuracy":
        return with_error(result.metric_value, evaluated, documents, form)
    return format(result.metric_value, form)


def _public_name(source: Mapping[str, Any]) -> str:
    """Return the name of an input without its folders, but keep `user/name` of a Hub dataset."""
    name = source["name"]
    if is_url(source["location"]):  # user, password and query may be secret
        url = urlsplit(source["location"])
        name = posixpath.basename(url.path.rstrip("/")) or url.hostname or ""
    bare = name.removeprefix("dataset:")
    is_path = bare.startswith(("/", ".", "~")) or bare.count("/") > 1
    return bare.rstrip("/").rsplit("/", 1)[-1] if is_path else bare
