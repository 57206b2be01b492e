"""The command that fine-tunes; its flags are the fields of the tool's `Settings`."""

from pathlib import Path
from typing import Annotated

import typer

from bert_pretrain.cli.loading import load
from bert_pretrain.cli.options import Output, Overwrite
from bert_pretrain.places import local_place


def finetune(
    task: Annotated[str, typer.Argument(metavar="TASK", help="classify, tag or answer.")],
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A BERT folder with its tokenizer.")],
    train: Annotated[str, typer.Option("--train", metavar="INPUT", help="Labelled rows: a file, or dataset:NAME.")],
    output: Output,
    validation: Annotated[
        str | None, typer.Option("--validation", metavar="INPUT", help="Chooses the epoch; else a tenth is held out.")
    ] = None,
    test: Annotated[
        str | None, typer.Option("--test", metavar="INPUT", help="Predicted at the end; labels may lack.")
    ] = None,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="At the end of the warm-up.")] = 3e-5,
    epochs: Annotated[int, typer.Option("--epochs", help="Passes over the rows.")] = 3,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Windows of text a step.")] = 32,
    warmup_ratio: Annotated[float, typer.Option("--warmup-ratio", help="Share of all steps.")] = 0.1,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="Of matrices.")] = 0.01,
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="Tokens seen at once; 128, for answer 384.")
    ] = None,
    dropout: Annotated[float | None, typer.Option("--dropout", help="The model's own by default.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the head, the order and what is held out.")] = 42,
    text_field: Annotated[str, typer.Option("--text-field", help="classify: column of the text.")] = "text",
    pair_field: Annotated[str | None, typer.Option("--pair-field", help="classify: column of a second text.")] = None,
    label_field: Annotated[str, typer.Option("--label-field", help="classify: column of the label.")] = "label",
    regression: Annotated[bool, typer.Option("--regression", help="classify: labels are numbers to predict.")] = False,
    tokens_field: Annotated[str, typer.Option("--tokens-field", help="tag: column of the words.")] = "tokens",
    tags_field: Annotated[str, typer.Option("--tags-field", help="tag: column of the BIO tags.")] = "tags",
    stride: Annotated[
        int | None, typer.Option("--stride", help="answer: tokens that windows of a long context share.")
    ] = None,
    max_answer_length: Annotated[int, typer.Option("--max-answer-length", help="answer: tokens at most.")] = 30,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Fine-tune a model to classify texts or pairs, tag words, or answer questions from a context.

    Example: bert-pretrain finetune classify run/model --train reviews.csv --output classifier
    """
    given = dict(locals())
    settings = load("bert_pretrain.tools.finetune.settings", "Settings")
    run_finetune = load("bert_pretrain.tools.finetune.run", "finetune")
    run_finetune(
        task,
        model,
        train=train,
        output=local_place(output, "--output", remedy="fine-tune into a local folder, and copy that"),
        validation=validation,
        test=test,
        settings=settings(**{name: given[name] for name in settings.__dataclass_fields__}),
        device=device,
        overwrite=overwrite,
    )
