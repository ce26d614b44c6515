"""The charts, read back from the SVG and from matplotlib: positions are values, widths are shares."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from megatron_blackmamba.report import charts
from megatron_blackmamba.report.charts import Line, Mark
from megatron_blackmamba.report.pictures import write_pictures

X0, X1 = charts.LEFT, charts.WIDTH - charts.RIGHT
Y0, Y1 = charts.HEIGHT - charts.BOTTOM, charts.TOP  # y grows upwards


def drawn(figure):
    return ElementTree.fromstring(figure.html())


def shapes(figure, tag, kind):
    return [shape for shape in drawn(figure).iter(tag) if kind in shape.get("class", "").split()]


def points(shape):
    return [tuple(map(float, pair.split(","))) for pair in shape.get("points").split()]


def texts(figure):
    return {text.text: (float(text.get("x")), float(text.get("y"))) for text in drawn(figure).iter("text")}


def titles(figure, tag):
    return [title.text for shape in drawn(figure).iter(tag) for title in shape.iter("title")]


def test_curve_goes_from_corner_to_corner():
    figure = charts.Lines("loss", [Line("a", [0, 5, 10], [0, 0.5, 1])], zero=True)
    (curve,) = shapes(figure, "polyline", "line")
    top = Y0 - (Y0 - Y1) / 1.05  # 5% of air above the largest value
    assert points(curve) == [(X0, Y0), ((X0 + X1) / 2, round((Y0 + top) / 2, 1)), (X1, round(top, 1))]
    assert titles(figure, "polyline") == ["a"]
    (inner,) = (svg for svg in drawn(figure).iter("svg") if svg.get("y"))
    assert inner.get("viewBox") == f"0 {Y1} {charts.WIDTH} {Y0 - Y1}"
    assert (inner.get("y"), inner.get("height")) == (str(Y1), str(Y0 - Y1))


def test_band_of_a_short_curve_is_drawn_whole():
    band = Line("a", [0, 10], [2, 4], low=np.array([1.0, 3.0]), high=np.array([3.0, 9.0]))
    (shape,) = shapes(charts.Lines("loss", [band]), "polygon", "band")
    assert all(Y1 <= y <= Y0 for _, y in points(shape))


def test_axes_cover_all_curves():
    curves = [Line("a", [0, 4], [1, 1]), Line("b", [2, 8], [2, 3], dashed=True, colour=9), Line("none", [], [])]
    figure = charts.Lines("loss", curves, [Mark(6, "skipped", "step 6: <bad>")], x_label="samples")
    first, second = shapes(figure, "polyline", "line")
    width = X1 - X0
    assert [x for x, _ in points(first)] == [X0, X0 + width / 2]
    assert [x for x, _ in points(second)] == [X0 + width / 4, X1]
    assert "dashed" not in first.get("class") and "dashed" in second.get("class")
    assert "c1" in second.get("class").split()  # colours repeat after 8
    (mark,) = shapes(figure, "line", "mark")
    assert mark.get("x1") == mark.get("x2") == f"{X0 + 0.75 * width:.1f}"
    assert (mark.get("y1"), mark.get("y2")) == (str(Y1), str(Y0))
    assert "step 6: <bad>" in titles(figure, "line")
    (numbers,) = shapes(figure, "script", "chart-data")
    first, second = json.loads(numbers.text)["series"]
    assert first == {"name": "a", "colour": 0, "dashed": False, "x": [0, 4], "y": [1, 1]}
    assert second == {"name": "b", "colour": 1, "dashed": True, "x": [2, 8], "y": [2, 3]}
    assert texts(figure)["samples"] == (X1, charts.HEIGHT - 3)
    assert [key.text or key[0].tail for key in drawn(figure).iter("span")] == ["a", "b"]


def test_ticks_stand_at_their_values():
    figure = charts.Lines("loss", [Line("a", [0, 300], [0, 20])], zero=True)
    places = texts(figure)
    assert places["100"] == (round(X0 + (X1 - X0) / 3, 1), Y0 + 16)
    height = Y0 - 10 / 21 * (Y0 - Y1)
    assert places["10"] == (X0 - 6, round(height + 4, 1))
    assert round(height, 1) in {float(line.get("y1")) for line in shapes(figure, "line", "grid")}


def test_band_lies_between_low_and_high():
    line = Line("a", np.array([0, 1]), np.array([1, 1]), np.array([0, 0]), np.array([2, 1]))
    (band,) = shapes(charts.Lines("loss", [line], zero=True), "polygon", "band")
    unit = (Y0 - Y1) / (2 * 1.05)  # the band of so short a curve sets the axis
    assert points(band) == [
        (X0, round(Y0 - 2 * unit, 1)),
        (X1, round(Y0 - unit, 1)),
        (X1, Y0),
        (X0, Y0),
    ]
    flat = Line("a", np.array([0, 1]), np.array([1, 1]), np.array([1, 1]), np.array([1, 1]))
    assert shapes(charts.Lines("loss", [flat]), "polygon", "band") == []


def test_single_point_is_a_dot():
    figure = charts.Lines("loss", [Line("a", [3], [1.0])])
    (dot,) = shapes(figure, "circle", "dot")
    assert float(dot.get("cx")) == X0
    assert float(dot.get("cy")) == (Y0 + Y1) / 2
    assert texts(figure)["4"][0] == X1  # an axis of one step
    assert shapes(charts.Lines("loss", [Line("a", [3, 4], [1.0, 2.0])]), "circle", "dot") == []
    assert list(drawn(figure).iter("span")) == []  # one curve needs no legend


def test_few_outliers_are_cut_off():
    y = np.ones(300)
    y[::2], y[7] = 2, 1000
    (curve,) = shapes(charts.Lines("loss", [Line("a", np.arange(300), y)]), "polyline", "line")
    assert points(curve)[0][1] - points(curve)[1][1] == pytest.approx(-(Y0 - Y1) / 1.1, abs=0.2)
    (short,) = shapes(charts.Lines("loss", [Line("a", np.arange(50), y[:50])]), "polyline", "line")
    assert min(height for _, height in points(short)) >= Y1


def test_stacked_areas_fill_the_chart():
    figure = charts.Stacked("experts", [0, 10], np.array([[0.25, 0.75], [0.5, 0.5]]), ["one", "two"])
    below, above = shapes(figure, "polygon", "area")
    at = lambda share: Y0 - share * (Y0 - Y1)
    assert points(below) == [(X0, at(0.25)), (X1, at(0.5)), (X1, Y0), (X0, Y0)]
    assert points(above) == [(X0, Y1), (X1, Y1), (X1, at(0.5)), (X0, at(0.25))]
    assert titles(figure, "polygon") == ["one", "two"]
    (alone, _) = shapes(charts.Stacked("experts", [5], np.array([[0.25, 0.75]]), ["one", "two"]), "polygon", "area")
    assert [x for x, _ in points(alone)] == [X0, X1, X1, X0]


def test_bars_are_as_long_as_their_values():
    figure = charts.Bars(
        "shares", ["pile", "a very long name of a source"], {"planned": [0.5, 0.25], "achieved": [0.4, 0]}
    )
    widths = [float(bar.get("width")) for bar in drawn(figure).iter("rect")]
    longest = charts.WIDTH - 110 - 64
    assert widths == [longest, round(0.8 * longest, 1), longest / 2, 1.0]
    tops = [float(bar.get("y")) for bar in drawn(figure).iter("rect")]
    assert tops == [Y1, Y1 + 15, Y1 + 40, Y1 + 55]
    assert {"50.00%", "40.00%", "25.00%", "0.00%", "pile", "a very long na…"} == set(texts(figure))
    height = float(next(drawn(figure).iter("svg")).get("viewBox").split()[3])
    assert height == Y1 + 2 * 40 + 4


def test_layers_are_divided_into_shares():
    figure = charts.Shares("experts", ["layer 1", "layer 3"], np.array([[0.25, 0.75], [0.5, 0.5]]))
    span = charts.WIDTH - 70 - charts.RIGHT
    rects = [(float(r.get("x")), float(r.get("y")), float(r.get("width"))) for r in drawn(figure).iter("rect")]
    assert rects == [
        (70, Y1, 0.25 * span),
        (70 + 0.25 * span, Y1, 0.75 * span),
        (70, Y1 + 20, 0.5 * span),
        (70 + 0.5 * span, Y1 + 20, 0.5 * span),
    ]
    (equal,) = shapes(figure, "line", "equal")
    assert float(equal.get("x1")) == 70 + span / 2
    assert titles(figure, "rect")[1] == "layer 1, expert 1: 75.0%"
    assert {"0%", "50%", "100%", "share", "layer 1", "layer 3"} == set(texts(figure))
    assert texts(figure)["layer 1"][0] < 70  # beside its bar


def test_estimates_have_dots_intervals_and_numbers():
    figure = charts.Forest("x", ["a", "b"], [-0.1, 0.2], [0.1, None], "nats", signed=True)
    first, second = ([float(shape.get(at)) for at in ("x1", "x2")] for shape in shapes(figure, "line", "line"))
    dots = [float(dot.get("cx")) for dot in shapes(figure, "circle", "dot")]
    (zero,) = (float(line.get("x1")) for line in shapes(figure, "line", "axis"))
    assert first[1] == zero and dots[0] == pytest.approx(sum(first) / 2, abs=0.1) and second == [dots[1]] * 2
    assert dots[1] - zero == pytest.approx(2 * (zero - dots[0]), abs=0.2)
    assert {"-0.100 ± 0.100", "+0.200", "a", "nats"} <= set(texts(figure))
    (points, _, (bars,)) = plotted(figure).containers[0]
    assert list(points.get_xdata()) == [-0.1, 0.2] and bars.get_segments()[0][:, 0].tolist() == [-0.2, 0.0]


@pytest.mark.parametrize(
    "figure",
    [
        charts.Forest("t", [], [], [], "nats"),
        charts.Lines("t", []),
        charts.Bars("t", [], {}),
        charts.Stacked("t", [], np.zeros((0, 2)), []),
        charts.Shares("t", [], np.zeros((0, 2))),
    ],
)
def test_chart_without_values_says_so(figure):
    assert set(texts(figure)) == {"nothing recorded yet"}


def test_logarithmic_axis_has_powers_of_ten():
    figure = charts.Lines("loss", [Line("a", [1, 10, 100], [0, 1, 2])], log=True)
    (curve,) = shapes(figure, "polyline", "line")
    assert [x for x, _ in points(curve)] == [X0, (X0 + X1) / 2, X1]
    assert texts(figure)["10"] == ((X0 + X1) / 2, Y0 + 16) and "20" in texts(figure)
    (numbers,) = shapes(figure, "script", "chart-data")
    assert json.loads(numbers.text)["log"] and json.loads(numbers.text)["series"][0]["x"] == [1, 10, 100]
    assert charts.log_ticks(0, 3) == [1, 10, 100, 1000]


# Pictures for slides: the same charts, drawn by matplotlib.


def plotted(chart):
    axes = Figure().subplots()
    chart.draw(axes)
    return axes


def test_picture_has_the_curves_of_the_page():
    band = Line("a", [1, 10], np.array([1, 2]), np.array([0, 1]), np.array([2, 3]), colour=3)
    alone = Line("b", [5], np.array([4.0]), np.array([3.0]), np.array([5.0]), dashed=True)
    axes = plotted(charts.Lines("loss", [band, alone], [Mark(2, "skipped", "x")], x_label="tokens", log=True))
    named = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    assert named["a"] == ([1, 10], [1, 2]) and named["b"] == ([5], [4])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert (axes.get_xscale(), axes.get_xlabel()) == ("log", "tokens")
    edges = axes.collections[0].get_paths()[0].vertices
    assert {tuple(edge) for edge in edges} == {(1, 0), (10, 1), (10, 3), (1, 2)}
    (lower, upper) = axes.containers[0][2][0].get_segments()[0]
    assert (lower[1], upper[1]) == (3, 5)


def test_picture_of_many_curves_names_a_few():
    curves = [Line(f"{i}", [0, 1], [i, i], dashed=i > 1) for i in range(11)]
    names = [text.get_text() for text in plotted(charts.Lines("loss", curves)).get_legend().get_texts()]
    assert names == ["0", "1"]


def test_picture_has_bars_beside_each_other():
    axes = plotted(charts.Bars("shares", ["web", "books"], {"planned": [0.5, 0.0], "achieved": [0.6, 0.4]}))
    planned, achieved = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert planned == [0.5, 0.0] and achieved == [0.6, 0.4]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["web", "books"]
    assert {"60.00%", "0.00%"} <= {text.get_text() for text in axes.texts}


def test_picture_has_shares_behind_each_other():
    axes = plotted(charts.Shares("experts", ["layer 1", "layer 3"], np.array([[0.25, 0.75], [0.5, 0.5]])))
    assert [[bar.get_x() for bar in bars] for bars in axes.containers] == [[0, 0], [0.25, 0.5]]
    assert [[bar.get_width() for bar in bars] for bars in axes.containers] == [[0.25, 0.5], [0.75, 0.5]]
    areas = plotted(
        charts.Stacked("experts", [0, 10], np.array([[0.25, 0.75], [0.5, 0.5]]), ["one", "two"])
    ).collections
    assert [area.get_paths()[0].vertices[:, 1].max() for area in areas] == [0.5, 1.0]


def test_pictures_of_nothing_are_not_written(tmp_path):
    bars, nothing = charts.Bars("a", ["x"], {"one": [1.0]}), charts.Lines("b", [])
    assert write_pictures(tmp_path, {"both": [bars, nothing], "none": [nothing]}) == [tmp_path / "both.png"]
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
