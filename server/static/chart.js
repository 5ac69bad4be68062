// Small charts over time, in SVG.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 132;
const TOP = 8, BOTTOM = 18, LEFT = 44, RIGHT = 2;

export class TimeChart {
  #points = []; // {time, values}, the oldest first
  #hovered = null; // a time
  #svg = make("svg", { class: "plot", role: "img", preserveAspectRatio: "none" });
  #legend; // {item, value} for each series
  #options;

  // title: above the chart. series: [{key, label, color, isRare}], color: a number of the palette; a rare one is in the
  // legend only while it is not 0. isStacked: areas on each other, the first at the bottom; else lines. format: of a
  // value in the legend and at the axis. seconds: the width. minTop: the least that the axis goes up to.
  constructor({ title, note, series, isStacked = false, format = String, seconds = 120, minTop = 1 }) {
    this.#options = { title, series, isStacked, format, seconds, minTop };
    this.element = document.createElement("figure");
    this.element.className = "chart";
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    if (note) caption.append(Object.assign(document.createElement("small"), { textContent: note }));
    const legend = document.createElement("ul");
    legend.className = "legend";
    this.#legend = series.map(({ label, color }) => {
      const item = document.createElement("li");
      const swatch = Object.assign(document.createElement("span"), { className: `swatch fill-${color}` });
      const value = document.createElement("b");
      item.append(swatch, `${label} `, value);
      legend.append(item);
      return { item, value };
    });
    this.element.append(caption, this.#svg, legend);
    this.#svg.addEventListener("pointermove", (event) => this.#hover(event));
    this.#svg.addEventListener("pointerleave", () => this.#hover(null));
    new ResizeObserver(() => this.#draw()).observe(this.element);
  }

  // values: by key; null where there is none.
  push(time, values) {
    this.#points.push({ time, values });
    while (this.#points[0].time < time - this.#options.seconds - 5) this.#points.shift();
    this.#draw();
  }

  #hover(event) {
    if (event) {
      const box = this.#svg.getBoundingClientRect();
      const part = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
      this.#hovered = Math.min(0, (part - 1) * this.#options.seconds); // seconds before now
    } else {
      this.#hovered = null;
    }
    this.#draw();
  }

  #draw() {
    const width = this.#svg.clientWidth;
    const last = this.#points.at(-1);
    if (!width || !last) return;
    const { series, isStacked, format, seconds, minTop } = this.#options;
    const sums = this.#points.map(({ values }) => {
      const known = series.map(({ key }) => values[key] ?? 0);
      return isStacked ? known.reduce((sum, value) => sum + value, 0) : Math.max(...known);
    });
    const top = niceTop(Math.max(minTop, ...sums));
    const x = (time) => LEFT + (1 - (last.time - time) / seconds) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
    const parts = [...this.#axes(width, top, x, y, last.time)];
    parts.push(...(isStacked ? this.#areas(x, y) : this.#lines(x, y)));
    const shown = this.#hovered === null ? last : nearest(this.#points, last.time + this.#hovered);
    if (this.#hovered !== null) {
      parts.push(make("line", { class: "cursor", x1: x(shown.time), x2: x(shown.time), y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.#svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.#svg.replaceChildren(...parts);
    series.forEach(({ key, isRare }, index) => {
      const value = shown.values[key];
      this.#legend[index].value.textContent = value === null || value === undefined ? "–" : format(value);
      this.#legend[index].item.hidden = isRare && !this.#points.some(({ values }) => values[key]);
    });
    this.#describe(last);
  }

  *#axes(width, top, x, y, now) {
    for (const value of [0, top / 2, top]) {
      yield make("line", { class: value ? "grid" : "axis", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) });
      yield text(this.#options.format(value), { x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" });
    }
    const { seconds } = this.#options;
    for (const ago of [seconds, seconds / 2, 0]) {
      const anchor = ago === seconds ? "start" : ago ? "middle" : "end";
      yield text(ago ? `−${ago} s` : "now", { x: x(now - ago), y: HEIGHT - 4, "text-anchor": anchor });
    }
  }

  #areas(x, y) {
    const { series } = this.#options;
    const points = this.#visible(x);
    const floor = points.map(() => 0);
    return series.map(({ key, color }) => {
      const below = [...floor];
      points.forEach(({ values }, index) => (floor[index] += values[key] ?? 0));
      const up = points.map(({ time }, index) => `${x(time).toFixed(1)},${y(floor[index]).toFixed(1)}`);
      const down = points.map(({ time }, index) => `${x(time).toFixed(1)},${y(below[index]).toFixed(1)}`);
      return make("path", { class: `area fill-${color}`, d: `M${up.join("L")}L${down.reverse().join("L")}Z` });
    });
  }

  #lines(x, y) {
    return this.#options.series.map(({ key, color }) => {
      let path = "", isDrawing = false;
      for (const { time, values } of this.#visible(x)) {
        const value = values[key];
        if (value === null || value === undefined) {
          isDrawing = false;
          continue;
        }
        path += `${isDrawing ? "L" : "M"}${x(time).toFixed(1)},${y(value).toFixed(1)}`;
        if (!isDrawing) path += "h0.01"; // so that a single point is seen
        isDrawing = true;
      }
      return make("path", { class: `line stroke-${color}`, d: path });
    });
  }

  #visible(x) {
    return this.#points.filter(({ time }) => x(time) >= LEFT);
  }

  #describe(last) {
    const { title, series, format } = this.#options;
    const now = series.map(({ key, label }) => `${label} ${format(last.values[key] ?? 0)}`);
    this.#svg.setAttribute("aria-label", `${title}, now: ${now.join(", ")}`);
  }
}

function make(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function text(content, attributes) {
  const element = make("text", attributes);
  element.textContent = content;
  return element;
}

// The least of 1, 2, 4, 5 or 10 times a power of ten that is not below the value.
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].find((step) => step * power >= value * 0.999) * power;
}

function nearest(points, time) {
  return points.reduce((best, point) => (Math.abs(point.time - time) < Math.abs(best.time - time) ? point : best));
}
