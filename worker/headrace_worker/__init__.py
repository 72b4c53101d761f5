"""The worker: claims what its free KV blocks can take and runs packed forwards over it."""
