"""The Python API for notebooks: make vocabulary and data, open folders, and train.

The functions take the same options as the commands and raise `UserError` where a command exits with code 2. Messages
use the names of the command-line flags, such as `--init-from` for `init_from`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_pretrain.io.files import local_path

if TYPE_CHECKING:
    from bert_pretrain.config import Config
    from bert_pretrain.examples.data_folder import DataFolder
    from bert_pretrain.model.sequences import Bert
    from bert_pretrain.text.tokenizer import Tokenizer

Keys = Mapping[str, Any]  # keys of one section of the configuration, with their values


def _config(source: str | Path | None, **sections: Keys | None) -> "Config":
    """Load presets or files and override keys of their sections."""
    from bert_pretrain.config_file import load_config

    flags = {
        f"{section}.{key}": (f"{section}['{key}']", value)
        for section, keys in sections.items()
        for key, value in (keys or {}).items()
    }
    return load_config(source, (), flags, with_phases=False)


def build_vocab(
    inputs: str | Path | Sequence[str | Path],
    output: str | Path,
    config: str | Path | None = None,
    *,
    vocab: Keys | None = None,
    data: Keys | None = None,
    **options: Any,
) -> Path:
    """Make a WordPiece vocabulary like `bert-pretrain vocab`, and return the path of the tokenizer folder.

    `inputs` are files, globs, folders, URLs or `dataset:` names. `config` is a preset such as "tiny" or the path of a
    YAML file; several are joined by commas. `vocab` and `data` override keys of these sections, as in `{"size": 8192}`.
    `options` are the flags `extend`, `lowercase`, `workers`, `scheduler` and `overwrite` of the command.
    """
    from bert_pretrain.model.hub import model_folder
    from bert_pretrain.vocab.run import make_vocab

    if options.get("extend") is not None:
        options["extend"] = model_folder(options["extend"], "--extend")
    elif options.get("lowercase") is not None:
        vocab = {**(vocab or {}), "lowercase": options["lowercase"]}
    loaded = _config(config, vocab=vocab, data=data)
    return make_vocab(loaded, _inputs(inputs), local_path(output, "output"), **options)


def build_data(
    inputs: str | Path | Sequence[str | Path],
    vocab: str | Path,
    output: str | Path,
    config: str | Path | None = None,
    *,
    data: Keys | None = None,
    **options: Any,
) -> Path:
    """Make training examples like `bert-pretrain make-data`, and return the path of the data folder.

    `vocab` is the tokenizer folder. `inputs`, `config` and `data` are the same as in `build_vocab`. `options` are the
    flags `workers`, `scheduler`, `store`, `overwrite`, `verify`, `lowercase` and `dry_run` of the command.
    """
    from bert_pretrain.make_data.run import make_data
    from bert_pretrain.model.hub import model_folder

    if options.get("store") is not None:
        options["store"] = local_path(options["store"], "store")
    loaded, folder = _config(config, data=data), model_folder(local_path(vocab, "--vocab"), "--vocab")
    return make_data(
        loaded,
        _inputs(inputs),
        folder,
        local_path(output, "output"),
        **options,
    )


def _inputs(inputs: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(path) for path in ([inputs] if isinstance(inputs, str | Path) else inputs)]


def load_data(folder: str | Path) -> "DataFolder":
    """Open a data folder and check its shards against its manifest.

    The result has `manifest`, `config`, `rows(split)` and `tokenizer()`. Its `loader(split)` yields padded batches for
    a training loop; `dataset()` returns the examples as a `datasets.DatasetDict`.
    """
    from bert_pretrain.examples.data_folder import DataFolder

    return DataFolder.open(local_path(folder, "folder"), "folder")


def load_tokenizer(folder: str | Path) -> "Tokenizer":
    """Load the tokenizer of a tokenizer or model folder. It has `encode_text` (text to ids) and `decode`."""
    from bert_pretrain.text.tokenizer import Tokenizer

    return Tokenizer.load(local_path(folder, "folder"), "folder")


def load_model(folder: str | Path, *, device: str = "auto", precision: str = "fp32") -> "Bert":
    """Load a BERT model and its tokenizer, from a folder or by its name on the Hub.

    The result has `network` (the PyTorch module in evaluation mode), `tokenizer` and `add_special_tokens`. Its `pack`
    turns lists of ids into inputs of the network; `running()` is a context without gradients in `precision`.
    """
    from bert_pretrain.config_file import load_config
    from bert_pretrain.model.hub import model_folder
    from bert_pretrain.model.sequences import open_bert

    flags = {"train.device": ("device", device), "train.precision": ("precision", precision)}
    return open_bert(model_folder(folder, "MODEL"), load_config(flags=flags).train, ("mlm_head",))


def pretrain(
    data: str | Path,
    output: str | Path,
    config: str | Path | None = None,
    *,
    model: Keys | None = None,
    train: Keys | None = None,
    **options: Any,
) -> Path:
    """Train a BERT model like `bert-pretrain train`, and return the path of the final model folder.

    Repeat the same call to resume an unfinished run; a finished run is not trained again. Interrupting the kernel saves
    a checkpoint first. `config` is the same as in `build_vocab`. `model` and `train` override keys of these sections,
    as in `{"max_steps": 1000}`. `options` are the flags `init_from`, `carry_optimizer`, `overwrite` and `dry_run` of
    the command.
    """
    from bert_pretrain.model.hub import model_folder
    from bert_pretrain.train.run import train as run

    if options.get("init_from") is not None:
        options["init_from"] = model_folder(options["init_from"], "--init-from")
    loaded = _config(config, model=model, train=train)
    return run(loaded, local_path(data, "data"), local_path(output, "output"), **options)
