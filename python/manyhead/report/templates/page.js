"use strict";
(() => {
  const charts = [...document.querySelectorAll(".chart")];
  const scheme = matchMedia("screen and (prefers-color-scheme: dark)");

  // Figures name their colours as the style sheet's variables do; plotly wants the colours themselves.
  const coloured = (value, style) => {
    if (typeof value === "string") {
      return value.replace(/^var\((--[\w-]+)\)$/, (_, name) => style.getPropertyValue(name).trim());
    }
    if (Array.isArray(value)) return value.map((item) => coloured(item, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, style)]));
  };

  const draw = async (chart) => {
    const figure = JSON.parse(document.getElementById(chart.id + "-figure").textContent);
    const { data, layout } = coloured(figure, getComputedStyle(document.documentElement));
    await Plotly.react(chart, data, { ...layout, width: chart.clientWidth }, { displayModeBar: false });
    tilt(chart);
  };

  // The labels of sloping lines lie along them and a little above, at an angle that depends on the chart's width.
  const tilt = (chart) => {
    const { xaxis, yaxis, annotations = [] } = chart.layout;
    const box = chart.querySelector(".nsewdrag").getBoundingClientRect();
    const span = (axis) => axis.range[1] - axis.range[0];
    const slope = Math.atan2(box.height / span(yaxis), box.width / span(xaxis));
    const angle = Math.round((-slope * 180) / Math.PI);
    const update = {};
    annotations.forEach((label, index) => {
      if (label.name !== "along") return;
      update[`annotations[${index}].textangle`] = angle;
      update[`annotations[${index}].xshift`] = -8 * Math.sin(slope);
      update[`annotations[${index}].yshift`] = 8 * Math.cos(slope);
    });
    if (Object.keys(update).length) Plotly.relayout(chart, update);
  };

  const fit = (chart) => {
    if (chart.layout?.width !== chart.clientWidth) draw(chart);
  };

  const sizes = new ResizeObserver((entries) => entries.forEach((entry) => fit(entry.target)));
  charts.forEach((chart) => sizes.observe(chart));
  // Paper has a width of its own, and is white.
  for (const query of [scheme, matchMedia("print")]) query.addEventListener("change", () => charts.forEach(draw));
})();
