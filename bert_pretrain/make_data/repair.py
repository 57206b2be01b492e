"""A finished data folder is compared with its manifest: damaged or missing shards are rebuilt, the rest is kept.

A shard is a pure function of what the manifest records, so a rebuilt one has the same examples. Where other library
versions encode the same examples in other bytes, the manifest is updated; other examples are an error.
"""

import shutil
from pathlib import Path
from typing import Any

from bert_pretrain.errors import DataError
from bert_pretrain.examples.shards import DataFolder, ShardRecord, damage_of
from bert_pretrain.make_data import build
from bert_pretrain.make_data.build import ShardTask
from bert_pretrain.make_data.plan import BuildPlan
from bert_pretrain.parallel.cores import available_cores
from bert_pretrain.parallel.executor import Pool, run_all
from bert_pretrain.storage import manifest
from bert_pretrain.storage.files import remove_temporaries, write_checked_json
from bert_pretrain.text.tokenizer import Tokenizer

TOKENIZER = "tokenizer"


def _damage_of(shard: tuple[Path, ShardRecord]) -> str | None:
    return damage_of(*shard, whole=True)


def find_damage(output: Path, *, verify: bool, workers: int | None) -> dict[str, str]:
    """Return what is wrong with which shard, or with the tokenizer, of a finished folder; empty when nothing is.

    With `verify` the SHA-256 of all shards is compared, not only their sizes and footers.
    """
    shutil.rmtree(output / build.RECORDS, ignore_errors=True)  # of a command killed at its very end
    folder = DataFolder(output, manifest.read_manifest(output, "data", "--output"))
    records = [*folder.shards("train"), *folder.shards("validation")]
    if verify:
        shards = [(output, record) for record in records]
        weights = [float(record.bytes) for record in records]
        damages = run_all(
            _damage_of, shards, workers=workers or available_cores(), description="verify", unit="B", weights=weights
        )
    else:
        damages = [damage_of(output, record, whole=False) for record in records]
    found = {record.path: damage for record, damage in zip(records, damages, strict=True) if damage}
    try:
        tokenizer = Tokenizer.load(output / TOKENIZER)
        absent = [name for name in tokenizer.files if not (output / TOKENIZER / name).is_file()]
        if absent:
            found[TOKENIZER] = f"has no {', '.join(absent)}"
        elif tokenizer.hash != folder.manifest["tokenizer"]["hash"]:
            found[TOKENIZER] = "is not the one that made the data"
    except DataError as error:
        found[TOKENIZER] = f"cannot be read: {error.what}"
    return found


def restore_tokenizer(output: Path, tokenizer: Tokenizer, damaged: dict[str, str]) -> dict[str, str]:
    """Write the tokenizer again if it is damaged; returns which shards are."""
    if TOKENIZER in damaged:
        tokenizer.save(output / TOKENIZER)
        print(f"{TOKENIZER} {damaged[TOKENIZER]}; written again")
    return {name: damage for name, damage in damaged.items() if name != TOKENIZER}


def rebuild(plan: BuildPlan, damaged: dict[str, str], pool: Pool) -> None:
    """Rebuild damaged shards, and print which; the manifest stays true.

    Raises:
        DataError: when the same inputs and configuration no longer give the same examples.
    """
    output = plan.output
    for name, damage in damaged.items():
        print(f"{name} {damage}; rebuilt")
    tasks = [
        task
        for split in plan.splits
        for number in range(split.num_shards)
        if (task := ShardTask(plan, split, number)).name in damaged
    ]
    shutil.rmtree(output / build.RECORDS, ignore_errors=True)  # of a repair that was interrupted
    build.open_records(plan)
    built = run_all(build.build_shard, tasks, workers=pool, description="rebuild", unit="shard")
    _update_manifest(output, {task.name: result["record"] for task, (result, _) in zip(tasks, built, strict=True)})
    shutil.rmtree(output / build.RECORDS, ignore_errors=True)
    for split in plan.splits:
        remove_temporaries(output / split.name)


def _update_manifest(output: Path, rebuilt: dict[str, dict[str, Any]]) -> None:
    body = manifest.read_manifest(output, "data", "--output")
    versions = manifest.library_versions()
    is_changed = False
    for split in body["splits"].values():
        for index, record in enumerate(split["shards"]):
            new = rebuilt.get(record["path"], record)
            if new["content_hash"] != record["content_hash"]:
                raise DataError(
                    f"the rebuilt shard {record['path']} holds other examples than the manifest says",
                    where=f"made with {body['versions']}, now {versions}",
                    remedy="use the versions it was made with, or build all of it again with --overwrite",
                )
            is_changed = is_changed or new != record
            split["shards"][index] = new
    if is_changed:
        print(
            f"the same examples in other bytes, because of other versions: {versions}; the manifest names the new ones"
        )
        write_checked_json(output / manifest.MANIFEST, body)
