"""`run`: all stages and phases from one YAML, each into its own folder; what is complete is not done again."""

from collections.abc import Sequence
from pathlib import Path

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError
from bert_pretrain.make_data.run import make_data
from bert_pretrain.vocab.run import make_vocab


def run_pipeline(
    config: Config,
    output: Path,
    *,
    inputs: Sequence[str] = (),
    workers: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Build vocabulary, data and model under `output`; returns the final model folder.

    Args:
        config: the whole configuration; its `inputs` are read unless `inputs` is given.
        output: gets `vocab`, `data` and `train` (with phases: `data/NAME` and `train/NAME`).
        inputs: raw text.
        workers: processes for the data stages; all cores when None.
        overwrite: move other outputs aside instead of refusing them.

    Raises:
        UserError: for a mistake in the configuration, the inputs or the folders.
    """
    from bert_pretrain.train.run import train  # torch takes a second to import

    texts = list(inputs or config.inputs)
    if not texts:
        raise ConfigError(
            "no inputs are given", where="the key 'inputs'", remedy="add for example inputs: [corpus/*.txt]"
        )
    print(f"── vocabulary ── {output / 'vocab'}")
    vocab = make_vocab(config, texts, output / "vocab", workers=workers, overwrite=overwrite)
    stages = [(phase.name, config.for_phase(phase)) for phase in config.phases] or [("", config)]
    previous: Path | None = None
    model = output
    for name, stage in stages:
        data = output / "data" / name
        print(f"── data {name}── {data}")
        make_data(stage, texts, vocab, data, workers=workers, store=output / ".token-store", overwrite=overwrite)
        run = output / "train" / name
        print(f"── training {name}── {run}")
        model = train(stage, data, run, init_from=previous, carry_optimizer=previous is not None, overwrite=overwrite)
        previous = newest_checkpoint(run)
    return model


def newest_checkpoint(run: Path) -> Path:
    """Return the checkpoint with which a finished run ended."""
    return max((run / "checkpoints").glob("step-*"))
