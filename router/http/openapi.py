"""The OpenAPI document of the HTTP door, made from the models that parse requests."""

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from baton.cluster.packages import version
from router.http.messages_in import CountTokens, CreateMessage
from router.http.openai_in import Chat, Completion, Detokenize, Tokenize
from router.http.responses_in import Response
from router.http.tokens_in import Generate

_Json = dict[str, Any]


@cache
def document() -> _Json:
    """The same for all doors of a process. Read only."""
    paths = {
        "/v1/chat/completions": {"post": _post("Answers a conversation.", "Chat", stream=True)},
        "/v1/completions": {"post": _post("Continues one or more texts.", "Completion", stream=True)},
        "/v1/responses": {"post": _post("Answers a conversation, and keeps the answer.", "Response", stream=True)},
        "/v1/responses/{id}": {
            "get": _get("An answer that is kept.", refusals=_OF_KEPT) | {"parameters": [_ID]},
            "delete": _get("Forgets an answer.", refusals=_OF_KEPT) | {"parameters": [_ID]},
        },
        "/v1/chat/completions/render": {"post": _post("The token ids of a conversation, as a body of /inference/v1/generate.", "Chat")},
        "/inference/v1/generate": {"post": _post("Continues token ids.", "Generate", stream=True)},
        "/v1/messages": {"post": _post("Answers a conversation.", "CreateMessage", stream=True, error="MessagesError") | _ANY_KEY},
        "/v1/messages/count_tokens": {"post": _post("Tokens of a conversation.", "CountTokens", error="MessagesError") | _ANY_KEY},
        "/v1/models": {"get": _get("The model that is served.")},
        "/v1/models/{name}": {"get": _get("One model.", refusals=("401", "404")) | {"parameters": [_NAME]}},
        "/tokenize": {"post": _post("Token ids of a prompt.", "Tokenize")},
        "/detokenize": {"post": _post("The text of token ids.", "Detokenize")},
        "/health": {"get": _get("Whether a request could be answered now.", refusals=("503",))},
        "/readyz": {"get": _get("The same as /health.", refusals=("503",))},
        "/livez": {"get": _get("Whether the process answers.", refusals=())},
        "/version": {"get": _get("The version of the software.", refusals=())},
    }
    bodies = (Chat, Completion, Response, CreateMessage, CountTokens, Tokenize, Detokenize, Generate)
    models = [(model, "validation") for model in bodies]
    _, made = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = made["$defs"] | {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version(), "description": "The HTTP door of a Baton cluster."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _KEYS},
        "security": [{}, {"key": []}],
    }


_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_OF_KEPT = ("400", "401", "404", "503")
_KEYS = {"key": {"type": "http", "scheme": "bearer"}, "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
_ANY_KEY: _Json = {"security": [{}, *({name: []} for name in _KEYS)]}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_MESSAGES_ERROR = {
    "type": "object",
    "properties": {
        "type": {"enum": ["error"]},
        "error": {
            "type": "object",
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {
                    "type": "object",
                    "properties": {"error_code": {"type": "string"}, "param": {"type": "string"}},
                    "required": ["error_code"],
                },
            },
            "required": ["type", "message", "details"],
        },
        "request_id": {"type": "string"},
    },
    "required": ["type", "error", "request_id"],
}
_GENERAL = ("400", "401", "404", "408", "413", "415", "429", "500", "503", "504")


def _post(summary: str, schema: str, stream: bool = False, error: str = "Error") -> _Json:
    content: _Json = {"application/json": {"schema": {"type": "object"}}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}}
    return {"summary": summary, "requestBody": body, "responses": _responses(content, _GENERAL, error)}


def _get(summary: str, refusals: tuple[str, ...] = ("401",)) -> _Json:
    return {"summary": summary, "responses": _responses({"application/json": {"schema": {"type": "object"}}}, refusals)}


def _responses(content: _Json, refusals: tuple[str, ...], error: str = "Error") -> _Json:
    refusal = {"description": "Refused.", "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}}
    return {"200": {"description": "Done.", "content": content}} | dict.fromkeys(refusals, refusal)
