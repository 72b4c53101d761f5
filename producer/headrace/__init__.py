"""Headrace: push prompts to Redis Streams, read tokens back exactly once."""
