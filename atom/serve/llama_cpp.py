"""Map routes of llama.cpp and Ollama, and fields of llama.cpp, to ours."""

ROUTES = {
    "/completion": "POST /v1/completions",
    "/completions": "POST /v1/completions",
    "/chat/completions": "POST /v1/chat/completions",
    "/embedding": "POST /v1/embeddings",
    "/embeddings": "POST /v1/embeddings",
    "/props": "GET /v1/models or /server_info",
    "/slots": "GET /load or /metrics",
    "/api/chat": "POST /v1/chat/completions",
    "/api/tags": "GET /v1/models",
    "/api/generate": "POST /v1/completions",
    "/api/embed": "POST /v1/embeddings",
    "/api/embeddings": "POST /v1/embeddings",
    "/api/ps": "GET /v1/models",
    "/api/show": "GET /v1/models or /server_info",
    "/api/version": "GET /version",
    "/apply-template": "POST /tokenize with messages",
    "/lora-adapters": "GET /v1/models",
}
FIELDS = {"n_predict": "max_tokens", "content": "prompt", "json_schema": "response_format"}
