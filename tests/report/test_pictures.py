"""Pictures for slides."""

from types import SimpleNamespace

from matplotlib.figure import Figure

from megatron_blackmamba.report import pictures


def test_the_mixture_is_drawn_beside_its_plan():
    axes = Figure().subplots()
    history = SimpleNamespace(name="run", achieved={"web": 0.6, "books": 0.4}, planned={"web": 0.5})
    assert pictures._mixture(history, axes)
    planned, achieved = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert planned == [0.5, 0.0] and achieved == [0.6, 0.4]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["web", "books"]
    assert axes.get_xlabel() == "share of the samples" and axes.get_title() == "run: mixture"
