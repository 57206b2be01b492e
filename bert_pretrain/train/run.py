"""Stage 3, `train`: a data folder in, a run folder out.

The run folder holds `config.yaml`, `metrics.jsonl`, `checkpoints/step-XXXXXXXX/` and, at the end, `model/`; every
checkpoint and `model/` open in `transformers` as they are. The same command again continues or finds it done.
"""

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bert_pretrain import manifest
from bert_pretrain.config import Config, dump_yaml
from bert_pretrain.files import atomic_folder, exclusive, write_text
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import CARD, load_weights, save_tensors, to_huggingface
from bert_pretrain.shards import DataFolder
from bert_pretrain.tokenizer import Tokenizer
from bert_pretrain.train import distributed, flops, hardware, replay
from bert_pretrain.train.batches import GlobalBatch, TrainingData, evaluation_batches
from bert_pretrain.train.card import About, draw_beside_card, model_card
from bert_pretrain.train.checkpoint import Checkpoint, CheckpointWriter, carry_over, restore, take_snapshot
from bert_pretrain.train.continuing import checkpoint_to_continue, describe_continuation, is_up_to_date, record_of
from bert_pretrain.train.evaluate import evaluate_batches
from bert_pretrain.train.loop import Hooks, Plan, fit
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.metrics import MetricsFile
from bert_pretrain.train.optimizer import make_optimizers
from bert_pretrain.train.rehearsal import rehearse
from bert_pretrain.train.reporter import reporting
from bert_pretrain.train.setting import (
    Origin,
    Setting,
    check_sizes,
    choose_setting,
    describe,
    identity_of,
    open_origin,
    with_model_of,
)
from bert_pretrain.train.state import TrainState
from bert_pretrain.train.step import LossScale
from bert_pretrain.train.trackers import Tracker, open_trackers


def train(
    config: Config,
    data: Path,
    output: Path,
    *,
    init_from: Path | None = None,
    carry_optimizer: bool = False,
    resume: bool = True,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Path:
    """Train a BERT and return the path of the final model folder.

    Started by `torchrun`, this is one of several processes that train together.

    Args:
        config: the whole configuration; the sections `model` and `train` matter here, its phases do not.
        data: a data folder of stage 2.
        output: the run folder; need not exist.
        init_from: any BERT folder whose weights to begin with.
        carry_optimizer: take optimizer state and step from there too; it must be a checkpoint of ours.
        resume: go on from the newest checkpoint in `output`.
        overwrite: move what is in `output` aside and begin anew.
        dry_run: only say what the run would do, need and take; nothing is written.

    Raises:
        UserError: when folders or settings do not fit each other.
        Interrupted: after SIGINT or SIGTERM, once the checkpoint is written.
    """
    team = distributed.join(config.train.device)
    with team.only_first_prints(), contextlib.ExitStack() as held:
        if config.phases:
            print("the phases of the configuration are for 'bert-pretrain run'; this trains by the section train alone")
            config = config.model_copy(update={"phases": ()})
        folder = DataFolder.open(data)
        tokenizer = folder.tokenizer()
        config = config if init_from is None else with_model_of(config, init_from)
        check_sizes(config, folder, team)
        setting = choose_setting(config, folder, team)
        if setting.device.type == "cuda":
            torch.cuda.set_device(setting.device)
        origin = open_origin(config, init_from, carry_optimizer, setting, tokenizer)
        run = _Run(config, folder, tokenizer, setting, output)
        if dry_run:
            run.rehearse(origin)
            return output / "model"
        identity = identity_of(config, folder, tokenizer, setting, origin)

        def claim() -> tuple[bool, Checkpoint | None]:
            held.enter_context(exclusive(output))
            claimed = manifest.claim(output, "run", identity, overwrite=overwrite)
            if claimed is manifest.Progress.COMPLETE and is_up_to_date(output, setting):
                return True, None
            return False, checkpoint_to_continue(output, setting, resume)

        is_done, latest = team.on_first(claim)
        if not is_done:
            run.train(origin, latest, identity)
    return output / "model"


class _Run:
    """One run, from the choice of its weights to its manifest."""

    def __init__(
        self, config: Config, folder: DataFolder, tokenizer: Tokenizer, setting: Setting, output: Path
    ) -> None:
        self.config, self.folder, self.tokenizer = config, folder, tokenizer
        self.setting, self.output, self.team = setting, output, setting.team

    def train(self, origin: Origin | None, latest: Checkpoint | None, identity: dict[str, Any]) -> None:
        """Train to the end and complete the run folder."""
        state, micro_batch_tokens, _ = self._prepare(origin, latest)
        if latest is not None:
            print(describe_continuation(latest, self.setting))
        with contextlib.ExitStack() as open_files:
            log = self._open_log(latest) if self.team.is_first else None
            if log is not None:
                open_files.enter_context(contextlib.closing(log))
            trackers = self._open_trackers(state) if self.team.is_first else []
            reporter = open_files.enter_context(reporting(self.setting.length, log, trackers, state.progress))
            about = self._about(state, origin)
            hooks = self._hooks(state, log, about, micro_batch_tokens)
            data = self._training_data(state, micro_batch_tokens)
            try:
                fit(state, data, self._plan(), reporter, hooks, evaluate_first=latest is None)
            except Exception:  # whatever it was, the checkpoint under way shall not be lost
                with contextlib.suppress(Exception):
                    hooks.finish_saving()
                raise
        self._finish(state, log, about, identity)

    def rehearse(self, origin: Origin | None) -> None:
        """Say what the run would do, need and take."""
        state, micro_batch_tokens, parallel = self._prepare(origin, None)
        data = self._training_data(state, micro_batch_tokens)
        shards = self.team.size if parallel == "fsdp" else 1
        with torch.random.fork_rng(devices=[]):
            print(rehearse(self.config, self.folder, self.setting, state, data, num_shards=shards))

    def _prepare(self, origin: Origin | None, latest: Checkpoint | None) -> tuple[TrainState, int, str]:
        """Return the state to begin with, the size of a micro-batch, and how ranks share the model; describe them."""
        model = self._make_model(origin, latest)
        parallel = distributed.choose_parallel(
            self.config.train.parallel, model.num_parameters, self.setting.device, self.team
        )
        micro_batch_tokens = self._micro_batch_tokens(model, parallel[0], latest)
        carried = origin.checkpoint.step if origin is not None and origin.checkpoint is not None else 0
        print(describe(self.config, self.folder, self.setting, model, micro_batch_tokens, parallel, carried))
        return self._make_state(model, parallel[0], origin, latest), micro_batch_tokens, parallel[0]

    def _make_model(self, origin: Origin | None, latest: Checkpoint | None) -> BertForPreTraining:
        """Build the model with weights from the run's checkpoint, from `--init-from`, or drawn anew."""
        seed = self.config.train.seed
        model = BertForPreTraining(self.config.model, self.tokenizer.vocab_size, attention=self.setting.attention)
        if latest is not None:
            load_weights(model, latest.path, flag="checkpoint", seed=seed)
        elif origin is not None:
            fresh, unused = load_weights(
                model, origin.folder, flag="--init-from", seed=seed, extension=origin.extension
            )
            print(origin.describe())
            for names, what in ((fresh, "not there, drawn anew"), (unused, "there, but without a place here")):
                if names:
                    print(f"  {what}: {', '.join(names)}")
        else:
            model.initialize(seed)
        if self.folder.config.next_sentence == "none":  # no loss reaches these two; they stay as they are
            model.pooler.requires_grad_(False)
            model.nsp_head.requires_grad_(False)
        model.encoder.activation_checkpointing = self.config.train.activation_checkpointing
        return model.to(self.setting.device)

    def _make_state(
        self, model: BertForPreTraining, parallel: str, origin: Origin | None, latest: Checkpoint | None
    ) -> TrainState:
        """Add the optimizer to the model, and bring both to where the run stands."""
        losses = PretrainingLoss(model, compiled=self.setting.compiled)
        if self.setting.compiled:
            hardware.compile_layers(model)
        network = distributed.spread(losses, model, parallel, self.setting.precision.dtype)
        loss_scale = LossScale.start(self.setting.device) if self.setting.precision.name == "fp16" else None
        state = TrainState.start(model, network, make_optimizers(model, self.config.train), loss_scale)
        if latest is not None:
            restore(state, latest)
        elif origin is not None and origin.checkpoint is not None:
            carry_over(state, origin.checkpoint, self.folder.content_hash)
        return state

    def _micro_batch_tokens(self, model: BertForPreTraining, parallel: str, latest: Checkpoint | None) -> int:
        """Return the size of a micro-batch; one found automatically stays as it was: it decides the last bits."""
        train, setting = self.config.train, self.setting
        shards = self.team.size if parallel == "fsdp" else 1
        own = hardware.choose_micro_batch_tokens(
            train, model, self.folder.max_seq_length, setting.device, setting.precision.dtype, self.team.size, shards
        )
        fitting = self.team.on_first(lambda: own)
        if latest is None or train.micro_batch_tokens != "auto":
            return fitting
        before = int(latest.record["micro_batch_tokens"])
        if setting.device.type == "cuda" and fitting < 0.9 * before:  # free memory varies a little
            print(f"micro-batches of {before:,} tokens, as before, do not fit here: now {fitting:,}")
            return fitting
        return before

    def _open_log(self, latest: Checkpoint | None) -> MetricsFile:
        write_text(self.output / "config.yaml", dump_yaml(self.config))
        return MetricsFile(self.output / "metrics.jsonl", keep_until_step=latest.step if latest else None)

    def _open_trackers(self, state: TrainState) -> list[Tracker]:
        names, config = self.config.train.trackers, self.config.model_dump(mode="json")
        return open_trackers(names, self.output, config, state.progress.step)

    def _training_data(self, state: TrainState, micro_batch_tokens: int) -> TrainingData:
        return TrainingData(
            self.folder,
            seed=self.config.train.seed,
            global_batch_size=self.config.train.global_batch_size,
            micro_batch_tokens=micro_batch_tokens,
            first_step=state.progress.step,
            first_example=state.progress.examples - state.progress.examples_before,
            rank=self.team.rank,
            num_ranks=self.team.size,
            static_shapes=self.setting.compiled,
        )

    def _plan(self) -> Plan:
        device, dtype = self.setting.device, self.setting.precision.dtype
        peak = flops.peak_flops(device, dtype)
        all_peaks = None if peak is None else peak * self.team.size
        return Plan(self.config.train, self.setting.length, device, dtype, all_peaks, self.team)

    def _about(self, state: TrainState, origin: Origin | None) -> About:
        name = self.output.resolve().name
        begun = None if origin is None else origin.folder.resolve().name
        return About(name, self.config, self.folder, self.tokenizer, self.setting, state.model.num_parameters, begun)

    def _hooks(self, state: TrainState, log: MetricsFile | None, about: About, micro_batch_tokens: int) -> Hooks:
        """Return evaluating, saving and giving up, bound to this run."""
        setting, folder = self.setting, self.folder
        checkpoints = self.output / "checkpoints"
        writer = CheckpointWriter(checkpoints, self.tokenizer, self.config.train.keep_checkpoints)
        record = record_of(setting, micro_batch_tokens, self.config.train.optimizer, folder.content_hash)

        def evaluate() -> dict[str, float]:
            batches = evaluation_batches(folder, "validation", micro_batch_tokens)
            return evaluate_batches(state.losses, batches, setting.device, setting.precision.dtype, self.team)

        def save() -> Path:
            snapshot = take_snapshot(state, record)
            if log is None:
                return checkpoints / f"step-{snapshot.step:08d}"
            return writer.write(snapshot, model_card(about, state.progress, log.last_validation, is_final=False))

        def give_up(batch: GlobalBatch) -> None:
            if replay.is_stuck(state):
                checkpoint = save()
                where = replay.save_replay(self.output, state, batch, self.team, checkpoint)
                writer.wait()
                raise replay.diverged(state, where)

        return Hooks(
            evaluate if folder.rows("validation") else None, save, writer.check, writer.wait, writer.seconds, give_up
        )

    def _finish(self, state: TrainState, log: MetricsFile | None, about: About, identity: dict[str, Any]) -> None:
        """Write the final model and, last of all, the manifest with the final figures."""
        weights = to_huggingface(state.weights())
        if log is None:
            return
        with atomic_folder(self.output / "model") as temporary:
            save_tensors(weights, state.model, temporary, self.tokenizer)
            drawn = draw_beside_card(self.output, temporary)
            card = model_card(about, state.progress, log.last_validation, is_final=True, has_curves=drawn)
            write_text(temporary / CARD, card)
        body = {
            "length": asdict(self.setting.length),
            "progress": asdict(state.progress),
            "training": log.last_training,
            "validation": log.last_validation,
            "parameters": state.model.num_parameters,
            "device": str(self.setting.device),
            "torch": torch.__version__,
            "data": {"path": str(self.folder.path), "content_hash": self.folder.content_hash},
            "config": self.config.model_dump(mode="json"),
        }
        manifest.complete(self.output, "run", identity, body)
        print(f"the model is {self.output / 'model'}")
