// The little Markdown that chat models write, as DOM nodes. Text only ever becomes text nodes, so nothing in an answer is run or loaded.

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|(?<![\w*])\*(?=[^\s*])([^*\n]*[^\s*])\*(?![\w*])/g;

// Text -> nodes. Works on unfinished text: an open code fence runs to the end.
export function render(text) {
  const lines = text.split("\n");
  const nodes = [];
  for (let at = 0; at < lines.length; ) {
    const [node, next] = block(lines, at);
    if (node) nodes.push(node);
    at = next;
  }
  return nodes;
}

function block(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = /^\s*(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/.exec(line);
  if (fence) return code(lines, at + 1, fence[1], fence[2]);
  const heading = /^(#{1,6})\s+(.*)$/.exec(line);
  if (heading) return [element(`h${Math.min(heading[1].length, 4)}`, inline(heading[2])), at + 1];
  if (/^ {0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) return [element("hr"), at + 1];
  if (itemOf(line)) return list(lines, at);
  if (tableAt(lines, at)) return table(lines, at);
  if (/^>\s?/.test(line)) {
    const end = endOf(lines, at, (other) => /^>\s?/.test(other));
    return [element("blockquote", render(lines.slice(at, end).map((quoted) => quoted.replace(/^>\s?/, "")).join("\n"))), end];
  }
  const end = endOf(lines, at, (other, index) => index === at || (other.trim() && !opens(other) && !tableAt(lines, index)));
  return [element("p", inline(lines.slice(at, end).join("\n"))), end];
}

function opens(line) {
  return /^\s*(`{3,}|~{3,})|^#{1,6}\s|^>/.test(line) || itemOf(line) !== null;
}

function endOf(lines, at, belongs) {
  let end = at;
  while (end < lines.length && belongs(lines[end], end)) end++;
  return end;
}

function code(lines, at, fence, language) {
  const end = endOf(lines, at, (line) => !(line.trim().startsWith(fence) && !line.trim().slice(fence.length).replaceAll(fence[0], "")));
  const figure = element("figure", [element("figcaption", [language || "code"]), element("pre", [element("code", [lines.slice(at, end).join("\n")])])]);
  return [figure, end + 1];
}

// A row of cells above a row of dashes.
function tableAt(lines, at) {
  return lines[at].includes("|") && /^\s*\|?(\s*:?-+:?\s*\|)+(\s*:?-+:?)?\s*$/.test(lines[at + 1] ?? "");
}

function table(lines, at) {
  const end = endOf(lines, at + 2, (line) => line.includes("|"));
  const row = (line, tag) => element("tr", line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => element(tag, inline(cell.trim().replaceAll("\\|", "|")))));
  const head = element("thead", [row(lines[at], "th")]);
  return [element("table", [head, element("tbody", lines.slice(at + 2, end).map((line) => row(line, "td")))]), end];
}

function itemOf(line) {
  return /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/.exec(line);
}

function list(lines, at) {
  const [, indent, marker] = itemOf(lines[at]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const found = itemOf(lines[end]);
    if (!found || found[1].length < indent.length || (found[1].length === indent.length && ordered(found[2]) !== ordered(marker))) break;
    const next = endOf(lines, end, (line, index) => index === end || (line.trim() && (!itemOf(line) || itemOf(line)[1].length > indent.length) && /^\s/.test(line)));
    const below = lines.slice(end + 1, next);
    const depth = Math.min(...below.map((line) => /^\s*/.exec(line)[0].length));
    items.push(element("li", [...inline(found[3]), ...render(below.map((line) => line.slice(depth)).join("\n"))]));
    end = next;
    if (end + 1 < lines.length && !lines[end].trim() && itemOf(lines[end + 1])) end++; // blank lines between items
  }
  const node = element(ordered(marker) ? "ol" : "ul", items);
  if (ordered(marker)) node.start = parseInt(marker, 10);
  return [node, end];
}

function ordered(marker) {
  return /\d/.test(marker);
}

function inline(text) {
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , verbatim, strong, emphasis] = found;
    nodes.push(text.slice(at, found.index));
    if (verbatim !== undefined) nodes.push(element("code", [verbatim]));
    else if (strong !== undefined) nodes.push(element("strong", inline(strong)));
    else nodes.push(element("em", inline(emphasis)));
    at = found.index + whole.length;
  }
  return [...nodes, text.slice(at)];
}

export function element(tag, children = [], className = "") {
  const node = document.createElement(tag);
  node.append(...children); // strings become text nodes
  if (className) node.className = className;
  return node;
}
