"""The engine's process and the HTTP process's view of it: a socket pair and msgpack between them."""
