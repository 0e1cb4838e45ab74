"""`GET /`: a page with a chat and metrics plots, self-contained.

    app.include_router(page.routes(context))

Its Content-Security-Policy allows the script and the style of this file by their hashes, requests to its own origin,
and nothing else. Where API keys are set, the browser prompts for one (Basic, the key is the password) and sends it with
every request of the page.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from atom.serve.context import Context


def routes(_: Context) -> APIRouter:
    router = APIRouter(tags=["page"])
    html = resources.files("atom.serve").joinpath("page.html").read_text("utf-8")

    @router.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        """Chat with the model and watch the server."""
        return HTMLResponse(html, headers=headers(html))

    return router


def headers(html: str) -> dict[str, str]:
    """The headers of a page: its policy, and that it is not cached."""
    return {
        "content-security-policy": policy(html),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def policy(html: str) -> str:
    """The Content-Security-Policy of a page: its own script and style by hash, requests to its own origin only."""
    rules = {
        "default-src": "'none'",
        "script-src": hashes("script", html),
        "style-src": hashes("style", html),
        "img-src": "data:",  # the icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",  # text never becomes HTML
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def hashes(tag: str, html: str) -> str:
    """The sources of a policy that allow the content of these tags."""
    inlined = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inlined]
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
