/**
 * Draw the metrics of the last five minutes.
 *
 * Without a library: uPlot 1.6.32, the smallest that is maintained, has 53 KB, with which the page would have 195 KB of its
 * 150. It would replace 80 of these lines: rates, quantiles, gaps after a restart and the legend would stay.
 */

import {byId, element} from "./dom.js";
import {count, percent, seconds} from "./format.js";
import {Change, parseMetrics} from "./metrics.js";

const WINDOW = 5;  // seconds over which rates are taken
export const PERIOD = 1;  // seconds between two looks
const SPANS = [[60, 15, "s"], [120, 30, "s"], [300, 60, "min"]];  // seconds shown and between two ticks, their unit
const plots = {samples: [], rows: [], pointed: null};  // pointed: the time under the pointer

const rate = name => ({rate: change => change.rate(name)});
const latency = name => ({mean: change => change.mean(name), p95: change => change.quantile(name, 0.95)});
const CHARTS = [  // empty: where the axis ends while there is nothing but 0
  {title: "Generated", unit: "tokens/s", format: count, empty: 10, series: rate("generation_tokens_total")},
  {title: "Prompts", unit: "tokens/s", format: count, empty: 10, series: rate("prompt_tokens_total")},
  {title: "Time to first token", format: seconds, empty: 0.1, series: latency("time_to_first_token_seconds")},
  {title: "Inter-token latency", format: seconds, empty: 0.1, series: latency("inter_token_latency_seconds")},
  {
    title: "Requests", unit: "sequences", format: count, empty: 2, isWhole: true,
    series: {
      running: change => change.value("num_requests_running"),
      waiting: change => change.value("num_requests_waiting"),
    },
  },
  {title: "Queue time", format: seconds, empty: 0.1, series: latency("request_queue_time_seconds")},
  {
    title: "KV", unit: "blocks", format: count, empty: 2, isWhole: true,
    series: {used: change => change.value("kv_cache_blocks_used")},
    note: change => {  // of all replicas, whose shares cannot be added
      const used = change.value("kv_cache_blocks_used"), all = change.value("kv_cache_blocks");
      return `of ${all} (${percent(all ? used / all : 0)})`;
    },
  },
  {
    title: "Prefix hits", unit: "of prompt tokens", format: percent, top: 1,
    series: {hits: change => change.share("prefix_cache_hits_total", "prefix_cache_queries_total")},
    note: change => change.value("prefix_cache_queries_total") ? "" : "nothing looked up yet",
  },
];

for (const chart of CHARTS) {
  chart.canvas = element("canvas");
  chart.canvas.setAttribute("role", "img");
  chart.canvas.setAttribute("aria-label", `${chart.title} over the last five minutes`);
  chart.legend = element("div", "legend");
  const title = element("h2", "", chart.title, element("span", "", chart.unit ? ` ${chart.unit}` : ""));
  const caption = element("figcaption", "", title, chart.legend);
  byId("charts").append(element("figure", "", caption, element("div", "canvas", chart.canvas)));
  chart.canvas.addEventListener("pointermove", event => pointAt(event.offsetX, chart.canvas.clientWidth));
  chart.canvas.addEventListener("pointerleave", () => pointAt(null));
}

/** Take what /metrics said into the plots; "" where it could not be read, which breaks the lines. */
export function takeSample(text) {
  const time = performance.now() / 1000, sample = {...parseMetrics(text), time};
  const [before, after] = [plots.samples.at(-1), sample].map(each => each?.sums.get("engine_steps_total"));
  if (!text || after < before) plots.samples = [];  // a server that was started anew counts from 0
  if (text) plots.samples.push(sample);
  while (plots.samples.length > 2 && plots.samples[0].time < time - WINDOW - PERIOD / 2) plots.samples.shift();
  const change = plots.samples.length > 1 ? new Change(plots.samples[0], sample) : null;
  plots.rows.push({
    time,
    values: CHARTS.map(chart => Object.values(chart.series).map(read => change && read(change))),
    notes: CHARTS.map(chart => change && chart.note ? chart.note(change) : ""),
  });
  while (plots.rows[0].time < time - SPANS.at(-1)[0]) plots.rows.shift();
}

/** What the axis of time shows: the last five minutes, less while the page is young. */
function timeAxis() {
  const first = plots.rows[0]?.time ?? 0, now = plots.rows.at(-1)?.time ?? 0;
  const [span, step, unit] = SPANS.find(([span]) => now - first <= span) ?? SPANS.at(-1);
  return {now, span, step, unit};
}

const MARGIN = {left: 50, right: 10, top: 8, bottom: 20};  // pixels

function pointAt(x, width) {
  const {now, span} = timeAxis(), share = (x - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
  plots.pointed = x === null || share < 0 || share > 1 ? null : now - span * (1 - share);
  drawCharts();
}

/** The end of an axis: 1, 2 or 5 times a power of ten that is not less; for whole numbers one that has a whole half. */
function roundUp(value, isWhole) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  const step = (isWhole ? [2, 4, 10, 20] : [1, 2, 5, 10]).find(step => step * power >= value * 0.9999);
  return isWhole ? Math.max(2, step * power) : step * power;
}

export function drawCharts() {
  const style = getComputedStyle(document.documentElement), named = name => style.getPropertyValue(name);
  const lines = [named("--accent"), named("--faint")];
  const ink = {lines, grid: named("--line"), text: named("--quiet"), font: named("--sans")};
  const {rows, pointed} = plots, row = pointed === null ? rows.at(-1) : rows.findLast(each => each.time <= pointed);
  CHARTS.forEach((chart, index) => {
    const shown = Object.keys(chart.series).map((name, which) => {
      const value = row?.values[index][which] ?? null;
      return element("span", "", `${name} `, element("b", "", value === null ? "–" : chart.format(value)), " ");
    });
    chart.legend.replaceChildren(...shown, row?.notes[index] ?? "");
    drawChart(chart, rows.map(({time, values}) => ({time, values: values[index]})), ink);
  });
}

/** Draw one chart: a grid with its units, a line for each series, broken where there was nothing to measure. */
function drawChart({canvas, ...chart}, rows, ink) {
  const width = canvas.clientWidth, height = canvas.clientHeight, scale = window.devicePixelRatio;
  if (!width || !height) return;  // another view is shown
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d"), right = width - MARGIN.right, bottom = height - MARGIN.bottom;
  const highest = Math.max(0, ...rows.flatMap(row => row.values));
  const top = chart.top ?? (highest ? roundUp(highest, chart.isWhole) : chart.empty);
  const {now, span, step, unit} = timeAxis();
  const x = time => right - (right - MARGIN.left) * (now - time) / span;
  const y = value => bottom - (bottom - MARGIN.top) * value / top;
  const crisp = value => Math.round(value) + 0.5;
  const stroke = (...points) => {
    pen.beginPath();
    points.forEach(point => pen.lineTo(...point));
    pen.stroke();
  };

  pen.scale(scale, scale);
  pen.font = `11px ${ink.font}`;
  pen.fillStyle = ink.text;
  pen.strokeStyle = ink.grid;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const value of [0, top / 2, top]) {
    stroke([MARGIN.left, crisp(y(value))], [right, crisp(y(value))]);
    pen.fillText(value ? chart.format(value) : "0", MARGIN.left - 6, y(value));
  }
  pen.textBaseline = "top";
  for (let ago = 0; ago <= span; ago += step) {
    const at = x(now - ago), label = `−${unit === "min" ? ago / 60 : ago}`;
    stroke([crisp(at), bottom], [crisp(at), bottom + 4]);
    pen.textAlign = ago ? "center" : "right";
    pen.fillText(ago === 0 ? "now" : ago === span ? `${label} ${unit}` : label, at, bottom + 6);
  }
  pen.lineWidth = 2;  // a pixel in full wherever it lies
  pen.lineJoin = pen.lineCap = "round";
  for (let which = Object.keys(chart.series).length - 1; which >= 0; which--) {  // the first one lies on top
    pen.strokeStyle = ink.lines[which];
    pen.setLineDash(which ? [4, 4] : []);
    let points = [];
    for (const {time, values} of [...rows, {time: now, values: []}]) {
      if (values[which] != null) points.push([x(time), y(values[which])]);
      else if (points.length) {
        stroke([points[0][0] - 2, points[0][1]], ...points);  // so that a single point is seen too
        points = [];
      }
    }
  }
  if (plots.pointed === null) return;
  pen.setLineDash([]);
  pen.strokeStyle = ink.lines[1];
  pen.lineWidth = 1;
  stroke([crisp(x(plots.pointed)), MARGIN.top], [crisp(x(plots.pointed)), bottom]);
}

new ResizeObserver(drawCharts).observe(byId("charts"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
