"""The worker: claims what its free KV blocks can take, runs packed forwards, streams tokens back."""
