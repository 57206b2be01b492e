"""A finished data folder held against its manifest: what is damaged or missing is made anew, the rest left alone.

A shard is a pure function of what the manifest records, so one built again is the one that was lost. Where other
library versions lay the same examples out in other bytes, the manifest follows; other examples are refused.
"""

from dataclasses import dataclass
from typing import Any

from bert_pretrain import manifest
from bert_pretrain.errors import DataError
from bert_pretrain.executor import Pool, run_all
from bert_pretrain.files import remove_temporaries, remove_tree, write_json
from bert_pretrain.make_data import build
from bert_pretrain.make_data.build import ShardTask
from bert_pretrain.make_data.plan import BuildPlan
from bert_pretrain.places import Place
from bert_pretrain.shards import DataFolder, ShardRecord, damage_of
from bert_pretrain.tokenizer import FILES, Tokenizer

TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class _Check:
    folder: Place
    record: ShardRecord
    whole: bool


def _check(check: _Check) -> str | None:
    return damage_of(check.folder, check.record, whole=check.whole)


def find_damage(output: Place, *, verify: bool, workers: int) -> dict[str, str]:
    """Return what is wrong with which shard, or with the tokenizer, of a finished folder; empty when nothing is.

    Args:
        output: the data folder.
        verify: compare the SHA-256 of all shards, not only their sizes and footers.
        workers: processes that read.
    """
    folder = DataFolder(output, manifest.read_manifest(output, "data", "--output"))
    records = [*folder.shards("train"), *folder.shards("validation")]
    checks = [_Check(output, record, verify) for record in records]
    weights = [float(record.bytes) for record in records]
    if verify:
        damages = run_all(_check, checks, workers=workers, description="verify", unit="B", weights=weights)
    else:
        damages = [_check(check) for check in checks]
    found = {record.path: damage for record, damage in zip(records, damages, strict=True) if damage}
    absent = [name for name in FILES if not (output / TOKENIZER / name).is_file()]
    try:
        if absent:
            found[TOKENIZER] = f"has no {', '.join(absent)}"
        elif Tokenizer.load(output / TOKENIZER).hash != folder.manifest["tokenizer"]["hash"]:
            found[TOKENIZER] = "is not the one that made the data"
    except DataError as error:
        found[TOKENIZER] = f"cannot be read: {error.what}"
    return found


def rebuild(plan: BuildPlan, tokenizer: Tokenizer, damaged: dict[str, str], pool: Pool) -> None:
    """Make damaged shards anew, and say so; the manifest stays true.

    Raises:
        DataError: when the same inputs and configuration no longer give the same examples.
    """
    output = plan.output
    for name, damage in damaged.items():
        print(f"{name} {damage}; made anew")
    if TOKENIZER in damaged:
        tokenizer.save(output / TOKENIZER)
    tasks = [
        task
        for split in plan.splits
        for number in range(split.num_shards)
        if (task := ShardTask(plan, split, number)).name in damaged
    ]
    remove_tree(output / build.RECORDS)  # notes of a repair that was interrupted
    build.open_records(plan)
    results = run_all(build.build_shard, tasks, workers=pool, description="rebuild", unit="shard")
    _update_manifest(output, {task.name: result["record"] for task, result in zip(tasks, results, strict=True)})
    remove_tree(output / build.RECORDS)
    for split in plan.splits:
        remove_temporaries(output / split.name)


def _update_manifest(output: Place, rebuilt: dict[str, dict[str, Any]]) -> None:
    body = manifest.read_manifest(output, "data", "--output")
    versions = manifest.library_versions()
    is_changed = False
    for split in body["splits"].values():
        for place, record in enumerate(split["shards"]):
            new = rebuilt.get(record["path"], record)
            if new["content_hash"] != record["content_hash"]:
                raise DataError(
                    f"the shard {record['path']}, made anew, holds other examples than the manifest says",
                    where=f"made with {body['versions']}, now {versions}",
                    remedy="use the versions it was made with, or make all of it anew with --overwrite",
                )
            is_changed = is_changed or new != record
            split["shards"][place] = new
    if is_changed:
        print(
            f"the same examples in other bytes, because of other versions: {versions}; the manifest names the new ones"
        )
        write_json(output / manifest.MANIFEST, body)
