// Draw the charts of the page in the colours of its style, and again when the colour scheme changes.
const colours = getComputedStyle(document.documentElement);
const touched = matchMedia("(pointer: coarse)").matches;  // there a finger scrolls the page, so buttons zoom, and are always shown
const axis = { gridcolor: "--line", linecolor: "--muted", zerolinecolor: "--line", tickcolor: "--muted", automargin: true };
const look = JSON.stringify({
  paper_bgcolor: "--card", plot_bgcolor: "--card", margin: { l: 12, r: 20, t: touched ? 84 : 60, b: 12 }, uirevision: "kept",
  font: { family: "system-ui, sans-serif", size: 12, color: "--muted" }, hovermode: "x unified",
  hoverlabel: { bgcolor: "--card", bordercolor: "--line", font: { color: "--text" }, namelength: -1 },
  title: {
    x: 0, xref: "container", xanchor: "left", y: 1, yref: "container", yanchor: "top", pad: { l: 8, t: touched ? 36 : 12 },
    font: { size: 14, color: "--text" }, subtitle: { font: { size: 12, color: "--muted" } },
  },
  legend: { orientation: "h", x: 0, xref: "container", y: 0, yref: "container", yanchor: "bottom", font: { color: "--text" } },
  modebar: { bgcolor: "--card", color: "--muted", activecolor: "--text" },
  xaxis: { ...axis, title: { font: { size: 12 }, standoff: 8 } }, yaxis: axis,
  dragmode: touched ? false : "zoom",
});
const config = {
  responsive: true, displaylogo: false, displayModeBar: touched || "hover",
  modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
};

const resolve = (key, value) => (key.endsWith("color") && typeof value === "string" ? colours.getPropertyValue(value).trim() : value);
const merge = (below, above) => {
  const merged = { ...below };
  for (const [key, value] of Object.entries(above)) {
    merged[key] = value && below[key] && value.constructor === Object ? merge(below[key], value) : value;
  }
  return merged;
};

const draw = () => {
  for (const figure of document.querySelectorAll("figure")) {
    const place = figure.querySelector("div");
    if (!figure.ariaLabel) {
      figure.ariaLabel = place.textContent;
      place.replaceChildren();
    }
    const { data, layout } = JSON.parse(figure.querySelector("script").textContent, resolve);
    const filename = figure.ariaLabel.split(":")[0].replace(/[^\w-]+/g, "_");
    const toImageButtonOptions = { filename, scale: 2 };
    const drawn = merge(JSON.parse(look, resolve), layout);
    drawn.margin.t -= layout.title.subtitle.text ? 0 : 16;
    Plotly.react(place, data, drawn, { ...config, toImageButtonOptions });
  }
};
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
