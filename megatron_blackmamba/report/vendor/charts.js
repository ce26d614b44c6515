// Replaces the drawn charts of a page by ones that can be zoomed and read: drag to zoom, double-click to go back.
"use strict";
(() => {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (v) => {
    if (v == null) return "–";
    const size = Math.abs(v);
    for (const [unit, name] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
      if (size >= unit) return +(v / unit).toPrecision(3) + name;
    return size && size < 1e-3 ? v.toExponential(1) : String(+v.toPrecision(4));
  };
  const exact = (v) => v == null ? "–" : Number.isInteger(v) ? v.toLocaleString("en") : String(+v.toPrecision(6));

  const build = (figure, given) => {
    const series = [{ label: given.x_label, value: (u, v) => exact(v) }], tables = [], bands = [];
    for (const s of given.series) {
      const colour = css("--c" + s.colour), columns = [s.x, s.y];
      const at = series.push({
        label: s.name, stroke: colour, width: s.thin ? 0.8 : 1.6, dash: s.dashed ? [5, 4] : undefined,
        value: (u, v) => exact(v), points: { show: s.x.length < 30, size: 5 }, spanGaps: true,
      }) - 1;
      if (s.low) {
        columns.push(s.high, s.low);
        for (let i = 0; i < 2; i++)
          series.push({ class: "quiet", label: "", stroke: "transparent", points: { show: false }, spanGaps: true });
        bands.push({ series: [at + 1, at + 2], fill: colour + "2e" });
      }
      tables.push(columns);
    }
    const axis = { stroke: css("--soft"), grid: { stroke: css("--rule"), width: 1 }, ticks: { show: false },
      values: (u, values) => values.map((v) => v == null ? "" : short(v)), font: "12px system-ui", size: 34, gap: 4 };
    const marks = (u) => {
      const ctx = u.ctx, { left, top, width, height } = u.bbox;
      ctx.save();
      ctx.setLineDash([4, 4]);
      for (const m of given.marks) {
        const x = u.valToPos(m.x, "x", true);
        if (x < left || x > left + width) continue;
        ctx.strokeStyle = css(m.kind === "skipped" ? "--skip" : "--restart");
        ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, top + height); ctx.stroke();
      }
      ctx.restore();
    };
    // Without a pointer over the chart, the legend tells the last values.
    const last = (u) => {
      if (u.cursor.left >= 0) return;
      const idxs = u.data.map((values) => { let i = values.length - 1; while (i > 0 && values[i] == null) i--; return i; });
      if (u.legend.idxs.some((idx, i) => idx !== idxs[i])) u.setLegend({ idxs }, false);
    };
    const home = (u) => u.setScale("y", { min: given.y0, max: given.y1 });
    const chart = new uPlot({
      width: figure.clientWidth, height: 260, series, bands, cursor: { drag: { x: true, y: true, uni: 20 } },
      scales: { x: { time: false, distr: given.log ? 3 : 1 } }, axes: [{ ...axis, size: 22, label: given.x_label, labelSize: 16, labelGap: 0, labelFont: axis.font }, { ...axis, size: 52 }], legend: { live: true },
      hooks: { draw: [marks], ready: [home, last], setCursor: [last] },
    }, uPlot.join(tables), figure);
    chart.over.addEventListener("dblclick", () => home(chart));
    return chart;
  };

  const charts = [];
  const draw = () => {
    for (const made of charts) made.chart.destroy();
    charts.length = 0;
    for (const script of document.querySelectorAll("script.chart-data")) {
      const figure = script.parentElement;
      for (const drawn of figure.querySelectorAll("svg, .legend")) drawn.hidden = drawn.style.display = "none";
      charts.push({ figure, chart: build(figure, JSON.parse(script.textContent)) });
    }
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("resize", () => {
    for (const { figure, chart } of charts) chart.setSize({ width: figure.clientWidth, height: 260 });
  });
})();
