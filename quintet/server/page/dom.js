/** Builds DOM nodes. Text becomes text nodes and nothing else: what a model writes is never read as HTML. */

/** An element with attributes (`on` holds listeners) and children, which are nodes or text. */
export function h(tag, { on = {}, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  element.append(...children);
  return element;
}

/** Gives an element these children. Those in front that it has already are not touched: a selection in them stays. */
export function swap(element, children) {
  const old = [...element.childNodes];
  let same = 0;
  while (same < children.length && old[same] === children[same]) same++;
  for (const node of old.slice(same)) node.remove();
  element.append(...children.slice(same));
}

/** The element with this id; a typo in an id is a bug and shows at once. */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`index.html has no element #${id}`);
  return element;
}
