"""Writes docs/errors.md, the index of the API's error codes: python scripts/errors.py

Codes and statuses are read off the `ApiError(...)` calls of the server and the router; causes and remedies are here.
tests/rules/test_errors_page.py checks that every code has both, and that the page is current.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from quintet.server.http.errors import ApiError

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "errors.md"
SOURCES = ("quintet/server", "quintet/router", "quintet/chat")

# codes whose status or name is no literal of the call
COMPUTED = {
    "not_ready": 503,
    "asleep": 503,
    "context_length_exceeded": 400,
    "method_not_allowed": 405,
    "not_found": 404,
}

# code -> cause, remedy
SERVER = {
    "adapter_exists": (
        "`/v1/load_lora_adapter` names an adapter that is served.",
        "Give another `lora_name`, or set `load_inplace` to true.",
    ),
    "adapter_not_found": (
        "No adapter is at the path, or none has the name.",
        "Correct `lora_path`, or use a name of `GET /v1/models`.",
    ),
    "admin_only": ("The action needs the administrator's key.", "Send the key of `--admin-api-key`."),
    "asleep": ("The engine sleeps; its memory is freed.", "`POST /wake_up`, then repeat the request."),
    "cannot_sleep": ("Requests run or wait, or the device cannot sleep.", "Wait until none runs, and repeat it."),
    "cannot_trace": ("A trace runs already, or there is none to stop.", "`POST /stop_profile` first, or start one."),
    "context_length_exceeded": (
        "Prompt and one token of output do not fit into `max_model_len`.",
        "Shorten the prompt, set `truncate_prompt_tokens`, or start the server with a larger `--max-model-len`.",
    ),
    "audio_too_long": (
        "A session of `/v1/realtime` has more audio than `--max-audio-seconds`.",
        "Open another session.",
    ),
    "engine_dead": (
        "The process that runs the model has ended or hangs; the server ends with code 1.",
        "Read the server's log for the reason, and restart it.",
    ),
    "headers_too_large": ("Request line and headers exceed the limit.", "Send fewer, or raise `--max-header-bytes`."),
    "invalid_api_key": (
        "The request has no key, or a wrong one.",
        "Send `Authorization: Bearer KEY` or `x-api-key: KEY` with a key of `--api-key`.",
    ),
    "invalid_audio": (
        "The file is no audio, is damaged, is longer than `--max-audio-seconds`, or needs a package that is missing.",
        "The message has the reason; convert the file, such as by `ffmpeg -i FILE -ar 16000 -ac 1 a.wav`.",
    ),
    "invalid_event": (
        "A message to `/v1/realtime` is no event of it, or has a wrong value.",
        "Send the events of [speech to text](speech.md#while-it-is-spoken); the session goes on.",
    ),
    "invalid_encoding": ("The compressed body is damaged.", "Compress it again, or send it uncompressed."),
    "invalid_form": (
        "The body is no form (multipart/form-data), is damaged, or holds too many fields or files.",
        "Let the client's library write it (`curl -F`); the message has the reason.",
    ),
    "invalid_http": ("The connection does not carry HTTP.", "Check address, port and `http://` or `https://`."),
    "invalid_json": (
        "The body is not a JSON object, or nests too deep.",
        "Send valid JSON; the message has the place.",
    ),
    "invalid_pdf": ("The PDF is damaged, encrypted, too large, or has no text.", "Attach its text, or a part of it."),
    "invalid_value": (
        "A field has a value that it cannot have.",
        "`param` names the field, the message what it may be.",
    ),
    "item_not_found": ("`item_reference` names an item that is not stored.", "Send the item itself."),
    "method_not_allowed": ("The path exists for other HTTP methods.", "Use the method that the message names."),
    "missing_field": ("A required field is missing.", "Add the field that `param` names."),
    "invalid_adapter": (
        "The files of a LoRA adapter are wrong, do not fit the model, or have changed; the message names the tensor.",
        "Correct the adapter and load it again ([LoRA adapters](lora.md#what-is-refused)).",
    ),
    "model_not_found": (
        "No served model has this name.",
        "Use a name of `GET /v1/models`; `--served-model-name` (may be repeated) adds names such as `gpt-4o`.",
    ),
    "no_tokenizer": ("The server runs with `--skip-tokenizer-init`.", "Send token ids to `/v1/completions`."),
    "not_enabled": (
        "Adapters are not loaded over HTTP on this server.",
        "Start it with `--enable-lora --allow-runtime-lora`, or name adapters with `--lora-modules`.",
    ),
    "not_found": ("There is nothing at this path.", "The message names the nearest path; `/openapi.json` lists all."),
    "no_space": ("The server's disk has no room for the file that was sent.", "Try again later, or free some."),
    "not_installed": ("The server lacks an optional package.", "Install it with the command of the message."),
    "not_ready": (
        "The engine loads, drains or does not answer.",
        "Wait for `GET /ready` to be 200; see `Retry-After`.",
    ),
    "previous_response_not_found": (
        "`previous_response_id` is not stored: expired, removed, or of another key.",
        "Send the conversation in `input`.",
    ),
    "request_failed": ("This request failed inside the engine; others continue.", "Read the log; report it as a bug."),
    "request_too_large": (
        "The body exceeds the limit.",
        "Send less, or raise `--max-body-bytes` (of files `--max-upload-bytes`).",
    ),
    "response_not_found": ("No response with this id is stored for this key.", "Create it with `store: true`."),
    "server_overloaded": (
        "Too many requests run or wait, for the server or for this key.",
        "Repeat after `Retry-After`; raise `--max-queued-requests` or its neighbours, or add servers.",
    ),
    "shutting_down": ("The server ends and the drain time is over.", "Repeat the request at another server."),
    "timeout": ("The request took longer than allowed.", "Ask for fewer tokens, or raise `--request-timeout`."),
    "too_many_connections": ("All connections are in use.", "Close idle ones, or raise `--max-connections`."),
    "too_many_pipelined": ("Too many requests wait on one connection.", "Wait for answers before sending more."),
    "tool_server_unavailable": (
        "An MCP server of `--tool-server` does not answer.",
        "Start it, or leave the tool out.",
    ),
    "unknown_field": (
        "With `--strict-requests`: the request has a field that the server does not know.",
        "Correct the name that the message suggests, or start the server without the flag.",
    ),
    "unsupported": (
        "The served model or this server cannot do that.",
        "The message names what can: a route or a model.",
    ),
    "unsupported_encoding": ("The body's `Content-Encoding` is unknown.", "Use gzip or deflate, or none."),
    "unsupported_field": (
        "A known field asks for something that does not exist here.",
        "Leave it out; the message says why.",
    ),
    "weights_refused": (
        "A pause or an update of the weights is not possible; the message names the tensor, or the reason.",
        "Correct what it names; after weights were replaced in part, send a full update.",
    ),
    "wrong_host": ("The `Host` header is not a name of this machine.", "Add the name with `--allowed-hosts NAME`."),
    "wrong_origin": ("A page of another origin sent the request.", "Add its origin with `--allowed-origins`."),
}
ROUTER = {
    "backend_down": (
        "The server that keeps this response does not answer.",
        "Repeat it, or send the conversation whole.",
    ),
    "backend_failed": (
        "A server ended the connection during its answer.",
        "Repeat the request; read that server's log.",
    ),
    "backend_timeout": (
        "A server did not begin to answer in time.",
        "Check its load; see the timeouts in `quintet router --help`.",
    ),
    "backend_unreachable": ("No server accepted the connection.", "Check addresses and that the servers run."),
    "conflict": ("The server to add is listed already.", "Remove it first, or leave it."),
    "draining": ("The router ends and takes no new requests.", "Repeat the request at another router."),
    "model_busy": ("A model of `--models` has requests, and is not unloaded.", "Wait until they have ended."),
    "model_load_failed": (
        "The engine of a model of `--models` did not start; the message has its reason.",
        "Correct the model's entry; the next try is made after `Retry-After`.",
    ),
    "model_not_loaded": (
        "A model of `--models` found no room within `--max-wait`: other models had requests.",
        "Repeat it; raise `--memory-budget` or `--max-wait`.",
    ),
    "model_too_large": (
        "A model of `--models` does not fit into the memory budget.",
        "Raise `--memory-budget`, or lower the model's `max_model_len` or `memory`.",
    ),
    "no_backend": ("No server takes requests now.", "Wait; check `/ready` of each server."),
    "not_passed_on": ("The path concerns a single server.", "Call that server directly."),
    "prefill_failed": ("No prefill server computed the prompt.", "Repeat it; check the servers of `--prefill`."),
}


def _literal(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def calls() -> Iterator[tuple[str, int]]:
    """Code and status of every ApiError call that has both as literals."""
    for path in sorted(each for folder in SOURCES for each in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "ApiError":
                status = _literal(node.args[0]) if node.args else None
                code = _literal(next((each.value for each in node.keywords if each.arg == "code"), None))
                if isinstance(code, str) and isinstance(status, int):
                    yield code, status


def statuses() -> dict[str, list[int]]:
    """Code -> the HTTP statuses it comes with."""
    found: dict[str, set[int]] = {code: {status} for code, status in COMPUTED.items()}
    for code, status in calls():
        found.setdefault(code, set()).add(status)
    return {code: sorted(found[code]) for code in sorted(found)}


def _table(entries: dict[str, tuple[str, str]]) -> str:
    there = statuses()
    rows = [
        f"| `{code}` | {', '.join(map(str, there.get(code, ())))} | {cause} | {remedy} |\n"
        for code, (cause, remedy) in sorted(entries.items())
    ]
    return "| code | status | cause | remedy |\n| --- | --- | --- | --- |\n" + "".join(rows)


def _types() -> str:
    there: dict[str, list[str]] = {}
    for status in sorted({408, 500, *(each for found in statuses().values() for each in found)}):
        there.setdefault(ApiError(status, "").type, []).append(str(status))
    rows = [f"| {', '.join(found)} | `{name}` |\n" for name, found in there.items()]
    return "| status | `type` |\n| --- | --- |\n" + "".join(rows)


def page() -> str:
    return f"""# Error index

<!-- written by scripts/errors.py -->

Every error of the HTTP API is `{{"error": {{"message", "type", "param", "code"}}}}`; clients of Anthropic's API get it
in Anthropic's form. `param` names the field. The message says what is wrong, the value, and what to do. `code` is null
where the message alone describes the error. Errors of a command or of Python have such a message: see
[troubleshooting](troubleshooting.md).

{_types()}
## The server

{_table(SERVER)}
In a stream, an error after the first token is an event with the same object. A response that was cancelled ends its
stream with the code `response_cancelled`. `quintet run-batch` has codes of its own for lines without an answer:
[clients](client-commands.md#quintet-run-batch).

## The router, and servers of several models

They pass the servers' errors on, and have these of its own; `server_overloaded` (429, 503), `model_not_found`,
`invalid_json` and others mean the same as above.

{_table(ROUTER)}"""


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
