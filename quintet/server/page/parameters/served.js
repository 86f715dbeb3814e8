/** Tools of tool servers that this server knows: the reader offers a server's to the model, and has each call run. */

import { request } from "../api.js";
import { byId, h } from "../dom.js";

const servers = new Map(); // name -> its tools, as OpenAI's API has them

/** Asks which there are, and puts a switch for each server into the form. Only where index.html says that there are some. */
export async function loadServed() {
  if (!("toolServers" in document.body.dataset) || servers.size) return;
  const { data } = await (await request("v1/tool_servers")).json();
  for (const { name, tools } of data) servers.set(name, tools.map((each) => ({ type: "function", function: each })));
  byId("served").append(...data.map(choice));
  byId("served").hidden = data.length === 0;
}

/** The tools of the servers that the reader has chosen. */
export function servedTools() {
  return chosen().flatMap((name) => servers.get(name));
}

/** What runs a call of this tool, once the reader says so; null where no chosen server has it. */
export function runner(tool) {
  const server = chosen().find((name) => servers.get(name).some((each) => each.function.name === tool));
  return server === undefined ? null : (args) => run(server, tool, args);
}

async function run(server, name, args) {
  const body = JSON.stringify({ server, name, arguments: args });
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body };
  try {
    return (await (await request("v1/tool_servers/call", options)).json()).output;
  } catch (error) {
    return error.message;
  }
}

function chosen() {
  const marks = byId("served").querySelectorAll("input:checked");
  return [...marks].map((mark) => mark.value).filter((name) => servers.has(name));
}

function choice({ name, tools, error }) {
  const mark = h("input", { type: "checkbox", name: "served", value: name, disabled: Boolean(error) });
  const words = error ?? tools.map((tool) => tool.name).join(", ");
  return h("label", { class: "check", title: words }, mark, ` ${name} (${error ? "not there" : tools.length})`);
}
