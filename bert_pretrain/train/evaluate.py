"""Held-out losses and accuracies over a whole split, with the masks that are stored in it: equal for equal weights."""

import math
from collections.abc import Iterable
from pathlib import Path

import torch

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import DataError
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import check_same_vocabulary, load_model
from bert_pretrain.shards import DataFolder
from bert_pretrain.train import hardware
from bert_pretrain.train.batches import Batch, evaluation_batches
from bert_pretrain.train.loss import pretraining_loss


def evaluate(model: Path, data: Path, *, config: TrainConfig, split: str = "validation") -> dict[str, float]:
    """Measure a model folder on a data folder.

    Returns:
        `mlm_loss` (nats a predicted token), `mlm_accuracy`, `mlm_perplexity`, `nsp_loss` (nats a pair) and
        `nsp_accuracy` (both of the sentence order where that is what the data asks; absent where examples are no
        pairs), and the numbers of `examples` and `predictions` behind them.

    Raises:
        DataError: when the model and the data do not fit each other, or the split is empty.
    """
    folder = DataFolder.open(data)
    tokenizer = folder.tokenizer()
    check_same_vocabulary(model, tokenizer, "MODEL")
    if not folder.rows(split):
        raise DataError(
            f"{data} has no examples in its split '{split}'",
            where="--data",
            remedy="make the data with a validation_fraction above 0",
        )
    if split == "train" and folder.config.masking == "dynamic":
        raise DataError(
            "the training examples hold no masks; they are drawn in training",
            where=f"--data {data}",
            remedy="evaluate on the validation split",
        )
    device = hardware.choose_device(config.device)
    dtype = hardware.choose_precision(config.precision, device).dtype
    network = load_model(
        model, attention=config.attention, device=device, dtype=dtype, required=("bert.", "cls.")
    ).model
    if network.vocab_size != tokenizer.vocab_size:
        raise DataError(
            f"the model has {network.vocab_size} tokens, the data's vocabulary {tokenizer.vocab_size}",
            where=f"{model} and {data}",
            remedy="evaluate on data made with the model's own tokenizer folder",
        )
    if network.config.max_position_embeddings < folder.max_seq_length:
        raise DataError(
            f"the model has {network.config.max_position_embeddings} positions, the data up to {folder.max_seq_length}",
            where=f"{model} and {data}",
            remedy="evaluate on shorter data",
        )
    micro_batch_tokens = hardware.choose_micro_batch_tokens(config, network, folder.max_seq_length, device)
    return evaluate_batches(network, evaluation_batches(folder, split, micro_batch_tokens), device, dtype)


@torch.no_grad()
def evaluate_batches(
    model: BertForPreTraining, batches: Iterable[Batch], device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Return the figures of `evaluate` for a model in memory; its mode (training or not) is left as it was."""
    was_training = model.training
    model.eval()
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    examples = pairs = predictions = 0
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        for batch in batches:
            sums = pretraining_loss(model, batch.to(device))
            figures = (sums.mlm_loss, sums.mlm_correct, sums.nsp_loss, sums.nsp_correct)
            totals += torch.stack([figure.double() for figure in figures])
            examples += batch.num_sequences
            pairs += 0 if batch.next_sentence_labels is None else batch.num_sequences
            predictions += batch.num_predictions
    model.train(was_training)
    mlm_loss, mlm_correct, nsp_loss, nsp_correct = totals.tolist()
    return {
        "mlm_loss": mlm_loss / predictions,
        "mlm_accuracy": mlm_correct / predictions,
        "mlm_perplexity": math.exp(min(mlm_loss / predictions, 700.0)),
        **({"nsp_loss": nsp_loss / pairs, "nsp_accuracy": nsp_correct / pairs} if pairs else {}),
        "examples": examples,
        "predictions": predictions,
    }
