"""What the check of a GPU measures: the profile's tables and the benchmark's rows."""

import gpu_profile
import pytest

# ── the profile ──


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNN", "matrix products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, cutlass::bfloat16_t>>", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer and clipping"),
        ("triton_poi_fused__to_copy_7", "casts"),
        ("triton_red_fused__to_copy_add_embedding_native_layer_norm_2", "norms, softmax, sums"),
        ("void at::native::elementwise_kernel<128, 4, gpu_kernel_impl<bfloat16_copy_kernel_cuda>>", "casts"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and fills of memory"),
        ("a_kernel_of_the_future", "other"),
        ("aten::addmm", "matrix products"),
    ],
)
def test_kernels_are_sorted_by_their_names(name: str, kind: str) -> None:
    assert gpu_profile.kind_of(name) == kind


def test_a_profile_adds_up_kernels_gaps_and_launches() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": duration, "tid": 7}
        for name, begin, duration in [("nvjet_a", 0, 40), ("flash_fwd", 20, 40), ("nvjet_a", 80, 20), ("Memset", 90, 5)]
    ]
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": -50, "dur": 500, "tid": 1}
    rows = gpu_profile.summarize(gpu_profile.events_of({"traceEvents": [host, *events, {"ph": "M"}]}), steps=2)
    assert rows[0] == {
        "profiled_step_seconds": pytest.approx(50e-6),
        "gap_share": pytest.approx(0.2),  # nothing runs from 60 to 80 of 100
        "launches_per_step": 2,
    }
    kinds = {row["kind_of_kernel"]: row["seconds"] for row in rows[1:4]}
    assert kinds == pytest.approx({"matrix products": 30e-6, "attention": 20e-6, "copies and fills of memory": 2.5e-6})
    assert (rows[4]["kernel"], rows[4]["calls_per_step"]) == ("nvjet_a", 1.0)
    assert "gaps 20.0% of it, 2 launches a step" in gpu_profile.as_text(rows, "title")


# ── the benchmark ──
