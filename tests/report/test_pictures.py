"""Pictures for slides."""

from types import SimpleNamespace

import numpy as np
from matplotlib.figure import Figure

from megatron_blackmamba.report import pictures
from megatron_blackmamba.report.history import Series


def test_the_legend_names_every_loss_curve():
    axes = Figure().subplots()
    training = Series(np.array([1, 2]), np.array([3.0, 2.0]))
    validation = Series(np.array([2]), np.array([2.5]))
    history = SimpleNamespace(name="run", scalars={"loss": training}, of=lambda metric: {"web": validation})
    assert pictures._loss(history, axes)
    named = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert named == {"training, all sources": [3.0, 2.0], "web, validation": [2.5]}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(named)


def test_the_mixture_is_drawn_beside_its_plan():
    axes = Figure().subplots()
    history = SimpleNamespace(name="run", achieved={"web": 0.6, "books": 0.4}, planned={"web": 0.5})
    assert pictures._mixture(history, axes)
    planned, achieved = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert planned == [0.5, 0.0] and achieved == [0.6, 0.4]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["web", "books"]
    assert axes.get_xlabel() == "share of the samples" and axes.get_title() == "run: mixture"
