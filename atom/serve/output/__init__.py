"""Output parsers: split a streamed answer into reasoning, content and tool calls."""
