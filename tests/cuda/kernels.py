"""Counts what compiled layers launch, and turns their kernels into machine code."""

from typing import Any

from bert_pretrain.config_file import load_config
from tests.cuda.h200 import inductor_for_h200, launches, machine_code
from tests.cuda.memory import VOCAB_SIZE, change, full_batch
from tests.cuda.pretended import fake_global_batch, make_state, pin, pretended_cuda
from tests.cuda.steps import run_step

GRAPHS = (
    "embeddings", "embeddings backward", "layer", "layer backward", "head", "head backward", "softmax",
)  # fmt: skip
TOKENS, LENGTH = 32768, 128


def generate(cache: str) -> dict[str, Any]:
    """Trace two steps of BERT-Base in bf16, with two of its layers, compiled by Inductor; returns what it made."""
    sizes = {"num_hidden_layers": 2, "attention_probs_dropout_prob": 0.0}
    config = change(load_config("base"), sizes, {"precision": "bf16"})
    with pretended_cuda() as mode, inductor_for_h200(cache) as generated:
        state = make_state(config, VOCAB_SIZE, attention="varlen", backend="inductor")
        for step, tokens in enumerate((TOKENS, TOKENS - LENGTH)):
            run_step(state, config, pin(fake_global_batch(mode, full_batch(tokens, LENGTH))), step)
        found = dict(zip(GRAPHS, map(launches, generated.wrappers), strict=True))
        return {"launches": found, "machine_code": machine_code(generated)}
