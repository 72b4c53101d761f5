"""The engine: sequences, KV blocks, the scheduler and the step; synchronous, without I/O."""
