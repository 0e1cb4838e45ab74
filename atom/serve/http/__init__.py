"""HTTP: uvicorn's protocol, middleware, bodies, errors, events, pages."""
