"""Where queue meets engine: text in, tokens through, text out, and the books about it."""
