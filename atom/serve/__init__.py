"""The OpenAI API over HTTP: an app in one process, the engine in another, a socket pair between them."""
