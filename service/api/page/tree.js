// Draws the draft tree of one step: a column for each depth, a line for each leaf, the accepted path on top.

import { svg } from "./drawing.js";

const COLUMN = 124;
const ROW = 38;
const BOX = { width: 102, height: 31 };
const MARGIN = 10;
const LONGEST = 12;

export function visible(text) {
  return text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

export function told(step) {
  if (!step.drafted) return "Nothing was drafted: one pass, one token.";
  const own = visible(step.texts.at(-1) ?? "");
  const then = own ? `“${own}” from the target` : "a token without text";
  return `${step.drafted} nodes verified, ${step.accepted} accepted, then ${then}.`;
}

export function drawTree(step) {
  const root = rooted(step);
  const boxes = [];
  const edges = [];
  const size = { rows: 0, columns: 0 };
  place(root, 0, size, boxes, edges);
  const width = MARGIN * 2 + size.columns * COLUMN + BOX.width;
  const height = MARGIN * 2 + (size.rows - 1) * ROW + BOX.height;
  const label = step.drafted ? `Draft tree: ${told(step)}` : told(step);
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...edges, ...boxes);
}

// The root is the last token before the step; the target's own token hangs below the last accepted node.
function rooted(step) {
  const { texts, parents, survival, path } = step.tree;
  const root = { text: step.root, kind: "root", note: "root", children: [] };
  const nodes = texts.map((text, index) => ({
    text, kind: path.includes(index) ? "accepted" : "rejected", note: survival[index].toFixed(2), worth: survival[index], children: [],
  }));
  nodes.forEach((node, index) => (parents[index] < 0 ? root : nodes[parents[index]]).children.push(node));
  for (const node of nodes.concat(root)) {
    node.children.sort((one, other) => (other.kind === "accepted") - (one.kind === "accepted") || other.worth - one.worth);
  }
  const last = path.length ? nodes[path.at(-1)] : root;
  if (step.texts.length > step.accepted) {
    last.children.unshift({ text: step.texts.at(-1), kind: "bonus", note: "target", children: [] });
  }
  return root;
}

function place(node, depth, size, boxes, edges) {
  const x = MARGIN + depth * COLUMN;
  const y = MARGIN + size.rows * ROW;
  size.columns = Math.max(size.columns, depth);
  if (!node.children.length) size.rows += 1;
  for (const child of node.children) {
    const childY = place(child, depth + 1, size, boxes, edges);
    edges.push(edge(x, y, childY, child.kind));
  }
  boxes.push(box(node, x, y));
  return y;
}

function edge(x, y, childY, kind) {
  const [from, to] = [y + BOX.height / 2, childY + BOX.height / 2];
  const [start, end] = [x + BOX.width, x + COLUMN];
  return svg("path", { class: `edge ${kind}`, d: `M${start},${from}C${start + 14},${from} ${end - 14},${to} ${end},${to}` });
}

function box(node, x, y) {
  const text = visible(node.text);
  const short = text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text;
  return svg("g", { class: `node ${node.kind}`, transform: `translate(${x},${y})` },
    svg("title", {}, `${text} (${node.kind}, ${node.note})`),
    svg("rect", { width: BOX.width, height: BOX.height, rx: 5 }),
    svg("text", { x: 7, y: 14 }, short),
    svg("text", { x: 7, y: 26, class: "small" }, node.note));
}
