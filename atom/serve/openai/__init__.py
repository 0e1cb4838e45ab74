"""OpenAI's routes: chat, completions, and what vLLM adds (tokenize)."""
