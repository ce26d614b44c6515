import itertools
from types import SimpleNamespace

from megatron_blackmamba.interchange import hf
from megatron_blackmamba.study import generation, page
from tests.reference import tiny
from tests.reference.canonical import canonical, write_tokenizer


def test_token_s_time_is_a_difference_of_clocks(tmp_path, monkeypatch):
    hf.write(canonical(tiny(), tokenizer=write_tokenizer(tmp_path / "source.json")), tmp_path)
    clock = itertools.count(100.0, step=1.5)
    monkeypatch.setattr(generation, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(generation, "LENGTHS", (4, 16))
    measured = generation._of(SimpleNamespace(folder=SimpleNamespace(root=tmp_path)))
    assert measured["milliseconds"] == [1500, 1500]
    short, long = measured["bytes"]
    assert short == long > 0  # without attention the state does not grow


def test_generation_is_drawn_by_size():
    measured = [
        {"size": size, "group": "a_b", "lengths": [64, 128], "milliseconds": [2.0, 3.0], "bytes": [2**20, 3 * 2**19]}
        for size in ("xs", "s")
    ]
    drawn = page._generation(measured)
    assert [chart.title for chart in drawn[2:]] == ["s: ms a token, batch 1", "s: bytes of state"]
    assert [chart.curves[0].y for chart in drawn] == [[2.0, 3.0], [2**20, 3 * 2**19]] * 2
    assert page._generation([]) == []
