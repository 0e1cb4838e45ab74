"""Output parsers: reasoning, content and tool calls, told apart while they stream."""
