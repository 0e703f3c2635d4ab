// Elements with attributes, texts and children.

const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, inner) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...inner);
  return made;
}

export const element = (name, attributes = {}, ...inner) => fill(document.createElement(name), attributes, inner);
export const drawn = (name, attributes = {}, ...inner) => fill(document.createElementNS(SVG, name), attributes, inner);
export const at = (id) => document.getElementById(id);
