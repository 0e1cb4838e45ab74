"""What belongs to one request: text, grammar, logit processors, adapter."""
