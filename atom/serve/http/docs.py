"""`GET /docs`: the OpenAPI schema as a static page.

    app.include_router(docs.routes(app.openapi))

FastAPI's own loads its scripts from other hosts, and would run them on the origin whose key the browser holds.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import Any, NamedTuple

import jinja2
from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse

from atom.serve.http.errors import json_response
from atom.serve.http.page import headers

Schema = Mapping[str, Any]
WORD = (1 << 31) - 1  # limits of an integer's width are not shown


class Field(NamedTuple):
    name: str
    kind: str
    about: str
    is_required: bool


class Operation(NamedTuple):
    id: str
    method: str
    path: str
    about: str
    bodies: list[tuple[str, list[Field]]]  # the body first, then the objects in it, by name


def routes(openapi: Callable[[], Schema]) -> APIRouter:
    """openapi: gives the schema of all routes; called at the first request."""
    router = APIRouter(tags=["page"])
    text = resources.files("atom.serve.http").joinpath("docs.html").read_text("utf-8")
    template = jinja2.Environment(autoescape=True).from_string(text)

    @router.get("/docs", response_class=HTMLResponse)
    def docs() -> HTMLResponse:  # in a thread: the schema takes a while
        """This page."""
        schema = openapi()
        html = template.render(info=schema["info"], operations=list(operations(schema)))
        return HTMLResponse(html, headers=headers(styles=hashes(html)))

    @router.get("/openapi.json", include_in_schema=False)
    def openapi_json() -> Response:
        return json_response(openapi())

    return router


def hashes(html: str) -> str:
    """The sources of a policy that allow the styles in a page."""
    inlined = re.findall(r"<style\b[^>]*>(.*?)</style>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inlined]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


def operations(schema: Schema) -> Iterator[Operation]:
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            root = content.get("application/json", {}).get("schema", {})
            bodies = [(shorten(name), list(fields(schema, name))) for name in objects(schema, root)]
            about = operation.get("description") or operation.get("summary", "")
            yield Operation(operation["operationId"], method.upper(), path, about, bodies)


def objects(schema: Schema, root: Any) -> list[str]:
    """The names of the objects in a schema, in order of appearance."""
    found: list[str] = []
    rest = [root]
    while rest:
        at = rest.pop(0)
        if isinstance(at, list):
            rest += at
        elif isinstance(at, Mapping):
            name = named(at)
            if name is not None and name not in found:
                found.append(name)
                rest.append(schema["components"]["schemas"][name])
            rest += at.values()
    return [name for name in found if "properties" in schema["components"]["schemas"][name]]


def fields(schema: Schema, name: str) -> Iterator[Field]:
    model = schema["components"]["schemas"][name]
    for key, value in model["properties"].items():
        yield Field(key, kind_of(value), value.get("description", ""), key in model.get("required", ()))


def kind_of(value: Schema) -> str:
    """A type in words: `list of integer from 0, or string`."""
    if (name := named(value)) is not None:
        return shorten(name)
    if alternatives := value.get("anyOf") or value.get("oneOf"):
        kinds = [kind_of(each) for each in alternatives if each.get("type") != "null"]
        return ", or ".join(dict.fromkeys(kinds))
    if "const" in value:
        return f"{value['const']!r}"
    if "enum" in value:
        return " | ".join(map(str, value["enum"]))
    if value.get("type") == "array":
        return f"list of {kind_of(value.get('items', {}))}"
    ends = (value.get("minimum", value.get("exclusiveMinimum")), value.get("maximum", value.get("exclusiveMaximum")))
    low, high = (
        "" if end is None or abs(end) >= WORD else f" {word} {end:g}"
        for word, end in zip(("from", "to"), ends, strict=True)
    )
    return f"{value.get('type', 'anything')}{low}{high}"


def shorten(name: str) -> str:
    """A model's name without its module, which FastAPI adds if two have the same name."""
    return name.rpartition("__")[2]


def named(value: Schema) -> str | None:
    reference = value.get("$ref")
    return reference.rpartition("/")[2] if isinstance(reference, str) else None
