// The last five minutes as small charts, one per figure, and one of the time since the start.

import { byId, html, number, svg } from "./drawing.js";

const SECONDS = 300;
const WIDTH = 300;
const HEIGHT = 60;
const RECENT_SECONDS = 10;
const MOST_BINS = 60;
const BIN_SECONDS = 2;

const CHARTS = [
  {
    id: "gain", title: "Tokens/s since start", digits: 1, floor: 0, marks: true, from: "start", sinceStart: true,
    series: [{ name: "with drafts", of: (point) => point.speed }, { name: "plain", of: (point) => point.plain }],
  },
  { id: "tau", title: "Mean acceptance length (tau)", digits: 2, floor: 1, marks: true, series: [{ of: (point) => point.tau }] },
  { id: "speed", title: "Tokens per second", digits: 1, floor: 0, series: [{ of: (point) => point.tokens_per_second }] },
  { id: "budget", title: "Draft tokens per step", digits: 1, floor: 0, series: [{ of: (point) => point.budget }] },
  {
    id: "load", title: "Requests", digits: 0, floor: 0,
    series: [{ name: "running", of: (point) => point.running }, { name: "waiting", of: (point) => point.waiting }],
  },
  {
    id: "arms", title: "Value of updates", digits: 3, floor: 0, learning: true,
    series: [{ name: "head", of: (point) => point.values.head }, { name: "full", of: (point) => point.values.full }],
  },
];

class Chart {
  constructor(form) {
    this.form = form;
    this.now = html("span", { class: "now" });
    this.top = html("span");
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    const scale = html("div", { class: "scale", "aria-hidden": "true" }, form.from ?? "5 min ago", this.top, "now");
    const caption = html("figcaption", {}, form.title, this.now);
    this.figure = html("figure", { class: "chart", id: `chart-${form.id}` }, caption, this.picture, scale);
  }

  draw(points, end) {
    const columns = this.form.series.map(({ of }) => points.map((point) => finite(of(point))));
    const { low, high } = bounds(columns.flat(), this.form.floor);
    const x = (point) => WIDTH - ((end - point.unix_seconds) / SECONDS) * WIDTH;
    const y = (value) => HEIGHT - 2 - ((value - low) / (high - low)) * (HEIGHT - 6);
    const lines = columns.flatMap((column, place) => traced(points.map(x), column.map((v) => (v === null ? null : y(v))), place));
    const marks = this.form.marks ? versionMarks(points, x) : [];
    const grid = svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(high), y2: y(high), "vector-effect": "non-scaling-stroke" });
    this.picture.replaceChildren(grid, ...marks, ...lines);
    this.top.textContent = `${number(low, low % 1 ? 2 : 0)} to ${number(high, high % 1 ? 2 : 0)}`;
    this.#say(columns.map((column) => latest(points, column, end)));
  }

  #say(values) {
    const { title, series, digits } = this.form;
    const words = values.map((value, place) => (series[place].name ? `${series[place].name} ` : "") + number(value, digits));
    this.picture.setAttribute("aria-label", `${title}${this.form.sinceStart ? "" : ", last five minutes"}; now ${words.join(", ")}`);
    const keyed = values.map((value, place) => [
      ...(series[place].name ? [html("small", { class: place ? "key-second" : "key-first" }, `${place ? " ┄ " : "— "}${series[place].name} `)] : []),
      number(value, digits),
    ]);
    this.now.replaceChildren(...keyed.flat());
  }
}

function finite(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

function bounds(values, floor) {
  const known = values.filter((value) => value !== null);
  const low = Math.min(floor, ...known);
  const high = Math.max(...known, floor);
  return { low, high: high > low ? roundedUp(high) : low + 1 };
}

function roundedUp(value) {
  if (value <= 0) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10].find((step) => step * power >= value) * power;
}

// One path for the line and one for what is below it; where nothing is known the line is broken.
function traced(xs, ys, place) {
  const stretches = [];
  ys.forEach((y, index) => {
    if (y === null || xs[index] < 0) return;
    if (index === 0 || ys[index - 1] === null || !stretches.length) stretches.push([]);
    stretches.at(-1).push(`${xs[index].toFixed(1)},${y.toFixed(1)}`);
  });
  const lines = stretches.map((points) => `M${points.join("L")}${points.length > 1 ? "" : "h1"}`).join("");
  const areas = stretches.map((points) => `M${points[0].split(",")[0]},${HEIGHT}L${points.join("L")}V${HEIGHT}Z`).join("");
  const line = svg("path", { class: place ? "line second" : "line", d: lines, "vector-effect": "non-scaling-stroke" });
  return place ? [line] : [svg("path", { class: "area", d: areas }), line];
}

function versionMarks(points, x) {
  const versioned = points.filter((point) => point.version !== null);
  const changes = versioned.filter((point, index) => point.version !== (versioned[index - 1] ?? point).version);
  return changes.map((point) =>
    svg("line", { class: "mark", x1: x(point), x2: x(point), y1: 0, y2: HEIGHT, "vector-effect": "non-scaling-stroke" },
      svg("title", {}, `drafter version ${point.version}`)),
  );
}

function latest(points, column, end) {
  for (let index = column.length - 1; index >= 0 && end - points[index].unix_seconds <= RECENT_SECONDS; index--) {
    if (column[index] !== null) return column[index];
  }
  return null;
}

// Spans of computing time, put together to as many points of equal width as a chart shows.
function binned(spans, end) {
  const total = spans.reduce((sum, [, seconds]) => sum + seconds, 0);
  const count = Math.min(MOST_BINS, Math.ceil(total / BIN_SECONDS));
  const bins = Array.from({ length: count }, () => ({ tokens: 0, seconds: 0, plain: 0, version: null }));
  let before = 0;
  for (const [tokens, seconds, plain, version] of spans) {
    const bin = bins[Math.min(count - 1, Math.floor((count * (before + seconds / 2)) / total))];
    before += seconds;
    Object.assign(bin, { tokens: bin.tokens + tokens, seconds: bin.seconds + seconds, plain: bin.plain + plain, version });
  }
  const place = (index) => end - (count > 1 ? SECONDS * (1 - index / (count - 1)) : 0);
  return bins
    .map(({ tokens, seconds, plain, version }, index) => ({
      unix_seconds: place(index), speed: tokens / seconds, plain: tokens / plain, version, seconds,
    }))
    .filter(({ seconds }) => seconds > 0);
}

export class Charts {
  constructor() {
    this.points = [];
    this.spans = []; // [tokens, seconds, seconds of plain decoding, version] each
    this.charts = CHARTS.map((form) => new Chart(form));
    byId("charts").replaceChildren(...this.charts.map((chart) => chart.figure));
  }

  restart(points, spans) {
    this.points = points;
    this.spans = spans;
  }

  sums() {
    const [tokens, seconds, plain] = [0, 1, 2].map((place) => this.spans.reduce((sum, span) => sum + span[place], 0));
    return { tokens, seconds, plain };
  }

  add(moment) {
    const { unix_seconds, tau, tokens_per_second, budget, accepted_by_source, running, waiting, learning } = moment;
    const [version, values] = learning ? [learning.version, learning.values] : [null, {}];
    this.points.push({ unix_seconds, tau, tokens_per_second, budget, accepted_by_source, running, waiting, version, values });
    this.points = this.points.filter((point) => unix_seconds - point.unix_seconds <= SECONDS);
    const compared = moment.against_plain;
    if (compared) this.spans.push([compared.tokens, compared.seconds, compared.plain_seconds, version]);
    const sinceStart = binned(this.spans, unix_seconds);
    for (const chart of this.charts) {
      const { learning: ofLearning, sinceStart: whole } = chart.form;
      chart.figure.hidden = (ofLearning === true && !learning) || (whole === true && !sinceStart.length);
      chart.draw(whole ? sinceStart : this.points, unix_seconds);
    }
  }
}
