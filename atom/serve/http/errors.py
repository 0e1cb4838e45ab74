"""Error bodies as OpenAI's and Anthropic's clients know them.

OpenAI's: {"error": {"message", "type", "param", "code"}}.

At MESSAGES and below it as Anthropic's do: {"type": "error", "error": {"type", "message"}, "request_id"}.

raise FieldError("n", "n=3 is more than best_of=2")      # 400
error_response(request.scope, error)                     # of any AtomError: 400, 429, 503 or 500
refuse(request.scope, 404, error_body(404, f"no such route: {shown(path)}"))
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi.responses import Response
from starlette.types import Scope

from atom.errors import EngineDeadError, RequestError, WeightsIncompleteError
from atom.serve.auth.tenants import LimitError
from atom.serve.engine.client import QueueFullError
from atom.serve.engine.stream import UnreadError

TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
MESSAGES = "/v1/messages"
ANTHROPIC_TYPES = TYPES | {403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}
ERROR_CODES = ("thread_unsupported_request",)  # that Anthropic's SDKs know
MAX_SHOWN = 200  # characters of a client's text in an error or a log line
MAX_MESSAGE = 1000  # of an error


def shown(text: str, max_chars: int = MAX_SHOWN) -> str:
    """A client's text as quoted in an error or the log, cut to this many characters."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


class FieldError(RequestError):
    """A field of a body is wrong. code: by which clients know what to do"""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class ContextLengthError(FieldError):
    """A prompt is too long."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(param, message, "context_length_exceeded")


def constraint_error(field: str, message: str, name: str = "structured_outputs") -> FieldError:
    """An engine's error of the parameter `name`, which is `field` in the body: tools, response_format.json_schema."""
    return FieldError(field.partition(".")[0], shown(field + message.removeprefix(name)))


class ModelNotFoundError(RequestError):
    """A model that is not served here."""

    param = "model"


class ResponseNotFoundError(RequestError):
    """A response that is not stored, or not with this key."""

    param = "response_id"


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = None if param is None else shown(param)
    return {"error": {"message": shown(message, MAX_MESSAGE), "type": kind, "param": param, "code": code}}


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
    match error:
        case ModelNotFoundError() | ResponseNotFoundError():
            return 404
        case RequestError():
            return 400
        case UnreadError():
            return 408
        case QueueFullError() | LimitError():
            return 429
        case EngineDeadError() | WeightsIncompleteError():
            return 503
    return 500


def body_of(error: Exception) -> dict[str, Any]:
    """The body of an error. The message of an unforeseen error is only in the log."""
    status = status_of(error)
    message = "internal error, the server's log has it" if status == 500 else str(error)
    code = {404: "model_not_found", 503: "unavailable"}.get(status)
    if isinstance(error, ResponseNotFoundError):
        code = None
    elif isinstance(error, QueueFullError | LimitError):
        code = error.limit
    elif isinstance(error, FieldError):
        code = error.code
    return error_body(status, message, getattr(error, "param", None), code)


def is_anthropic(path: str) -> bool:
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def anthropic_body(status: int, message: str, request_id: str | None, code: str | None = None) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"details": {"error_code": code}} if code in ERROR_CODES else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}, "request_id": request_id}


def body_at(path: str, status: int, body: dict[str, Any], request_id: str | None = None) -> dict[str, Any]:
    """Convert an OpenAI error body to the form of the API on this path."""
    if not is_anthropic(path):
        return body
    return anthropic_body(status, body["error"]["message"], request_id, body["error"]["code"])


def refuse(scope: Scope, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """An error response to a request that has passed the guard; the error is noted for the request's log line."""
    scope["state"]["log"]["error"] = body["error"]["message"]
    return json_response(body_at(scope["path"], status, body, scope["state"]["request_id"]), status, headers)


def error_response(scope: Scope, error: Exception) -> Response:
    headers = {}
    if isinstance(error, QueueFullError | LimitError):
        headers["retry-after"] = str(error.retry_after)
    elif isinstance(error, EngineDeadError):
        headers |= {"retry-after": "5", "connection": "close"}  # so that a retry reaches the next server, or another
    return refuse(scope, status_of(error), body_of(error), headers)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
