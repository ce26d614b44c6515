// Replaces the drawn charts of a page by ones with controls: axis, smoothing, logarithms, hovering across charts, zoom.
"use strict";
(() => {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (v, digits = 3) => {
    const size = Math.abs(v);
    if (size < 1e15)
      for (const [unit, name] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
        if (size >= unit) return +(v / unit).toPrecision(digits) + name;
    return size && (size < 1e-3 || size >= 1e15) ? v.toExponential(1).replace("e+", "e") : String(+v.toPrecision(digits));
  };
  const exact = (v) => v == null ? "–" : Number.isInteger(v) ? v.toLocaleString("en") : String(+v.toPrecision(5));

  // Run → axis → values at the same places of the run; charts are drawn along the first axis.
  const axes = JSON.parse(document.getElementById("axes")?.textContent || "[]"), names = Object.keys(axes[0] || {});
  const given = [...document.querySelectorAll("script.chart-data")].map((script) =>
    ({ figure: script.parentElement, ...JSON.parse(script.textContent) }));
  const state = { axis: names[0], smooth: 0.6, logx: false, logy: false, range: true };

  const along = (x, run) => {
    const from = axes[run][names[0]], to = axes[run][state.axis];
    let low = 0, high = from.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (from[middle] <= x) low = middle; else high = middle; }
    const part = high > low ? Math.min(1, Math.max(0, (x - from[low]) / (from[high] - from[low]))) : 0;
    return to[low] + part * (to[high] - to[low]);
  };
  // Exponential mean of the values so far, as TensorBoard's: the first ones do not pull it to zero.
  const smoothed = (values) => {
    let mean = 0, weight = 0;
    return values.map((v) => {
      if (v == null) return null;
      mean = state.smooth * mean + (1 - state.smooth) * v;
      weight = state.smooth * weight + 1 - state.smooth;
      return mean / weight;
    });
  };
  const logTicks = (low, high) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const part of high / low < 300 ? high / low < 5 ? [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9] : [1, 2, 5] : [1])
        if (part * 10 ** power >= low * 0.999 && part * 10 ** power <= high * 1.001) found.push(part * 10 ** power);
    return found;
  };

  const build = (chart) => {
    const moves = chart.x_label === names[0], label = moves ? state.axis : chart.x_label;
    const at = (x, run = 0) => moves && label !== names[0] ? along(x, run) : x;
    const logx = chart.log || state.logx;
    const values = chart.series.flatMap((s) => s.y).filter((v) => v != null);
    const logy = state.logy && values.every((v) => v > 0);
    const series = [{ label, value: (u, v) => v == null ? "–" : v >= 1e4 ? short(v, 4) : label === "step" ? exact(Math.round(v)) : exact(v) }];
    const tables = [], bands = [], known = new Set();
    for (const s of chart.series) {
      const colour = css("--c" + s.colour), keep = s.x.map((x) => !logx || at(x, s.run) > 0), some = (v) => v.filter((_, i) => keep[i]);
      const raw = some(s.y), smooth = s.smooth && state.smooth && raw.length > 2, columns = [some(s.x).map((x) => at(x, s.run))];
      const quiet = { class: "quiet", label: "", points: { show: false }, spanGaps: true };
      if (smooth) { columns.push(raw); series.push({ ...quiet, stroke: colour + "40", width: 1 }); }
      columns.push(smooth ? smoothed(raw) : raw);
      const place = series.push({
        label: s.name, stroke: colour, width: s.thin ? 0.8 : 1.6, dash: s.dashed ? [5, 4] : undefined, spanGaps: true,
        value: (u, v) => exact(v), points: { show: s.x.length < 30 && !s.thin, size: 5 }, class: known.has(s.name) ? "quiet" : undefined,
      }) - 1;
      known.add(s.name);
      if (s.low && state.range) {
        columns.push(some(s.high), some(s.low));
        series.push({ ...quiet, stroke: "transparent" }, { ...quiet, stroke: "transparent" });
        bands.push({ series: [place + 1, place + 2], fill: colour + "2e" });
      }
      tables.push(columns);
    }
    const axis = { stroke: css("--soft"), grid: { stroke: css("--rule"), width: 1 }, ticks: { show: false }, font: "12px system-ui", size: 34, gap: 4,
      values: (u, ticks, i, space, step) => ticks.map((v) => v == null ? "" : short(v, Math.max(3, Math.ceil(Math.log10(Math.abs(ticks.at(-1)) / step)) + 1 || 3))) };
    const logarithmic = { splits: (u, i, low, high) => logTicks(low, high), filter: (u, ticks) => ticks, values: (u, ticks) => ticks.map((v) => short(v)) };
    const marks = (u) => {
      const ctx = u.ctx, { left, top, width, height } = u.bbox;
      ctx.save();
      ctx.setLineDash([4, 4]);
      for (const m of chart.marks) {
        const x = u.valToPos(at(m.x), "x", true);
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
    const range = logy ? [Math.min(...values) / 1.03, Math.max(...values) * 1.03] : [chart.y0, chart.y1];
    return new uPlot({
      width: chart.figure.clientWidth || 480, height: 260, series, bands, legend: { live: true },
      cursor: { drag: { x: true, y: true, uni: 20 }, sync: { key: label, scales: ["x", null], setSeries: false } },
      scales: { x: { time: false, distr: logx ? 3 : 1, ...(logx ? { range: (u, low, high) => low < high ? [low, high] : [low / 2, low * 2] } : {}) }, y: { distr: logy ? 3 : 1, range } },
      axes: [{ ...axis, size: 22, label, labelSize: 16, labelGap: 0, labelFont: axis.font, ...(logx ? logarithmic : {}) }, { ...axis, size: 52, ...(logy ? logarithmic : {}) }],
      hooks: { draw: [marks], ready: [last], setCursor: [last] },
    }, uPlot.join(tables), chart.figure);
  };

  const draw = () => {
    for (const chart of given) {
      chart.drawn?.destroy();
      for (const still of chart.figure.querySelectorAll("svg, .legend")) still.hidden = still.style.display = "none";
      chart.drawn = build(chart);
    }
  };
  const wide = new ResizeObserver((entries) => {
    for (const chart of given) {
      const width = chart.figure.clientWidth; // 0 in what is folded away
      if (width && width !== chart.drawn.width) chart.drawn.setSize({ width, height: 260 });
    }
  });

  const controls = () => {
    const bar = document.createElement("form"), smooth = given.some((chart) => chart.series.some((s) => s.smooth));
    bar.className = "controls";
    const add = (label, input, read) => {
      const made = bar.appendChild(document.createElement("label"));
      input.setAttribute("aria-label", label);
      made.append(label, " ", input);
      input.addEventListener("input", () => { read(input); requestAnimationFrame(draw); });
    };
    const input = (fields) => Object.assign(document.createElement("input"), fields);
    if (names.length > 1) {
      const select = document.createElement("select");
      select.append(...names.map((name) => new Option(name)));
      add("by", select, ({ value }) => { state.axis = value; });
    }
    if (smooth) add("smooth", input({ type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth }), ({ value }) => { state.smooth = +value; });
    const boxes = [["logx", "log x"], ["logy", "log y"]];
    if (given.some((chart) => chart.series.some((s) => s.low))) boxes.push(["range", "min–max"]);
    for (const [key, label] of boxes) add(label, input({ type: "checkbox", checked: state[key] }), ({ checked }) => { state[key] = checked; });
    given[0].figure.closest("section").before(bar);
  };

  if (given.length) {
    controls();
    draw();
    for (const chart of given) wide.observe(chart.figure);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
