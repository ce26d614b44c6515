"""The functions shared by all benchmarks."""

from benchmarks import _common


def test_measuring_begins_once_process_has_all_its_memory(monkeypatch):
    made = []
    peaks = [100, 180, 200, 200, 200]  # the second round still finds no place for one call: it is not the one to time
    monkeypatch.setattr(_common, "_peak_of_memory", lambda: peaks[len(made) // 2])
    _common.settle([lambda: made.append("short"), lambda: made.append("long")])
    assert made == ["short", "long"] * 3


def test_growing_process_is_measured_after_a_limit(monkeypatch):
    made = []
    monkeypatch.setattr(_common, "_peak_of_memory", lambda: 2 ** len(made))
    _common.settle([lambda: made.append("call")], rounds=4)
    assert len(made) == 4
