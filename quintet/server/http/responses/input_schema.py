"""JSON schema of `input` for the API's documentation (OpenAPI); input_items.py checks the values."""

from typing import Any

_MESSAGE = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["message"]},
        "role": {"type": "string", "enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
    "required": ["role", "content"],
}
_REFERENCE = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["item_reference"]}, "id": {"type": "string"}},
    "required": ["type", "id"],
    "additionalProperties": False,
}
_CALL = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["function_call"]},
        "call_id": {"type": "string"},
        "name": {"type": "string"},
        "arguments": {"type": "string", "description": "a JSON object"},
    },
    "required": ["type", "call_id", "name", "arguments"],
}
_CALLED = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["function_call_output"]},
        "call_id": {"type": "string"},
        "output": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
    "required": ["type", "call_id", "output"],
}
_REASONING_ITEM = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["reasoning"]},
        "content": {"type": "array", "items": {"type": "object"}},
        "summary": {"type": "array", "items": {"type": "object"}},
        "encrypted_content": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["type"],
}
_APPROVAL_REQUEST = {
    "type": "object",
    "description": "as it came out: a call that needs approval",
    "properties": {
        "type": {"type": "string", "enum": ["mcp_approval_request"]},
        "id": {"type": "string", "minLength": 1, "maxLength": 256},
        "server_label": {"type": "string"},
        "name": {"type": "string"},
        "arguments": {"type": "string", "description": "a JSON object"},
    },
    "required": ["type", "id", "server_label", "name", "arguments"],
}
_ANSWER = {
    "type": "object",
    "description": "the call runs first, or the model gets a refusal as its result",
    "properties": {
        "type": {"type": "string", "enum": ["mcp_approval_response"]},
        "approval_request_id": {"type": "string"},
        "approve": {"type": "boolean"},
        "reason": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["type", "approval_request_id", "approve"],
}
INPUT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {"anyOf": [_MESSAGE, _CALL, _CALLED, _REASONING_ITEM, _APPROVAL_REQUEST, _ANSWER, _REFERENCE]},
        },
    ]
}
