"""Images of requests: the rows they take, when they are encoded, what steps send."""
