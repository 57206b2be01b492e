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
CLASSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "BertForPreTraining": ("", ()),
    "BertForMaskedLM": ("", (_POOLER, _PAIRS)),
    "BertForNextSentencePrediction": ("", (_WORDS,)),
    "BertModel": ("", (_WORDS, _PAIRS)),
    "BertForSequenceClassification": ("classifier.", (_WORDS, _PAIRS)),
    "BertForTokenClassification": ("classifier.", (_POOLER, _WORDS, _PAIRS)),
    "BertForQuestionAnswering": ("qa_outputs.", (_POOLER, _WORDS, _PAIRS)),
}
# Class -> what we compute -> its output of that.
OUTPUTS = {
    "BertForPreTraining": {"words": "prediction_logits", "pairs": "seq_relationship_logits"},
    "BertForMaskedLM": {"words": "logits"},
    "BertForNextSentencePrediction": {"pairs": "logits"},
    "BertModel": {"pooled": "pooler_output"},
}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


INPUTS = ("input_ids", "token_type_ids", "attention_mask")


def random_inputs(longest: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Draw three padded sequences of different lengths."""
    mask = torch.arange(longest)[None] < torch.tensor([longest, 4, 7])[:, None]
    ids = torch.randint(104, vocab_size, mask.shape, generator=torch.Generator().manual_seed(1))
    types = (torch.arange(longest)[None] >= 3).long()
    return dict(zip(INPUTS, (ids * mask, types * mask, mask.long()), strict=True))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def outputs_of(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a model computes: (tokens, …) without padding, (sequences, …)."""
    real = inputs["attention_mask"].bool()
    output = model.eval()(**inputs, output_hidden_states=True)
    found = {"hidden": output.hidden_states[-1][real]}
    for ours, theirs in OUTPUTS.get(type(model).__name__, {}).items():
        if theirs in output:  # a model may have no pooler
            found[ours] = output[theirs][real] if ours == "words" else output[theirs]
    return found


def check_class(folder: Path, name: str, expected: dict[str, torch.Tensor]) -> None:
    """Open a folder with a class: only its head may be missing, only our heads may be unused, and outputs are equal."""
    auto = name.replace("BertFor", "AutoModelFor").replace("BertModel", "AutoModel")
    model, info = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    head, allowed = CLASSES[name]
    assert all(key.startswith(head) for key in info["missing_keys"]), info
    assert all(key.startswith(allowed) for key in info["unexpected_keys"]), info
    assert not info["mismatched_keys"], info
    assert bool(info["missing_keys"]) == bool(head)  # the head of a new task cannot have been there
    for output, value in outputs_of(model, {key: expected[key] for key in INPUTS}).items():
        close(expected[output], value)


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
    inputs = random_inputs(12, 150)
    target.mkdir(parents=True, exist_ok=True)
    for name, model in layouts.items():
        found = {key: value.contiguous() for key, value in outputs_of(model, inputs).items()}
        save_file({**inputs, **found}, target / f"{name}.safetensors")
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
