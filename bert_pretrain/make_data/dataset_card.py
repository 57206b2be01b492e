"""The `README.md` of a data folder whose splits differ in their columns: it tells `datasets` which columns there are.

With `masking: dynamic` the training shards hold no masks, while those of validation do. `datasets` wants one set of
columns for all splits; given the union, it fills in null where a split lacks one.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bert_pretrain.report.markdown import card
from bert_pretrain.storage.files import write_text

CARD = "README.md"
_TEXT = (
    "Examples for BERT, written by `bert-pretrain make-data`. The masks of `train` are drawn when it trains; those "
    "of `validation` are stored. A column that a split does without is null in `datasets`.\n"
)


def write_dataset_card(folder: Path, splits: list[str]) -> None:
    """Write the card from the columns of each split's first shard, or nothing where they are all the same."""
    schemas = [_schema(folder / split / "00000.parquet") for split in splits]
    if len({tuple(schema.names) for schema in schemas}) == 1:
        return
    columns = {field.name: field.type for schema in schemas for field in schema}
    features = [{"name": name, **_feature(kind)} for name, kind in columns.items()]
    write_text(folder / CARD, card({"dataset_info": {"features": features}}, _TEXT))


def _feature(kind: pa.DataType) -> dict[str, str]:
    return {"list": str(kind.value_type)} if pa.types.is_list(kind) else {"dtype": str(kind)}


def _schema(shard: Path) -> pa.Schema:
    with shard.open("rb") as file:
        return pq.read_schema(file)
