"""What the check of a GPU measures: the profile's tables, the benchmark's rows, variants of the step."""

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_train as bench
import gpu_step
import numpy as np
import pytest
import torch

from bert_pretrain.examples.shards import DataFolder

# ── the profile ──


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNN", "matrix products"),
        ("sm90_xmma_gemm_bf16f32_bf16f32_f32_tn_n_tilesize128x128x64_execute", "matrix products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, cutlass::bfloat16_t>>", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer and clipping"),
        ("triton_poi_fused__to_copy_7", "casts"),
        ("triton_poi_fused__to_copy_gelu_view_5", "pointwise"),
        ("triton_red_fused__to_copy_add_embedding_native_layer_norm_2", "norms, softmax, sums"),
        ("void at::native::elementwise_kernel<128, 4, gpu_kernel_impl<bfloat16_copy_kernel_cuda>>", "casts"),
        ("void at::native::indexSelectLargeIndex<float, long, 2, -2, true>", "embeddings and indexing"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and fills of memory"),
        ("a_kernel_of_the_future", "other"),
        ("aten::addmm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
    ],
)
def test_kernels_are_sorted_by_their_names(name: str, kind: str) -> None:
    assert gpu_step.kind_of(name) == kind


def test_a_profile_adds_up_kernels_gaps_and_launches() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": duration, "tid": 7}
        for name, begin, duration in [("nvjet_a", 0, 40), ("flash_fwd", 20, 40), ("nvjet_a", 80, 20), ("Memset", 90, 5)]
    ]
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": -50, "dur": 500, "tid": 1}
    rows = gpu_step.summarize(gpu_step.events_of({"traceEvents": [host, *events, {"ph": "M"}]}), steps=2)
    assert rows[0] == {
        "profiled_step_seconds": pytest.approx(50e-6),
        "gap_share": pytest.approx(0.2),  # nothing runs from 60 to 80 of 100
        "launches_per_step": 2,
    }
    kinds = {row["kind_of_kernel"]: row["seconds"] for row in rows[1:4]}
    assert kinds == pytest.approx({"matrix products": 30e-6, "attention": 20e-6, "copies and fills of memory": 2.5e-6})
    assert (rows[4]["kernel"], rows[4]["calls_per_step"]) == ("nvjet_a", 1.0)
    assert "gaps 20.0% of it, 2 launches a step" in gpu_step.as_text(rows, "title")


# ── the benchmark ──


def test_a_contestant_is_held_against_ours(data_folder: Path) -> None:
    folder, device = DataFolder.open(data_folder), torch.device("cpu")
    recipe = bench.Recipe(folder, device, bench.hardware.choose_precision("fp32", device), 3000, "1x64", 8)
    batch = recipe.batches(4096).global_batch(0)
    times = {"ours": np.array([0.5, 0.5, 0.5]), "eager": np.array([1.0, 1.5, 2.0])}
    memory = {"ours": 2.0**30, "eager": 2.0**32}
    row = bench.result_row(recipe, "eager", batch, times, 1e12, memory)
    assert (row["examples"], row["examples_per_second"], row["ours_over_it"]) == (8, 8 / 1.5, 3.0)
    assert row["ours_over_it_quartiles"] == [2.5, 3.5]
    assert row["memory_over_it"] == 0.25
    assert row["mfu"] is None
    assert json.loads(json.dumps(row)) == row
    assert bench.table_line(row).endswith("| – | 4.00 GiB (ours 0.25 of it) | 3.00 × (2.50–3.50) |")


# ── variants ──


def test_variants_come_with_the_base_of_their_size() -> None:
    assert [one.label for one in gpu_step.choose(["CUDA graphs, small", "muon"])] == [
        "base", "base, small", "CUDA graphs, small", "muon",
    ]  # fmt: skip
    assert len({one.label for one in gpu_step.VARIANTS}) == len(gpu_step.VARIANTS)
    with pytest.raises(SystemExit, match="unknown variants: float9"):
        gpu_step.choose(["float9"])


def test_losses_and_times_are_held_against_the_base() -> None:
    compared = gpu_step.compared
    base = {"outcome": "done", "examples": 8, "examples_per_second": 100.0, "losses": [3.0, 2.0]}
    assert compared({**base, "examples_per_second": 125.0, "losses": [3.0, 2.25]}, base) == {
        "time_over_base": 0.8,
        "largest_loss_difference": 0.25,
    }
    assert compared({**base, "losses": [3.0, float("nan")]}, base)["largest_loss_difference"] is None
    assert "largest_loss_difference" not in compared({**base, "examples": 32}, base)
    assert compared({"outcome": "failed: x"}, base) == {}


@pytest.fixture
def measure(data_folder: Path) -> Callable[..., dict[str, Any]]:
    """Measure a change of a tiny step on the CPU, in a process of its own."""
    scope = argparse.Namespace(
        data=data_folder, device="cpu", precision="bf16", vocab_size=3000, examples=8, dropout=0.0, size="1x64",
        loss_steps=3, timed_steps=1,
    )  # fmt: skip

    def run(change: Callable[[Any], Any], limit: float = 60.0) -> dict[str, Any]:
        def on_one_thread(recipe: Any) -> None:
            torch.set_num_threads(1)  # a fork has none of the threads that tests before it may have started
            change(recipe)

        variant = gpu_step.Variant("a", "", on_one_thread)
        return gpu_step.in_a_process(scope, variant, limit)

    return run


def test_variants_that_change_no_arithmetic_have_the_base_losses(measure: Callable[..., dict[str, Any]]) -> None:
    base = measure(gpu_step._set())
    assert base["outcome"] == "done"
    assert len(base["losses"]) == 3
    by_name = {variant.name: variant for variant in gpu_step.VARIANTS}
    row = measure(by_name["large decoder blocks"].change)
    assert row["outcome"] == "done", row
    assert row["losses"] == pytest.approx(base["losses"], abs=1e-6)
    assert measure(by_name["batch times four"].change)["examples"] == 32


def test_a_variant_that_fails_dies_or_hangs_stops_no_other(measure: Callable[..., dict[str, Any]]) -> None:
    def fails(recipe: Any) -> None:
        raise RuntimeError("out of memory\nand more")

    assert measure(fails)["outcome"] == "failed: RuntimeError: out of memory"
    assert measure(lambda recipe: os.kill(os.getpid(), signal.SIGKILL))["outcome"] == "failed: its process died"
    assert measure(lambda recipe: time.sleep(60), limit=0.5)["outcome"].startswith("stopped at its limit")
