"""The Python API for notebooks: open a data folder, a tokenizer or a model, and train.

The functions take what the commands take, and raise `UserError` where a command would exit with code 2. Each imports
the heavy libraries it needs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_pretrain.storage.paths import parse_local_path, parse_path

if TYPE_CHECKING:
    from bert_pretrain.examples.shards import DataFolder
    from bert_pretrain.text.tokenizer import Tokenizer
    from bert_pretrain.tools.inference import Bert


def load_data(folder: str | Path) -> "DataFolder":
    """Open a data folder and check its shards against its manifest.

    The result has `manifest`, `config`, `rows(split)`, `tokenizer()`, and `dataset()`, the examples in `datasets`.

    Raises:
        DataError: when the folder is unfinished or does not match its manifest.
    """
    from bert_pretrain.examples.shards import DataFolder

    return DataFolder.open(parse_local_path(str(folder), "load_data", remedy="copy it first"), "load_data")


def load_tokenizer(folder: str | Path) -> "Tokenizer":
    """Open a tokenizer or model folder; `encode_text` gives the ids of a text, `decode` the text of ids.

    Raises:
        DataError: when the folder holds no tokenizer of a BERT.
    """
    from bert_pretrain.text.tokenizer import Tokenizer

    return Tokenizer.load(parse_path(str(folder)), "load_tokenizer")


def load_model(folder: str | Path, *, device: str = "auto", precision: str = "fp32") -> "Bert":
    """Open any BERT folder with its tokenizer.

    The result has `network`, the PyTorch module in evaluation mode, `tokenizer`, `add_special_tokens`, `pack`, which
    makes the network's inputs from lists of ids, and `running()`, a context without gradients in that precision.

    Args:
        folder: written by this package or by Hugging Face's tools.
        device: auto, cpu, cuda, cuda:N or mps.
        precision: of the matrix products: fp32, bf16, fp16 or auto.

    Raises:
        UserError: when the folder holds no BERT with a masked-language-model head, or there is no such device.
    """
    from bert_pretrain.config_file import load_config
    from bert_pretrain.tools.inference import open_bert

    flags = {"train.device": ("device", device), "train.precision": ("precision", precision)}
    return open_bert(Path(folder), load_config(flags=flags).train, ("cls.predictions",))


def pretrain(
    data: str | Path,
    output: str | Path,
    config: str | Path | None = None,
    *,
    model: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Train a BERT as `bert-pretrain train` does, and return the path of the final model folder.

    The same call again resumes an unfinished run and returns at once for a finished one. Interrupting the kernel saves
    a checkpoint first.

    Args:
        data: a data folder.
        output: the run folder.
        config: a shipped preset such as "tiny", or the path of a YAML file; several are joined by commas.
        model: keys of the section `model` to set, such as `{"num_hidden_layers": 4}`.
        train: keys of the section `train`, such as `{"max_steps": 1000}`.
        options: `init_from`, `carry_optimizer`, `resume`, `overwrite` and `dry_run`, as for the command.

    Raises:
        UserError: when folders or settings do not match.
        Interrupted: after an interruption, when the checkpoint is saved.
    """
    from bert_pretrain.config_file import load_config
    from bert_pretrain.train.run import train as run

    flags = {
        f"{section}.{key}": (f"{section}['{key}']", value)
        for section, values in (("model", model), ("train", train))
        for key, value in (values or {}).items()
    }
    if options.get("init_from") is not None:
        options["init_from"] = Path(options["init_from"])
    remedy = "copy it, or name a local folder"
    folders = {"data": data, "output": output}
    paths = (parse_local_path(str(folder), name, remedy=remedy) for name, folder in folders.items())
    return run(load_config(config, flags=flags, with_phases=False), *paths, **options)
