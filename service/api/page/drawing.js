// Small helpers that make elements. Text goes in as text, never as markup: it may come from a model or a stranger.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function html(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

export function number(value, digits = 1) {
  const known = Number(value ?? NaN); // the feed writes infinities as words
  if (Number.isFinite(known)) return known.toFixed(digits);
  return Math.abs(known) === Infinity ? (known > 0 ? "∞" : "−∞") : "–";
}
