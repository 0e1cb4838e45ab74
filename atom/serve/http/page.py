"""`GET /`: a page with a chat and metrics plots, from `web/`.

    app.include_router(page.routes(context))

Its Content-Security-Policy allows scripts, styles and requests of its own origin, and nothing else. If API keys are
set, the browser prompts for one (Basic, the key is the password) and sends it with every request of the page.
"""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import HTMLResponse

from atom.serve.context import Context

TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript"}


def routes(_: Context) -> APIRouter:
    router = APIRouter(tags=["page"])
    files = read_files(resources.files("atom.serve").joinpath("web"))
    html = files.pop("index.html")

    @router.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        """Chat with the model and watch the server."""
        return HTMLResponse(html, headers=headers("'self'", "'self'"))

    @router.get("/page/{name:path}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return Response(files[name], media_type=TYPES[name.rpartition(".")[2]], headers=headers())

    return router


def read_files(folder: Traversable) -> dict[str, str]:
    """The files of a folder that a page is made of, and of the folders in it, by their path."""
    files: dict[str, str] = {}
    for each in folder.iterdir():
        if each.is_dir():
            files |= {f"{each.name}/{name}": text for name, text in read_files(each).items()}
        elif each.name.rpartition(".")[2] in TYPES:
            files[each.name] = each.read_text("utf-8")
    return files


def headers(scripts: str = "'none'", styles: str = "'none'") -> dict[str, str]:
    """The headers of a page: its policy, and that it is not cached. scripts, styles: the sources that it may have."""
    return {
        "content-security-policy": policy(scripts, styles),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def policy(scripts: str, styles: str) -> str:
    """The Content-Security-Policy of a page: requests to its own origin only."""
    rules = {
        "default-src": "'none'",
        "script-src": scripts,
        "style-src": styles,
        "img-src": "data:",  # the icon, and images of messages
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # text becomes HTML through the sanitizer only
        "trusted-types": "dompurify",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())
