"""Per-request state: detokenizer, grammar, logit processors, adapter."""
