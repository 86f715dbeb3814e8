/** What the model may call. The reader gives it as JSON, and answers the calls himself; another source would join here. */

const WRONG = 'must be a JSON list of tools, as [{"type": "function", "function": {"name": "get_weather"}}]';

/** The tools that a text gives, each as OpenAI's API has it; throws where it is no list of such. */
export function parseTools(text) {
  if (!text.trim()) return [];
  const list = JSON.parse(text);
  if (!Array.isArray(list)) throw new Error(WRONG);
  return list.map(tool);
}

/** Why a text gives no tools; empty where it does. */
export function wrongTools(text) {
  try {
    parseTools(text);
    return "";
  } catch {
    return `Tools ${WRONG}.`;
  }
}

function tool(given) {
  const whole = given?.function ? given : { type: "function", function: given };
  if (typeof whole.function?.name !== "string" || !whole.function.name) throw new Error(WRONG);
  return whole;
}
