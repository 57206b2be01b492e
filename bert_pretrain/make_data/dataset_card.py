"""The `README.md` of a data folder whose splits differ in their columns: `datasets` opens it by what stands there.

Masks drawn in training are in no training shard, while validation keeps its own. `datasets` wants one set of columns
for all splits; given the union, it fills in null where a split has none.
"""

import pyarrow as pa
import pyarrow.parquet as pq

from bert_pretrain.files import write_text
from bert_pretrain.places import Place

CARD = "README.md"


def write_dataset_card(folder: Place, splits: list[str]) -> None:
    """Write the card from the columns of each split's first shard, or nothing where they are all the same."""
    schemas = [_schema(folder / split / "00000.parquet") for split in splits]
    if len({tuple(schema.names) for schema in schemas}) == 1:
        return
    features: dict[str, str] = {}
    for schema in schemas:
        for field in schema:
            is_list = pa.types.is_list(field.type)
            features[field.name] = f"list: {field.type.value_type}" if is_list else f"dtype: {field.type}"
    columns = "".join(f"  - name: {name}\n    {kind}\n" for name, kind in features.items())
    about = (
        "Examples for BERT, written by `bert-pretrain make-data`. The masks of `train` are drawn when it trains; those "
        "of `validation` are stored. A column that a split does without is null in `datasets`.\n"
    )
    write_text(folder / CARD, f"---\ndataset_info:\n  features:\n{columns}---\n\n{about}")


def _schema(shard: Place) -> pa.Schema:
    with shard.open("rb") as file:
        return pq.read_schema(file)
