// The heat map of experts on servers, on a canvas with a mark that the keyboard moves.

import { number } from "./model.js";

const LABEL_WIDTH = 120;
const MIN_CELL = 4;
const MAX_CELL = 18;

export class Heat {
  constructor(canvas, readout, scale) {
    this.canvas = canvas;
    this.readout = readout;
    this.scale = scale;
    this.map = { rows: [], numExperts: 0, highest: 0 };
    this.mark = null;
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    canvas.addEventListener("pointermove", (event) => this.onPointer(event));
    canvas.addEventListener("pointerleave", () => this.setMark(null));
    new ResizeObserver(() => requestAnimationFrame(() => this.draw())).observe(canvas.parentElement);
  }

  show(map) {
    this.map = map;
    this.draw();
    this.say();
  }

  draw() {
    const { rows, numExperts } = this.map;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const room = this.canvas.parentElement.clientWidth - LABEL_WIDTH;
    this.cell = Math.max(MIN_CELL, Math.min(MAX_CELL, Math.floor(room / Math.max(1, numExperts))));
    this.height = rows.length > 200 ? MIN_CELL : Math.max(12, this.cell);
    const [width, height] = [LABEL_WIDTH + numExperts * this.cell, rows.length * this.height];
    // Browsers limit the area of a canvas, so a high map is drawn without extra pixels for sharp screens.
    const ratio = width * height > 4e6 ? 1 : window.devicePixelRatio;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    const isDark = colour("--ground").startsWith("#1");
    rows.forEach((row, y) => {
      const top = y * this.height;
      if (this.height >= 12 || y % 4 === 0) {
        context.fillStyle = colour("--muted");
        context.fillText(shorten(context, row.name, LABEL_WIDTH - 8), 0, top + this.height / 2);
      }
      row.cells.forEach((tokens, x) => {
        if (tokens === null) return;
        context.fillStyle = cellColour(tokens, this.map.highest, isDark);
        context.fillRect(LABEL_WIDTH + x * this.cell, top, Math.max(1, this.cell - 1), this.height - 1);
      });
    });
    if (this.mark && rows[this.mark.y]) {
      context.strokeStyle = colour("--mark");
      context.lineWidth = 2;
      context.strokeRect(LABEL_WIDTH + this.mark.x * this.cell - 1, this.mark.y * this.height - 1, this.cell + 1, this.height + 1);
    }
    this.scale.textContent = this.map.highest > 0 ? `0 to ${number(this.map.highest, 1)} tokens/s` : "no tokens in the last window";
  }

  onKey(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step || !this.map.rows.length) return;
    event.preventDefault();
    const { x, y } = this.mark ?? { x: -step[0], y: -step[1] };
    this.setMark({
      x: clamp(x + step[0], this.map.numExperts - 1, 0),
      y: clamp(y + step[1], this.map.rows.length - 1, 0),
    });
    this.reveal();
  }

  // Scrolls the box so that the mark is seen.
  reveal() {
    const box = this.canvas.parentElement;
    const [left, top] = [LABEL_WIDTH + this.mark.x * this.cell, this.mark.y * this.height];
    box.scrollTo({
      left: clamp(box.scrollLeft, left - LABEL_WIDTH, left + this.cell - box.clientWidth),
      top: clamp(box.scrollTop, top, top + this.height - box.clientHeight),
    });
  }

  onPointer(event) {
    const x = Math.floor((event.offsetX - LABEL_WIDTH) / this.cell);
    const y = Math.floor(event.offsetY / this.height);
    const isInside = x >= 0 && x < this.map.numExperts && y >= 0 && y < this.map.rows.length;
    this.setMark(isInside ? { x, y } : null);
  }

  setMark(mark) {
    if (mark?.x === this.mark?.x && mark?.y === this.mark?.y) return;
    this.mark = mark;
    this.draw();
    this.say();
  }

  say() {
    const row = this.mark && this.map.rows[this.mark.y];
    if (!row || this.mark.x >= this.map.numExperts) {
      this.readout.textContent = "No cell is marked.";
      return;
    }
    const holders = row.holders(this.mark.x).join(", ");
    const cell = row.cells[this.mark.x];
    const here = cell === null ? "not held" : `${number(cell, 1)} tokens/s`;
    this.readout.textContent = `Expert ${this.mark.x}, ${row.name}: ${here}. Replicas: ${holders || "none"}.`;
  }
}

function clamp(value, highest, lowest) {
  return Math.max(lowest, Math.min(highest, value));
}

function shorten(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}

// One hue. The square root keeps cold experts visible beside a hot one.
function cellColour(tokens, highest, isDark) {
  const share = highest > 0 ? Math.sqrt(tokens / highest) : 0;
  return isDark ? `hsl(212 85% ${22 + 52 * share}%)` : `hsl(214 80% ${88 - 56 * share}%)`;
}
