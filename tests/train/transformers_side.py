"""Open our model folders with `transformers`, and save folders with it.

Tests import this file to check the installed version of `transformers`. To check another version, they run it as a
script in an environment without this package and its tests:

    python transformers_side.py open  FOLDER EXPECTED   check FOLDER against what we computed from it
    python transformers_side.py save  TARGET            save small BERTs in every layout, with what they compute
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

_POOLER, _WORDS, _PAIRS = "bert.pooler.", "cls.predictions.", "cls.seq_relationship."
# Class -> its new head, and what a folder for pretraining holds beyond what the class has a place for.
CLASSES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "AutoModelForPreTraining": (None, ()),
    "AutoModelForMaskedLM": (None, (_POOLER, _PAIRS)),
    "AutoModelForNextSentencePrediction": (None, (_WORDS,)),
    "AutoModel": (None, (_WORDS, _PAIRS)),
    "AutoModelForSequenceClassification": ("classifier.", (_WORDS, _PAIRS)),
    "AutoModelForTokenClassification": ("classifier.", (_POOLER, _WORDS, _PAIRS)),
    "AutoModelForQuestionAnswering": ("qa_outputs.", (_POOLER, _WORDS, _PAIRS)),
}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def check_class(folder: Path, name: str, expected: dict[str, torch.Tensor]) -> None:
    """Open a folder with a class: only its head may be missing, only our heads may be unused, and outputs are equal."""
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    head, allowed = CLASSES[name]
    assert all(head and key.startswith(head) for key in info["missing_keys"]), info
    assert all(key.startswith(allowed) for key in info["unexpected_keys"]), info
    assert not info["mismatched_keys"], info
    if head:
        assert info["missing_keys"], "the head of a new task cannot have been there"
    inputs = {key: expected[key] for key in ("input_ids", "token_type_ids", "attention_mask")}
    real = inputs["attention_mask"].bool()
    found = model.eval()(**inputs, output_hidden_states=True)
    hidden = found.last_hidden_state if name == "AutoModel" else found.hidden_states[-1]
    close(expected["hidden"], hidden[real])
    if name == "AutoModel":
        close(expected["pooled"], found.pooler_output)
    if name == "AutoModelForPreTraining":
        close(expected["words"], found.prediction_logits[real])
        close(expected["pairs"], found.seq_relationship_logits)
    if name == "AutoModelForMaskedLM":
        close(expected["words"], found.logits[real])
    if name == "AutoModelForNextSentencePrediction":
        close(expected["pairs"], found.logits)


def check_tokenizer_and_pipeline(folder: Path, expected: dict[str, Any]) -> None:
    """Encode texts and fill blanks, as we did."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, ids in expected["ids"].items():
        assert tokenizer(text)["input_ids"] == ids
    pair = tokenizer("a", "b")
    assert len(set(pair["token_type_ids"])) == 2
    fill = transformers.pipeline("fill-mask", model=str(folder), top_k=3)
    for text, answers in expected["answers"].items():
        found = fill(text)
        assert [answer["token"] for answer in found] == [token for token, _ in answers]
        assert all(abs(a["score"] - share) < 1e-5 for a, (_, share) in zip(found, answers, strict=True))


def check_folder(folder: Path, expected: Path) -> None:
    for name in CLASSES:
        check_class(folder, name, load_file(expected.with_suffix(".safetensors")))
    check_tokenizer_and_pipeline(folder, json.loads(expected.with_suffix(".json").read_text()))


@torch.no_grad()
def save_layouts(target: Path) -> None:
    """Save a small BERT of every layout as safetensors parts and as pickles, and its outputs in a file next to it."""
    torch.manual_seed(5)
    config = transformers.BertConfig(vocab_size=150, max_position_embeddings=24, initializer_range=0.2, **SIZES)
    layouts: dict[str, Any] = {
        "pretraining": transformers.BertForPreTraining(config),
        "masked": transformers.BertForMaskedLM(config),
        "pairs": transformers.BertForNextSentencePrediction(config),
        "bare": transformers.BertModel(config),
        "unpooled": transformers.BertModel(config, add_pooling_layer=False),
        "classifier": transformers.BertForSequenceClassification(config),
    }
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(12)[None] < torch.tensor([12, 5, 9])[:, None]
    inputs = {
        "input_ids": torch.randint(5, 150, (3, 12), generator=generator) * mask,
        "token_type_ids": (torch.arange(12)[None] >= 3).long() * mask,
        "attention_mask": mask.long(),
    }
    for name, model in layouts.items():
        model.eval()
        output = model(**inputs, output_hidden_states=True)
        found = {**inputs, "hidden": output.hidden_states[-1][mask]}
        if name in ("pretraining", "masked"):
            found["words"] = (output.prediction_logits if name == "pretraining" else output.logits)[mask]
        if name in ("pretraining", "pairs"):
            found["pairs"] = output.seq_relationship_logits if name == "pretraining" else output.logits
        target.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in found.items()}, target / f"{name}.safetensors")
        model.save_pretrained(target / f"{name} parts", max_shard_size="20KB")
        _save_pickles(model, target / f"{name} pickles")


def _save_pickles(model: Any, folder: Path) -> None:
    """Save pickles of all of the state, tied tensors twice, as versions did that knew no safetensors."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    state = list(model.state_dict().items())
    names = [f"pytorch_model-0000{number}-of-00003.bin" for number in (1, 2, 3)]
    for number, name in enumerate(names):
        torch.save(dict(state[number::3]), folder / name)
    places = {key: names[place % 3] for place, (key, _) in enumerate(state)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def main() -> None:
    print("transformers", transformers.__version__)
    if sys.argv[1] == "save":
        save_layouts(Path(sys.argv[2]))
        return
    check_folder(Path(sys.argv[2]), Path(sys.argv[3]))
    print("opened by every class, the same numbers")


if __name__ == "__main__":
    main()
