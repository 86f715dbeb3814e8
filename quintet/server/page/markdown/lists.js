/** Finds the items of Markdown lists, also where they are indented less than the standard asks for. */

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+)(.*)$/;
const TAB = 4; // columns

/** What a line says of the item that it begins, or null: its indent, where its text stands, its kind and number. */
export function listItem(line) {
  const match = ITEM.exec(line);
  if (!match) return null;
  const [, space, mark, gap] = match;
  const indent = columns(space);
  const text = indent + mark.length + (gap.length > TAB ? 1 : columns(gap));
  return { indent, text, ordered: /\d/.test(mark), number: parseInt(mark, 10) };
}

/** The line after a list. `starts(lines, at)` says where another block would begin. */
export function listEnd(lines, at, starts) {
  const first = listItem(lines[at]);
  let end = at + 1;
  for (let next = end; next < lines.length; next++) {
    if (!lines[next].trim()) continue;
    const goesOn = next === end && !starts(lines, next); // a paragraph's next line may stand at the margin
    if (!goesOn && !within(lines[next], first) && !isSibling(lines[next], first)) break;
    end = next + 1;
  }
  return end;
}

/** The lines of each item, without the item's mark and indent. */
export function items(lines) {
  const first = listItem(lines[0]);
  const parts = [];
  for (const line of lines) {
    if (isSibling(line, first)) parts.push([line.replace(ITEM, "$4")]);
    else parts.at(-1).push(dedent(line, first.text));
  }
  return parts;
}

function isSibling(line, first) {
  const item = listItem(line);
  return item !== null && item.ordered === first.ordered && !within(line, first);
}

/** Whether a line belongs to an item: it stands below the text, or begins a deeper item. */
function within(line, first) {
  const indent = columns(/^\s*/.exec(line)[0]);
  return indent >= (listItem(line) ? Math.min(first.text, first.indent + 2) : first.text);
}

function columns(space) {
  return [...space].reduce((sum, sign) => sum + (sign === "\t" ? TAB : 1), 0);
}

function dedent(line, width) {
  let at = 0;
  for (let column = 0; column < width && /[ \t]/.test(line[at] ?? ""); at++) column += line[at] === "\t" ? TAB : 1;
  return line.slice(at);
}
