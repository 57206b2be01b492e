"""Automatic choices for each device, FLOPs, memory estimates and compilation."""

import ctypes
import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from bert_pretrain.config import ModelConfig, TrainConfig
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.model import devices
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train import hardware
from bert_pretrain.train.evaluation import evaluate_batches
from bert_pretrain.train.flops import batch_flops, peak_flops
from bert_pretrain.train.hardware import activation_bytes_per_token, choose_micro_batch_tokens
from bert_pretrain.train.loader import evaluation_batches
from bert_pretrain.train.loss import PretrainingLoss, pretraining_loss
from tests.train.conftest import NO_DROPOUT, cut, cut_alike, estimate_memory, make_examples, make_model, tiny

CPU, CUDA, FP32, BF16 = torch.device("cpu"), torch.device("cuda"), torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("flags", "feature"),
    [("fpu avx512_bf16", "avx512_bf16"), ("fpu avx512_bf16 amx_bf16 amx_tile", "amx_bf16"), ("fpu avx512f", None)],
)
def test_cpu_uses_bf16_only_with_its_instructions(tmp_path: Path, monkeypatch, flags: str, feature: str | None) -> None:
    assert devices.cores.cpu_bf16_feature(tmp_path / "nothing") is None
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t: none\n")
    assert devices.cores.cpu_bf16_feature(cpuinfo) == feature
    monkeypatch.setattr(devices.cores, "cpu_bf16_feature", lambda: feature)
    precision = devices.choose_precision("auto", CPU)
    assert precision.name == ("bf16" if feature else "fp32")


@pytest.mark.parametrize(("visible", "count", "expected"), [("3", 1, 0), ("0,1,2,3", 4, 2), (None, 4, 2)])
def test_rank_takes_its_only_visible_card_or_the_one_of_its_local_rank(
    monkeypatch, visible: str | None, count: int, expected: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert devices.choose_device("cuda", local_rank=2) == torch.device("cuda", expected)
    with pytest.raises(ConfigError, match="this machine has"):
        devices.choose_device("cuda:99")


def page_faults_and_choice_of_threads(owns_process: bool) -> tuple[int, bool]:
    """Count the page faults of allocating large tensors for the fifth time, and ask MKL whether it chooses threads."""
    if not owns_process:
        ctypes.CDLL(None).mallopt(-3, 128 * 1024)  # glibc's default before it adapts
    devices.cores.owns_process = owns_process
    devices.configure_cpu(CPU)
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [torch.ones(number * 1_000_000) for number in (3, 8, 1, 5, 8, 2)]
        del kept
    page_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    return page_faults, not torch.backends.mkl.is_available() or bool(library.mkl_serv_get_dynamic()) != owns_process


def test_only_a_process_that_is_ours_keeps_freed_memory_and_its_number_of_threads() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        plain, ours = (child.submit(page_faults_and_choice_of_threads, owns).result(120) for owns in (False, True))
    assert plain[0] > 10_000
    assert ours[0] < 3000
    assert plain[1]
    assert ours[1]


def test_flops_count_real_tokens_only() -> None:
    table = make_examples(9)
    config = ModelConfig(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=20)
    weights = 3 * (4 * 8 * 8 + 2 * 8 * 20)
    expected = (
        6 * weights * len(table.input_ids)
        + 12 * 3 * 8 * (table.lengths**2).sum()
        + 6 * (8 * 8 + 8 * 150) * len(table.masks.positions)
        + 6 * (8 * 8 + 16) * 9
    )
    for budget in (10_000, 60):
        assert batch_flops(cut(table, budget), config, 150) == expected


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [  # as torch.cuda.get_device_name prints them
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla V100-PCIE-32GB", 112),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H2000", None),
    ],
)
def test_peak_flops_by_card_name(monkeypatch, name: str, teraflops: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak = None if teraflops is None else pytest.approx(teraflops * 1e12)
    assert peak_flops(CUDA, torch.bfloat16) == peak_flops(CUDA, torch.float16) == peak
    assert peak_flops(CUDA, FP32) is peak_flops(CPU, torch.bfloat16) is None


@pytest.mark.parametrize(
    ("setting", "device", "attention"),
    [("auto", CUDA, "padded"), (True, CPU, "padded"), (False, CUDA, "varlen")],
)
def test_layers_are_not_compiled_on_a_cpu_with_padding_or_if_configured(setting, device, attention) -> None:
    assert not hardware.choose_compile(setting, device, attention)[0]


def test_compiling_needs_triton_a_c_compiler_and_the_headers_of_python(monkeypatch, tmp_path: Path) -> None:
    def check(expected: str) -> None:
        compiled, reason = hardware.choose_compile("auto", CUDA, "varlen")
        assert (compiled, expected in reason) == (expected == "shapes", True)

    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(hardware.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    check("Python.h (package python3-dev)")
    (tmp_path / "Python.h").touch()
    check("shapes")
    monkeypatch.delenv("CC")
    monkeypatch.setattr(hardware.shutil, "which", lambda _: None)
    check("a C compiler")
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda _: None)
    check("its package")


@pytest.mark.parametrize(("is_command", "expected"), [(False, (7, True)), (True, (64, False))])
def test_only_a_command_sets_compiler_options(monkeypatch, is_command: bool, expected: tuple[int, bool]) -> None:
    monkeypatch.setattr(devices.cores, "owns_process", is_command)
    with torch._dynamo.config.patch(recompile_limit=7, optimize_ddp=True):
        hardware.compile_layers(make_model(tiny()))
        assert (torch._dynamo.config.recompile_limit, torch._dynamo.config.optimize_ddp) == expected


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 computes wrong gradients")
def test_compiled_model_has_no_graph_breaks_and_equal_gradients_and_metrics(data_folder: Path) -> None:
    # Batches differ in their numbers of tokens, sequences and masks.
    batches = [cut_alike(make_examples(rows), 10**6, 32, 16.0).micro_batches[0] for rows in (30, 61, 90)]
    data, counters, results, graphs = DataFolder.open(data_folder), torch._dynamo.utils.counters, [], []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Trace as for a GPU, but without code generation, which takes a minute on a slow core."""
        values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        sizes = [value.shape for value in values if isinstance(value, torch.Tensor)]
        assert any(not isinstance(size[0], int) for size in sizes)
        assert all(isinstance(length, int) for size in sizes for length in size[1:])  # widths are static
        return aot_eager(graph, inputs)

    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = make_model(tiny(model=NO_DROPOUT)).train()
        if compiled:
            hardware.compile_layers(model, backend, strict=True)
        for checkpointing in (False, True):
            model.encoder.activation_checkpointing = checkpointing
            model.zero_grad()
            losses = torch.stack([pretraining_loss(model, batch).mean(100, 30) for batch in batches])
            losses.sum().backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            results.append((losses.detach(), gradients))
        graphs.append(counters["stats"]["unique_graphs"])
        for tokens in (200, 90, 1000):
            held_out = evaluation_batches(data, "validation", tokens, static_shapes=compiled)
            metrics = evaluate_batches(PretrainingLoss(model), held_out, CPU, FP32)
            results.append((torch.tensor(list(metrics.values())), {}))
        graphs.append(counters["stats"]["unique_graphs"])
    # One graph each for all layers, the embeddings and the head, for every shape; none for evaluation.
    assert graphs == [0, 0, 3, 3]
    for number, result in enumerate(results):
        torch.testing.assert_close(result, results[0 if number % 5 < 2 else 2], atol=1e-5, rtol=1e-5)


def base(attention: str = "varlen", **model: Any) -> BertForPreTraining:
    with torch.device("meta"):
        return BertForPreTraining(ModelConfig(**model), 30522, attention=attention)


def test_cpu_micro_batches_are_as_configured_or_limited_in_size() -> None:
    small, large = make_model(tiny()), base("padded")

    def chosen(model: BertForPreTraining, **settings: int) -> int:
        return choose_micro_batch_tokens(TrainConfig(**settings), model, 128, CPU, BF16)

    assert chosen(small, micro_batch_tokens=77) == 77
    assert chosen(small, global_batch_size=2) == 256
    assert 1024 < chosen(large) < chosen(small, global_batch_size=10_000) == hardware.CPU_MICRO_BATCH_TOKENS
    assert chosen(large) * sum(activation_bytes_per_token(large, 128, BF16)[:2]) <= hardware.CPU_ACTIVATION_BYTES


def test_bert_large_fits_on_a_12_gb_card() -> None:
    config = load_config("large-12gb")
    model, tokens = base(**config.model.model_dump()), config.train.micro_batch_tokens
    assert isinstance(tokens, int)
    assert estimate_memory(config.train, model, 512, tokens, dtype=BF16) < 10.5 * 2**30
    assert estimate_memory(TrainConfig(), model, 512, tokens, dtype=BF16) > 16 * 2**30


@pytest.mark.parametrize(("gigabytes", "examples", "at_once"), [(12, 256, 128), (24, 1024, 256), (80, 1024, 1024)])
def test_micro_batch_fills_the_card_up_to_the_global_batch(
    monkeypatch, gigabytes: int, examples: int, at_once: int
) -> None:
    card, length = gigabytes * 10**9, 128

    def pretend(free: int, reserved: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, card))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)

    pretend(card // 2, card // 2)  # half of it is cached by PyTorch after an earlier phase
    config, model = TrainConfig(global_batch_size=examples), base(attention_probs_dropout_prob=0.0)
    tokens = choose_micro_batch_tokens(config, model, length, CUDA, BF16)
    assert at_once <= tokens // length <= examples
    assert estimate_memory(config, model, length, tokens, dtype=BF16) < card
    if tokens < examples * length:
        assert estimate_memory(config, model, length, 2 * tokens, dtype=BF16) > card
    shared = choose_micro_batch_tokens(config, model, length, CUDA, BF16, 4)
    assert shared == min(tokens, examples * length // 4)
    pretend(0, 10**9)
    assert choose_micro_batch_tokens(config, model, length, CUDA, BF16) == length


def test_activation_checkpointing_gives_equal_gradients_with_dropout() -> None:
    model, batch, gradients = make_model(tiny()).train(), cut(make_examples(20), 10**6).micro_batches[0], []
    for checkpointing in (False, True):
        model.encoder.activation_checkpointing = checkpointing
        model.zero_grad()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            pretraining_loss(model, batch).mean(100, 20).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
