"""Stage 3, `train`: train a BERT on a data folder and write a run folder.

The run folder holds `config.yaml`, `metrics.jsonl`, `checkpoints/step-XXXXXXXX/` and, at the end, `model/`.
`transformers` can load `model/` and every checkpoint. The same command resumes a run, or reports that it is up to date.
"""

import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bert_pretrain.config import Config, duration
from bert_pretrain.config_keys import dump_yaml
from bert_pretrain.errors import DataError
from bert_pretrain.io.files import atomic_folder, write_text
from bert_pretrain.metrics import read_metrics, value_of
from bert_pretrain.model.architectures import huggingface_names
from bert_pretrain.model.bert import BertForPreTraining, ElectraForPreTraining, make_network
from bert_pretrain.model.folder import CARD, GENERATOR
from bert_pretrain.model.huggingface import (
    export_weights,
    load_model,
    load_weights,
    save_generator,
    save_model_folder,
)
from bert_pretrain.report.curves import draw_curves
from bert_pretrain.report.diagnosis import nothing_learned, too_large
from bert_pretrain.train import distributed, hardware
from bert_pretrain.train.checkpoint import Checkpoint, carry_over, restore
from bert_pretrain.train.distillation import DistillationLoss
from bert_pretrain.train.electra import losses_of
from bert_pretrain.train.evaluation import MLM_WEIGHTS
from bert_pretrain.train.initial_weights import (
    start_from_cooccurrences,
    start_from_teacher,
    start_positional_heads,
    unigram_bias,
)
from bert_pretrain.train.inputs import TEACHER, check_inputs
from bert_pretrain.train.loader import TrainingData
from bert_pretrain.train.log import RunLog
from bert_pretrain.train.loop import Loop
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.model_card import model_card
from bert_pretrain.train.optimizers import make_optimizers
from bert_pretrain.train.resolved import ResolvedRun, describe, describe_resume, find_progress, resolve_run
from bert_pretrain.train.rotary_weights import start_rotary
from bert_pretrain.train.sampled_softmax import CandidateSampler
from bert_pretrain.train.schedule import too_long
from bert_pretrain.train.signals import remove_status, write_status
from bert_pretrain.train.state import LossScale, TrainState


def train(
    config: Config,
    data: Path,
    output: Path,
    *,
    init_from: Path | None = None,
    carry_optimizer: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Path:
    """Train a BERT and return the path of the final model folder.

    Under `torchrun`, each process calls this. `init_from` is any BERT folder. With `carry_optimizer`, `init_from` must
    be a checkpoint of this package; training continues from its step and optimizer state. `dry_run` only prints the
    settings and the time. Stop signals save a checkpoint and raise `Interrupted`.
    """
    dist_context = distributed.init_distributed(config.train.device)
    with dist_context.only_main_prints(), contextlib.ExitStack() as locks:
        if config.phases:
            print("the section 'phases' is only for 'bert-pretrain run'; 'train' uses the section 'train'")
            config = config.model_copy(update={"phases": ()})
        start: dict[str, Any] = {"init_from": init_from, "carry_optimizer": carry_optimizer}
        config, folder = check_inputs(
            config,
            data,
            output,
            **start,
            overwrite=overwrite,
        )
        run = resolve_run(
            config,
            folder,
            output,
            dist_context,
            **start,
        )
        if run.device.type == "cuda":
            torch.cuda.set_device(run.device)

        def claim() -> tuple[bool, Checkpoint | None]:
            if dry_run:
                folder_state = run.folder.would_be(overwrite=overwrite)
            else:
                folder_state = locks.enter_context(run.folder.open(overwrite=overwrite))
            return find_progress(run, folder_state, changes=not dry_run)

        is_done, latest = dist_context.run_on_main(claim)
        if is_done:
            return output / "model"
        if dry_run:
            _dry_run(run, latest)
        else:
            dist_context.run_on_main(lambda: remove_status(output))
            _train(run, latest)
            dist_context.run_on_main(lambda: write_status(output, 0))
    return output / "model"


def _train(run: ResolvedRun, latest: Checkpoint | None) -> None:
    """Train to the end and write the final model and manifest."""
    state = _prepare(run, latest)
    data = _training_data(run, state)
    is_main = run.dist_context.is_main
    record = _manifest_record(run)
    if is_main:
        write_text(run.output / "config.yaml", dump_yaml(run.config))
        run.folder.add(record)
    metrics_end = None if latest is None else latest.record["metrics"]
    with contextlib.closing(RunLog(run, state.progress, record if is_main else None, metrics_end)) as log:
        loop = Loop(
            run,
            state,
            data,
            log,
            is_start=latest is None,
        )
        try:
            loop.fit()
        except Exception:  # let the thread finish the checkpoint that it is writing
            with contextlib.suppress(Exception):
                loop.checkpoints.wait()
            raise
        if is_main:
            _finish(run, state, log, record)


def _dry_run(run: ResolvedRun, latest: Checkpoint | None) -> None:
    """Print the plan of the run and how long it would take."""
    state = _prepare(run, latest)
    silent = RunLog(run, state.progress)
    step_seconds = Loop(
        run,
        state,
        _training_data(run, state),
        silent,
        is_start=latest is None,
    ).time_steps()
    if run.length.steps is None:
        seconds = run.length.seconds or 0.0
        steps_left = int(max(seconds - state.progress.wall_seconds, 0.0) / step_seconds)
    else:
        steps_left = run.length.steps - state.progress.step
        seconds = steps_left * step_seconds
    print(
        f"time       {duration(seconds)} for {steps_left:,} steps of {step_seconds:.3g} s, without evaluations and "
        f"checkpoints; nothing was written (--dry-run){too_long(seconds)}"
    )


def _prepare(run: ResolvedRun, latest: Checkpoint | None) -> TrainState:
    """Print the settings of the run and return its initial or restored state."""
    begin = time.perf_counter()
    model = _make_model(run, latest)
    print(describe(run))
    tokens = run.data.manifest["corpus"]["tokens"]
    num_weights = sum(weight.numel() for weight in model.encoder.parameters() if weight.dim() > 1)
    if run.init_from is None and (hint := too_large(num_weights, tokens)):
        print(hint)
    losses = _make_losses(run, model)
    if run.compiled:
        hardware.compile_layers(model)
    network = distributed.parallelize(losses, run.dist_context)
    loss_scale = LossScale.start(run.device) if run.precision.name == "fp16" else None
    state = TrainState(model, network, make_optimizers(model, run.config.train), loss_scale)
    if latest is not None:
        restore(state, latest)
        print(describe_resume(latest, run))
        return state
    if run.carried is not None:
        carry_over(state, run.carried, run.data.content_hash)
    # All ranks need the same value.
    state.progress.wall_seconds = run.dist_context.run_on_main(lambda: time.perf_counter() - begin)
    return state


def _make_model(run: ResolvedRun, latest: Checkpoint | None) -> BertForPreTraining:
    """Build the model, with weights from the checkpoint or `--init-from`, or with new weights."""
    train = run.config.train
    model = make_network(
        run.config.model,
        run.tokenizer.vocab_size,
        run.attention,
        checkpointing=train.activation_checkpointing,
    )
    if latest is not None:
        load_weights(model, latest.path, flag="checkpoint", seed=train.seed)
    elif run.init_from is not None:
        _load_weights(model, run, run.init_from)
    else:
        _initialize(model, run)
    if run.data.config.next_sentence == "none":
        model.freeze_pair_heads()
    return model.to(run.device)


def _make_losses(run: ResolvedRun, model: BertForPreTraining) -> PretrainingLoss:
    train = run.config.train
    if run.teacher is None or not train.distillation:
        return losses_of(model, train, compiled=run.compiled)
    teacher = load_model(
        run.teacher,
        attention=train.attention,
        device=run.device,
        dtype=run.precision.dtype,
        required=MLM_WEIGHTS,
        flag=TEACHER,
    ).model
    losses = DistillationLoss(model, teacher, compiled=run.compiled)
    compared = "and hidden states" if losses.compares_hidden else "(hidden states have another width)"
    print(f"teacher    {run.teacher}, compared in the loss: distributions {compared}")
    return losses


def _load_weights(model: BertForPreTraining, run: ResolvedRun, folder: Path) -> None:
    """Load the weights of `--init-from`, and print what is new and what is not used."""
    extension = run.extension
    fresh, unused = load_weights(
        model,
        folder,
        flag="--init-from",
        seed=run.config.train.seed,
        extension=extension,
    )
    note = "; the teacher is not used" if run.teacher and not run.config.train.distillation else ""
    print(f"weights from {folder}{note}")
    if extension is not None and extension.pieces:
        text = "tokens to the model's; each new embedding starts as the mean of the token's old pieces"
        print(f"the vocabulary of the data adds {len(extension.pieces):,} {text}")
    if fresh:
        names = [part for name in fresh for part in huggingface_names(name, model.config.architecture)]
        print(f"  missing, initialized from the seed: {', '.join(names)}")
    if unused:
        print(f"  present, but not used: {', '.join(unused)}")


def _initialize(model: BertForPreTraining, run: ResolvedRun) -> None:
    """Set the initial weights of a run that starts from no other weights than a teacher's."""
    train = run.config.train
    model.initialize(train.seed)
    # The heads would not match a teacher's embeddings. Only the main process counts: DDP copies its weights to all.
    if model.config.is_modern and train.init != "normal" and run.teacher is None and run.dist_context.is_main:
        counted = train.init == "cooccurrences"
        num_vectors = start_rotary(
            model,
            run.data,
            run.tokenizer,
            train.seed,
            with_cooccurrences=counted,
        )
        print(f"initial weights from the co-occurrences of {num_vectors:,} tokens")
    elif train.init == "cooccurrences" and run.teacher is None and run.dist_context.is_main:
        num_vectors = start_from_cooccurrences(model, run.data, run.tokenizer, train.seed)
        print(f"initial weights from the co-occurrences of {num_vectors:,} tokens")
    elif train.init != "normal":
        start_positional_heads(model, train.seed)
    if train.mlm_bias == "unigram":
        model.mlm_head.bias.data.copy_(unigram_bias(run.data, run.tokenizer))
    if run.teacher is not None:
        teacher = load_model(run.teacher, required=MLM_WEIGHTS, flag=TEACHER).model
        print(f"initial weights from the teacher {run.teacher}: {start_from_teacher(model, teacher)}")


def _manifest_record(run: ResolvedRun) -> dict[str, Any]:
    """Return the manifest entries that are known at the start. `Diagnosis` needs them for its hints."""
    data = run.data
    entropies = {name: value_of(split, "statistics.unigram_entropy") for name, split in data.manifest["splits"].items()}
    return {
        "length": asdict(run.length),
        "data": {
            "path": str(data.path),
            "content_hash": data.content_hash,
            "statistics": {
                "next_sentence": data.config.next_sentence,
                "vocab_size": run.tokenizer.vocab_size,
                "language": data.config.language,
                "masked_lm_prob": data.config.masked_lm_prob,
                "held_out": data.rows("validation"),
                "unigram_entropy": entropies,
            },
        },
        "config": run.config.model_dump(mode="json"),
    }


def _training_data(run: ResolvedRun, state: TrainState) -> TrainingData:
    train = run.config.train
    progress = state.progress
    sampler = None
    if run.samples_softmax:
        frequencies = unigram_bias(run.data, run.tokenizer).exp().numpy()
        sampler = CandidateSampler(frequencies, train.softmax_candidates, train.seed)
    return TrainingData(
        run.data,
        seed=train.seed,
        global_batch_size=train.global_batch_size,
        micro_batch_tokens=run.micro_batch_tokens,
        offset=progress.examples - progress.examples_before - progress.step * train.global_batch_size,
        dist_context=run.dist_context,
        static_shapes=run.compiled,
        sampler=sampler,
        with_pairs=run.config.model.has_pair_heads,
        with_draws=run.config.model.is_electra,
    )


def _finish(
    run: ResolvedRun,
    state: TrainState,
    log: RunLog,
    record: dict[str, Any],
) -> None:
    """Write the final model and then the manifest with the final metrics."""
    try:
        metrics = read_metrics(run.output)
    except DataError as error:  # damaged metrics must not prevent writing the model
        print(f"the final loss was not checked: {error}")
        metrics = []
    warning = nothing_learned(record, metrics)
    validation = log.newest.get("validation")
    parameters = {name: parameter.detach() for name, parameter in state.model.named_parameters()}
    exported = export_weights(parameters, run.config.model.architecture)
    pretraining = run.pretraining(state.progress.tokens)
    if isinstance(state.model, ElectraForPreTraining):
        with atomic_folder(run.output / GENERATOR) as temporary:
            save_generator(
                exported,
                state.model,
                temporary,
                run.tokenizer,
                pretraining,
            )
    with atomic_folder(run.output / "model") as temporary:
        save_model_folder(
            exported.weights,
            state.model,
            temporary,
            run.tokenizer,
            pretraining,
        )
        has_curves = draw_curves([run.output], temporary / "curves.png")
        card = model_card(
            run,
            state,
            validation,
            is_final=True,
            has_curves=has_curves,
            warning=warning,
        )
        write_text(temporary / CARD, card)
    body = {
        **record,
        "progress": asdict(state.progress),
        "metrics": log.position,
        "training": log.newest.get("training"),
        "validation": validation,
        "parameters": state.model.num_parameters,
        "device": str(run.device),
        "torch": torch.__version__,
    }
    run.folder.publish(body)
    print(f"the model is {run.output / 'model'}")
    if warning is not None:
        print(warning)
