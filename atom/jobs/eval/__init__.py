"""`job=eval`: measure how well a configuration predicts, besides its speed and bytes."""
