"""Evaluate a model on the validation split of a data folder, with the masks that the split stores.

Every evaluation of a split uses the same masks, so results of different weights can be compared.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import torch

from bert_pretrain.config import TrainConfig
from bert_pretrain.errors import DataError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.metrics import perplexity
from bert_pretrain.model.folder import check_same_vocabulary
from bert_pretrain.model.sequences import open_bert
from bert_pretrain.train import hardware
from bert_pretrain.train.distributed import SINGLE_PROCESS, DistContext
from bert_pretrain.train.loader import Prefetcher, evaluation_batches
from bert_pretrain.train.loss import LossSums, PretrainingLoss, extra_metrics
from bert_pretrain.train.packing import Batch

MLM_WEIGHTS = ("embeddings", "encoder", "mlm_head")  # parts of a network for masked tokens


def evaluate(
    model: Path,
    data: Path,
    *,
    config: TrainConfig,
    max_length: int | None = None,
) -> dict[str, float]:
    """Evaluate a model folder on the validation split of a data folder, and return its metrics by name.

    `mlm_loss` is in nats per masked token, and `mlm_perplexity` is its exponential. `nsp_loss` is in nats per pair.
    `mlm_accuracy` and `nsp_accuracy` are shares. The `nsp_` metrics are those of sentence order if that is the data's
    objective, and absent if examples are not pairs or the model has no next-sentence head. `examples`, `predictions`
    and `documents` are counts. `max_length` is that of `length_limit`. Raises DataError if the model does not fit the
    data, or if the split has no examples.
    """
    folder = DataFolder.open(data)
    tokenizer = folder.tokenizer()
    check_same_vocabulary(model, tokenizer, "MODEL")
    if not folder.rows("validation"):
        raise DataError(
            f"{data} has no examples in its validation split",
            where="--data",
            remedy="make it with data.validation_fraction above 0",
        )
    bert = open_bert(
        model,
        config,
        MLM_WEIGHTS,
        max_length=max_length,
        tokenizer=tokenizer,
    )
    lacks_head = any(name.startswith(("pooler", "nsp_head")) for name in bert.missing)
    has_pairs = bert.network.nsp_head is not None and not lacks_head
    if not has_pairs and folder.config.next_sentence != "none":
        print(f"{model} has no next-sentence head, so only masked tokens are evaluated")
    longest = folder.max_seq_length
    remedy = "evaluate on data with a smaller data.max_seq_length, or read more with --max-length"
    bert.check_length(longest, "the longest example", where=f"{model} and {data}", remedy=remedy)
    micro_batch_tokens = hardware.choose_micro_batch_tokens(
        config,
        bert.network,
        longest,
        bert.device,
        bert.dtype,
    )
    batches = evaluation_batches(folder, "validation", micro_batch_tokens, with_pairs=has_pairs)
    documents = folder.num_documents("validation")
    losses = PretrainingLoss(bert.network)
    metrics = evaluate_batches(losses, batches, bert.device, bert.dtype)
    if documents is not None:
        metrics["documents"] = documents
    return metrics


@torch.no_grad()
def evaluate_batches(
    losses: PretrainingLoss,
    batches: Iterable[Batch],
    device: torch.device,
    dtype: torch.dtype,
    dist_context: DistContext = SINGLE_PROCESS,
) -> dict[str, float]:
    """Return the metrics of `evaluate`, with `nsp_` metrics if examples are pairs. Restore the training mode.

    The extra metrics of the losses are the last ones.
    `batches` is this rank's share of a split.
    """
    was_training = losses.training
    losses.eval()
    totals = torch.zeros(len(losses.eval_extras) + 4, dtype=torch.float64, device=device)
    counts = torch.zeros(4, dtype=torch.int64)
    with (
        contextlib.closing(Prefetcher(iter(batches), device)) as ready,
        torch.autocast(device.type, dtype, enabled=dtype != torch.float32),
    ):
        for batch in ready:
            sums: LossSums = losses(batch)
            totals += torch.stack([value.to(totals.dtype) for value in (*sums.extras, *sums[:4])])
            num_pairs = 0 if batch.next_sentence_labels is None else batch.num_sequences
            counts += torch.tensor([batch.num_sequences, num_pairs, batch.num_predictions, batch.num_tokens])
    losses.train(was_training)
    *extras, mlm_loss, nsp_loss, mlm_correct, nsp_correct = dist_context.all_reduce_sum(totals).tolist()
    examples, pairs, predictions, tokens = dist_context.all_reduce_sum(counts).tolist()
    metrics = {
        "mlm_loss": mlm_loss / predictions,
        "mlm_accuracy": mlm_correct / predictions,
        "mlm_perplexity": perplexity(mlm_loss / predictions),
    }
    if pairs:
        metrics["nsp_loss"] = nsp_loss / pairs
        metrics["nsp_accuracy"] = nsp_correct / pairs
    metrics["examples"] = examples
    metrics["predictions"] = predictions
    return metrics | extra_metrics(losses.eval_extras, [tokens, *extras], predictions)
