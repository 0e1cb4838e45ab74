"""Images of prompts: read, decoded, cut into patches, placed among tokens; no torch.

data = read_source("data:image/png;base64,…", SourceLimits())
with Decoder() as decoder:
    pixels = decoder.decode(data)                         # u8[height, width, 3]
image = prepare(pixels, processor)                        # patches, as the model's encoder takes them
tokens, placed = place_images(tokens, [image], processor.token)
"""
