"""Images of prompts: read, decoded, cut into patches, placed among tokens; no torch.

data = read_source("data:image/png;base64,…", SourceLimits())
with Decoder() as decoder:
    image = decoder.read(data, processor)                 # patches, as the model's encoder takes them
tokens, placed = place_images(tokens, [image], processor.token)
"""
