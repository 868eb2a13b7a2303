"""Every file of ../shared/data gives a result, or exit 3 with the reason that is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli_runner import Runner

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not beside this checkout")

# path -> pipeline stages of the result (None: no pipeline in it), or a part of the reason for the refusal
EXPECTED: dict[str, int | str | None] = {
    "README.md": "no readable trace",
    "kineto/cpu_only_rank-34.pt.trace.json.gz": "no finished training step",
    "kineto/distributed_info_not_found.json.gz": "no GPU events",
    "kineto/dlrm_8rank": None,
    "kineto/nccl_data.json.gz": None,
    "kineto/ns_resolution_rank-0.pt.trace.json.gz": None,
    "kineto/rank_non_gpu.json.gz": "no GPU events",
    "kineto/rank_not_found.json.gz": "no GPU events",
    "kineto/rocm_mi250.json.gz": None,
    "kineto/sendrecv_rank0.json.gz": None,
    "kineto/tests__data__trace_filter__sampled_rank-0.json.gz": None,
    "kineto/tests__data__trace_filter__sampled_rank-1.json.gz": None,
    "kineto/torchtitan_pp2_kernels_excerpt.tsv": "no readable trace",
    "megatronapp": "2 MegatronApp traces were given",
    "megatronapp/merged_trace.json": 4,
    "megatronapp/pp4_vpp4_iter10.json": 4,
    "nsys": None,
    "nsys/mfu_2gpu_after.sqlite": None,
    "straggler": "2 straggler traces were given",
    "straggler/meta-SE.yaml": "no readable trace",
    "straggler/meta-ST.yaml": "no readable trace",
    "straggler/ms-SE.json": "not a Kineto/Chrome trace",
    "straggler/ms-ST.json": "not a Kineto/Chrome trace",
    "straggler/mw-SE.json": "not a Kineto/Chrome trace",
    "straggler/mw-ST.json": "not a Kineto/Chrome trace",
    "straggler/trace-SE.parquet": 2,
    "straggler/trace-ST.parquet": 4,
}


def test_every_file_is_in_the_table() -> None:
    files = {str(p.relative_to(DATA)) for p in DATA.rglob("*") if p.is_file() and "dlrm_8rank" not in p.parts}
    assert files <= set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_result_or_the_right_reason(name: str, bubblescope: Runner) -> None:
    expected = EXPECTED[name]
    done = bubblescope("analyze", str(DATA / name), "--json", "-")
    assert "Traceback" not in done.stderr
    if isinstance(expected, str):
        assert done.returncode == 3, done.stderr
        assert expected in done.stderr
        assert "\nhint: " in done.stderr
        assert done.stdout == ""
        return
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["pipeline"]["stages"] == expected
    for gpu in data["gpus"]:
        assert gpu["busy"] > 0
        assert gpu["busy"] + gpu["idle"] == pytest.approx(gpu["window"], abs=1e-6)
        causes = [value for value in gpu["causes"].values() if value is not None]
        assert sum(causes) == pytest.approx(gpu["idle"], abs=1e-6)


def test_a_folder_of_several_formats_is_refused_and_they_are_named(bubblescope: Runner) -> None:
    done = bubblescope("analyze", str(DATA))
    assert done.returncode == 3
    assert "mix formats" in done.stderr
    assert "1 straggler, " in done.stderr  # the folder of its two files
    assert "nsys" in done.stderr
