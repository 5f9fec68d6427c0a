// Lines over the time that this page is open.

import { clock } from "./model.js";

const MAX_POINTS = 900;
// Pixels of a chart, as in style.css, and of a legend in one line.
const HEIGHT = 150;
const LEGEND_HEIGHT = 30;
// Time axis of a page that has just been opened.
const LEAST_SECONDS = 60;

export class Chart {
  constructor(element, names, format) {
    this.element = element;
    this.format = format;
    this.data = [[], ...names.map(() => [])];
    this.names = names;
    this.build();
    new ResizeObserver(() => requestAnimationFrame(() => this.plot.setSize(this.size()))).observe(element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
  }

  // Of the plot; the legend stands below it.
  size() {
    return { width: Math.max(200, this.element.clientWidth), height: this.names.length > 1 ? HEIGHT - LEGEND_HEIGHT : HEIGHT };
  }

  // uPlot takes colours once, so another theme needs another plot.
  build() {
    this.plot?.destroy();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const strokes = [colour("--accent"), colour("--warn"), colour("--good")];
    const options = {
      ...this.size(),
      legend: { show: this.names.length > 1 },
      cursor: { y: false },
      scales: { x: { range: (_, low, high) => (low == null ? [now() - LEAST_SECONDS, now()] : [Math.min(low, high - LEAST_SECONDS), high]) }, y: { range: (_, low, high) => [Math.min(0, low), high > 0 ? high * 1.1 : 1] } },
      axes: [{ ...axis, space: 80, values: (_, values) => values.map((seconds) => clock(seconds * 1000)) }, { ...axis, size: 60, values: (_, values) => values.map(this.format) }],
      series: [
        { value: (_, seconds) => (seconds == null ? "" : clock(seconds * 1000)) },
        ...this.names.map((label, nth) => ({
          label,
          stroke: strokes[nth],
          width: 2,
          points: { show: false },
          value: (_, value) => (value == null ? "–" : this.format(value)),
        })),
      ],
    };
    this.plot = new window.uPlot(options, this.data, this.element);
  }

  add(seconds, values) {
    [seconds, ...values].forEach((value, nth) => {
      this.data[nth].push(value);
      if (this.data[nth].length > MAX_POINTS) this.data[nth].shift();
    });
    this.plot.setData(this.data);
  }
}

function now() {
  return Date.now() / 1000;
}
