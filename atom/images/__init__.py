"""Images of prompts, ahead of their encoder."""
