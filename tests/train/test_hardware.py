"""What `auto` comes to."""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.torch_version import TorchVersion

from bert_pretrain.config import Config, ModelConfig, TrainConfig
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train import hardware
from bert_pretrain.train.evaluation import evaluate_batches
from bert_pretrain.train.hardware import activation_bytes_per_token
from bert_pretrain.train.loader import evaluation_batches
from bert_pretrain.train.loss import PretrainingLoss, pretraining_loss
from tests.train.static_batches import cut_alike

CPU, FP32 = torch.device("cpu"), torch.float32


@pytest.mark.parametrize(
    ("flags", "feature"),
    [
        ("fpu avx2 avx512f avx512_bf16", "avx512_bf16"),
        ("fpu avx512_bf16 amx_bf16 amx_tile", "amx_bf16"),
        ("fpu avx2 avx512f", None),
    ],
)
def test_bf16_on_the_cpu_needs_its_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, feature: str | None
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t: none\n")
    assert hardware.cores.cpu_bf16_feature(cpuinfo) == feature
    monkeypatch.setattr(hardware.cores, "cpu_bf16_feature", lambda: feature)
    precision = hardware.choose_precision("auto", CPU)
    assert precision.name == ("bf16" if feature else "fp32")
    assert (feature or "neither") in precision.reason


def test_an_unknown_kind_of_cpu_computes_in_fp32(tmp_path: Path) -> None:
    assert hardware.cores.cpu_bf16_feature(tmp_path / "nothing") is None


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="this machine has"):
        hardware.choose_device("cuda:99")


@pytest.mark.parametrize(("visible", "count", "expected"), [("3", 1, 0), ("0,1,2,3", 4, 2), (None, 4, 2)])
def test_a_rank_takes_the_only_card_that_it_sees_or_the_one_of_its_number(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, expected: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert hardware.choose_device("cuda", local_rank=2) == torch.device("cuda", expected)


def test_micro_batches_are_as_given_or_fit(tiny: Callable[..., Config]) -> None:
    model = BertForPreTraining(tiny().model, 152)
    assert hardware.choose_micro_batch_tokens(TrainConfig(micro_batch_tokens=77), model, 32, CPU, FP32) == 77
    assert hardware.choose_micro_batch_tokens(TrainConfig(global_batch_size=2), model, 32, CPU, FP32) == 64
    many = hardware.choose_micro_batch_tokens(TrainConfig(global_batch_size=10_000), model, 32, CPU, FP32)
    assert many == hardware.CPU_MICRO_BATCH_TOKENS
    with torch.device("meta"):
        base = BertForPreTraining(ModelConfig(), 30522)
    few = hardware.choose_micro_batch_tokens(TrainConfig(), base, 128, CPU, torch.bfloat16)
    assert 1024 < few < many
    assert few * activation_bytes_per_token(base, 128, torch.bfloat16) <= hardware.CPU_ACTIVATION_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc's")
def test_freed_memory_is_kept_for_the_next_tensors() -> None:
    code = """
import resource, sys, torch
from bert_pretrain.io import cores
from bert_pretrain.train.hardware import keep_freed_memory
cores.owns_process = bool(int(sys.argv[1]))
keep_freed_memory(torch.device("cpu"))
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
found = []
for _ in range(8):
    before = faults()
    kept = [torch.ones(number * 1_000_000) for number in (3, 8, 1, 5, 8, 2)]
    del kept
    found.append(faults() - before)
print(min(found[1:]) if cores.owns_process else max(found))
"""
    pages = [
        int(subprocess.run([sys.executable, "-c", code, owns], capture_output=True, text=True, check=True).stdout)
        for owns in "10"
    ]
    assert pages[0] < 3000  # of 26,367
    assert pages[1] > 10_000  # in another program's process, nothing is set


def test_layers_are_compiled_on_cuda_where_nothing_pads() -> None:
    cuda = torch.device("cuda")
    assert hardware.choose_compile("auto", cuda, "varlen")[0]
    assert not hardware.choose_compile("auto", cuda, "padded")[0]
    assert not hardware.choose_compile("auto", CPU, "padded")[0]
    assert hardware.choose_compile(True, CPU, "varlen") == (True, "as configured")


def test_a_torch_that_compiles_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, is_refused in (("2.11.0+cu130", True), ("2.13.0+cpu", False), ("2.14.1", False)):
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        with pytest.raises(ConfigError, match="wrong gradients") if is_refused else contextlib.nullcontext():
            assert hardware.choose_compile(True, CPU, "padded") == (True, "as configured")


@pytest.mark.skipif(torch.__version__ < "2.13", reason="it is refused there")
def test_a_compiled_model_has_no_graph_breaks_and_the_same_gradients(
    tiny: Callable[..., Config], examples: Callable[..., Any]
) -> None:
    no_dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    # Steps differ in their numbers of tokens, sequences and masks.
    batches = [cut_alike(examples(rows), 10**6, 32, 16.0).micro_batches[0] for rows in (30, 44, 61, 90, 133)]
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = BertForPreTraining(tiny(model=no_dropout).model, 152)
        model.initialize(1)
        if compiled:
            # Traced as for a GPU, but without the code that would be generated, which takes a minute on a slow core.
            hardware.compile_layers(model, backend="aot_eager", strict=True)
        for checkpointing in (False, True):
            model.encoder.activation_checkpointing = checkpointing
            model.zero_grad()
            losses = [pretraining_loss(model.train(), batch).mean(100, 30) for batch in batches]
            torch.stack(losses).sum().backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            results.append((torch.stack(losses).detach(), gradients))
    # One graph for all layers, one for the embeddings, one for the head, whatever the shape.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-5, rtol=1e-5)
    names = {name for name, _ in model.named_parameters()}
    assert names == {name for name, _ in BertForPreTraining(tiny().model, 152).named_parameters()}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="it is refused there")
def test_an_evaluation_compiles_once_for_all_its_batches_and_has_the_same_figures(
    tiny: Callable[..., Config], data_folder: Path
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    data = DataFolder.open(data_folder)
    model = BertForPreTraining(tiny().model, data.tokenizer().vocab_size)
    model.initialize(1)

    def figures(tokens: int, **options: bool) -> dict[str, float]:
        batches = evaluation_batches(data, "validation", tokens, **options)
        return evaluate_batches(PretrainingLoss(model), batches, CPU, FP32)

    plain = figures(200)
    hardware.compile_layers(model, backend="aot_eager", strict=True)
    for tokens in (200, 90, 1000):
        assert figures(tokens, static_shapes=True) == pytest.approx(plain, rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize("is_command", [False, True])
def test_only_a_command_sets_the_compiler_s_limits(
    is_command: bool, tiny: Callable[..., Config], examples: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(hardware.cores, "owns_process", is_command)
    seen = set()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.add((torch._dynamo.config.recompile_limit, torch._dynamo.config.optimize_ddp))
        return graph.forward

    with torch._dynamo.config.patch(recompile_limit=7, optimize_ddp=True):
        model = BertForPreTraining(tiny().model, 152)
        hardware.compile_layers(model, backend, strict=True)
        pretraining_loss(model, cut_alike(examples(44), 10**6, 32, 16.0).micro_batches[0])
        assert (torch._dynamo.config.recompile_limit == 64) is is_command
    assert seen == {(64, False) if is_command else (7, True)}


def test_only_numbers_of_tokens_and_sequences_vary_in_compiled_layers(
    tiny: Callable[..., Config], examples: Callable[..., Any]
) -> None:
    torch._dynamo.reset()
    recorder = EagerAndRecordGraphs()
    model = BertForPreTraining(tiny().model, 152)
    hardware.compile_layers(model, backend=recorder, strict=True)
    pretraining_loss(model, cut_alike(examples(44), 10**6, 32, 16.0).micro_batches[0])
    assert len(recorder.graphs) == 3
    for graph in recorder.graphs:
        values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        sizes = [value.shape for value in values if isinstance(value, torch.Tensor)]
        assert any(not isinstance(size[0], int) for size in sizes)
        assert all(isinstance(length, int) for size in sizes for length in size[1:])
