// The charts of the last minutes. A point: [time, tok/s, live buffers, pending, active bytes, cache bytes, running, waiting].
const SECONDS = 900;
const HEIGHT = 170;
const NEAR = 0.25; // of the limit: from there on its line is drawn; before that it would flatten a leak's slope
const clock = (time) => new Date(time * 1000).toLocaleTimeString([], { hourCycle: "h23" });
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const bytes = (value) => {
  if (value == null) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(value) / 3));
  return `${(value / 1000 ** power).toPrecision(3)} ${units[power]}`;
};
export const number = (value) => (value == null ? "–" : value.toLocaleString("en", { maximumFractionDigits: 1 }));

// The legend names the newest values, unless the pointer is at others.
function showNewest(chart) {
  const { left, idx } = chart.cursor;
  if (left == null || left < 0 || idx == null) chart.setLegend({ idx: chart.data[0].length - 1 });
}

export class Charts {
  constructor(place) {
    this.place = place;
    this.points = [];
    this.marks = [];
    this.limit = null;
    this.counted = null;
    this.charts = [];
    new ResizeObserver(() => this.resize()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
  }

  load(points) {
    this.points = points.slice(-SECONDS);
    this.draw();
  }

  add(point, events, limit) {
    // Later points are of a clock that has been set back since.
    while (this.points.length && this.points.at(-1)[0] >= point[0]) this.points.pop();
    this.points.push(point);
    this.points = this.points.slice(-SECONDS);
    this.marks = events.filter((event) => event.kind === "death" || event.kind === "rotation");
    this.limit = limit;
    this.draw();
  }

  isNear() {
    return this.points.some((point) => point[2] > NEAR * this.limit);
  }

  draw() {
    const counted = this.points.some((point) => point[2] != null);
    if (!this.charts.length || counted !== this.counted) {
      this.counted = counted;
      this.build();
    }
    const columns = (indices) => [0, ...indices].map((i) => this.points.map((point) => point[i]));
    for (const { chart, indices, limit } of this.charts) {
      const data = columns(indices);
      if (limit) data.push(this.points.map(() => (this.isNear() ? this.limit : null)));
      chart.setData(data);
      showNewest(chart);
    }
  }

  build() {
    for (const { chart } of this.charts) chart.destroy();
    this.place.replaceChildren();
    const buffers = this.counted
      ? { title: `Live buffers, of ${number(this.limit)} at most`, names: ["live"], indices: [2], limit: true, say: number }
      : { title: "Cache arrays pending (no count of live buffers here)", names: ["pending"], indices: [3], say: number };
    this.charts = [
      { title: "Tokens a second", names: ["tokens/s"], indices: [1], say: number },
      buffers,
      { title: "Memory", names: ["in use", "caches"], indices: [4, 5], say: bytes },
      { title: "Sequences", names: ["running", "waiting"], indices: [6, 7], say: number },
    ].map((kind) => ({ ...kind, chart: this.chart(kind) }));
  }

  chart({ title, names, limit, say }) {
    const box = document.createElement("div");
    box.className = "chart";
    const heading = document.createElement("h3");
    heading.textContent = title;
    box.append(heading);
    this.place.append(box);
    const axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") } };
    const colors = [style("--one"), style("--two")];
    const series = names.map((label, i) => ({
      label, stroke: colors[i], width: 2, points: { show: false }, value: (_, value) => say(value),
    }));
    if (limit) series.push({ label: "limit", stroke: style("--critical"), dash: [6, 4], points: { show: false }, value: (_, v) => say(v) });
    const options = {
      width: Math.max(200, box.clientWidth), height: HEIGHT, cursor: { y: false },
      scales: { y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1) * 1.05] } },
      series: [{ label: "at", value: (_, time) => (time == null ? "" : clock(time)) }, ...series],
      axes: [{ ...axis, space: 80, values: (_, times) => times.map(clock) }, { ...axis, size: 64, values: (_, values) => values.map(say) }],
      hooks: { draw: [(chart) => this.drawMarks(chart)], setCursor: [showNewest] },
    };
    return new uPlot(options, [[], ...series.map(() => [])], box);
  }

  drawMarks(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.setLineDash([]);  // the limit's dashes stay set otherwise
    for (const mark of this.marks) {
      const x = chart.valToPos(mark.time, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = style(mark.kind === "death" ? "--mark-death" : "--mark-rotation");
      ctx.lineWidth = 2 * devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  resize() {
    for (const { chart } of this.charts) {
      const width = chart.root.parentElement.clientWidth;
      if (width && width !== chart.width) chart.setSize({ width, height: HEIGHT });
    }
  }
}
