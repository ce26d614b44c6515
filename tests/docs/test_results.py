"""`make bench` and the file it writes."""

import shutil

import pytest

from benchmarks import run


def test_failed_or_skipped_benchmark_keeps_its_block(tmp_path, monkeypatch):
    out = tmp_path / "RESULTS.md"
    shutil.copy(run.RESULTS, out)
    before = run._sections(out)
    assert list(before) == [benchmark.name for benchmark in run.CPU]

    fresh = "### experts: grouped experts\n\nnew\n"
    monkeypatch.setattr(run, "_run", lambda benchmark: fresh if benchmark.name == "experts" else None)
    monkeypatch.setattr("sys.argv", ["run", "--only", "experts", "sinkhorn", "--out", str(out)])
    with pytest.raises(SystemExit, match="failed: sinkhorn"):
        run.main()
    assert run._sections(out) == before | {"experts": fresh}
    _, _, after = run.RESULTS.read_text().partition(run.END)
    assert "## GPU" in after and out.read_text().endswith(after)
