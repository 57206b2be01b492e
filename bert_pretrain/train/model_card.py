"""The `README.md` of a model folder: what the model is, its data and training, its metrics, how to load it.

In: what a run knows of itself. Out: Markdown with the metadata that the Hugging Face Hub reads. Names given by users
are escaped, and shown without the folders that they are in.
"""

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from huggingface_hub import EvalResult, ModelCardData

from bert_pretrain import __version__
from bert_pretrain.examples.examples import with_error
from bert_pretrain.io.files import is_url
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.hub import name_of_folder
from bert_pretrain.model.scale import fine_tuning_rate
from bert_pretrain.report.curves import PANELS, Metrics, image_bytes, make_figure, perplexity
from bert_pretrain.report.diagnosis import Hint
from bert_pretrain.report.render import render
from bert_pretrain.report.use import expected_use
from bert_pretrain.train.resolved import MASKING, OBJECTIVES, ResolvedRun
from bert_pretrain.train.schedule import duration, spanned_steps, warmup_steps
from bert_pretrain.train.state import Progress

CURVES = "curves.png"
_MAX_INPUTS = 20


_FIGURES = (
    ("MLM loss (nats per masked token)", "mlm_loss", "loss"),
    ("MLM perplexity", "mlm_perplexity", "perplexity"),
    ("MLM accuracy", "mlm_accuracy", "accuracy"),
    ("NSP loss (nats per pair)", "nsp_loss", "loss"),
    ("NSP accuracy", "nsp_accuracy", "accuracy"),
)
"""Title, name in an evaluation, and what the Hub calls such a figure."""
_FORMS = {"loss": ".4f", "perplexity": ",.2f", "accuracy": ".2%"}
_PAIR_TASKS = {"nsp": "next sentence prediction", "sop": "sentence order prediction", "none": ""}


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

    `validation` is the newest line of `metrics.jsonl` with held-out metrics. A card that `is_final` advises on
    fine-tuning; `has_curves` if their picture is next to it; `warning` says that nothing was learned.
    """
    data, manifest, held_out = run.data.config, run.data.manifest, run.data.rows("validation")
    train, results, name = run.config.train, _results(run, validation or {}), run.output.resolve().name
    evaluated = (validation or {}).get("validation_examples") or held_out
    loss = next((result.metric_value for result in results), None)
    inputs = [_public_name(one) for one in manifest["inputs"] if one["split"] == "train"]
    if run.length.steps is None:
        warmup = f"{train.warmup_ratio:.1%} of the time"
    else:
        warmup = f"{warmup_steps(train, spanned_steps(train, run.length.steps)):,} steps"
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
        metrics=[(result.metric_name, _shown(result, evaluated)) for result in results],
        use=None if loss is None else expected_use(loss, run.tokenizer.vocab_size, data.language),
        evaluated_step=validation["step"] if results and validation else None,
        inputs=inputs[:_MAX_INPUTS], more_inputs=max(0, len(inputs) - _MAX_INPUTS),
        is_lower_case=run.tokenizer.settings["do_lower_case"],
        machine=torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else "CPU",
        time=duration(progress.elapsed_seconds),
    )  # fmt: skip
    # A licence is for the owner of the text to name, so there is none.
    metadata = ModelCardData(
        language=data.language if re.fullmatch(r"[a-z]{2,3}", data.language) else None,
        library_name="transformers",
        pipeline_tag="fill-mask",
        tags=["bert", "fill-mask", "pretraining", "bert-pretrain"],
        model_name=name if results else None,
        eval_results=results or None,
    )
    return f"---\n{metadata}\n---\n\n{body}"


def draw_beside_card(run: Path, record: Mapping[str, Any], metrics: Metrics, folder: Path) -> bool:
    """Draw the curves of a run, whose manifest says `record`, into its model folder; return whether there is a picture.

    A missing picture must not cost the model: what prevents drawing is printed only. Where memory or the disk does not
    suffice, the error is raised, so that the same command draws it later.
    """
    try:
        picture = image_bytes(make_figure([run], [record], [metrics], PANELS))
    except MemoryError:
        raise
    except Exception as error:
        print(f"no curves in the model's card: {(str(error) or type(error).__name__).splitlines()[0]}")
        return False
    (folder / CURVES).write_bytes(picture)
    return True


def _results(run: ResolvedRun, validation: Mapping[str, Any]) -> list[EvalResult]:
    """Return the held-out metrics that have values, as the Hub reads them, the loss of masked tokens first."""
    objective, loss = run.data.config.next_sentence, validation.get("validation_mlm_loss")
    values = validation if loss is None else {**validation, "validation_mlm_perplexity": perplexity(loss)}
    return [
        EvalResult(
            task_type="fill-mask" if name.startswith("mlm") else "text-classification",
            task_name="masked language modelling" if name.startswith("mlm") else _PAIR_TASKS[objective],
            dataset_type="held-out", dataset_name="held-out documents of the training corpus",
            dataset_split="validation", metric_type=metric,
            metric_name=title.replace("NSP", objective.upper()), metric_value=values[f"validation_{name}"],
        )
        for title, name, metric in _FIGURES
        if loss is not None and values.get(f"validation_{name}") is not None
    ]  # fmt: skip


def _shown(result: EvalResult, evaluated: int) -> str:
    form = _FORMS[result.metric_type]
    if result.task_type == "text-classification" and result.metric_type == "accuracy":
        return with_error(result.metric_value, evaluated, form)
    return format(result.metric_value, form)


def _public_name(source: Mapping[str, Any]) -> str:
    """Return the name of an input without the folders of a machine; `user/name` on the Hub stays whole."""
    name = source["name"]
    if is_url(source["location"]):  # user, password and query may be secrets
        url = urlsplit(source["location"])
        name = posixpath.basename(url.path.rstrip("/")) or url.hostname or ""
    bare = name.removeprefix("dataset:")
    is_path = bare.startswith(("/", ".", "~")) or bare.count("/") > 1
    return bare.rstrip("/").rsplit("/", 1)[-1] if is_path else bare
