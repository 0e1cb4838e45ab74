"""Answer files of OpenAI's batch lines with the server's own routes, without a socket."""
