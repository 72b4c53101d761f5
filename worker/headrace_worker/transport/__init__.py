"""The worker's side of the queue: asyncio and Redis, never torch."""
