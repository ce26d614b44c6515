import itertools
from types import SimpleNamespace

from matplotlib.figure import Figure

from megatron_blackmamba.interchange import hf
from megatron_blackmamba.study import generation, pictures
from tests.reference import tiny
from tests.reference.canonical import canonical, write_tokenizer


def test_a_token_s_time_is_a_difference_of_clocks(tmp_path, monkeypatch):
    hf.write(canonical(tiny(), tokenizer=write_tokenizer(tmp_path / "source.json")), tmp_path)
    clock = itertools.count(100.0, step=1.5)
    monkeypatch.setattr(generation, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(generation, "LENGTHS", (4, 16))
    measured = generation._of(SimpleNamespace(folder=SimpleNamespace(root=tmp_path)))
    assert measured["milliseconds"] == [1500, 1500]
    short, long = measured["bytes"]
    assert short == long > 0  # without attention the state does not grow


def test_picture_shows_state_in_mebibytes():
    axes = Figure().subplots(1, 2)
    measured = [
        {"size": size, "group": "a_b", "lengths": [64, 128], "milliseconds": [2.0, 3.0], "bytes": [2**20, 3 * 2**19]}
        for size in ("xs", "s")
    ]
    assert pictures._generation(measured, axes) and not pictures._generation([], axes)
    shown = [[line.get_ydata().tolist() for line in place.lines] for place in axes]
    assert shown == [[[2.0, 3.0]], [[1.0, 1.5]]]
    assert axes[0].get_legend().get_texts()[0].get_text() == "a b" and "s models" in axes[1].get_xlabel()
